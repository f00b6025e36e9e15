"""figures/explorer.html: the interpreter, this package's sources and the first runs, in one file without a network.

The page runs the very files of this package: they are written into its interpreter's memory and imported there. Their
hash stands on the page. The interpreter is Pyodide, from npm's package or from the page that is there."""

from __future__ import annotations

import base64
import gzip
import hashlib
import inspect
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
import yaml

import repro
from repro.errors import UserError
from repro.explore import queue
from repro.explore.run import run
from repro.explore.settings import SHAREGPT, SHAREGPT_LONGEST, Settings
from repro.hashing import canonical_json, sha256_json, write_atomically
from repro.history.pages import TEMPLATES, packed
from repro.workloads import fig11_lengths

FILE_NAME = "explorer.html"
SHOWN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("shown.yaml").read_text(encoding="utf-8"))
_INTERPRETER = SHOWN["interpreter"]
#: What the page runs, below the package's folder. The module of first fit is handed in.
_LEAVES = ("__init__.py", "checks.py", "display.py", "errors.py", "sampling_params.py", "words.py")
_RUN = (*_LEAVES, "engine/**/*.py", "history/__init__.py", "history/sentences.py")
_OURS = ("__init__", "settings", "queue", "rules", "recording", "run")
_POLICIES = ("max", "pow2", "oracle", "paged")


def sources(first_fit: ModuleType) -> dict[str, str]:
    """Path in the interpreter -> text, of all that the page runs."""
    folder = Path(repro.__file__).parent
    files = [path for pattern in _RUN for path in sorted(folder.glob(pattern))]
    files += [folder / "explore" / f"{name}.py" for name in _OURS]
    found = {path.relative_to(folder.parent).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return found | {f"{first_fit.__name__.replace('.', '/')}.py": inspect.getsource(first_fit)}


def drawn(lengths: Callable[..., Any], seeds: Iterable[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The lengths that the page has, as NumPy draws them: lengths(count=, spread=, seed=), and those of Fig. 11."""
    made, sharegpt = {}, fig11_lengths("sharegpt", SHAREGPT_LONGEST)
    for seed in seeds:
        for differs in ({}, {"spread": 0}, {"lengths": "sharegpt", **SHAREGPT}):
            one = Settings(**differs, seed=seed, max_num_seqs=256)
            count = queue.saturating(one)
            uniform = one.lengths == "uniform"
            pair = lengths(count=count, spread=one.spread, seed=seed) if uniform else sharegpt.draw(count, seed).T
            made[queue.key_of(one)] = pair[0].tolist(), pair[1].tolist()
    return made


def first_runs() -> list[Settings]:
    """What the page shows without running anything: every preset with every policy, each run once."""
    presets = [preset["differs"] for preset in SHOWN["presets"].values()]
    return list(dict.fromkeys(Settings(**preset, policy=one).relevant for preset in presets for one in _POLICIES))


def build(target: Path, first_fit: ModuleType, drawn: queue.Drawn, interpreter: Path | None = None) -> Path:
    """Write the page. The interpreter's files come from a folder, or else from the page that is there.

    `first_fit` has FirstFitAllocator; `drawn` is what `drawn` returns. UserError if there is no interpreter of the
    version of shown.yaml, or the page cannot be written."""
    parts = _interpreter(interpreter or target)
    code, runs = sources(first_fit), [run(one, first_fit.FirstFitAllocator, drawn) for one in first_runs()]
    lock = {**_INTERPRETER["info"], **{name: _INTERPRETER[name] for name in ("version", "python")}}
    about = {
        **controls(),
        "allocator": first_fit.__name__,
        "lock": {"info": lock, "packages": {}},
        "files": list(parts),
        "runs": {canonical_json(one["settings"]): f"run-{number}" for number, one in enumerate(runs)},
    }
    text = template("explorer.html.j2").render(
        about=canonical_json(about).replace("<", "\\u003c"),
        runs=[packed(one) for one in runs],
        later={"drawn": packed(drawn), "sources": packed(code), **parts},
        sources_hash=sha256_json(code),
        num_sources=len(code),
        interpreter=_INTERPRETER,
    )
    write_atomically(target, text.encode())
    return target


def controls() -> dict[str, Any]:
    """What the explorer's controls offer, and what they show first: the first preset."""
    presets = [{"name": name, **preset} for name, preset in SHOWN["presets"].items()]  # JSON here is sorted
    first = {"differs": presets[0]["differs"], "shown": ["max", "oracle", "paged"]}
    return {
        "presets": presets,
        **{name: SHOWN[name] for name in ("policies", "sliders", "lines", "examples")},
        "defaults": asdict(Settings()),
        "sharegpt": SHAREGPT,
        "start": {**first, "said": "These runs came with the page."},
    }


def part(page: str, name: str) -> bytes:
    """What a page's text holds under a name, unpacked; nothing if it is not there or damaged."""
    found = re.search(rf'<script type="text/plain" id="{re.escape(name)}">([^<]*)</script>', page)
    try:
        return gzip.decompress(base64.b64decode(found[1])) if found else b""
    except (ValueError, OSError, EOFError, zlib.error):
        return b""


def template(name: str) -> jinja2.Template:
    """One of this room's, with what it shares with memory maps."""
    strict = dict(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    rooms = [jinja2.PackageLoader("repro.explore"), jinja2.FileSystemLoader(TEMPLATES)]
    return jinja2.Environment(loader=jinja2.ChoiceLoader(rooms), **strict).get_template(name)


def _interpreter(source: Path) -> Mapping[str, str]:
    """The interpreter's files, packed, from their folder or from a page; UserError if they are not those stated."""
    page = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
    parts = {}
    for name, expected in _INTERPRETER["files"].items():
        content = (source / name).read_bytes() if (source / name).is_file() else part(page, name)
        if hashlib.sha256(content).hexdigest() != expected:
            raise UserError(
                f"{source} does not have {name} of Pyodide {_INTERPRETER['version']}; run `make explorer`, which "
                "fetches it from npm"
            )
        parts[name] = packed(content)
    return parts
