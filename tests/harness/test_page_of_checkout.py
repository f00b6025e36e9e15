"""The page of a checkout: built from its figures, and checked with them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_project import FakeProject

from repro import paths
from repro.cli import main
from repro.harness import page


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeProject]:
    """A project that has drawn its figure and executed its notebook: once, as that starts a kernel and workers."""
    with pytest.MonkeyPatch.context() as patch:
        project = FakeProject(tmp_path_factory.mktemp("checkout") / "checkout", patch)
        views = "views:\n  tiny: {table: runs, x: rate, y: latency, series: seed}\n"
        project.parameter_file.write_text(project.parameter_file.read_text() + views)
        assert main(["run", "tiny"]) == 0
        page.build("paper")
        yield project


@pytest.fixture
def figures(project: FakeProject, tmp_path: Path) -> Iterator[Path]:
    """The project's figures, which with its results are afterwards as they were."""
    made = ("figures", "results")
    for name in made:
        shutil.copytree(project.folder / name, tmp_path / name)
    yield project.folder / "figures"
    for name in made:
        shutil.rmtree(project.folder / name)
        shutil.copytree(tmp_path / name, project.folder / name)


def problems() -> dict[str, str]:
    return {path.name: problem for path, problem in page.problems(paths.folders()).items()}


def test_a_page_that_was_just_built_has_no_problems(figures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems() == {"tiny.html": "", "index.html": ""}
    assert main(["verify"]) == 0
    assert "index.html: of these figures" in capsys.readouterr().out
    text = (figures / "index.html").read_text()
    assert 'href="notebooks/tiny.html"' in text and '"x":"rate","y":"latency","series":"seed"' in text


def test_another_page_or_a_notebook_of_other_rows_is_noticed(figures: Path) -> None:
    index, notebook = figures / "index.html", figures / "notebooks" / "tiny.html"
    index.write_text(index.read_text().replace("A tiny thing", "A huge thing"))
    notebook.write_text(notebook.read_text().replace('name="rows" content="', 'name="rows" content="0'))
    assert "built again, it comes out differently" in problems()["index.html"]
    assert problems()["tiny.html"] == "it shows other rows than the figures"
    assert main(["verify"]) == 1 and main(["verify", "tiny"]) == 0


def test_figures_without_a_page_are_no_problem(figures: Path) -> None:
    (figures / "index.html").unlink()
    (figures / "notebooks" / "tiny.html").unlink()
    assert problems() == {} and main(["verify"]) == 0


def test_equal_rows_give_equal_pages_and_notebooks(figures: Path) -> None:
    """Executed again, with everything kept: another notebook with other clocks, the same HTML."""
    before = {path: path.read_bytes() for path in figures.rglob("*.html")}
    executed = paths.folders().results / "tiny" / "tiny.ipynb"
    first = executed.read_bytes()
    assert main(["run", "tiny"]) == 0 and executed.read_bytes() != first
    page.build("paper")
    assert {path: path.read_bytes() for path in figures.rglob("*.html")} == before
