"""Executed notebooks as HTML: what a reader sees, without what belongs to the run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nbformat import v4
from test_page import check_links

from repro.report import notebooks
from repro.setup.environment import ROOT

ROWS = "ab" * 32


def output(kind: str, **data: Any) -> Any:
    return v4.new_output("execute_result", {kind: data["value"]}, execution_count=1)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    (tmp_path / "figures").mkdir()
    (tmp_path / "results" / "mine").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "why.md").touch()
    (tmp_path / "figures" / "index.html").write_text('<p id="mine"></p>')
    (tmp_path / "figures" / "mine.json").write_text(json.dumps({"experiment": "mine", "rows_hash": ROWS}))
    return tmp_path / "results", tmp_path / "figures"


def execute(results: Path, run: int = 1, rows_hash: str = ROWS, **changes: Any) -> None:
    """Leave an executed notebook; what a run says of itself differs between runs."""
    said = [
        v4.new_output("stream", name="stderr", text=f"{results}/x.py:{run}: Warning: slow\n"),
        v4.new_output("stream", name="stdout", text=f"mine: 6/6 points, {run} computed in {run} s\nkept: 7\n"),
        v4.new_output("display_data", {"text/plain": f"'mine: 6/6 points, {run} s'"}),
        v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": f"bar {run}"}),
        output("text/html", value=f'<div>a card<section class="now"><b>{run} kept</b></section></div>'),
        output(
            "text/html", value=f'<style>#T_{run}fe {{}}</style><table id="T_{run}fe"><tr id="T_{run}fe_r"></tr></table>'
        ),
        output("text/plain", value=f"<Thing at 0x7f{run:x}0> in {sys.prefix}/lib and {results.parent}/figures"),
    ]
    cells = [
        v4.new_markdown_cell(
            "# A <title>\n\nWhat to *see*: [why](../docs/why.md).\n\n[This notebook as executed](myself.html)."
        ),
        v4.new_code_cell("scale = 1", metadata={"tags": ["parameters"]}, execution_count=1),
        v4.new_code_cell("# Parameters\nscale = 2\n", metadata={"tags": ["injected-parameters"]}, execution_count=2),
        v4.new_code_cell("run()", outputs=said, execution_count=3, metadata={"papermill": {"duration": float(run)}}),
        v4.new_code_cell("", execution_count=None),
    ]
    for name, value in changes.items():
        setattr(cells[3], name, value)
    (results / "mine" / "mine.ipynb").write_text(json.dumps(v4.new_notebook(cells=cells)))
    (results / "mine" / "manifest.json").write_text(json.dumps({"rows_hash": rows_hash}))


def rendering(results: Path, figures: Path) -> Path | None:
    notebooks.render_all(results, figures)
    return notebooks.rendered("mine", figures)


def test_cells_and_results_are_there_and_what_belongs_to_the_run_is_not(folders: tuple[Path, Path]) -> None:
    execute(folders[0])
    path = rendering(*folders)
    text = path.read_text()
    for part in (
        "<title>A &lt;title&gt;</title>",
        "<em>see</em>",
        "kept: 7",
        "a card",
        "&lt;Thing&gt; in lib and figures",
    ):
        assert part in text, part
    assert re.sub(r"<[^>]*>", "", text).count("scale = ") == 1 and "tags" not in text
    for part in (
        "Warning",
        "points",
        "bar 1",
        "1 kept",
        "0x7f",
        str(folders[0].parent),
        sys.prefix,
        "papermill",
        "myself.html",
    ):
        assert part not in text, part
    assert notebooks.rows_hash_of(path) == ROWS


def test_it_needs_no_network_and_its_links_resolve(folders: tuple[Path, Path]) -> None:
    execute(folders[0])
    path = rendering(*folders)
    assert "../../docs/why.md" in check_links(path).links
    style = path.with_name("notebook.css").read_text()
    assert "http" not in path.read_text() + style and "url(" not in style and "<script" not in path.read_text()
    assert "prefers-color-scheme: dark" in style


def test_equal_rows_give_equal_bytes_in_any_run(folders: tuple[Path, Path]) -> None:
    execute(folders[0], run=1)
    first = rendering(*folders).read_bytes()
    execute(folders[0], run=2)
    assert rendering(*folders).read_bytes() == first


@pytest.mark.parametrize(
    "changes",
    [
        {"rows_hash": "cd" * 32},
        {"execution_count": None},
        {"outputs": [v4.new_output("error", ename="KeyError", evalue="x", traceback=[])]},
    ],
    ids=["of other rows than the figures", "ended early", "failed"],
)
def test_only_the_whole_run_behind_the_figures_is_rendered(folders: tuple[Path, Path], changes: dict[str, Any]) -> None:
    execute(folders[0], **changes)
    assert rendering(*folders) is None


def test_a_rendering_stays_where_nothing_was_executed(folders: tuple[Path, Path]) -> None:
    execute(folders[0])
    first = rendering(*folders).read_bytes()
    (folders[0] / "mine" / "mine.ipynb").unlink()
    assert rendering(*folders).read_bytes() == first


def test_no_schema_of_a_notebook_needs_the_grammar_that_quick_imports_leave_out() -> None:
    schemas = list(Path(v4.__file__).parent.parent.glob("v*/*.schema.json"))
    assert len(schemas) > 5
    assert not [path.name for path in schemas if re.search(r'"format": *"iri', path.read_text(encoding="utf-8"))]


def test_quick_imports_leave_out_the_grammar_and_what_python_may_import_later() -> None:
    program = """
import sys
from repro.report.notebooks import quick_imports
with quick_imports():
    import papermill, nbconvert, jsonschema
assert "rfc3987_syntax" not in sys.modules
checker = jsonschema.Draft7Validator.FORMAT_CHECKER
assert "iri" not in checker.checkers and {"date", "email", "ipv4", "regex"} <= set(checker.checkers)
sys.modules["rfc3987_syntax"] = kept = object()
with quick_imports():
    pass
assert sys.modules["rfc3987_syntax"] is kept
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
