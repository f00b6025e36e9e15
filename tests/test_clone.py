"""A fresh clone has figures and no results: the page and one experiment at the paper's scale, as a user types them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from repro.harness.parameters import read_parameter_file
from repro.setup.environment import ROOT

pytestmark = pytest.mark.heavy(20)

ONE = "fig01_memory"  # arithmetic: seconds


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name in ("repro", "experiments", "notebooks", "figures"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return folder


def command(clone: Path, *arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("REPRO_", "SCALE", "LENGTHS"))}
    done = subprocess.run(
        [sys.executable, "-m", "repro", *arguments],
        cwd=clone,
        env=environ | {"PYTHONPATH": str(clone), "JOBS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout


def machines(clone: Path) -> dict[str, dict]:
    path = clone / "figures" / "machines.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def test_the_page_needs_nothing_that_a_clone_lacks(clone: Path) -> None:
    shown = {json.loads(path.read_text(encoding="utf-8"))["experiment"] for path in sidecars(clone)}
    titles = {stem: read_parameter_file(clone / "experiments" / f"{stem}.yaml").title for stem in shown}
    before = machines(clone)

    def whole() -> str:
        page = unescape((clone / "figures" / "index.html").read_text(encoding="utf-8"))
        assert [stem for stem, title in titles.items() if title not in page] == []
        return page

    command(clone, "page")
    whole()
    assert len(titles) >= 20 and not (clone / "results").exists()
    said = command(clone, "reproduce", "--only", ONE)
    assert f"{ONE}  done in" in said and "claims: " in said
    page, after = whole(), machines(clone)
    assert {**after, ONE: None} == {**before, ONE: None} and after[ONE]["computed_by"]  # the others' are as they were
    shutil.rmtree(clone / "results")
    command(clone, "page")
    assert machines(clone) == after and len(whole()) > 0.98 * len(page)  # without what was only executed here


def sidecars(clone: Path) -> list[Path]:
    return [path for path in (clone / "figures").glob("*.json") if path.with_suffix(".svg").is_file()]
