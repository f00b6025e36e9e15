"""figures/index.html: five findings, every figure, the claims ledger and the machines, on one page without a network.

The page is a pure function of what lies in the folders (figures, the JSON file beside each that says what it is, rows,
claims.json, machines.json, renderings of notebooks) and of the descriptions that it is handed. It judges and computes
nothing. How it looks is in templates/, what it says of a claim in ledger_rows."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from repro import paths
from repro.hashing import read_json, write_atomically
from repro.report import claims, notebooks
from repro.report.claims.compare import COLOR
from repro.report.claims.rules import Verdict
from repro.report.embedding import MACHINES
from repro.report.findings import findings
from repro.report.ledger_rows import row, sources
from repro.report.views import View, chart

_MEANINGS = {
    Verdict.REPRODUCED: "ours meets the claim's rule",
    Verdict.DIFFERS: "ours misses it",
    Verdict.CONTRADICTORY: "the source disagrees with itself",
    Verdict.REPORTED: "shown beside the claim, no tolerance to meet",
    Verdict.CALIBRATION: "the value went into a model and cannot test it",
    Verdict.NOT_RUN: "not all of it has been computed yet",
}
_EVIDENCE = {
    "exact": "arithmetic",
    "replayed": "the allocator and scheduler on a trace",
    "modelled": "a cost model in virtual time",
    "measured": "a clock on the machine that made the figures",
    "recorded": "measured earlier, on the GPU named",
}
FILE_NAME = "index.html"
EXPLORER = "explorer.html"  # beside it, if repro.explore has made one
#: A title's beginning serves as its label where it is no longer than this.
_LABEL_LENGTH = 34


@dataclass(frozen=True)
class Description:
    """What the page says about an experiment: its title, a caption for each figure and table by name, what its
    parameters mean, and for a figure the view of its rows (repro.report.views.View's fields)."""

    title: str
    captions: Mapping[str, str]
    meanings: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """A short name for navigation: what stands before the title's colon, "" if that is long."""
        head, colon, _ = self.title.partition(":")
        return head if colon and len(head) <= _LABEL_LENGTH else ""


def build(figures: Path, results: Path, experiments: Mapping[str, Description]) -> Path:
    """Render the notebooks that were executed below `results`, write `figures`/index.html and return its path.

    `experiments` describes them by name. Raises UserError for a broken ledger or view, and where the page
    cannot be written."""
    notebooks.render_all(results, figures)
    page = figures / FILE_NAME
    write_atomically(page, html(figures, experiments).encode())
    return page


def html(figures: Path, experiments: Mapping[str, Description]) -> str:
    """The page's text; as `build`, but nothing is written."""
    made = read_json(figures / MACHINES)
    drawn: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(figures.glob("*.svg")):
        about = read_json(path.with_suffix(".json"))
        stem = about.get("experiment", "")
        drawn.setdefault(stem, []).append(_figure(path, about, experiments.get(stem) or Description(stem, {})))
    tables = _tables(figures, experiments)
    stems = sorted({*drawn, *tables} - {""}, key=paths.reading_order) + ([""] if "" in drawn else [])
    entries = claims.read(figures)
    described = {stem: experiments.get(stem) or Description(stem or "Other figures", {}) for stem in stems}
    sections = [
        {
            "stem": stem,
            "id": stem or "other",
            "title": about.title,
            "label": about.label or stem.replace("_", " ").capitalize() or about.title,
            "links": _links(stem, figures),
            "figures": drawn.get(stem, []),
            "tables": tables.get(stem, []),
            "entries": [entry for entry in entries if stem and stem in sources(entry)],
        }
        for stem, about in described.items()
    ]
    return _template().render(
        sections=sections,
        by_stem={section["stem"]: section for section in sections},
        findings=list(findings(entries)),
        claims=[row(entry) for entry in entries],
        counts=Counter(entry["verdict"] for entry in entries),
        meanings=_MEANINGS,
        evidence=_EVIDENCE,
        colors=COLOR,
        machines=_machines(made),
        explorer=EXPLORER if (figures / EXPLORER).is_file() else "",
    )


def _figure(path: Path, about: Mapping[str, Any], description: Description) -> dict[str, Any]:
    """What the page shows of one figure: its picture with its size, what it is, its rows, and a view of them."""
    files = {name: path.with_name(table["file"]) for name, table in (about.get("tables") or {}).items()}
    stated = description.views.get(path.stem)
    view = View.parse(path.stem, stated) if stated else None
    size = re.search(r'<svg[^>]* width="([\d.]+)pt" height="([\d.]+)pt"', path.read_text(encoding="utf-8")[:2000])
    return {
        "name": path.stem,
        "caption": description.captions.get(path.stem, ""),
        "badge": _badge(about),
        "size": [round(float(points) * 4 / 3) for points in size.groups()] if size else None,  # CSS pixels
        "about": about,
        "tables": [(name, file.name, about["tables"][name]["rows"]) for name, file in files.items() if file.is_file()],
        "parameters": [
            (name, _in_words(value), description.meanings.get(name, ""))
            for name, value in (about.get("parameters") or {}).items()
        ],
        "view": Markup(chart(view, files[view.table])) if view and _is_file(files.get(view.table)) else "",
    }


def _is_file(path: Path | None) -> bool:
    return path is not None and path.is_file()


def _tables(figures: Path, experiments: Mapping[str, Description]) -> dict[str, list[dict[str, str]]]:
    """The tables that experiments keep beside their figures as HTML, by experiment; a comment says whose each is."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(figures.glob("*.html")):
        comment, _, table = path.read_text(encoding="utf-8").partition("\n")
        whose = re.match(r"<!-- experiment (\w+), rows", comment)
        if whose and whose[1] in experiments:
            caption = experiments[whose[1]].captions.get(path.stem, "")
            found.setdefault(whose[1], []).append({"name": path.stem, "caption": caption, "table": Markup(table)})
    return found


def _template() -> jinja2.Template:
    strict = dict(autoescape=True, undefined=jinja2.StrictUndefined)
    loader = jinja2.PackageLoader("repro.report")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **strict)
    environment.filters["css"] = lambda verdict: verdict.split()[0]
    return environment.get_template("page.html.j2")


def _badge(about: Mapping[str, Any]) -> str:
    """What a figure's numbers are and of which device, from the file beside it."""
    if not about:
        return "no provenance"
    evidence, devices = ", ".join(about.get("evidence") or ["unknown evidence"]), ", ".join(about.get("devices") or [])
    scale = "" if about.get("scale", "paper") == "paper" else f"scale {about['scale']}"
    return " · ".join(filter(None, (evidence, devices, scale)))


def _links(stem: str, figures: Path) -> list[tuple[str, str]]:
    """Names and addresses of what belongs to an experiment, of that which exists."""
    where = paths.folders()
    places = {
        "executed notebook": notebooks.rendered(stem, figures),
        "notebook": where.notebooks / f"{stem}.ipynb",
        "parameter file": where.experiments / f"{stem}.yaml",
    }
    found = {name: path for name, path in places.items() if stem and _is_file(path)}
    return [(name, Path(os.path.relpath(path, figures)).as_posix()) for name, path in found.items()]


def _in_words(value: Any) -> str:
    """A parameter's value as its file writes it."""
    return json.dumps(value, ensure_ascii=False).replace('"', "")


def _machines(made_by: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The machines that computed points, each once for its versions and commit, with the experiments."""
    made: dict[tuple[str, ...], list[str]] = {}
    for stem in sorted(made_by, key=paths.reading_order):
        for machine in made_by[stem].get("computed_by", []):
            hardware = [f"{machine.get('cpu')}, {machine.get('cores')} cores", *(machine.get("gpus") or [])]
            versions = [f"{name} {version}" for name, version in machine.get("libraries", {}).items() if version]
            changes = " + changes" if machine.get("uncommitted_changes") else ""
            commit = (machine.get("commit") or "unknown")[:10] + changes
            key = (", ".join(hardware), f"Python {machine.get('python')}, {', '.join(versions)}", commit)
            if stem not in made.setdefault(key, []):
                made[key].append(stem)
    names = ("machine", "versions", "commit", "experiments")
    return [dict(zip(names, (*key, stems), strict=True)) for key, stems in made.items()]
