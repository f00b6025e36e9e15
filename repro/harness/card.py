"""How a run displays in a notebook: a card with its parameters, what each means, its points, and its claims."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from repro.harness.progress import duration
from repro.report import claims

if TYPE_CHECKING:
    from repro.harness.experiment import Run

_STYLE = "text-align:left;vertical-align:top;white-space:normal"


def html(run: Run) -> str:
    """The run as HTML: parameters in force beside those of the file, points kept and missing, and the verdicts."""
    return f"<h4>{escape(run.title)}</h4><p>{escape(_points(run))}</p>{_parameters(run)}{_claims(run)}"


def _points(run: Run) -> str:
    """How much is kept, and how long the rest will take, by what the kept points took."""
    points = run.identified_points()
    kept = {key: content for key in points if (content := run.store.read(key)) is not None}
    missing = len(points) - len(kept)
    said = f"{run.stem}, {run.scale} scale: {len(points)} points, {len(kept)} kept, {missing} missing"
    if not missing:
        return f"{said}."
    done = sum(point.weight for key, (_, point) in points.items() if key in kept)
    if not done:
        return f"{said}; how long they take is not known before one is finished."
    left = sum(point.weight for key, (_, point) in points.items() if key not in kept)
    seconds = sum(content["seconds"] for content in kept.values()) * left / done
    return f"{said}: about {duration(seconds)} of computing, divided among the processes."


def _parameters(run: Run) -> str:
    rows = []
    for name in type(run.params).model_fields:
        now, stated = getattr(run.params, name), run.file.params.get(name)
        changed = _text(now) != _text(stated)
        shown = f"<b>{escape(_text(now))}</b>" if changed else escape(_text(now))
        rows.append([f"<code>{name}</code>", shown, escape(_text(stated)), escape(run.file.meanings.get(name, ""))])
    return _table(("parameter", "in force", "in the file", "meaning"), rows)


def _claims(run: Run) -> str:
    entries = [
        entry for entry in claims.read(run.folders.figures) if run.stem in (entry["experiment"] or "").split(", ")
    ]
    if not entries:
        return "<p>No claims are judged with these parameters, or none has been yet.</p>"
    rows = [[f"<code>{entry['id']}</code>", escape(entry["says"]), escape(entry["verdict"])] for entry in entries]
    return f"<details><summary>{len(rows)} claims</summary>{_table(('claim', 'says', 'verdict'), rows)}</details>"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    cells = "".join(f'<th style="{_STYLE}">{name}</th>' for name in head)
    body = "".join("<tr>" + "".join(f'<td style="{_STYLE}">{cell}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    """A value as the parameter file writes it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return (
        {None: "null", True: "true", False: "false"}.get(value, str(value))
        if not isinstance(value, float)
        else f"{value:g}"
    )
