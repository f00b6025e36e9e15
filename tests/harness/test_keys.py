"""What enters a point's key: arguments by content, the source that computes, notebook definitions."""

from __future__ import annotations

import ast
import enum
import functools
import linecache
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import repro
from repro.errors import UserError
from repro.harness import keys, sources
from repro.harness.keys import describe, identify
from repro.hashing import canonical_json, sha256_text


def cell(source: str, number: list[int] = [0]) -> dict[str, Any]:  # noqa: B006 - counts the cells
    """Run a notebook cell: a new __main__ whose definitions know their source."""
    number[0] += 1
    name = f"<cell {number[0]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), space)
    return space


def key_of(source: str, name: str = "f", **arguments: Any) -> str:
    return identify(cell(source)[name], arguments).key


FUNCTION = """
LIMIT = 3

def helper(x):
    return x + LIMIT

def f(x=1):
    'Doc.'
    return helper(x)  # note
"""


def test_comments_docstrings_and_unused_definitions_do_not_enter_a_key() -> None:
    assert key_of(FUNCTION) == key_of(FUNCTION.replace("  # note", "").replace("Doc.", "Other."))
    assert key_of(FUNCTION) == key_of(FUNCTION + "\ndef other():\n    return 5\n")


@pytest.mark.parametrize(
    "old, new",
    [
        ("return helper(x)", "return helper(x + 0)"),
        ("x + LIMIT", "x * LIMIT"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("x=1", "x=2"),
    ],
)
def test_everything_that_a_notebook_function_uses_enters_its_key(old: str, new: str) -> None:
    assert old in FUNCTION and key_of(FUNCTION) != key_of(FUNCTION.replace(old, new))


CLASS = """
import dataclasses
import math
from typing import Protocol

class Rule(Protocol):
    def tokens(self, length): ...

@dataclasses.dataclass(frozen=True)
class Policy(Rule):
    '''Reserves a multiple.'''
    name: str = "quarter"
    step: int = 4

    def tokens(self, length):
        return math.ceil(length / self.step) * self.step

    @property
    def label(self):
        return self.name

    @staticmethod
    def twice(x):
        return 2 * x

policy = Policy()
def f(policy): ...
"""


def class_key(source: str, what: str = "policy") -> str:
    space = cell(source)
    return identify(space["f"], {"policy": space[what]}).key


@pytest.mark.parametrize("what", ["policy", "Policy"])
@pytest.mark.parametrize(
    "old, new",
    [
        ("math.ceil", "math.floor"),
        ("step: int = 4", "step: int = 8"),
        ("2 * x", "3 * x"),
        ("self.name", "self.step"),
        ("def tokens(self, length): ...", "def tokens(self, length): return 1"),
    ],
)
def test_a_policy_defined_in_a_notebook_enters_the_key_with_its_source(what: str, old: str, new: str) -> None:
    assert old in CLASS and class_key(CLASS, what) != class_key(CLASS.replace(old, new), what)
    assert class_key(CLASS, what) == class_key(CLASS.replace("Reserves a multiple", "Other words"), what)


def test_closures_enter_with_what_they_hold() -> None:
    source = "def make(n):\n    def g(x):\n        return x + n\n    return g\n\nf, g = make(1), make(2)\n"
    space = cell(source)
    assert identify(space["f"], {}).key != identify(space["g"], {}).key
    assert identify(functools.partial(space["f"], 1), {}).key != identify(functools.partial(space["f"], 2), {}).key


def test_definitions_may_refer_to_one_another() -> None:
    source = "def f(n):\n    return g(n - 1) if n else 0\n\ndef g(n):\n    return f(n - 1) if n else 1\n"
    assert key_of(source) == key_of(source) != key_of(source.replace("else 1", "else 2"))


def test_imports_inside_a_notebook_function_lead_to_the_projects_code() -> None:
    space = cell("def f():\n    from repro import hashing\n    return hashing\n\ndef g():\n    return 1\n")
    assert identify(space["f"], {}).code != identify(space["g"], {}).code
    assert ("repro", "hashing") in roots_of(space["f"])


def roots_of(value: Any) -> set[tuple[str, str]]:
    collector = keys._Collector()
    collector.describe(value, "value")
    return collector.roots


def test_of_a_module_that_a_notebook_imports_only_what_is_used_counts() -> None:
    source = "import repro\nimport repro.hashing as h\ndef f():\n    return repro.serve, h.read_json\n"
    assert roots_of(cell(source)["f"]) == {("__main__", "f"), ("repro", "serve"), ("repro.hashing", "read_json")}
    source = "import repro\ndef f():\n    return getattr(repro, 'serve')\n"
    assert ("repro", "*") in roots_of(cell(source)["f"])


def test_annotations_of_arguments_lead_nowhere() -> None:
    source = "from repro.hashing import read_json\ndef f(x: read_json) -> read_json:\n    return x\n"
    assert roots_of(cell(source)["f"]) == {("__main__", "f")}


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Box:
    size: float


def test_arguments_count_by_content() -> None:
    distinct = [
        None,
        True,
        1,
        1.5,
        "1",
        [1],
        [1, 2],
        {"a": 1},
        {"a": 2},
        {1: "a"},
        Colour.RED,
        Colour.BLUE,
        Box(1.0),
        Box(2.0),
        frozenset({1, 2}),
        np.arange(3),
        np.arange(3.0),
        np.arange(4),
        len,
        max,
        Path("a"),
    ]
    texts = [canonical_json(describe(value)) for value in distinct]
    assert len(set(texts)) == len(distinct)
    assert describe({"b": 1, "a": 2}) == describe({"a": 2, "b": 1})
    assert describe((1, 2)) == describe([1, 2])
    assert describe({3, 1, 2}) == describe({2, 3, 1})


@pytest.mark.parametrize("value", [object(), iter([1]), np.array([object()]), np.random.default_rng(0)])
def test_what_has_no_content_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="argument 'x': a .* cannot be identified by its content"):
        identify(len, {"x": value})


def test_functions_without_a_source_are_refused() -> None:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(): return 1", space)
    with pytest.raises(UserError, match="the source of f cannot be read"):
        identify(space["f"], {})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small package in place of ours: an engine with data, a study, and what only drawing needs."""
    folder = tmp_path / "repro"
    files = {
        "__init__.py": "_NAMES = {'run': ('repro.engine.core', 'run'), 'pen': ('repro.draw', 'pen')}\nVERSION = 1\n",
        "engine/__init__.py": "from .core import run\n",
        "engine/core.py": "from repro import units\n\ndef run(x):\n    import repro.lazy\n    return x\n",
        "engine/data/costs.yaml": "a: 1\n",
        "units.py": "SECOND = 1\n",
        "lazy.py": "VALUE = 1\n",
        "draw.py": "from repro import fonts\n",
        "fonts.py": "",
        "fonts.json": "{}",
        "paper/__init__.py": "",
        "paper/curves.json": "{}",
        "studies/__init__.py": "",
        "studies/one.py": "from typing import TYPE_CHECKING\nfrom repro import draw as pen\n"
        "from repro.engine import run\nif TYPE_CHECKING:\n    from repro import paper\n"
        "RATE = 2\nBINS = 9\n"
        "def points(params):\n    return [compute]\n\ndef compute(x):\n    return run(x) * RATE\n\n"
        "def draw(rows, params):\n    return pen, BINS\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(sources, "_PACKAGE", folder)
    return folder


def code(root: tuple[str, str] = ("repro.studies.one", "compute")) -> str:
    return sources.Sources().digest(frozenset({root}))


def test_the_computing_code_is_what_the_points_function_reaches(package: Path) -> None:
    reached = sources.Sources().reached({("repro.studies.one", "compute")})
    assert {module for module, _ in reached} == {
        "repro",
        "repro.engine",
        "repro.engine.core",
        "repro.units",
        "repro.lazy",
        "repro.studies",
        "repro.studies.one",
    }
    names = {name for module, name in reached if module == "repro.studies.one"}
    assert names == {"", "compute", "run", "RATE"}


def test_a_name_that_the_package_offers_lazily_counts_as_what_it_stands_for(package: Path) -> None:
    reached = sources.Sources().reached({("repro", "run")})
    assert ("repro.engine.core", "*") in reached and "repro.draw" not in {module for module, _ in reached}
    assert {"repro.engine.core", "repro.draw"} <= {module for module, _ in sources.Sources().reached({("repro", "*")})}


@pytest.mark.parametrize(
    "imported, used",
    [
        ("from repro.studies.two import shared", "shared"),
        ("from repro.studies import two", "two.shared"),
        ("import repro.studies.two as other", "other.shared"),
        ("from .two import shared as its", "its"),
    ],
)
def test_studies_follow_one_another_by_name(package: Path, imported: str, used: str) -> None:
    one, two = (package / "studies" / name for name in ("one.py", "two.py"))
    two.write_text("from repro import draw\nSTEP = 1\ndef shared():\n    return STEP\ndef draw():\n    return draw\n")
    one.write_text(f"{imported}\n" + one.read_text().replace("* RATE", f"* RATE * {used}()"))
    before = code()
    (package / "draw.py").write_text("import os\n")
    two.write_text(two.read_text().replace("return draw", "return None"))
    assert code() == before
    two.write_text(two.read_text().replace("STEP = 1", "STEP = 2"))
    assert code() != before


@pytest.mark.parametrize(
    "name, old, new, changes",
    [
        ("units.py", "SECOND = 1", "SECOND = 2", True),
        ("lazy.py", "VALUE = 1", "VALUE = 2", True),
        ("engine/__init__.py", "from .core", "from . import core\nfrom .core", True),
        ("engine/data/costs.yaml", "1", "2", True),
        ("studies/one.py", "RATE = 2", "RATE = 3", True),
        ("studies/one.py", "run(x) * RATE", "run(x) + RATE", True),
        ("fonts.json", "{}", "[]", True),  # beside the package's own modules: any of them may read it
        ("units.py", "SECOND = 1", "SECOND = 1  # one", False),
        ("draw.py", "from", "import os\nfrom", False),
        ("paper/curves.json", "{}", "[]", False),
        ("studies/one.py", "BINS = 9", "BINS = 8", False),
        ("studies/one.py", "[compute]", "[compute, compute]", False),
        ("studies/one.py", "import draw as pen", "import fonts as pen", False),
        ("studies/one.py", "def compute(x):", "def compute(x: pen) -> pen:", True),  # its text, not what it names
        ("__init__.py", "VERSION = 1", "VERSION = 2", False),
        ("__init__.py", "'repro.draw'", "'repro.fonts'", False),
    ],
)
def test_edits_change_the_code_hash_only_if_they_can_change_a_result(
    package: Path, name: str, old: str, new: str, changes: bool
) -> None:
    before, path = code(), package / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert (code() != before) is changes


def test_a_star_import_counts_whole(package: Path) -> None:
    study = package / "studies" / "one.py"
    study.write_text(study.read_text() + "from repro.fonts import *\n")
    before = code()
    (package / "fonts.py").write_text("SIZE = 1\n")
    assert code() != before


def test_a_statement_with_a_side_effect_counts(package: Path) -> None:
    before, path = code(), package / "studies" / "one.py"
    path.write_text(path.read_text() + "TABLE = {}\nTABLE['x'] = BINS\n")
    after = code()
    assert after != before
    path.write_text(path.read_text().replace("BINS = 9", "BINS = 8"))
    assert code() != after


def test_a_broken_source_file_is_named_with_its_line(package: Path) -> None:
    (package / "units.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(UserError, match=r"units\.py, line 2"):
        code()


def test_the_real_package_can_be_read_whole() -> None:
    folder = Path(repro.__file__).parent
    names = {"repro." + ".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    reached = sources.Sources().reached((name.removesuffix(".__init__"), "*") for name in names)
    assert {("repro.harness.keys", "*"), ("repro.harness.sources", "*")} <= set(reached)


@pytest.mark.parametrize("name", repro.__all__)
def test_every_name_of_the_face_leads_to_the_module_that_has_it(name: str) -> None:
    reached = set(sources.Sources().reached({("repro", name)}))
    module, own = repro._NAMES[name]
    assert ("repro", name) in reached
    assert reached & {(module, "*"), (module, own)}  # of a study only what is used


SNIPPET = r"""
@cached
def f(x: int = 1, *, y=None, **z) -> str:
    'Dropped.'
    # dropped
    a, (b, c) = x, [1.50, 'é', b"\x00", ..., 1_000, None, True]
    return f"{x!r:>{y}}" f"{a}" 'tail' if not x else f'{b:{c}} {"quoted"}' "end"
"""


def test_the_text_of_a_source_is_the_same_in_every_version_of_python() -> None:
    """Else figures made with one version would carry other hashes than those made with another."""
    program = (
        "import ast, hashlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from repro.harness.sources import canonical_source, normalised\n"
        "texts = [sys.argv[2], *(path.read_text('utf-8') for path in sorted(Path(sys.argv[1], "
        "'repro').rglob('*.py')))]\n"
        "print([hashlib.sha256(canonical_source(normalised(ast.parse(text))).encode()).hexdigest() for text in texts])"
    )
    outputs = {}
    for version in ("3.11", "3.12", "3.13"):
        candidates = [
            shutil.which(f"python{version}"),
            *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python3")),
        ]
        for python in filter(None, [*candidates, sys.executable]):
            done = subprocess.run(
                [python, "-I", "-c", program, str(Path(repro.__file__).parent.parent), SNIPPET],
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                outputs[python] = done.stdout
    assert len(outputs) >= 1 and len(set(outputs.values())) == 1, outputs
    text = sources.canonical_source(sources.normalised(ast.parse(SNIPPET)))
    assert sha256_text(text).startswith("78c91897"), "every figure's code_hash would change"
    assert "ropped" not in text
