"""How a run displays in a notebook: a card with its points, its parameters and what each means, and its verdicts.

The card takes its colours from the page that it stands on, so that it can be read in light and in dark themes; only a
verdict brings colours of its own, a background and the text on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from repro.harness.progress import duration
from repro.report import claims
from repro.report.claims.compare import look

if TYPE_CHECKING:
    from repro.harness.experiment import Run

_CELL = "text-align:left;vertical-align:top;white-space:normal;padding:0.1em 0.8em 0.1em 0"


def html(run: Run) -> str:
    """The run as HTML: points kept and missing, parameters in force beside those of the file, and the verdicts."""
    head = f"<b>{escape(run.title)}</b><br><code>{run.stem}</code>, {run.scale} scale: {_points(run)}"
    return f"<div><p>{head}</p>{_parameters(run)}{_claims(run)}</div>"


def _points(run: Run) -> str:
    """How much is kept, what it took, and how long the rest will take by that."""
    points = run.identified_points()
    kept = {key: content for key in points if (content := run.store.read(key)) is not None}
    took = sum(content["seconds"] for content in kept.values())
    said = f"{len(points)} points, {len(kept)} kept" + (f" (they took {duration(took)})" if kept else "")
    if len(kept) == len(points):
        return f"{said}."
    said += f", {len(points) - len(kept)} missing"
    done = sum(points[key][1].weight for key in kept)
    left = sum(point.weight for _, point in points.values()) - done
    if not done:
        return f"{said}. How long they take is known when the first one is finished."
    return f"{said}: about {duration(took * left / done)} of computing, divided among the processes."


def _parameters(run: Run) -> str:
    rows = []
    for name in type(run.params).model_fields:
        now, stated = _text(getattr(run.params, name)), _text(run.file.params.get(name))
        changed = f"<b>{escape(now)}</b>, not {escape(stated)}"
        meaning = escape(run.file.meanings.get(name, ""))
        rows.append((f"<code>{name}</code>", escape(now) if now == stated else changed, meaning))
    return _table(("parameter", "value (bold: not the file's)", "meaning"), rows)


def _claims(run: Run) -> str:
    if not run.params.as_in_paper:
        return "<p>The paper's claims are not judged with these parameters.</p>"
    entries = [one for one in claims.read(run.folders.figures) if run.stem in (one["experiment"] or "").split(", ")]
    if not entries:
        return "<p>No claim is judged yet.</p>"
    counts = Counter(one["verdict"] for one in entries)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    chip = '<span style="{}">&nbsp;{}&nbsp;</span>'
    rows = [
        (f"<code>{one['id']}</code>", escape(one["says"]), chip.format(look(one["verdict"]), one["verdict"]))
        for one in entries
    ]
    return f"<details><summary>Claims: {said}</summary>{_table(('claim', 'says', 'verdict'), rows)}</details>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [
        "<tr>" + "".join(f'<{tag} style="{_CELL}">{cell}</{tag}>' for cell in cells) + "</tr>"
        for tag, cells in [("th", head), *(("td", row) for row in rows)]
    ]
    return f"<table>{''.join(lines)}</table>"


def _text(value: Any) -> str:
    """A value as the parameter file writes it; a function or a system by its name."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "__name__", value))
