"""The house style, in which every mark has one meaning.

A colour and a marker of `STYLE` are that system and nothing else. Hollow is the paper and nothing else. A dashed line
is modelled time; a solid one was counted, or with a dark rim clocked. A cross is ours with one thing changed. What is
no system takes its colours from `other`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import seaborn
from matplotlib.colors import to_rgb

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
    Style("#6A51A3", "P"),
    Style("#8C8B1F", "X"),
    Style("#333333", "p"),
    Style("#882255", "<"),
    Style("#A0703C", ">"),
    Style("#5F7A8A", "h"),
    Style("#9BBF30", "*"),
    Style("#B39DDB", "d"),
)

# Ways to decode and to preempt: no systems either, but the same in every figure.
WAYS: Mapping[str, Style] = dict(zip(("parallel", "beam", "recompute", "swap", "swap-in", "swap-out"), _OTHERS))

_CLOCKED = dict(linestyle="-", linewidth=2.0, markersize=6.5, markeredgecolor="black", markeredgewidth=0.8)
LINE: dict[str, dict[str, Any]] = {
    "exact": dict(linestyle="-", linewidth=1.2, markersize=4.5),
    "replayed": dict(linestyle="-", linewidth=1.2, markersize=4.5),
    "modelled": dict(linestyle=(0, (4, 1.5)), linewidth=1.7, markersize=4.5),
    "measured": _CLOCKED,
    "recorded": _CLOCKED,
}
_CLOCKED_BAR = dict(edgecolor="black", linewidth=0.8)
BAR: dict[str, dict[str, Any]] = {
    "exact": dict(linewidth=0),
    "replayed": dict(linewidth=0),
    "modelled": dict(edgecolor="#333333", linewidth=1.0, linestyle="--", alpha=0.8),
    "measured": _CLOCKED_BAR,
    "recorded": _CLOCKED_BAR,
}
for _look in (LINE, BAR):
    _look |= {f"{kind} on the authors' lengths": _look[kind] for kind in ("replayed", "modelled")}
PAPER: Mapping[str, Any] = dict(
    linestyle=(0, (1, 1.6)), linewidth=1.0, markersize=7, markerfacecolor="none", markeredgewidth=1.1
)
PAPER_BAR: Mapping[str, Any] = dict(facecolor="none", linewidth=1.4)
CROSS: Mapping[str, Any] = dict(marker="x", linestyle="", markersize=7, markeredgewidth=1.6)
GREY = "#555555"

# The parts of Fig. 2, from the bottom up: name in `MemoryUsage` -> (label, colour, hatch).
PIECES: Mapping[str, tuple[str, str, str]] = {
    "token_states": ("token states", "#3B8B5D", ""),
    "reserved": ("reservation", "#E3B23C", ""),
    "internal": ("internal fragmentation", "#C8553D", ""),
    "rounding": ("external & others: rounded up", "#9FABC0", "////"),
    "free": ("external & others: free or lost", "#9FABC0", ""),
}


def styles(systems: Iterable[str]) -> dict[str, Style]:
    """A style for each system: the fixed one, or for systems of the user's the next free one in order of appearance."""
    fixed, names = {**STYLE, **WAYS}, list(dict.fromkeys(systems))
    strangers = [name for name in names if name not in fixed]
    return {name: fixed[name] if name in fixed else other(strangers.index(name)) for name in names}


def other(number: int) -> Style:
    """A style that no system of the paper's has: the same number, the same style."""
    return _OTHERS[number % len(_OTHERS)]


def label(system: str) -> str:
    """The system's name in figures: the paper's for its systems, else the name itself."""
    return LABEL.get(system, system)


def ink(color: str) -> str:
    """Dark or white, whichever is read better on a colour (by WCAG's relative luminance)."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return "#1A1A1A" if sum(c * weight for c, weight in zip(channels, (0.2126, 0.7152, 0.0722))) > 0.179 else "white"


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
                "font.size": 9.5,  # of what is written into a panel
                "axes.titlesize": 11,
                "axes.titleweight": "bold",
                "axes.edgecolor": "#888888",
                "hatch.linewidth": 0.6,
                "legend.frameon": False,
                "legend.fontsize": 10,
                "legend.title_fontsize": 10,
                "axes.labelsize": 10.5,
                "xtick.labelsize": 9.5,
                "ytick.labelsize": 9.5,
                "figure.dpi": 130,
            }
        ),
    ):
        yield
