"""How every figure is drawn: from rows alone, in one style.

    with plotting.house():
        figure, axes = plotting.panels(["ShareGPT", "Alpaca"])
        plotting.curves(axes[0], rows, "rate", "latency_s_per_token", paper=...)
        plotting.legend(figure, rows, with_paper=True)
        plotting.footer(figure, rows, with_paper=True)

Rows are flat records with `system`, `evidence`, `device`, `seed` and metrics. How a number came about is read from
their `evidence`, never passed by the caller. The package computes means and ranges over seeds and nothing else."""

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from repro.report.plotting.legends import footer, legend, memory_legend, provenance
from repro.report.plotting.marks import Figure, bare, bars, curves, memory_bars, panels, pool_timeline, ticks, whisker
from repro.report.plotting.style import LABEL, LINE, PIECES, STYLE, Style, house, label, styles

__all__ = [
    "LABEL",
    "LINE",
    "PIECES",
    "STYLE",
    "Figure",
    "Line2D",
    "Patch",
    "Style",
    "bare",
    "bars",
    "curves",
    "footer",
    "house",
    "label",
    "legend",
    "memory_bars",
    "memory_legend",
    "panels",
    "pool_timeline",
    "provenance",
    "styles",
    "ticks",
    "whisker",
]
