"""An experiment from the template, from `new` to the page, as docs/extending.md has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_project import FakeProject

from repro.cli import main
from repro.report import claims


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path / "checkout", monkeypatch)


def test_from_the_template_to_the_page(project: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "mine"]) == 0
    written = [line.removeprefix("wrote ") for line in capfd.readouterr().out.splitlines()[:3]]
    assert all(Path(path).is_relative_to(project.folder) and Path(path).stem == "mine" for path in written)
    quick = ["-p", "block_sizes=[8, 64]", "-p", "duration_s=20.0"]
    assert main(["run", "mine", "--scale", "smoke", *quick]) == 0, capfd.readouterr().err  # its notebook judges, too
    results = project.folder / "results" / "custom"
    assert (results / "mine" / "pool.csv").read_text().count("\n") == 3
    assert main(["page", "--variant", "custom"]) == 0
    page = (results / "figures" / "index.html").read_text(encoding="utf-8")
    assert "mine: slots of last blocks without a token" in page and "Larger blocks leave more" in page
    assert main(["verify", str(results / "figures" / "mine.png")]) == 0
    assert [entry for entry in claims.read(results / "figures") if entry["experiment"]] == []
    cells = json.loads((results / "mine" / "mine.ipynb").read_text())["cells"]
    assert all(cell["execution_count"] for cell in cells if cell["cell_type"] == "code" and cell["source"])
    assert main(["list"]) == 0 and "mine  mine: slots" in capfd.readouterr().out
    del sys.modules[f"{project.environment['REPRO_STUDIES']}.mine"]


@pytest.mark.parametrize("name", ["tiny", "Mine", "my-experiment", "../mine", "1st", "class", "", "é", "__init__"])
def test_a_name_that_cannot_be_is_one_line_and_writes_nothing(
    project: FakeProject, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    before = sorted(path for path in project.folder.rglob("*") if "__pycache__" not in path.parts)
    assert main(["new", name]) == 2
    assert capfd.readouterr().err.startswith(f"repro: {name!r} ")
    assert sorted(path for path in project.folder.rglob("*") if "__pycache__" not in path.parts) == before
