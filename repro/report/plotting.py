"""The house style: one colour and marker per system, one line style per kind of evidence, the paper's points hollow.

Figures are drawn from rows alone (flat records with `system`, `evidence`, `device`, `seed` and metrics), so whoever has
the rows can redraw them; how a number came about is read from the rows' `evidence`, never passed by the caller. The
module computes nothing but means and ranges over seeds, knows no experiment, and writes no file.

    with house():
        figure, axes = panels(["ShareGPT", "Alpaca"])
        curves(axes[0], rows, "rate", "latency_s_per_token", paper=...)
        legend(figure, rows, with_paper=True)
        footer(figure, rows, with_paper=True)
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure as _Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch


class Figure(_Figure):
    """A figure that a notebook shows without pyplot, whose global list of open figures nobody here needs."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


@dataclass(frozen=True)
class Style:
    """How a system looks in every figure."""

    color: str
    marker: str


# Colours that stay apart for colour-blind readers and in print (after Okabe and Ito), each with a marker of its own.
STYLE: Mapping[str, Style] = {
    "vllm": Style("#0072B2", "o"),
    "orca-oracle": Style("#009E73", "s"),
    "orca-pow2": Style("#E69F00", "^"),
    "orca-max": Style("#D55E00", "D"),
    "faster-transformer": Style("#B04C8E", "v"),
}
LABEL: Mapping[str, str] = {
    "vllm": "vLLM",
    "orca-oracle": "Orca (Oracle)",
    "orca-pow2": "Orca (Pow2)",
    "orca-max": "Orca (Max)",
    "faster-transformer": "FasterTransformer",
}
_OTHERS = (
    Style("#56B4E9", "P"),
    Style("#4D4D4D", "X"),
    Style("#882255", "<"),
    Style("#117733", ">"),
    Style("#999933", "p"),
    Style("#332288", "h"),
    Style("#AA4499", "*"),
    Style("#661100", "d"),
)

# Dashed is what no clock measured, solid is what one did; recorded runs carry a dark rim. The paper's own is hollow.
_LINE = {
    "exact": dict(linestyle="-", linewidth=1.2, markersize=4),
    "replayed": dict(linestyle=(0, (5, 1.5, 1, 1.5)), linewidth=1.6, markersize=4),
    "modelled": dict(linestyle=(0, (4, 1.5)), linewidth=1.6, markersize=4),
    "measured": dict(linestyle="-", linewidth=2.0, markersize=6.5),
    "recorded": dict(linestyle="-", linewidth=2.0, markersize=6.5, markeredgecolor="black", markeredgewidth=0.8),
}
_PAPER = dict(linestyle=(0, (1, 1.6)), linewidth=1.0, markersize=7, markerfacecolor="none", markeredgewidth=1.1)
_GREY = "#555555"

# The parts of Fig. 2, from the bottom up: name in `MemoryUsage` -> (label, colour, hatch). The paper's last piece holds
# both of ours that follow "internal".
PIECES: Mapping[str, tuple[str, str, str]] = {
    "token_states": ("token states", "#3B8B5D", ""),
    "reserved": ("reservation", "#E3B23C", ""),
    "internal": ("internal fragmentation", "#C8553D", ""),
    "rounding": ("external & others: rounding to a power of two", "#8E9AAF", "////"),
    "free": ("external & others: free or lost", "#8E9AAF", ""),
}
_PAPER_PIECE = {
    "token states": "token_states",
    "reservation": "reserved",
    "internal": "internal",
    "external & others": "free",
}


def styles(systems: Iterable[str]) -> dict[str, Style]:
    """A style for each system: the fixed one, or for systems of the user's the next free one in order of appearance."""
    names = list(dict.fromkeys(systems))
    strangers = [name for name in names if name not in STYLE]
    return {name: STYLE[name] if name in STYLE else _OTHERS[strangers.index(name) % len(_OTHERS)] for name in names}


def label(system: str) -> str:
    return LABEL.get(system, system)


@contextmanager
def house() -> Iterator[None]:
    """The look of every figure; also usable as a decorator. Leaves matplotlib's global settings as they were."""
    with (
        seaborn.axes_style("ticks"),
        seaborn.plotting_context("paper", font_scale=1.15),
        matplotlib.rc_context(
            {
                "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
                "axes.grid": True,
                "grid.color": "#E6E6E6",
                "grid.linewidth": 0.7,
                "axes.axisbelow": True,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.titlesize": 10.5,
                "axes.titleweight": "bold",
                "axes.edgecolor": "#888888",
                "hatch.linewidth": 0.6,
                "legend.frameon": False,
                "axes.labelsize": 10,
                "xtick.labelsize": 9,
                "ytick.labelsize": 9,
                "figure.dpi": 130,
            }
        ),
    ):
        yield


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


def curves(
    axis: Axes,
    rows: pd.DataFrame,
    x: str,
    y: str,
    by: str = "system",
    paper: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """One curve for each `by` and kind of evidence: mean over the seeds, with a band from the least to the most.

    `paper` maps a system to the paper's points [(x, y)], drawn hollow around ours.
    """
    looks = styles([*rows[by], *(paper or {})])
    for system, points in (paper or {}).items():
        axis.plot(*zip(*points), color=looks[system].color, marker=looks[system].marker, zorder=4, **_PAPER)
    for (system, evidence), group in rows.dropna(subset=[y]).groupby([by, "evidence"], sort=False):
        spread = group.groupby(x)[y].agg(["mean", "min", "max"])
        color, marker = looks[system].color, looks[system].marker
        axis.fill_between(spread.index, spread["min"], spread["max"], color=color, alpha=0.18, linewidth=0, zorder=1)
        axis.plot(spread.index, spread["mean"], color=color, marker=marker, zorder=3, **_LINE[evidence])


def bars(
    axis: Axes,
    rows: pd.DataFrame,
    y: str,
    by: str = "system",
    paper: Mapping[str, float] | None = None,
    digits: int = 1,
) -> None:
    """One bar for each `by`: mean over the rows, a whisker from the least to the most, the paper's hollow beside it."""
    looks = styles(rows[by])
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        values = group[y]
        mean = values.mean()
        axis.bar(place - 0.2, mean, 0.38, **_bar_look(looks[system].color, group))
        axis.errorbar(
            place - 0.2, mean, [[mean - values.min()], [values.max() - mean]], color="black", linewidth=1, capsize=2.5
        )
        _number_above(axis, f"{mean:.{digits}f}", place - 0.2, values.max(), "black")
        if paper and system in paper:
            axis.bar(place + 0.2, paper[system], 0.38, facecolor="none", edgecolor=looks[system].color, linewidth=1.3)
            _number_above(axis, f"{paper[system]:.{digits}f}", place + 0.2, paper[system], _GREY)
    _name_systems(axis, looks)


def _number_above(axis: Axes, text: str, x: float, y: float, color: str) -> None:
    axis.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=8, color=color)


def memory_bars(
    axis: Axes,
    rows: pd.DataFrame,
    by: str = "system",
    paper: Mapping[str, Mapping[str, float]] | None = None,
    beside: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Fig. 2: what the pool holds, stacked to 100 %; the paper's bar hollow to the right of ours.

    `rows` have the columns of `PIECES`, in % of the pool; `paper` is ``repro.report.paper.figure("fig2")``, or `beside`
    has other shares of the same columns to be drawn hollow. The whisker shows the least and the most token states over
    the rows."""
    looks = styles(rows[by])
    for place, (system, group) in enumerate(rows.groupby(by, sort=False)):
        _stack(axis, place - 0.21, {piece: group[piece].mean() for piece in PIECES}, hollow=False)
        states = group["token_states"]
        axis.errorbar(
            place - 0.33,
            states.mean(),
            [[states.mean() - states.min()], [states.max() - states.mean()]],
            color="black",
            linewidth=1,
            capsize=2.5,
        )
        if paper and system in paper:
            theirs = {_PAPER_PIECE[name]: share for name, share in paper[system].items()}
            _stack(axis, place + 0.21, theirs, hollow=True)
        elif beside and system in beside:
            _stack(axis, place + 0.21, {piece: beside[system][piece] for piece in PIECES}, hollow=True)
    _name_systems(axis, looks)
    axis.set_ylim(0, 101)


def _stack(axis: Axes, x: float, shares: Mapping[str, float], hollow: bool) -> None:
    bottom = 0.0
    for piece, share in shares.items():
        if share == 0:
            continue
        _, color, hatch = PIECES[piece]
        look = (
            dict(facecolor="none", edgecolor=color, linewidth=1.4)
            if hollow
            else dict(facecolor=color, edgecolor="white", linewidth=0.6, hatch=hatch)
        )
        inset = 0.35 if hollow and share > 1 else 0.0  # keeps the outlines of neighbours apart
        axis.bar(x, share - 2 * inset, 0.39, bottom=bottom + inset, **look)
        if share >= 4.5:
            axis.text(
                x,
                bottom + share / 2,
                f"{share:.1f}",
                ha="center",
                va="center",
                fontsize=7.5,
                color=_GREY if hollow else "white",
                fontweight="normal" if hollow else "bold",
                bbox=dict(facecolor=color, edgecolor="none", pad=1.2) if hatch else None,
            )
        bottom += share


def _bar_look(color: str, group: pd.DataFrame) -> dict[str, object]:
    clocked = group["evidence"].isin(["measured", "recorded"]).all()
    return (
        dict(color=color, edgecolor="black", linewidth=0.8)
        if clocked
        else dict(color=color, alpha=0.75, edgecolor=color, linewidth=0.8, linestyle="--")
    )


def _name_systems(axis: Axes, looks: Mapping[str, Style]) -> None:
    axis.set_xticks(range(len(looks)), [label(system).replace(" (", "\n(") for system in looks], fontsize=8.5)
    axis.grid(axis="x", visible=False)


def legend(figure: Figure, rows: pd.DataFrame, by: str = "system", with_paper: bool = False) -> None:
    """One legend above the panels: the systems, then the line style of each kind of evidence that the rows have."""
    handles = [
        Line2D([], [], color=style.color, marker=style.marker, linewidth=2, markersize=6, label=label(system))
        for system, style in styles(rows[by]).items()
    ]
    handles += [
        Line2D([], [], color=_GREY, marker="o", label=kind, **_LINE[kind]) for kind in dict.fromkeys(rows["evidence"])
    ]
    if with_paper:
        handles.append(Line2D([], [], color=_GREY, marker="o", label="the paper", **_PAPER))
    lines = -(-len(handles) // max(1, int(figure.get_figwidth() / 1.7)))
    figure.legend(
        handles=handles, loc="outside upper center", ncols=-(-len(handles) // lines), handlelength=2.4, fontsize=9
    )


def memory_legend(figure: Figure, with_paper: bool = False) -> None:
    """The legend of `memory_bars`."""
    handles = [
        Patch(facecolor=color, edgecolor="white", hatch=hatch, label=text) for text, color, hatch in PIECES.values()
    ]
    if with_paper:
        handles.append(Patch(facecolor="none", edgecolor=_GREY, linewidth=1.4, label="the paper"))
    figure.legend(handles=handles, loc="outside upper center", ncols=2 if figure.get_figwidth() < 9 else 3, fontsize=9)


def provenance(rows: pd.DataFrame, with_paper: bool = False) -> str:
    """What the rows are, in a sentence: "modelled on a100-2023, 3 seeds (band: least to most); hollow: the paper's"."""
    parts = []
    for evidence, group in rows.groupby("evidence", sort=False):
        devices = ", ".join(sorted(group["device"].dropna().unique())) if "device" in group else ""
        seeds = group["seed"].nunique() if "seed" in group else 0
        part = f"{evidence} on {devices}" if devices and evidence != "exact" else evidence
        if seeds:
            part += f", {seeds} seed{'s (mean; least to most)' if seeds > 1 else ''}"
        parts.append(part)
    if with_paper:
        parts.append("hollow: the paper's points")
    return "; ".join(parts)


def footer(figure: Figure, rows: pd.DataFrame, with_paper: bool = False, note: str = "") -> None:
    """Write on the figure what it is (see `provenance`), and `note` after it. Call it last."""
    text = provenance(rows, with_paper) + (f". {note}" if note else "")
    size, margin = 7.5, 0.06
    wrapped = textwrap.fill(text[0].upper() + text[1:], int((figure.get_figwidth() - 2 * margin) * 72 / (size * 0.53)))
    share = (wrapped.count("\n") + 1) * size * 1.3 / 72 / figure.get_figheight() + 0.02
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))
    figure.text(margin / figure.get_figwidth(), 0.01, wrapped, fontsize=size, color=_GREY, va="bottom", ha="left")
