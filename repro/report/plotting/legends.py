"""Legends above the panels, and the line below them that says what the numbers are."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repro.report.plotting.style import CROSS, GREY, LINE, PAPER, PAPER_BAR, PIECES, label, styles

#: What a kind of evidence is, for readers who have not met the word, and what comes before its device.
_SAYS = {
    "exact": ("Exact: nothing timed, nothing random", ""),
    "replayed": ("Replayed: counted on a trace", ", step times of "),
    "modelled": ("Modelled: virtual time", ", step times of "),
    "measured": ("Measured", " on "),
    "recorded": ("Recorded earlier", " on "),
    "replayed on the authors' lengths": ("Replayed: counted on the authors' own trace", ", step times of "),
    "modelled on the authors' lengths": ("Modelled: virtual time, the authors' own trace", ", step times of "),
}


def key(text: str, color: str = GREY, **look: Any) -> Line2D:
    """A legend's entry for a line or a marker."""
    return Line2D([], [], color=color, label=text, **look)


def swatch(text: str, color: str = GREY, **look: Any) -> Patch:
    """A legend's entry for a filled area."""
    return Patch(label=text, **{"facecolor": color} | look)


def cross(text: str) -> Line2D:
    """The legend's entry for crosses: what was changed in ours."""
    return key(text, **CROSS)


def seeds_band(rows: pd.DataFrame) -> list[Patch]:
    """The legend's entry for bands from the least to the most seed, where there are several seeds."""
    seeds = rows["seed"].nunique()
    return [swatch(f"least to most of {seeds} seeds", alpha=0.25)] if seeds > 1 else []


def paper_bar(text: str = "the paper") -> Patch:
    """The legend's entry for the paper's bars."""
    return Patch(edgecolor=GREY, label=text, **PAPER_BAR)


def place_legend(figure: Figure, handles: Sequence[Artist], **options: Any) -> None:
    """One legend above the panels, in as few lines as the figure's width allows."""
    widths = [0.75 + 0.075 * len(str(handle.get_label())) for handle in handles]
    for lines in range(1, len(handles) + 1):
        if sum(max(widths[at : at + lines]) for at in range(0, len(widths), lines)) < figure.get_figwidth():
            break
    columns = -(-len(handles) // lines)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, handlelength=2.4, **options)


def legend(
    figure: Figure, rows: pd.DataFrame, by: str = "system", with_paper: bool = False, more: Iterable[Artist] = ()
) -> None:
    """One legend above the panels: the systems, the line of each kind of evidence that the rows have, and `more`."""
    handles = [
        key(label(system), style.color, marker=style.marker, linewidth=2, markersize=6)
        for system, style in styles(rows[by]).items()
    ]
    looks = {kind: LINE[kind] for kind in dict.fromkeys(rows["evidence"])}
    looks |= {"the paper": PAPER} if with_paper else {}
    handles += [key(kind, marker="o", **look) for kind, look in looks.items()]
    place_legend(figure, [*handles, *more])


def memory_legend(figure: Figure, with_paper: bool = False, more: Iterable[Artist] = ()) -> None:
    """The legend of `memory_bars`."""
    handles = [swatch(text, color, edgecolor="white", hatch=hatch) for text, color, hatch in PIECES.values()]
    place_legend(figure, [*handles, *([paper_bar()] if with_paper else []), *more])


def provenance(rows: pd.DataFrame, with_paper: bool = False) -> str:
    """What the rows are, in sentences: "Modelled: virtual time (a100-2023), mean of 3 seeds. Hollow: the paper"."""
    parts = []
    for evidence, group in rows.groupby("evidence", sort=False):
        devices = ", ".join(sorted(group["device"].dropna().unique())) if "device" in group else ""
        says, on = _SAYS[evidence]
        seeds = group["seed"].nunique() if "seed" in group else 0
        over = "" if not seeds else ", one seed" if seeds == 1 else f", mean of {seeds} seeds (range: least to most)"
        parts.append(says + (on + devices if devices and on else "") + over)
    return ". ".join([*parts, *(["Hollow: the paper"] if with_paper else [])])


def footer(figure: Figure, rows: pd.DataFrame, with_paper: bool = False, note: str = "") -> None:
    """Write on the figure what it is (see `provenance`), and `note` after it. Call it last."""
    text = provenance(rows, with_paper) + (f". {note}" if note else "")
    size, margin = 8.5, 0.06
    wrapped = textwrap.fill(text, int((figure.get_figwidth() - 2 * margin) * 72 / (size * 0.53)))
    share = (wrapped.count("\n") + 1) * size * 1.3 / 72 / figure.get_figheight() + 0.02
    figure.get_layout_engine().set(rect=(0, share, 1, 1 - share))
    figure.text(margin / figure.get_figwidth(), 0.01, wrapped, fontsize=size, color=GREY, va="bottom", ha="left")


def watermark(figure: Figure, text: str) -> None:
    """Write across the figure what it is not."""
    look = dict(fontsize=17, color="#B00020", alpha=0.28, ha="center", va="center", rotation=8, zorder=10)
    wrapped = textwrap.fill(text, int(figure.get_figwidth() / 0.22))
    figure.text(0.5, 0.5, wrapped, fontweight="bold", **look)
