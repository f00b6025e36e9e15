"""The course: each notebook runs with its starters in place and fails its checks for the stated reasons, and passes
them with its solution; doing nothing, or the example alone, passes none."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from typing import Any

import pytest
from committed import committed

from repro.course.grading import Grade
from repro.setup.environment import ROOT

COURSE = committed() / "notebooks" / "course"
#: lesson -> the rule that each of its starters breaks, in the order of its tasks
REASONS = {
    "waste": ["books", "waste"],
    "block_tables": ["place", "table"],
    "copy_on_write": ["references", "contents"],
    "preemption": ["order", "lost token", "standstill"],
    "batching": ["starved", "budget"],
    "prefix_caching": ["contents", "nothing to compute", "no block"],
}


def cells(stem: str) -> list[dict[str, Any]]:
    content = json.loads((COURSE / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in content if cell["cell_type"] == "code"]


def graded(stem: str, solved: bool) -> list[Grade]:
    """Run a notebook from top to bottom; what its checks say. `solved`: with the solution in place of each starter."""
    names: dict[str, Any] = {}
    grades = []
    for cell in cells(stem):
        source, tags = "".join(cell["source"]), cell["metadata"].get("tags", [])
        if "check" in tags:
            grades.append(eval(source, names))
        else:
            exec(source, names)
        if solved and "task" in tags:
            names |= runpy.run_path(str(COURSE / "solutions" / f"{stem}.py"))
    return grades


#: runs the code of notebooks where nothing of the extra `models` can be imported
WITHOUT_MODELS = """
import json, sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "triton", "datasets", "accelerate")))
for path in sys.argv[1:]:
    cells = json.load(open(path, encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
"""


def test_the_course_runs_on_the_base_installation() -> None:
    paths = [str(COURSE / f"{stem}.ipynb") for stem in REASONS]
    done = subprocess.run([sys.executable, "-c", WITHOUT_MODELS, *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_lesson_has_a_notebook_a_solution_and_a_line() -> None:
    stems = set(REASONS)
    assert {path.stem for path in COURSE.glob("*.ipynb")} == stems
    assert {path.stem for path in (COURSE / "solutions").glob("*.py")} == stems
    text = (COURSE / "README.md").read_text(encoding="utf-8")
    assert all(f"({stem}.ipynb)" in text for stem in stems)


@pytest.mark.parametrize("stem", REASONS)
def test_a_lesson_is_short_and_kept_without_outputs(stem: str) -> None:
    whole = json.loads((COURSE / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
    assert 10 <= len(whole) <= 20
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells(stem))
    text = "".join("".join(cell["source"]) for cell in whole)
    assert "§" in text and "solutions" not in text


@pytest.mark.parametrize("stem", REASONS)
def test_each_starter_fails_its_check_for_the_stated_reason(stem: str) -> None:
    grades = graded(stem, solved=False)
    assert [grade.rule for grade in grades] == REASONS[stem]
    assert all(grade.shown and "NOT YET" in repr(grade) and grade.shown in repr(grade) for grade in grades)


@pytest.mark.parametrize("stem", REASONS)
def test_each_solution_passes(stem: str) -> None:
    grades = graded(stem, solved=True)
    assert [str(grade) for grade in grades if not grade.passed] == [] and len(grades) == len(REASONS[stem])
