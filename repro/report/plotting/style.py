"""The house style: one colour and marker per system, one line style per kind of evidence, the paper's points hollow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import seaborn

from repro.engine.systems import SYSTEMS


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
# The paper's own systems only: a figure must not depend on what else a process has registered.
LABEL: Mapping[str, str] = {name: SYSTEMS[name].label for name in STYLE}
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
LINE: Mapping[str, dict[str, Any]] = {
    "exact": dict(linestyle="-", linewidth=1.2, markersize=4),
    "replayed": dict(linestyle=(0, (5, 1.5, 1, 1.5)), linewidth=1.6, markersize=4),
    "modelled": dict(linestyle=(0, (4, 1.5)), linewidth=1.6, markersize=4),
    "measured": dict(linestyle="-", linewidth=2.0, markersize=6.5),
    "recorded": dict(linestyle="-", linewidth=2.0, markersize=6.5, markeredgecolor="black", markeredgewidth=0.8),
}
PAPER: Mapping[str, Any] = dict(
    linestyle=(0, (1, 1.6)), linewidth=1.0, markersize=7, markerfacecolor="none", markeredgewidth=1.1
)
GREY = "#555555"

# The parts of Fig. 2, from the bottom up: name in `MemoryUsage` -> (label, colour, hatch).
PIECES: Mapping[str, tuple[str, str, str]] = {
    "token_states": ("token states", "#3B8B5D", ""),
    "reserved": ("reservation", "#E3B23C", ""),
    "internal": ("internal fragmentation", "#C8553D", ""),
    "rounding": ("external & others: rounding to a power of two", "#8E9AAF", "////"),
    "free": ("external & others: free or lost", "#8E9AAF", ""),
}


def styles(systems: Iterable[str]) -> dict[str, Style]:
    """A style for each system: the fixed one, or for systems of the user's the next free one in order of appearance."""
    names = list(dict.fromkeys(systems))
    strangers = [name for name in names if name not in STYLE]
    return {name: STYLE[name] if name in STYLE else _OTHERS[strangers.index(name) % len(_OTHERS)] for name in names}


def label(system: str) -> str:
    """The system's name in figures: the paper's for its systems, else the name itself."""
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
