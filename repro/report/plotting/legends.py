"""Legends above the panels, and the line below them that says what the numbers are."""

from __future__ import annotations

import textwrap

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repro.report.plotting.style import GREY, LINE, PAPER, PIECES, label, styles


def legend(figure: Figure, rows: pd.DataFrame, by: str = "system", with_paper: bool = False) -> None:
    """One legend above the panels: the systems, then the line style of each kind of evidence that the rows have."""
    handles = [
        Line2D([], [], color=style.color, marker=style.marker, linewidth=2, markersize=6, label=label(system))
        for system, style in styles(rows[by]).items()
    ]
    looks = {kind: LINE[kind] for kind in dict.fromkeys(rows["evidence"])}
    looks |= {"the paper": PAPER} if with_paper else {}
    handles += [Line2D([], [], color=GREY, marker="o", label=kind, **look) for kind, look in looks.items()]
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
        handles.append(Patch(facecolor="none", edgecolor=GREY, linewidth=1.4, label="the paper"))
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
    figure.text(margin / figure.get_figwidth(), 0.01, wrapped, fontsize=size, color=GREY, va="bottom", ha="left")
