"""Panels and what is drawn on them: curves, bars, and the stacked bars of Fig. 2."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as _Figure

from repro.report.plotting.style import GREY, LINE, PAPER, PIECES, Style, house, label, styles

Points = Sequence[tuple[float, float]]
Shares = Mapping[str, float]
#: The paper's parts of Fig. 2 that have another name here; its last holds both of ours that follow "internal".
_PAPER_PIECE = {"token states": "token_states", "reservation": "reserved", "external & others": "free"}


class Figure(_Figure):
    """A figure that a notebook shows without pyplot, whose global list of open figures nobody here needs."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def panels(
    titles: Sequence[str], columns: int = 3, width: float = 3.4, height: float = 2.7, **options: object
) -> tuple[Figure, list[Axes]]:
    """A figure with one titled panel (inches) per title, row by row; `options` go to `Figure.subplots`."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(width * columns, height * rows + 0.8), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axis, title in zip(axes, titles):
        axis.set_title(title)
    for unused in axes[len(titles) :]:
        unused.remove()
    return figure, axes[: len(titles)]


def bare(axis: Axes) -> None:
    """A panel of cells: without ticks, grid and frame."""
    axis.tick_params(left=False, bottom=False)
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)


def ticks(axis: Axes, values: Sequence[float]) -> None:
    """Ticks at these values of a logarithmic y axis, and no others."""
    axis.set_yticks(values, [f"{value:,}" for value in values])
    axis.minorticks_off()


def curves(
    axis: Axes, rows: pd.DataFrame, x: str, y: str, by: str = "system", paper: Mapping[str, Points] | None = None
) -> None:
    """One curve for each `by` and kind of evidence: mean over the seeds, with a band from the least to the most.

    `paper` maps a system to the paper's points [(x, y)], drawn hollow around ours."""
    looks = styles([*rows[by], *(paper or {})])
    for system, points in (paper or {}).items():
        axis.plot(*zip(*points), color=looks[system].color, marker=looks[system].marker, zorder=4, **PAPER)
    for (system, evidence), group in rows.dropna(subset=[y]).groupby([by, "evidence"], sort=False):
        spread = group.groupby(x)[y].agg(["mean", "min", "max"])
        color, marker = looks[system].color, looks[system].marker
        axis.fill_between(spread.index, spread["min"], spread["max"], color=color, alpha=0.18, linewidth=0, zorder=1)
        axis.plot(spread.index, spread["mean"], color=color, marker=marker, zorder=3, **LINE[evidence])


def bars(
    axis: Axes, rows: pd.DataFrame, y: str, by: str = "system", paper: Shares | None = None, digits: int = 1
) -> None:
    """One bar for each `by`: mean over the rows, a whisker from the least to the most, the paper's hollow beside it."""
    looks = styles(rows[by])
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        values = group[y]
        mean = values.mean()
        axis.bar(place - 0.2, mean, 0.38, **_bar_look(looks[system].color, group))
        whisker(axis, place - 0.2, values)
        _number_above(axis, f"{mean:.{digits}f}", place - 0.2, values.max(), "black")
        if paper and system in paper:
            axis.bar(place + 0.2, paper[system], 0.38, facecolor="none", edgecolor=looks[system].color, linewidth=1.3)
            _number_above(axis, f"{paper[system]:.{digits}f}", place + 0.2, paper[system], GREY)
    _name_systems(axis, looks)


def memory_bars(
    axis: Axes,
    rows: pd.DataFrame,
    by: str = "system",
    paper: Mapping[str, Shares] | None = None,
    beside: Mapping[str, Shares] | None = None,
) -> None:
    """Fig. 2: what the pool holds, stacked to 100 %; the paper's bar hollow to the right of ours.

    `rows` have the columns of `PIECES`, in % of the pool; `paper` is ``repro.report.paper.figure("fig2")``, or `beside`
    has other shares of the same columns to be drawn hollow. The whisker shows the least and the most token states over
    the rows."""
    looks = styles(rows[by])
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        _stack(axis, place - 0.21, {piece: group[piece].mean() for piece in PIECES}, hollow=False)
        whisker(axis, place - 0.33, group["token_states"])
        if paper and system in paper:
            theirs = {_PAPER_PIECE.get(name, name): share for name, share in paper[system].items()}
            _stack(axis, place + 0.21, theirs, hollow=True)
        elif beside and system in beside:
            _stack(axis, place + 0.21, {piece: beside[system][piece] for piece in PIECES}, hollow=True)
    _name_systems(axis, looks)
    axis.set_ylim(0, 101)


def pool_timeline(usage: pd.DataFrame, title: str = "What the pool holds") -> Figure:
    """The parts of a pool over time, in slots; `usage` is that of a run (`repro.serve`), indexed by seconds."""
    with house():
        figure, (axis,) = panels([title], width=7.5, height=2.8)
        looks = dict(zip(("labels", "colors", "hatch"), zip(*PIECES.values())))
        axis.stackplot(usage.index, usage[list(PIECES)].T, edgecolor="white", **looks)
        axis.set(xlabel="time (s)", ylabel="slots", xlim=(usage.index[0], usage.index[-1]), ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
    return figure


def whisker(axis: Axes, x: float, values: pd.Series) -> None:
    """A line from the least to the most value, around their mean."""
    mean = values.mean()
    axis.errorbar(x, mean, [[mean - values.min()], [values.max() - mean]], color="black", linewidth=1, capsize=2.5)


def _number_above(axis: Axes, text: str, x: float, y: float, color: str) -> None:
    axis.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=color)


def _stack(axis: Axes, x: float, shares: Shares, hollow: bool) -> None:
    bottom = 0.0
    for piece, share in shares.items():
        if share == 0:
            continue
        _, color, hatch = PIECES[piece]
        if hollow:
            look = dict(facecolor="none", edgecolor=color, linewidth=1.4)
            text = dict(color=GREY)
        else:
            look = dict(facecolor=color, edgecolor="white", linewidth=0.6, hatch=hatch)
            text = dict(color="white", fontweight="bold")
        inset = 0.35 if hollow and share > 1 else 0.0  # keeps the outlines of neighbours apart
        axis.bar(x, share - 2 * inset, 0.39, bottom=bottom + inset, **look)
        if share >= 4.5:
            box = dict(facecolor=color, edgecolor="none", pad=1.2) if hatch else None
            middle = bottom + share / 2
            axis.text(x, middle, f"{share:.1f}", ha="center", va="center", fontsize=7.5, bbox=box, **text)
        bottom += share


def _bar_look(color: str, group: pd.DataFrame) -> dict[str, object]:
    if group["evidence"].isin(["measured", "recorded"]).all():
        return dict(color=color, edgecolor="black", linewidth=0.8)
    return dict(color=color, alpha=0.75, edgecolor=color, linewidth=0.8, linestyle="--")


def _name_systems(axis: Axes, looks: Mapping[str, Style]) -> None:
    axis.set_xticks(range(len(looks)), [label(system).replace(" (", "\n(") for system in looks], fontsize=8.5)
    axis.grid(axis="x", visible=False)
