"""How a run displays in a notebook: a card with its points, its parameters and what each means, and its verdicts.

The card takes its colours from the page that it stands on, so that it can be read in light and in dark themes; only a
verdict brings colours of its own, a background and the text on it. What it says of the moment (points kept, claims
judged so far) is marked, since the notebook as HTML leaves it out (repro.report.notebooks)."""

from __future__ import annotations

import json
from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any

from repro.harness.parameters import make_parameters
from repro.harness.progress import duration
from repro.report import claims

if TYPE_CHECKING:
    from repro.harness.experiment import Run


def html(run: Run) -> str:
    """The run as HTML: points kept and missing, parameters in force beside those of the file, and the verdicts."""
    head = f"<p><b>{escape(run.title)}</b><br><code>{run.stem}</code>, {run.scale} scale</p>"
    points = f"<details><summary>{_points(run)}</summary>{run.plan().to_html(max_rows=60)}</details>"
    return f"<div>{head}{_now(points)}{_parameters(run)}{_now(_claims(run))}</div>"


def _now(part: str) -> str:
    return f'<section class="now">{part}</section>'


def _points(run: Run) -> str:
    """How much is kept, what it took, and how long the rest will take by that."""
    points = run.identified_points()
    kept = {key: content for key in points if (content := run.store.read(key)) is not None}
    took = sum(content["seconds"] for content in kept.values())
    said = f"{len(points)} points, {len(kept)} kept" + (f" (they took {duration(took)})" if kept else "")
    if len(kept) == len(points):
        return said
    done = sum(points[key][1].weight for key in kept)
    left = sum(point.weight for _, point in points.values()) - done
    time = f"about {duration(took * left / done)} of computing" if done else "how long they take is not known yet"
    return f"{said}, {len(points) - len(kept)} missing: {time}"


def _parameters(run: Run) -> str:
    import pandas as pd

    stated = make_parameters(type(run.params), run.file, "paper", {}).model_dump()
    table = pd.DataFrame(
        {
            "parameter": name,
            "value": _text(value),
            "the file's, if another": "" if value == stated[name] else _text(stated[name]),
            "meaning": run.file.meanings.get(name, ""),
        }
        for name, value in run.params.model_dump().items()
    )
    left = [{"selector": "th, td", "props": "text-align: left"}]
    return table.style.set_uuid(run.stem).hide(axis="index").format(escape="html").set_table_styles(left).to_html()


def _claims(run: Run) -> str:
    if run.params.no_verdicts:
        return f"<p>{escape(run.params.no_verdicts)}</p>"
    entries = [one for one in claims.read(run.folders.figures) if run.stem in (one["experiment"] or "").split(", ")]
    if not entries:
        return "<p>No claim is judged yet.</p>"
    said = ", ".join(f"{count} {verdict}" for verdict, count in Counter(one["verdict"] for one in entries).items())
    shown = claims.style(claims.compare(entries)).to_html()
    return f"<details><summary>Claims: {said}</summary>{shown}</details>"


def _text(value: Any) -> str:
    """A value as the parameter file writes it; a function by its name."""
    return json.dumps(value, ensure_ascii=False, default=lambda one: getattr(one, "__name__", str(one))).replace(
        '"', ""
    )
