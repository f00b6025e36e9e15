"""README.md and docs/ name only what exists: links, files, commands, targets, modules; and show the engine as it is."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
from committed import committed

from repro.bench.catalogue import BENCHMARKS
from repro.cli import main
from repro.setup.environment import ROOT

IN_ROOT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
FILES = [*(ROOT / name for name in IN_ROOT), *(ROOT / "docs").glob("*.md")]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in FILES}
#: what docs/extending.md and docs/a100.md have the reader make
MADE_BY_THE_READER = re.compile(
    r"^(experiments|notebooks|repro/studies)/(mine|<stem>)\.|^experiments/recorded/a100-80gb$"
)
MODULE = re.compile(r"\brepro(?:\.[A-Za-z_]\w*)+")


def found(pattern: str, text: str) -> list[str]:
    return sorted(set(re.findall(pattern, text)))


@pytest.fixture(params=sorted(PAGES))
def page(request: pytest.FixtureRequest) -> str:
    return request.param


def test_every_link_resolves(page: str) -> None:
    folder = ROOT if page in IN_ROOT else ROOT / "docs"
    links = [link.partition("#")[0] for link in found(r"\]\(([^)\s]+)\)", PAGES[page]) if "://" not in link]
    assert [link for link in links if not (folder / link).exists()] == []


def test_every_path_exists(page: str) -> None:
    """Files and folders of the checkout; {a,b} stands for both."""
    named = found(r"(?<![\w./{-])((?:repro|tests|docs|experiments|notebooks)/[\w./<>{},*-]*[\w}])", PAGES[page])
    missing = []
    for path in named:
        inner = re.search(r"\{(.*?)\}", path)
        each = [path.replace(inner[0], one) for one in inner[1].split(",")] if inner else [path]
        missing += [one for one in each if not MADE_BY_THE_READER.match(one) and not (ROOT / one).exists()]
    assert missing == []


def test_every_test_file_is_named_by_its_path(page: str) -> None:
    assert found(r"(?<![\w/])test_\w+\.py", PAGES[page]) == []


def commands(text: str, pattern: str) -> list[tuple[str, ...]]:
    """What a pattern finds at the beginning of a line of code, fenced, indented or inline."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    inline = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", plain)]
    lines = [
        *re.findall(r"```\w*\n(.*?)```", text, re.DOTALL),
        *re.findall(r"^    (.+)$", plain, re.MULTILINE),
        *inline,
    ]
    return re.findall(pattern, "\n".join(lines), re.MULTILINE)


def test_every_make_target_and_setting_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    for target, settings in commands(PAGES[page], r"^(?:[A-Z]+=\S+ )?make( [a-z]+)?((?: [A-Z]+=\S+)*)"):
        assert not target or target.strip() in targets, target
        for setting in re.findall(r"([A-Z]+)=", settings):
            assert f"$({setting})" in makefile or setting == "BUDGET", setting  # BUDGET goes through the environment


def test_every_command_and_option_exists(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands(PAGES[page], r"^(?:.*/)?(?:python3? -m )?repro ([a-z].*)"):
        words = command.partition("#")[0].split()
        called = words[:2] if words[0] == "bench" and words[1:] and words[1] in BENCHMARKS else words[:1]
        with pytest.raises(SystemExit) as ended:
            main([*called, "--help"])
        assert ended.value.code == 0, command
        usage = capsys.readouterr().out
        assert [word for word in words if word.startswith("-") and word not in usage] == [], command


def test_every_module_and_name_exists(page: str) -> None:
    """repro.x.y is a module, or a name in one; file names such as `repro.x` in a path do not count."""
    missing = []
    for dotted in sorted(set(MODULE.findall(re.sub(r"https?://\S+", "", PAGES[page])))):
        if not exists(dotted):
            missing.append(dotted)
    assert missing == []


def exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:length])
        if base.with_suffix(".py").is_file() or (base / "__init__.py").is_file():
            thing = import_module(".".join(parts[:length])) if length < len(parts) else None
            return all(hasattr(thing, name) and (thing := getattr(thing, name)) is not None for name in parts[length:])
    return False


def test_the_index_has_every_page() -> None:
    linked = {Path(link).name for link in found(r"\]\(([^)\s#]+\.md)", PAGES["index.md"])}
    assert linked == set(PAGES) - {"index.md"}


def test_every_experiment_has_a_line_and_every_line_an_experiment() -> None:
    stems = {path.stem for path in (committed() / "experiments").glob("*.yaml")}
    assert set(re.findall(r"^\| \[(\w+)\]\(", PAGES["experiments.md"], re.MULTILINE)) == stems
    assert f"All {len(stems)} take" in PAGES["experiments.md"]


def test_the_engine_on_the_first_page_is_the_engine() -> None:
    shown = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL) if "step" in block
    )
    source = (ROOT / "repro" / "engine" / "loop.py").read_text(encoding="utf-8")
    step = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "step")
    step.body = step.body[1:]  # the docstring
    assert ast.unparse(ast.parse(textwrap.dedent(shown))) == ast.unparse(step)
    lines = [line for line in shown.splitlines()[1:] if line.strip()]
    assert len(lines) == 8 and "The engine in eight lines" in PAGES["README.md"]


def test_code_on_the_pages_is_python_and_imports_what_exists(page: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("repro."):
                assert [name.name for name in node.names if not exists(f"{node.module}.{name.name}")] == []


def test_no_line_is_too_wide(page: str) -> None:
    """Prose wraps at 120 columns; rows of tables cannot."""
    wide = [line for line in PAGES[page].splitlines() if len(line) > 120 and not line.startswith("|")]
    assert wide == []


def test_the_notebooks_link_nowhere_else() -> None:
    """Links of notebooks to files of the checkout resolve, too; to renderings, once `page` has made any."""
    for path in sorted((committed() / "notebooks").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for link in found(r"\]\(([^)\s]+)\)", text):
            target = ROOT / path.parent.relative_to(committed()) / link.partition("#")[0]
            rendering = link == f"../figures/notebooks/{path.stem}.html" and not target.parent.exists()
            assert "://" in link or target.exists() or rendering, f"{path.name}: {link}"
