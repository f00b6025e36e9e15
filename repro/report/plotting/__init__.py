"""How every figure is drawn: from rows alone, in one style.

    with plotting.house():
        figure, axes = plotting.panels(["ShareGPT", "Alpaca"])
        plotting.curves(axes[0], rows, "rate", "latency_s_per_token", paper=...)
        plotting.legend(figure, rows, with_paper=True)
        plotting.footer(figure, rows, with_paper=True)

Rows are flat records with `system`, `evidence`, `device`, `seed` and metrics. How a number came about is read from
their `evidence`, never passed by the caller. The package computes means and ranges over seeds and nothing else."""

from repro.report.plotting.legends import (
    cross,
    footer,
    key,
    legend,
    memory_legend,
    paper_bar,
    place_legend,
    provenance,
    seeds_band,
    swatch,
    watermark,
)
from repro.report.plotting.marks import (
    Figure,
    band,
    bare,
    bars,
    curves,
    log,
    memory_bars,
    name_systems,
    pair,
    panels,
    pool_timeline,
    powers_of_two,
    whisker,
)
from repro.report.plotting.style import (
    BAR,
    CROSS,
    GREY,
    LABEL,
    LINE,
    PAPER,
    PAPER_BAR,
    PIECES,
    STYLE,
    WAYS,
    Style,
    house,
    ink,
    label,
    other,
    styles,
)
