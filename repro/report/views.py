"""Looking closer at a figure: the rows behind it as data for the small chart that the page draws (templates/views.js).

A parameter file's section `views` says for a figure which table to show and which of its columns are what. The rows are
those of the CSV file beside the figure; numbers keep six digits."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro.errors import UserError
from repro.report.plotting.style import label, styles


@dataclass(frozen=True)
class View:
    """Columns of `table` by their part in the chart: the axes, what has a colour each, what is chosen (`panels`).

    `only` keeps the rows with these values, `log` names the axes that are logarithmic ("x", "y" or "xy"). UserError for
    an axis that is none."""

    table: str
    x: str
    y: str
    series: str
    panels: Sequence[str] = ()
    only: Mapping[str, str] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        if not set(self.log) <= set("xy"):
            raise UserError(f"a view's log = {self.log!r} must be x, y or xy")

    @classmethod
    def parse(cls, figure: str, stated: Any) -> View:
        """The view that a parameter file states for a figure; UserError that names what is allowed."""
        try:
            return cls(**stated)
        except TypeError as error:
            known = ", ".join(cls.__dataclass_fields__)
            raise UserError(f"views: {figure}: {error}; a view has table, x, y, series, and may have {known}") from None


def chart(view: View, path: Path) -> str:
    """The rows of the CSV file at `path` as JSON for views.js: the view, its columns, colours and names of its series.
    "" if there is none to show.

    UserError if the file lacks a column of the view."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    parts = [view.x, view.y, view.series, *view.panels, *view.only]
    if missing := [name for name in parts if rows and name not in rows[0]]:
        raise UserError(f"{path} has no column {missing[0]!r}, which a view names; it has {', '.join(rows[0])}")
    shown = [row for row in rows if all(row[name] == str(value) for name, value in view.only.items())]
    shown = [row for row in shown if row[view.y]]
    if not shown:
        return ""
    columns = {name: _column([row[name] for row in shown]) for name in rows[0]}
    series = list(dict.fromkeys(row[view.series] for row in shown))
    return json.dumps(
        {
            "x": view.x,
            "y": view.y,
            "series": view.series,
            "panels": list(view.panels),
            "log": view.log,
            "columns": {name: column for name, column in columns.items() if column is not None},
            "colors": {name: style.color for name, style in styles(series).items()},
            "labels": {name: label(name) for name in series},
        },
        separators=(",", ":"),
    ).replace("<", "\\u003c")


def _column(texts: Sequence[str]) -> Any:
    """A column as numbers (null where there is none), or as its distinct texts and an index of them a row; None for an
    empty one."""
    if not any(texts):
        return None
    try:
        return [float(f"{float(text):.6g}") if text else None for text in texts]
    except ValueError:
        # A hash is there to be recognised, not read.
        texts = [text[:12] if len(text) == 64 else text for text in texts]
        distinct = list(dict.fromkeys(texts))
        return {"texts": distinct, "at": [distinct.index(text) for text in texts]}
