"""What every study is written with, in one import.

A study computes where nothing is drawn, so `plotting` is loaded when it is first used; the names of what is drawn and
of tables are for annotations only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.harness.tables import Rows
from repro.report import paper
from repro.report.claims import Judgement


class _Plotting:
    """`repro.report.plotting`, loaded when it is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("repro.report.plotting"), name)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

    from repro.report import plotting
else:
    Axes = DataFrame = Figure = Series = Any
    plotting = _Plotting()

__all__ = ["Axes", "DataFrame", "Figure", "Judgement", "Parameters", "Point", "Rows", "Series", "paper", "plotting"]


def where(rows: DataFrame, **values: Any) -> DataFrame:
    """The rows whose columns have these values."""
    for column, value in values.items():
        rows = rows[rows[column] == value]
    return rows


_Draw = Callable[[Rows, Any], "dict[str, Figure]"]


def house(draw: _Draw) -> _Draw:
    """A study's `draw` in the house style; across the figures of another run than the paper's is written what it is."""

    @functools.wraps(draw)
    def styled(rows: Rows, params: Parameters) -> dict[str, Figure]:
        with plotting.house():
            figures = draw(rows, params)
            if (lengths := getattr(params, "lengths", None)) not in (None, "hub"):
                for figure in figures.values():
                    _name_lengths(figure, Path(lengths).name)
            for figure in figures.values() if params.another_run else ():
                plotting.watermark(figure, f"not the paper's run: {params.another_run}")
            return figures

    return styled


def _name_lengths(figure: Figure, file: str) -> None:
    """Requests whose lengths come from a file are not called ShareGPT's in a title."""
    for axis in figure.axes:
        for place in ("left", "center", "right"):
            if "ShareGPT" in (title := axis.get_title(loc=place)):
                axis.set_title(title.replace("ShareGPT", file), loc=place)
