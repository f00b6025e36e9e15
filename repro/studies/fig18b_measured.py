"""Fig. 18b and 19b measured on a GPU: vLLM's saturated throughput by block size, and with either way of preemption.

OPT-13B with the 12 GB pool of Table 1; rows come from `python -m repro bench serving` (see fig12_measured). A block
size has effects that differ in sign: larger blocks waste more of the pool at sequences' ends, so fewer requests run
together (exact, and the same everywhere); smaller ones cost the kernels more look-ups and, where swapping moves blocks
one by one, more transfers. Here kernels and swaps are ours: one launch moves all blocks. The paper has latencies at a
rate, on another card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.bench import kept
from repro.bench.kept import Params
from repro.harness.experiment import Point
from repro.report.claims import Judgement
from repro.studies.fig12_measured import WORKLOADS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: series -> (label, colour, marker)
LOOKS = {
    ("sharegpt", "recompute"): ("ShareGPT, recompute", "#0072B2", "o"),
    ("sharegpt", "swap"): ("ShareGPT, swap", "#D55E00", "s"),
    ("alpaca", "by_group"): ("Alpaca", "#009E73", "^"),
}
DRAWN = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "token_states")
RUN = (
    "system",
    "workload",
    "block_size",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "mean_batch",
    "token_states",
    "host_share",
    "mark",
    "preemptions",
    "model",
    "kv_slots",
    "device",
    "seed",
    "trace_hash",
)


def points(params: Params) -> list[Point]:
    return [Point(measured, kept.runs(params.gpu, "blocks"))]


def measured(path: Path, evidence: str) -> list[dict[str, Any]]:
    """The runs that this study draws; "by_group" is vLLM's own rule, which recomputes single sequences."""
    return [
        {"way": row["preemption"] or "by_group", **{name: row.get(name) for name in RUN}, "evidence": evidence}
        for row in kept.read(path, evidence)
        if row["kind"] == "blocks"
    ]


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    sizes = sorted(set(rows["block_size"]))
    with plotting.house():
        figure, axes = plotting.panels([*WORKLOADS.values(), "Token states in the pool"], width=3.9, height=3.1)
        for (workload, way), group in rows.groupby(["workload", "way"], sort=False):
            label, color, marker = LOOKS[workload, way]
            # A size that was not measured leaves a gap in its line.
            group, look = (
                group.groupby("block_size")[list(DRAWN)].mean().reindex(sizes),
                dict(color=color, marker=marker, label=label),
            )
            rate, low, high, held = (group[name] for name in DRAWN)
            axes[list(WORKLOADS).index(workload)].errorbar(sizes, rate, [rate - low, high - rate], capsize=2.5, **look)
            axes[2].plot(sizes, 100 * held, **look)
        for axis in axes:
            _label(axis, sizes)
            axis.set_ylabel("useful output tokens/s")
            axis.yaxis.set_major_formatter("{x:,.0f}")
        axes[2].set_ylabel("% of the K/V pool")
        other = rows[rows["mark"] != "steady"]
        plotting.footer(
            figure,
            rows,
            note="Not steady: "
            + ", ".join(f"{row['workload']} {row['way']} {row['block_size']}" for _, row in other.iterrows())
            if len(other)
            else "All runs are steady",
        )
    return {"fig18b_measured": figure}


def _label(axis: Axes, sizes: list[int]) -> None:
    axis.set(xscale="log", xlabel="block size (tokens)", ylim=(0, None))
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.minorticks_off()
    if len(axis.get_legend_handles_labels()[0]) > 1:
        axis.legend(fontsize=8.5)


def between_ways(rows: pd.DataFrame) -> dict[int, float]:
    """block size -> by how much swapping delivers more than recomputing on ShareGPT, in %."""
    rates = (
        rows[rows["workload"] == "sharegpt"]
        .groupby(["block_size", "way"])["tokens_per_s"]
        .mean()
        .unstack()
        .reindex(columns=["swap", "recompute"])
    )
    return {int(size): value for size, value in (100 * (rates["swap"] / rates["recompute"] - 1)).dropna().items()}


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    return []  # the claims are about latencies on an A100; what a saturated run of another card says stands beside them
