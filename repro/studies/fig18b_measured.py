"""Fig. 18b and 19b measured on a GPU: vLLM's saturated throughput by block size, and with either way of preemption.

OPT-13B with the 12 GB pool of Table 1. A block size has effects that differ in sign: larger blocks waste more of the
pool at sequences' ends, so fewer requests run together (exact, and the same everywhere); smaller ones cost the kernels
more look-ups and, where swapping moves blocks one by one, more transfers. Here kernels and swaps are ours: one launch
moves all blocks. The paper has latencies at a rate, on another card."""

from pathlib import Path
from typing import Any

from repro.bench import kept
from repro.harness.tables import ABOUT
from repro.studies import measured as shared
from repro.studies.base import DataFrame, Figure, Judgement, Point, Rows, house, plotting, where
from repro.studies.common import WORKLOAD_LABEL
from repro.studies.fig19_preemption import MIDDLE
from repro.studies.measured import INTERVAL, Measured

TABLES = {"blocks": ("workload", "way", "block_size")}
DRAWN = (*INTERVAL, "token_states")
SETTING = ("mean_batch", "host_share", "mark", "preemptions", "model", "kv_slots")
COLUMNS = ("system", "workload", "block_size", *DRAWN, *SETTING, *ABOUT)

Params = Measured


def points(params: Params) -> list[Point]:
    return [Point(measured, kept.runs(params.gpu, "blocks"), "blocks")]


def measured(path: Path, evidence: str) -> list[dict[str, Any]]:
    """The runs that this study draws; "by_group" is vLLM's own rule, which recomputes single sequences."""
    found = shared.runs(path, evidence, ("blocks",))
    return [{"way": row["preemption"] or "by_group", **shared.columns(row, COLUMNS)} for row in found]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    runs = rows["blocks"]
    sizes = sorted(set(runs["block_size"]))
    figure, axes = plotting.panels([*WORKLOAD_LABEL.values(), "Token states in the pool"], width=3.6, height=3.1)
    shown, looks = {"alpaca": axes[1], "sharegpt": axes[0]}, plotting.styles(["recompute", "swap", "vllm"])
    handles, clocked = [], plotting.LINE[runs["evidence"].iloc[0]]
    for (workload, way), group in runs.groupby(["workload", "way"], sort=False):
        style = looks.get(way, looks["vllm"])
        look = dict(color=style.color, marker=style.marker) | clocked
        # A size that was not measured leaves a gap in its line.
        means = group.groupby("block_size")[list(DRAWN)].mean().reindex(sizes)
        rate, low, high, held = (means[name] for name in DRAWN)
        shown[workload].errorbar(sizes, rate, [rate - low, high - rate], capsize=2.5, elinewidth=1, **look)
        for size in means.index[rate.isna()]:
            text = {"rotation": 90, "ha": "center", "color": plotting.GREY}
            shown[workload].annotate("not measured", (size, 0), (0, 4), textcoords="offset points", va="bottom", **text)
        name = f"{WORKLOAD_LABEL[workload]}, " + ("vLLM's own rule" if way == "by_group" else f"always {way}")
        axes[2].plot(sizes, 100 * held, label=name, **look)
        handles.append(plotting.key(name, **look))
    for axis in axes:
        axis.set(ylim=(0, None))
        plotting.powers_of_two(axis, sizes)
        shared.label_rates(axis)
    axes[2].set(ylabel="% of the K/V pool", ylim=(0, 104))
    plotting.place_legend(figure, handles)
    steady = shared.steadiness(runs, "{workload} {way} {block_size}")
    plotting.footer(figure, runs, note=f"Whiskers: 95 % interval from five parts of the run. {steady}")
    return {"fig18b_measured": figure}


def between_ways(rows: DataFrame) -> dict[int, float]:
    """block size -> by how much swapping delivers more than recomputing on ShareGPT, in %."""
    means = rows[rows["workload"] == "sharegpt"].groupby(["block_size", "way"])["tokens_per_s"].mean()
    rates = means.unstack().reindex(columns=["swap", "recompute"])
    return {int(size): value for size, value in (100 * (rates["swap"] / rates["recompute"] - 1)).dropna().items()}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    runs = rows["blocks"]
    ms: dict[str, dict[int, float]] = {}
    for workload, way in (("sharegpt", "recompute"), ("alpaca", "by_group")):  # vLLM's own way of preemption
        means = where(runs, workload=workload, way=way).groupby("block_size")["tokens_per_s"].mean()
        ms[workload] = {int(size): 1e3 / rate for size, rate in means.items()}

    def those(*sizes: int) -> dict[str, dict[int, float]]:
        return {name: {size: found[size] for size in sizes if size in found} for name, found in ms.items()}

    apart = [abs(value) for size, value in between_ways(runs).items() if size in MIDDLE]
    judged = {
        "fig18b-block-size": those(16, 32, 64, 128, 256),
        "fig18b-small-blocks": those(1, 2, 4, 8, 16),
        "fig19b-comparable": (max(apart), [min(apart), max(apart)]) if apart else None,
    }
    return shared.on_gpu(runs, judged)
