"""figures/explorer.html: the interpreter, this package's sources and the first runs, in one file without a network.

The page runs the very files of this package: they are written into its interpreter's memory and imported there. Their
hash stands on the page. The interpreter is Pyodide, as npm has it, or as an earlier page has it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

import repro
from repro.errors import UserError
from repro.explore import queue, rules
from repro.explore.run import FirstFit, run
from repro.explore.settings import CHUNKS, POLICIES, PRESETS, Settings, first_runs, settings
from repro.hashing import sha256_json, write_atomically

FILE_NAME = "explorer.html"
VERSION = "0.29.5"  # of Pyodide: the last that also runs in classic workers, which pages opened from a folder can start
#: its files -> their SHA-256
INTERPRETER = {
    "pyodide.js": "7f832a350240263d9946a9c3c877f7bcdab6c37d6dc65f72cd3be5905dca62dd",
    "pyodide.asm.js": "356c42f69e1695397e9d8670bd3c2e678248cde76e18bdae1731e848537b47d7",
    "pyodide.asm.wasm": "54309a5a2cfd757b1f0fdbc9093c92503f7b341500110329d932487183912718",
    "python_stdlib.zip": "831fd1e535084b972f87c6a35275de3d236efd5166f5e77ce89497710635e73c",
}
#: What the interpreter reads in place of its list of packages: it gets none.
_LOCK = {"abi_version": "2025_0", "arch": "wasm32", "platform": "emscripten_4_0_9", "python": "3.13.2"}
#: What the page runs, below this package's folder. `first_fit` is handed in.
_RUN = ("__init__.py", "checks.py", "errors.py", "sampling_params.py", "engine/**/*.py")
_OURS = ("__init__", "settings", "queue", "rules", "recording", "run")

#: as the paper prints them: Fig. 2 (% of the pool), and Fig. 13a (requests batched), both OPT-13B on ShareGPT
PRINTED = {
    "orca-max": {"sequences": 7.00, "token_states": 20.4, "reserved": 13.3, "internal": 57.3, "other": 8.9},
    "orca-pow2": {"sequences": 9.81, "token_states": 26.8, "reserved": 17.9, "internal": 13.6, "other": 41.6},
    "orca-oracle": {"sequences": 13.62, "token_states": 38.2, "reserved": 25.2, "internal": 0.0, "other": 36.6},
    "vllm": {"sequences": 30.42, "token_states": 96.3},
}


_STUDIED: tuple[dict[str, Any], ...] = ({}, {"spread": 0})  # what saturated_queue's outputs are


def sources(first_fit: ModuleType) -> dict[str, str]:
    """Path in the interpreter -> text, of all that the page runs."""
    folder = Path(repro.__file__).parent
    files = [path for pattern in _RUN for path in sorted(folder.glob(pattern))]
    files += [folder / "explore" / f"{name}.py" for name in _OURS]
    found = {path.relative_to(folder.parent).as_posix(): path.read_text(encoding="utf-8") for path in files}
    return found | {f"{first_fit.__name__.replace('.', '/')}.py": inspect.getsource(first_fit)}


def drawn(lengths: Callable[..., Any], seeds: Iterable[int]) -> dict[str, tuple[list[int], list[int]]]:
    """The lengths of the seeds that the page shows, as NumPy draws them: lengths(count=, spread=, seed=)."""
    made = {}
    for seed in seeds:
        for one in (Settings(**preset, seed=seed, max_num_seqs=256) for preset in _STUDIED):
            prompts, outputs = lengths(count=queue.saturating(one), spread=one.spread, seed=seed)
            made[queue.key_of(one)] = prompts.tolist(), outputs.tolist()
    return made


def build(target: Path, first_fit: ModuleType, drawn: queue.Drawn, interpreter: Path | None = None) -> Path:
    """Write the page. The interpreter's files come from a folder, or else from the page that is there.

    `first_fit` has FirstFitAllocator; `drawn` has the lengths of the seeds that the page shows. UserError if there is
    no interpreter of this version, or the page cannot be written."""
    parts = _from_folder(interpreter) if interpreter else _from_page(target)
    write_atomically(target, html(parts, first_fit, drawn).encode())
    return target


def html(interpreter: Mapping[str, str], first_fit: ModuleType, drawn: queue.Drawn) -> str:
    """The page's text, from the parts of an interpreter as `_packed` makes them."""
    code = sources(first_fit)
    allocator: FirstFit = first_fit.FirstFitAllocator
    runs = [run(one, allocator, drawn) for one in first_runs()]
    about = {
        "defaults": asdict(Settings()),
        "policies": POLICIES,
        "chunks": CHUNKS,
        "presets": PRESETS,
        "examples": rules.EXAMPLES,
        "printed": PRINTED,
        "allocator": first_fit.__name__,
        "lock": {"info": {**_LOCK, "version": VERSION}, "packages": {}},
        "runs": {key(one["settings"]): f"run-{number}" for number, one in enumerate(runs)},
    }
    loader = jinja2.PackageLoader("repro.explore")
    strict = dict(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return (
        jinja2.Environment(loader=loader, **strict)
        .get_template("explorer.html.j2")
        .render(
            about=_json(about),
            runs=[_packed(_json(one).encode()) for one in runs],
            drawn=_packed(_json(drawn).encode()),
            sources=_packed(_json(code).encode()),
            sources_hash=sha256_json(code),
            num_sources=len(code),
            interpreter=interpreter,
            version=VERSION,
            python=_LOCK["python"],
        )
    )


def key(values: Mapping[str, Any]) -> str:
    """By what a run is found on the page: its settings, without what it does not look at, as JSON."""
    return _json(dict(sorted(asdict(settings(values)).items())))


def sources_of(page: str) -> dict[str, str]:
    """The sources in a page's text, by path."""
    return json.loads(_unpacked(_part(page, "sources")))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _unpacked(text: str) -> bytes:
    return gzip.decompress(base64.b64decode(text))


def _part(page: str, name: str) -> str:
    found = re.search(rf'<script type="text/plain" id="{re.escape(name)}">([^<]*)</script>', page)
    return found[1] if found else ""


_REMEDY = f"run `make explorer`, which fetches Pyodide {VERSION} from npm"


def _from_folder(folder: Path) -> dict[str, str]:
    parts = {}
    for name, expected in INTERPRETER.items():
        try:
            content = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"--interpreter: {folder / name} cannot be read; {_REMEDY}") from error
        if hashlib.sha256(content).hexdigest() != expected:
            raise UserError(f"--interpreter: {folder / name} is not that of Pyodide {VERSION}; {_REMEDY}")
        parts[name] = _packed(content)
    return parts


def _from_page(path: Path) -> dict[str, str]:
    page = path.read_text(encoding="utf-8") if path.is_file() else ""
    parts = {name: _part(page, name) for name in INTERPRETER}
    for name, expected in INTERPRETER.items():
        if not parts[name] or hashlib.sha256(_unpacked(parts[name])).hexdigest() != expected:
            raise UserError(f"{path} holds no Pyodide {VERSION} to build the next page with; {_REMEDY}")
    return parts
