"""figures/index.html: every figure, the claims ledger and the machines behind them, on one page without a network.

The page is a pure function of what lies in the two folders (figures, the JSON file beside each that says what it is,
claims.json, machines.json, notebooks) and of the descriptions that it is handed. It judges
and computes nothing. How it looks is in templates/."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from repro import paths
from repro.hashing import read_json, write_atomically
from repro.report import claims
from repro.report.claims.compare import COLOR, lines, written, written_interval
from repro.report.claims.rules import Verdict
from repro.report.embedding import MACHINES

_MEANINGS = {
    Verdict.REPRODUCED: "ours meets the claim's rule",
    Verdict.DIFFERS: "ours misses it",
    Verdict.CONTRADICTORY: "the source disagrees with itself",
    Verdict.REPORTED: "shown beside the claim, no tolerance to meet",
    Verdict.CALIBRATION: "the value went into a model and cannot test it",
    Verdict.NOT_RUN: "not all of it has been computed yet",
}


@dataclass(frozen=True)
class Description:
    """What the page says about an experiment: its title, and a caption for each figure and table by name."""

    title: str
    captions: Mapping[str, str]


def build(figures: Path, results: Path, experiments: Mapping[str, Description]) -> Path:
    """Write `figures`/index.html and return its path; `experiments` describes them by name.

    Raises UserError for a broken ledger, and where the page cannot be written."""
    manifests = read_json(figures / MACHINES)
    drawn: dict[str, list[dict[str, str]]] = {}
    for path in sorted(figures.glob("*.svg")):
        about = read_json(path.with_suffix(".json"))
        stem = about.get("experiment", "")
        captions = experiments[stem].captions if stem in experiments else {}
        figure = {"name": path.stem, "caption": captions.get(path.stem, ""), "badge": _badge(about)}
        drawn.setdefault(stem, []).append(figure)
    tables = _tables(figures, experiments)
    stems = sorted({*drawn, *tables, *manifests} - {""}, key=paths.reading_order) + ([""] if "" in drawn else [])
    entries = claims.read(figures)
    text = _template().render(
        titles={stem: experiments[stem].title if stem in experiments else stem or "Other figures" for stem in stems},
        links={stem: _notebooks(stem, figures, results) for stem in stems},
        drawn=drawn,
        tables=tables,
        entries=entries,
        counts=Counter(entry["verdict"] for entry in entries),
        meanings=_MEANINGS,
        colors=COLOR,
        machines=[row for stem, manifest in manifests.items() for row in _machines(stem, manifest)],
    )
    page = figures / "index.html"
    write_atomically(page, text.encode())
    return page


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
    environment.filters |= {
        "lines": lines,
        "written": written,
        "written_interval": written_interval,
        "apart": _apart,
        "sources": lambda entry: entry["experiment"].split(", ") if entry["experiment"] else [],
        "css": lambda verdict: verdict.split()[0],
    }
    return environment.get_template("page.html.j2")


def _badge(about: Mapping[str, Any]) -> str:
    """What a figure's numbers are and of which device, from the file beside it."""
    if not about:
        return "no provenance"
    evidence, devices = ", ".join(about.get("evidence") or ["unknown evidence"]), ", ".join(about.get("devices") or [])
    scale = "" if about.get("scale", "paper") == "paper" else f"scale {about['scale']}"
    return " · ".join(filter(None, (evidence, devices, scale)))


def _notebooks(stem: str, figures: Path, results: Path) -> list[tuple[str, str]]:
    """Names and addresses of the experiment's notebook and of its executed copy, where they exist."""
    folders = {"notebook": paths.folders().notebooks, "executed notebook": results / stem}
    found = {name: path for name, folder in folders.items() if stem and (path := folder / f"{stem}.ipynb").exists()}
    return [(name, Path(os.path.relpath(path, figures)).as_posix()) for name, path in found.items()]


def _apart(line: Mapping[str, Any]) -> str:
    """How far ours lies from the paper's value, and the verdict unless ours meets the rule or is missing."""
    distance, verdict = line["deviation_percent"], line["verdict"]
    far = "" if distance is None or abs(distance) < 0.05 else f"{distance:+.1f} %"
    return f"{far} {'' if verdict in (Verdict.REPRODUCED, Verdict.NOT_RUN) else verdict.split()[0]}"


def _machines(stem: str, manifest: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The machines that computed an experiment's points."""
    for machine in manifest.get("computed_by", []):
        hardware = [f"{machine.get('cpu')}, {machine.get('cores')} cores", *(machine.get("gpus") or [])]
        versions = [f"{name} {version}" for name, version in machine.get("libraries", {}).items() if version]
        changes = " + changes" if machine.get("uncommitted_changes") else ""
        yield {
            "experiment": stem,
            "points": manifest.get("points"),
            "seconds of computing": manifest.get("seconds_of_computing"),
            "machine": ", ".join(hardware),
            "versions": f"Python {machine.get('python')}, {', '.join(versions)}",
            "commit": (machine.get("commit") or "unknown")[:10] + changes,
            "when (UTC)": (machine.get("utc") or "")[:16].replace("T", " "),
        }
