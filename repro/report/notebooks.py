"""Executed notebooks as HTML, for readers who have no kernel: figures/notebooks/<experiment>.html.

nbconvert turns the cells into HTML; the page around them and the one style sheet that they share are ours, so nothing
is fetched from anywhere. What belongs to the run and not to its results is left out: clocks, folders, warnings,
progress, what had been kept before. So equal rows give equal bytes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from repro import paths
from repro.hashing import read_json, write_atomically

if TYPE_CHECKING:
    from nbconvert import HTMLExporter
    from nbformat import NotebookNode

FOLDER = "notebooks"
_STYLE_SHEET = "notebook.css"
_LINK_TO_ITSELF = re.compile(r"\n+\[This notebook as executed\][^\n]*")
#: What a run's card says of the moment (repro.harness.card), and addresses in memory.
_OF_THE_MOMENT = re.compile(r'<section class="now">.*?</section>| at 0x[0-9a-f]+', re.DOTALL)


def render_all(results: Path, figures: Path) -> None:
    """Render every notebook below `results` that was executed to its end and drew what lies in `figures`.

    Renderings of other notebooks stay as they are: a clone has those of the committed figures."""
    drawn = {about.get("experiment"): about.get("rows_hash") for about in map(read_json, figures.glob("*.json"))}
    for executed in sorted(results.glob("*/*.ipynb")):
        stem = executed.stem
        rows_hash = read_json(executed.with_name("manifest.json")).get("rows_hash")
        if executed.parent.name == stem and rows_hash and drawn.get(stem) == rows_hash:
            _render(executed, figures / FOLDER / f"{stem}.html", rows_hash)


def rendered(stem: str, figures: Path) -> Path | None:
    """The rendering of an experiment's notebook, if there is one."""
    path = figures / FOLDER / f"{stem}.html"
    return path if path.is_file() else None


def rows_hash_of(path: Path) -> str | None:
    """The hash of the rows that a rendering shows."""
    found = re.search(r'<meta name="rows" content="(\w+)">', path.read_text(encoding="utf-8"))
    return found[1] if found else None


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import the libraries of notebooks inside this: it saves two seconds of processor time in each process.

    They import jsonschema, which builds the grammar of international addresses for its formats `iri` and
    `iri-reference`, where a package for it is installed (JupyterLab brings it). No schema of a notebook has such a
    field, and jsonschema does without. A process that has the grammar already keeps it."""
    grammar, modules = "rfc3987_syntax", sys.modules
    if grammar in modules:
        yield
        return
    modules[grammar] = None  # type: ignore[assignment]  # Python's way to say that an import fails
    try:
        yield
    finally:
        del modules[grammar]


def _render(executed: Path, page: Path, rows_hash: str) -> None:
    with quick_imports():
        import nbformat

    notebook = nbformat.read(executed, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    failed = any(output.output_type == "error" for cell in code for output in cell.outputs)
    if failed or any(cell.execution_count is None for cell in code):
        return
    notebook.cells = list(_without_injected(notebook.cells))
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index}"  # of a notebook without names they would be random
        if cell.cell_type == "markdown":
            cell.source = _moved_links(_LINK_TO_ITSELF.sub("", cell.source), page.parent)
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _cleared(output, executed.stem))]
    body, _ = _exporter().from_notebook_node(notebook)
    for index, name in enumerate(re.findall(r'<table id="(T_\w+)"', body)):  # pandas' own names are random
        body = body.replace(name, f"table-{index}")
    body = re.sub(r'<img alt="No description[^"]*"', '<img alt=""', body)  # the text around it says what it is
    headings = [cell.source.partition("\n")[0] for cell in notebook.cells if cell.source.startswith("# ")]
    loader = jinja2.PackageLoader("repro.report")
    template = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("notebook.html.j2")
    title = headings[0].removeprefix("# ") if headings else executed.stem
    text = template.render(title=title, stem=executed.stem, rows_hash=rows_hash, body=body)
    write_atomically(page, text.encode())
    write_atomically(page.with_name(_STYLE_SHEET), _style_sheet().encode())


@cache
def _exporter() -> HTMLExporter:
    """nbconvert's, for cells only; it compiles its templates once."""
    from nbconvert import HTMLExporter

    return HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)


def _without_injected(cells: list[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells with the parameters that Papermill injected in place of the notebook's own."""
    injected = [cell for cell in cells if "injected-parameters" in cell.metadata.get("tags", [])]
    for cell in cells:
        if injected and "parameters" in cell.metadata.get("tags", []):
            cell.source = injected[0].source.removeprefix("# Parameters\n")
        if cell not in injected:
            yield cell


def _moved_links(markdown: str, folder: Path) -> str:
    """The text with its links to files of the checkout as they read from `folder`."""

    def moved(link: re.Match[str]) -> str:
        return f"]({Path(os.path.relpath(paths.folders().notebooks / link[1], folder)).as_posix()})"

    return re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", moved, markdown)


def _cleared(output: NotebookNode, stem: str) -> NotebookNode | None:
    """An output without what belongs to the run; None if nothing is left."""
    if output.output_type == "stream":
        lines = output.text.splitlines(keepends=True) if output.name == "stdout" else []
        output.text = _without_places("".join(line for line in lines if not line.startswith(f"{stem}: ")))
        return output if output.text.strip() else None
    if any("widget" in kind for kind in output.data) or _text(output.data).startswith(f"{stem}: "):
        return None  # progress
    for kind, value in output.data.items():
        if kind.startswith("text/") and isinstance(value, str):
            output.data[kind] = _OF_THE_MOMENT.sub("", _without_places(value))
    return output


def _text(data: dict[str, Any]) -> str:
    return data.get("text/plain", "").lstrip("'\"")


def _without_places(text: str) -> str:
    """The text without the folders of this machine."""
    for folder in sorted({str(paths.root()), sys.prefix, str(Path.home())} - {"/"}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return text


def _style_sheet() -> str:
    """The style of all notebooks: ours, and the colours of code for light and dark."""
    from pygments.formatters import HtmlFormatter

    own = resources.files("repro.report.templates").joinpath(_STYLE_SHEET).read_text(encoding="utf-8")
    light, dark = (
        HtmlFormatter(style=style, nobackground=True).get_style_defs(".highlight") for style in ("default", "monokai")
    )
    return f"{own}\n{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
