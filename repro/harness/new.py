"""A new experiment from a template: its parameter file, its study and its notebook.

The template is an experiment that runs: tests/harness/test_new.py takes it from here to the page. docs/extending.md
says what to change in it."""

from __future__ import annotations

import importlib
import keyword
from pathlib import Path

import jinja2

from repro import paths
from repro.errors import UserError
from repro.hashing import write_atomically


def new(stem: str) -> list[Path]:
    """Write the three files of the experiment `stem`; returns their paths.

    UserError for a name that cannot be a module's, or is taken."""
    if not (stem.isascii() and stem.isidentifier() and stem.islower()) or keyword.iskeyword(stem):
        raise UserError(f"{stem!r} cannot name an experiment; use small letters, digits and _, such as my_experiment")
    where, studies = paths.folders(), Path(importlib.import_module(paths.studies_package()).__path__[0])
    files = {
        "parameters.yaml.j2": where.experiments / f"{stem}.yaml",
        "study.py.j2": studies / f"{stem}.py",
        "notebook.ipynb.j2": where.notebooks / f"{stem}.ipynb",
    }
    if taken := [str(path) for path in files.values() if path.exists()]:
        raise UserError(f"{stem!r} is taken: there is {', '.join(taken)}; choose another name")
    loader = jinja2.PackageLoader("repro.harness")
    templates = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)  # noqa: S701
    for template, path in files.items():
        write_atomically(path, templates.get_template(template).render(stem=stem).encode())
    return list(files.values())
