"""Panels and what is drawn on them: curves, bars, and the stacked bars of Fig. 2."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as _Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from repro.report.plotting.style import BAR, GREY, LINE, PAPER, PAPER_BAR, PIECES, Style, house, ink, label, styles

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


def log(axis: Axes, sides: str = "y") -> None:
    """Logarithmic axes ("x", "y" or "xy") with at least three plain numbers each, and the word in their labels. Call
    it once everything is drawn."""
    for side in sides:
        axis.set(**{f"{side}scale": "log"})
        low, high = getattr(axis, f"get_{side}lim")()
        choices = [_marks(low, high, steps) for steps in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 4, 5, 7))]
        line = getattr(axis, f"{side}axis")
        line.set_major_locator(FixedLocator(next((marks for marks in choices if len(marks) > 2), choices[-1])))
        line.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
        line.set_minor_locator(NullLocator())
        text = line.get_label_text()
        line.set_label_text(f"{text[:-1]}, log)" if text.endswith(")") else f"{text} (log)")


def _marks(low: float, high: float, steps: Sequence[int]) -> list[float]:
    """The multiples of powers of ten within two ends."""
    marks = (step * 10.0**power for power in range(-9, 10) for step in steps)
    return [mark for mark in marks if low * 0.999 <= mark <= high * 1.001]


def powers_of_two(axis: Axes, values: Iterable[float], label: str = "block size (tokens)") -> None:
    """A logarithmic x axis with a tick at each value."""
    ticks = list(values)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(f"{label[:-1]}, log)" if label.endswith(")") else f"{label} (log)")


def band(axis: Axes, low: float, high: float, text: str, side: str = "y") -> None:
    """A grey band between two values of an axis, named where it is drawn: in its lower left corner, or at its top."""
    look = dict(color=GREY, fontsize=8.5, zorder=1)
    if side == "y":
        axis.axhspan(low, high, color="#ECECEC", zorder=0)
        axis.text(0.005, low, text, transform=axis.get_yaxis_transform(), va="bottom", **look)
    else:
        axis.axvspan(low, high, color="#ECECEC", zorder=0)
        middle = (low + high) / 2
        axis.text(middle, 0.99, text, transform=axis.get_xaxis_transform(), ha="center", va="top", **look)


def curves(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    by: str = "system",
    paper: Mapping[str, Points] | None = None,
    looks: Mapping[str, Style] | None = None,
) -> None:
    """One curve for each `by` and kind of evidence: mean over the seeds, with a band from the least to the most.

    `paper` maps a system to the paper's points [(x, y)], drawn hollow around ours; `looks` are the systems' own unless
    given."""
    looks = looks or styles([*rows[by], *(paper or {})])
    for system, points in (paper or {}).items():
        axis.plot(*zip(*points), color=looks[system].color, marker=looks[system].marker, zorder=4, **PAPER)
    for (system, evidence), group in rows.dropna(subset=[y]).groupby([by, "evidence"], sort=False):
        spread = group.groupby(x)[y].agg(["mean", "min", "max"])
        color, marker = looks[system].color, looks[system].marker
        axis.fill_between(spread.index, spread["min"], spread["max"], color=color, alpha=0.25, linewidth=0, zorder=1)
        axis.plot(spread.index, spread["mean"], color=color, marker=marker, zorder=3, **LINE[evidence])


def bars(
    axis: Axes,
    rows: pd.DataFrame,
    y: str,
    by: str = "system",
    paper: Shares | None = None,
    beside: Shares | None = None,
    digits: int = 1,
) -> None:
    """One bar for each `by`: mean over the rows, a whisker from the least to the most; to the right of it the paper's,
    hollow, or another one of ours, pale."""
    looks = styles(rows[by])
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        other, alone = (paper or beside or {}).get(system), paper is None and beside is None
        pair(axis, place, group[y], group["evidence"].iloc[0], looks[system].color, other, digits, not paper, alone)
    name_systems(axis, looks)


def pair(
    axis: Axes,
    place: float,
    ours: pd.Series,
    evidence: str,
    color: str,
    other: float | None = None,
    digits: int = 1,
    pale: bool = False,
    alone: bool = False,
) -> None:
    """Our bar, with its mean written above, and another to the right of it: the paper's, hollow, or `pale`; or ours
    `alone` in the middle. The numbers grow outwards, so that neither reaches the other's bar."""
    mean, x = ours.mean(), place if alone else place - 0.2
    axis.bar(x, mean, 0.38, color=color, **BAR[evidence])
    whisker(axis, x, ours)
    axis.margins(y=0.1)
    written = dict(textcoords="offset points", va="bottom", fontsize=8.5)
    at, side = (place, "center") if alone else (place - 0.005, "right")
    axis.annotate(f"{mean:.{digits}f}", (at, ours.max()), (0, 2), ha=side, **written)
    if other is not None:
        look = dict(color=color, alpha=0.45) if pale else dict(PAPER_BAR, edgecolor=color)
        axis.bar(place + 0.2, other, 0.38, **look)
        axis.annotate(f"{other:.{digits}f}", (place + 0.03, other), (0, 2), ha="left", color=GREY, **written)


def memory_bars(
    axis: Axes,
    rows: pd.DataFrame,
    by: str = "system",
    paper: Mapping[str, Shares] | None = None,
    beside: Mapping[str, Shares] | None = None,
) -> None:
    """Fig. 2: what the pool holds, stacked to 100 %; the paper's bar hollow to the right of ours.

    `rows` have the columns of `PIECES`, in % of the pool; `paper` is ``repro.report.paper.figure("fig2")``, or `beside`
    has other shares of the same columns, which are drawn pale. Above each bar is what holds no token. The whisker shows
    the least and the most token states over the rows."""
    looks, left = styles(rows[by]), 0.0 if paper is None and beside is None else -0.21
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        _stack(axis, place + left, {piece: group[piece].mean() for piece in PIECES})
        whisker(axis, place + left, group["token_states"])
        if paper and system in paper:
            theirs = {_PAPER_PIECE.get(name, name): share for name, share in paper[system].items()}
            _stack(axis, place + 0.21, theirs, hollow=True)
        elif beside and system in beside:
            _stack(axis, place + 0.21, {piece: beside[system][piece] for piece in PIECES}, alpha=0.45)
    name_systems(axis, looks)
    axis.set(ylim=(0, 109), yticks=range(0, 101, 20))


def pool_timeline(usage: pd.DataFrame, title: str = "What the pool holds") -> Figure:
    """The parts of a pool over time, in slots; `usage` is that of a run (`repro.serve`), indexed by seconds."""
    with house():
        figure, (axis,) = panels([title], width=7.5, height=2.8)
        looks = dict(zip(("labels", "colors", "hatch"), zip(*PIECES.values())))
        axis.stackplot(usage.index, usage[list(PIECES)].T, edgecolor="white", **looks)
        axis.set(xlabel="time (s)", ylabel="slots", xlim=(usage.index[0], usage.index[-1]), ylim=(0, None))
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def whisker(axis: Axes, x: float, values: pd.Series) -> None:
    """A line from the least to the most of several values, around their mean."""
    mean = values.mean()
    if values.nunique() > 1:
        ends = [[mean - values.min()], [values.max() - mean]]
        axis.errorbar(x, mean, ends, color="black", linewidth=1, capsize=2.5)


def _stack(axis: Axes, x: float, shares: Shares, hollow: bool = False, alpha: float = 1.0) -> None:
    bottom = 0.0
    for piece, share in shares.items():
        if share == 0:
            continue
        _, color, hatch = PIECES[piece]
        inset = 0.35 if hollow and share > 1 else 0.0  # keeps the outlines of neighbours apart
        filled = dict(facecolor=color, edgecolor="white", linewidth=0.6, hatch=hatch, alpha=alpha)
        look = dict(PAPER_BAR, edgecolor=color) if hollow else filled
        axis.bar(x, share - 2 * inset, 0.39, bottom=bottom + inset, **look)
        if share >= 5:
            box = dict(facecolor=color, edgecolor="none", pad=1.0, alpha=alpha) if hatch and not hollow else None
            text = dict(color=GREY) if hollow else dict(color=ink(color))
            axis.text(x, bottom + share / 2, f"{share:.1f}", ha="center", va="center", fontsize=8.5, bbox=box, **text)
        bottom += share
    axis.text(x, 101, f"{100 - shares['token_states']:.1f}", ha="center", va="bottom", fontsize=8.5, color=GREY)


def name_systems(axis: Axes, systems: Iterable[str]) -> None:
    """Systems under their bars, in two lines where a name is long."""
    names = [label(system).replace(" (", "\n(").replace("FasterT", "Faster\nT") for system in systems]
    axis.set_xticks(range(len(names)), names)
    axis.grid(axis="x", visible=False)
