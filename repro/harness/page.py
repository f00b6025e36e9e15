"""The page of figures and verdicts of this checkout: built, and checked."""

from __future__ import annotations

from pathlib import Path

from repro import paths
from repro.harness.experiment import parameter_file
from repro.hashing import read_json
from repro.report import notebooks, page
from repro.report.page import Description


def build(variant: str) -> Path:
    """Build the page of a variant's figures, its notebooks too, and return its path."""
    where = paths.folders(variant)
    return page.build(where.figures, where.results, _described(where))


def problems(where: paths.Folders) -> dict[Path, str]:
    """What is wrong with the page beside the figures and with each rendered notebook; "" where nothing is."""
    drawn = {about.get("experiment"): about.get("rows_hash") for about in map(read_json, where.figures.glob("*.json"))}
    found = {
        path: "" if notebooks.rows_hash_of(path) == drawn.get(path.stem) else "it shows other rows than the figures"
        for path in sorted((where.figures / notebooks.FOLDER).glob("*.html"))
    }
    path = where.figures / page.FILE_NAME
    if path.is_file():
        same = page.html(where.figures, _described(where)) == path.read_text(encoding="utf-8")
        found[path] = "" if same else "built again, it comes out differently; build it with `python -m repro page`"
    return found


def _described(where: paths.Folders) -> dict[str, Description]:
    files = {stem: parameter_file(stem) for stem in where.stems()}
    return {stem: Description(file.title, file.captions, file.meanings, file.views) for stem, file in files.items()}
