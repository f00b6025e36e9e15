"""figures/index.html: every figure, the claims ledger and the machines behind them, on one page without a network.

The page is a pure function of what lies in the two folders - figures with their embedded provenance, claims.json, the
experiments' manifests, the notebooks beside them - and of the studies' captions: equal inputs give equal bytes. It
judges nothing and computes nothing; whatever it shows was written by an experiment.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from repro import paths
from repro.engine.errors import UserError
from repro.report import claims, embedding, page_assets
from repro.report.claims.rules import Tree, Verdict, at, deviation, leaves

_SHOWN = [
    Verdict.REPRODUCED,
    Verdict.DIFFERS,
    Verdict.CONTRADICTORY,
    Verdict.REPORTED,
    Verdict.CALIBRATION,
    Verdict.NOT_RUN,
]
_MEANING = {
    Verdict.REPRODUCED: "ours meets the claim's rule",
    Verdict.DIFFERS: "ours misses it",
    Verdict.CONTRADICTORY: "the source disagrees with itself",
    Verdict.REPORTED: "shown beside the claim, no tolerance to meet",
    Verdict.CALIBRATION: "the value went into a model and cannot test it",
    Verdict.NOT_RUN: "not all of it has been computed yet",
}
_FEW_KEYS = 8  # a claim with more keys than this folds them away


def build(figures_dir: Path, results_dir: Path) -> Path:
    """Write `figures_dir`/index.html and return its path. Raises UserError for a broken ledger or manifest."""
    entries = claims.read(figures_dir)
    manifests = {path.parent.name: _manifest(path) for path in sorted(results_dir.glob("*/manifest.json"))}
    figures = _figures(figures_dir)
    stems = sorted({*figures, *manifests} - {""}, key=paths.reading_order) + ([""] if "" in figures else [])
    links = {stem: _notebook_links(stem, figures_dir, results_dir) for stem in stems}
    sections = [
        _experiment(stem, figures.get(stem, []), manifests.get(stem, {}), links[stem], entries) for stem in stems
    ]
    text = page_assets.PAGE.format(
        style=page_assets.STYLE,
        script=page_assets.SCRIPT,
        summary=_summary(entries),
        contents="".join(
            f'<a href="#{escape(stem or "other")}">{escape(_title(stem, manifests.get(stem, {})))}</a>'
            for stem in stems
        ),
        experiments="\n".join(sections) or "<p>No experiment has been drawn yet: run <code>make reproduce</code>.</p>",
        ledger="\n".join(_ledger_row(entry, links) for entry in entries),
        machines=_machines(manifests),
    )
    path = figures_dir / "index.html"
    figures_dir.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)
    return path


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); delete it and run the experiment again") from error


def _figures(figures_dir: Path) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """experiment -> [(figure name, what the figure says about itself)]; "" for figures of no experiment."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(figures_dir.glob("*.svg")):
        try:
            embedded = embedding.read_embedded(path)
        except UserError:
            embedded = {}
        found.setdefault(embedded.get("experiment", ""), []).append((path.stem, embedded))
    return found


def _title(stem: str, manifest: Mapping[str, Any]) -> str:
    return manifest.get("title") or getattr(_study(stem), "TITLE", "") or stem or "Other figures"


def _study(stem: str) -> object:
    """The study's module, or None for an experiment that the package does not have."""
    try:
        return importlib.import_module(f"{paths.studies_package()}.{stem}") if stem else None
    except ModuleNotFoundError:
        return None


def _notebook_links(stem: str, figures_dir: Path, results_dir: Path) -> str:
    """Links to the experiment's notebook and to its executed copy, where they exist."""
    candidates = [
        ("notebook", paths.folders().notebooks / f"{stem}.ipynb"),
        ("executed notebook", results_dir / stem / f"{stem}.ipynb"),
    ]
    return " ".join(
        f'<a href="{escape(Path(os.path.relpath(path, figures_dir)).as_posix())}">{name}</a>'
        for name, path in candidates
        if stem and path.exists()
    )


def _experiment(
    stem: str,
    figures: list[tuple[str, dict[str, Any]]],
    manifest: Mapping[str, Any],
    links: str,
    entries: list[dict[str, Any]],
) -> str:
    captions = getattr(_study(stem), "CAPTION", {})
    judged = [entry for entry in entries if stem and stem in (entry["experiment"] or "").split(", ")]
    verdicts = " ".join(
        f'<a class="v {_css(entry["verdict"])}" href="#claim-{escape(entry["id"])}" '
        f'title="{escape(entry["verdict"])}">{escape(entry["id"])}</a>'
        for entry in judged
    )
    shown = "\n".join(
        f'<figure><a href="{name}.svg"><img src="{name}.svg" alt="{escape(captions.get(name, name))}" '
        f'loading="lazy"></a><figcaption>{_badge(embedded)} {escape(captions.get(name, ""))} <span class="links"><a '
        f'href="{name}.svg">SVG</a> <a href="{name}.png">PNG</a></span></figcaption></figure>'
        for name, embedded in figures
    )
    return (
        f'<section id="{escape(stem or "other")}"><h3>{escape(_title(stem, manifest))}</h3><p '
        f'class="links">{f"<code>{escape(stem)}</code>" if stem else ""} {links}</p>{shown}'
        + (f'<p class="judged">Verdicts: {verdicts}</p>' if judged else "")
        + "</section>"
    )


def _badge(embedded: Mapping[str, Any]) -> str:
    if not embedded:
        return '<span class="badge">no provenance</span>'
    text = ", ".join(embedded.get("evidence") or ["unknown evidence"])
    if embedded.get("devices"):
        text += f" · {', '.join(embedded['devices'])}"
    if embedded.get("scale", "paper") != "paper":
        text += f" · scale {embedded['scale']}"
    return f'<span class="badge">{escape(text)}</span>'


def _summary(entries: list[dict[str, Any]]) -> str:
    counts = Counter(entry["verdict"] for entry in entries)
    bar = "".join(
        f'<span class="{_css(verdict)}" style="flex:{counts[verdict]}"></span>' for verdict in _SHOWN if counts[verdict]
    )
    buttons = "".join(
        f'<button class="v {_css(verdict)}" data-verdict="{verdict}" title="{_MEANING[verdict]}">'
        f"<b>{counts[verdict]}</b> {verdict}</button>"
        for verdict in _SHOWN
    )
    return f'<div class="bar">{bar}</div><div class="counts"><b>{len(entries)}</b> claims: {buttons}</div>'


def _css(verdict: str) -> str:
    return "v-" + verdict.split()[0]


def _number(value: Tree) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "holds" if value else "does not hold"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.5g}"
    return escape(str(value))


def _ours(value: Tree, interval: Tree) -> str:
    text = _number(value)
    if isinstance(interval, list) and len(interval) == 2:
        text += f' <span class="interval">{_number(interval[0])} … {_number(interval[1])}</span>'
    return text


def _ledger_row(entry: Mapping[str, Any], links: Mapping[str, str]) -> str:
    paper, ours, interval = entry["paper"], entry["ours"], entry["interval"]
    if isinstance(paper, (dict, list)):
        values = _key_table(entry)
        cells = f'<td colspan="2" data-label="">{values}</td>'
    else:
        cells = (
            f'<td class="n" data-label="paper">{_number(paper)}</td><td class="n" '
            f'data-label="ours">{_ours(ours, interval)}</td>'
        )
    sources = "<br>".join(
        f'<a href="#{escape(stem)}">{escape(stem)}</a> <span class="links">{links.get(stem, "")}</span>'
        for stem in (entry["experiment"] or "").split(", ")
        if stem
    )
    printed = f" Printed: {escape(entry['printed'])}." if entry["printed"] else ""
    note = f'<p class="note">{escape(entry["note"])}</p>' if entry["note"] else ""
    return (
        f'<tr id="claim-{escape(entry["id"])}" data-verdict="{entry["verdict"]}"><td '
        f'data-label=""><b>{escape(entry["says"])}</b> <span class="unit">[{escape(entry["unit"])}]</span><p '
        f'class="note"><code>{escape(entry["id"])}</code> · {escape(entry["where"])} · '
        f'{entry["kind"]}</p></td>{cells}<td data-label="verdict"><span class="v '
        f'{_css(entry["verdict"])}">{entry["verdict"]}</span> <span '
        f'class="note">{entry["evidence"] or ""}</span></td><td data-label=""><p class="note">Rule: '
        f'{escape(entry["rule"])}.{printed}</p>{note}<p class="note">{sources}</p></td></tr>'
    )


def _key_table(entry: Mapping[str, Any]) -> str:
    """Paper and ours key by key, each with its own verdict."""
    keys = list(leaves(entry["paper"]))
    rows = []
    for path, paper in keys:
        ours = at(entry["ours"], path)
        verdict = _verdict_at(entry["verdicts"], path)
        distance = deviation(paper, ours)
        apart = "" if distance is None or abs(distance) < 0.05 else f"{distance:+.1f} %"
        word = "" if verdict in (Verdict.REPRODUCED, Verdict.NOT_RUN) else verdict.split()[0]
        name = _key_name(entry["paper"], path)
        rows.append(
            f'<tr class="{_css(verdict)}-key" title="{escape(verdict)}"><th>{escape(name)}</th><td '
            f'class="n">{_number(paper)}</td><td class="n">{_ours(ours, at(entry["interval"], path))}</td><td class="n '
            f'apart">{apart} {word}</td></tr>'
        )
    table = (
        '<table class="keys"><tr><th></th><th class="n">paper</th><th class="n">ours</th><th></th></tr>'
        f"{''.join(rows)}</table>"
    )
    return table if len(keys) <= _FEW_KEYS else f"<details><summary>{len(keys)} values</summary>{table}</details>"


def _key_name(tree: Tree, path: Iterable[str]) -> str:
    """The path in words; items of a list count from one."""
    steps = []
    for step in path:
        steps.append(f"({int(step) + 1})" if isinstance(tree, list) else step)
        tree = at(tree, (step,))
    return " · ".join(steps)


def _verdict_at(verdicts: Tree, path: Iterable[str]) -> str:
    """The verdict that covers a key: its own, or that of the group that a quorum judged as one."""
    for step in path:
        if isinstance(verdicts, str):
            return verdicts
        verdicts = at(verdicts, (step,))
    return verdicts


def _machines(manifests: Mapping[str, Mapping[str, Any]]) -> str:
    columns = ("experiment", "points", "seconds of computing", "machine", "versions", "commit", "when (UTC)")
    rows = []
    for stem, manifest in manifests.items():
        for machine in manifest.get("computed_by", []):
            libraries = ", ".join(
                f"{name} {version}" for name, version in machine.get("libraries", {}).items() if version
            )
            changes = " + changes" if machine.get("uncommitted_changes") else ""
            commit = (machine.get("commit") or "unknown")[:10] + changes
            hardware = f"{machine.get('cpu')}, {machine.get('cores')} cores" + "".join(
                f", {gpu}" for gpu in machine.get("gpus") or []
            )
            cells = (
                stem,
                manifest.get("points"),
                manifest.get("seconds_of_computing"),
                hardware,
                f"Python {machine.get('python')}, {libraries}",
                commit,
                (machine.get("utc") or "")[:16].replace("T", " "),
            )
            rows.append(
                "<tr>"
                + "".join(f'<td data-label="{name}">{escape(str(value))}</td>' for name, value in zip(columns, cells))
                + "</tr>"
            )
    if not rows:
        return "<p>No manifests: nothing has been run here.</p>"
    head = "".join(f"<th>{name}</th>" for name in columns)
    return f'<table class="cards"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
