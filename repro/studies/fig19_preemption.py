"""Fig. 19: what swapping and recomputing a preempted request cost, alone and end to end."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

from repro.bench import kept
from repro.engine.config import GB
from repro.engine.scheduler import PreemptionMode
from repro.engine.systems import system
from repro.simulate.profiles import a100_2023, cost_model
from repro.simulate.serve import serve
from repro.studies.base import (
    Axes,
    DataFrame,
    Figure,
    Judgement,
    Parameters,
    Point,
    Rows,
    house,
    paper,
    plotting,
    where,
)
from repro.studies.common import Lengths, Positive, Rates, Seeds, ServingBlockSizes, about, deployment_of, trace_of
from repro.studies.measured import GpuOrNone, kernel_rows, runs, together

_ALONE = ("way", "block_size")
TABLES = {"alone": _ALONE, "recorded": _ALONE, "end_to_end": ("rate", *_ALONE, "seed")}
PAPER_RATE = 2.01  # req/s: Fig. 19b's
TOKENS = 256
BLOCK_SIZES = tuple(2**power for power in range(9))
MODES = {"recompute": PreemptionMode.RECOMPUTE, "swap": PreemptionMode.SWAP}
RECOMPUTE, SWAP_2023, SWAP_BATCHED = "recompute", "2023 way: a copy a block and layer", "ours, one launch"
#: recorded ways -> label, and the way whose colour it has
RECORDED = {
    RECOMPUTE: ("recompute", "recompute"),
    SWAP_2023: ("swap, a copy a block", "swap"),
    SWAP_BATCHED: ("swap, one launch", "ours"),
}
#: §7.3 compares the two ways at these sizes.
MIDDLE = (16, 32, 64)
#: curve -> the way whose colour it has
WAYS = {way: way for way in ("recompute", "swap", "swap-in", "swap-out")} | {"swap-in+out": "swap"}


class Params(Parameters):
    rates: Rates
    block_sizes: ServingBlockSizes
    duration_s: Positive
    seeds: Seeds
    gpu: GpuOrNone
    lengths: Lengths


def points(params: Params) -> list[Point]:
    weight, run = 0.1 * params.duration_s, params.pick("duration_s", "lengths")
    sources = ((recorded_swaps, kept.KERNELS, None), (recorded_recomputations, kept.SERVING, RECOMPUTE))
    recorded = [
        Point(read, given, "recorded", weight)
        for read, kind, needs in sources
        if (given := kept.given(params.gpu, kind, needs))
    ]
    swept = itertools.product(params.rates, params.block_sizes, MODES, params.seeds)
    served = [dict(zip(("rate", "block_size", "mode", "seed"), values)) | run for values in swept]
    return [
        Point(alone, {}, "alone", weight),
        *recorded,
        *(Point(end_to_end, one, "end_to_end", weight=one["rate"] * params.duration_s) for one in served),
    ]


def _row(way: str, block_size: int, milliseconds: float, evidence: str, device: str) -> dict[str, Any]:
    return {"way": way, "block_size": block_size, "milliseconds": milliseconds, **about(evidence, device)}


def alone() -> list[dict[str, Any]]:
    """Milliseconds to swap or recompute 256 tokens of OPT-13B, for each block size of the figure."""
    deployment, data = deployment_of("opt-13b"), a100_2023()
    costs = cost_model("a100-2023", deployment)
    bytes_ms = 1e3 * TOKENS * deployment.model.kv_bytes_per_token / (data["link_gb_per_s"] * GB)
    # A pass over all tokens by itself: its arithmetic, or reading the weights if that takes longer.
    pass_ms = 1e3 * max(costs.per_prefill_token_s * TOKENS, costs.weight_read_s)
    rows = []
    for size in BLOCK_SIZES:
        per_block = data["swap_ms_per_block"]
        found = {f"swap-{way}": bytes_ms + TOKENS // size * per_block[way] for way in ("in", "out")}
        found |= {"swap-in+out": sum(found.values()), "recompute": pass_ms}
        rows += [_row(way, size, value, "modelled", costs.name) for way, value in found.items()]
    return rows


def recorded_swaps(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Recorded milliseconds to swap 256 tokens of OPT-13B's shape out and in again."""
    rows = [row for row in kernel_rows(path, evidence, "swap") if row["tokens"] == TOKENS]
    found: dict[tuple[str, int], float] = defaultdict(float)
    for row in rows:
        found[row["contender"], row["block_size"]] += float(row["us"]) / 1e3
    return [_row(way, size, value, evidence, rows[0]["device"]) for (way, size), value in sorted(found.items())]


def recorded_recomputations(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Recorded milliseconds of the engine's pass over 256 tokens of OPT-13B, from the request to its token on the
    host."""
    rows = [row for row in runs(path, evidence, (RECOMPUTE,)) if row["tokens"] == TOKENS]
    return [_row(RECOMPUTE, row["block_size"], 1e3 * row["seconds"], evidence, row["device"]) for row in rows]


def end_to_end(mode: str, rate: float, block_size: int, **traced: Any) -> dict[str, Any]:
    """Mean normalized latency (s/token) of vLLM with one way of preemption; `traced` are the trace's duration, seed and
    lengths."""
    deployment, trace = deployment_of("opt-13b"), trace_of("sharegpt", rate, **traced)
    costs = cost_model("a100-2023", deployment, block_size, anchor="opt-13b/sharegpt")
    served = serve(system("vllm").with_scheduler(preemption=MODES[mode]), deployment, trace, costs, block_size)
    return {
        "way": mode,
        "rate": rate,
        "block_size": block_size,
        **about("modelled", costs.name, traced["seed"], trace),
        "latency_s_per_token": served.latency_s_per_token,
        "preemptions": served.engine.scheduler.num_preemptions,
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    recorded, serving = rows["recorded"], rows["end_to_end"]
    panels = zip("bcdefgh", params.rates)
    titles = [f"(a) {TOKENS} tokens alone", *(f"({letter}) ShareGPT, {rate:g} req/s" for letter, rate in panels)]
    figure, axes = plotting.panels(titles, width=3.8, height=3.3)
    with_paper, looks = not params.another_run, plotting.styles([*WAYS.values(), "ours"])
    handles = draw_curves(axes[0], rows["alone"], "milliseconds", "fig19a" if with_paper else None)
    for way, group in recorded.groupby("way"):
        (label, shown), evidence = RECORDED[way], group["evidence"].iloc[0]
        look = dict(color=looks[shown].color, marker=looks[shown].marker) | plotting.LINE[evidence]
        axes[0].plot(group["block_size"], group["milliseconds"], **look)
        handles.append(plotting.key(f"{evidence}: {label}", **look))
    axes[0].set(ylabel="ms", yscale="log", ylim=(5, 1000))
    for axis, rate in zip(axes[1:], params.rates):
        drawn = "fig19b" if rate == PAPER_RATE and with_paper else None
        draw_curves(axis, where(serving, rate=rate), "latency_s_per_token", drawn)
        axis.set(ylabel="latency (s/token)", yscale="log")
    for axis in axes:
        plotting.log(axis)
    handles += [plotting.key("the paper", marker="o", **plotting.PAPER)] * with_paper
    plotting.place_legend(figure, [*handles, *plotting.seeds_band(serving)])
    note = "(a): swapping is calibrated on the paper's points"
    note += "; the paper has no points below its rate" if len(params.rates) > 1 else ""
    plotting.footer(figure, together(recorded, serving), with_paper=with_paper, note=note)
    return {"fig19_preemption": figure}


def draw_curves(axis: Axes, rows: DataFrame, y: str, drawn: str | None) -> list[Any]:
    """Returns the legend's entries for the ways."""
    looks = {way: plotting.WAYS[shown] for way, shown in WAYS.items()}
    plotting.curves(axis, rows, "block_size", y, by="way", looks=looks)
    ways = list(dict.fromkeys(rows["way"]))
    for way in ways if drawn else ():
        axis.plot(*zip(*paper.points(drawn, way)), color=looks[way].color, marker=looks[way].marker, **plotting.PAPER)
    plotting.powers_of_two(axis, sorted(set(rows["block_size"]) | {size for size in BLOCK_SIZES if drawn}))
    line = plotting.LINE["modelled"]
    return [plotting.key(f"modelled: {way}", looks[way].color, marker=looks[way].marker, **line) for way in ways]


def differences(rows: DataFrame, rate: float) -> dict[int, float]:
    """block size -> by how much the slower way's mean latency exceeds the other's end to end, in %."""
    means = where(rows, rate=rate).groupby(["block_size", "way"])["latency_s_per_token"].mean().unstack()
    return {size: 100 * (row.max() / row.min() - 1) for size, row in means.iterrows()}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    alone_ms = rows["alone"].pivot(index="block_size", columns="way", values="milliseconds")
    share = 100 * alone_ms["recompute"] / alone_ms["swap-in+out"]
    drawn = zip(paper.points("fig19a", "recompute"), paper.points("fig19a", "swap-in+out"))
    theirs = [100 * recompute[1] / swap[1] for recompute, swap in drawn]
    upper, lower = params.rates
    apart, below = ([differences(rows["end_to_end"], rate)[size] for size in MIDDLE] for rate in params.rates)
    spread, facts = [share.min(), share.max()], {"pass_ms": alone_ms["recompute"].iloc[0]}
    facts |= {"least": share.min(), "most": share.max(), "their_least": min(theirs), "their_most": max(theirs)}
    rates = {"upper": upper, "lower": lower, "most_below": max(below)}
    return [
        Judgement("fig19a-20-percent", share.max(), "modelled", spread, facts=facts),
        Judgement("fig19b-comparable", max(apart), "modelled", [min(apart), max(apart)], facts=rates),
        *judge_recorded(rows["recorded"]),
    ]


def judge_recorded(rows: DataFrame) -> list[Judgement]:
    """Both claims on the curves alone, as recorded; the modelled ones are flat and falling by construction."""
    if rows.empty:
        return []
    times = rows.pivot(index="block_size", columns="way", values="milliseconds")
    times = times.reindex(BLOCK_SIZES, columns=list(RECORDED))
    if times.isna().any(axis=None):
        return []  # not recorded, or not at every block size
    apart, swap = times.max() / times.min(), times[SWAP_2023]
    shapes, share = {"recomputing": apart[RECOMPUTE], "swapping": swap.to_dict()}, 100 * times[RECOMPUTE] / swap
    devices = ", ".join(rows["device"].unique())
    facts = {"devices": devices, "swap": [swap.iloc[0], swap.iloc[-1]]}
    for name, way in (("recompute", RECOMPUTE), ("batched", SWAP_BATCHED)):
        facts[name] = [times[way].min(), times[way].max(), apart[way]]
    evidence = rows["evidence"].max()  # recorded, if only a part was measured here
    return [
        Judgement("fig19a-recompute-flat", shapes, evidence, facts=facts, device=devices),
        Judgement("fig19a-20-percent", share.max(), evidence, [share.min(), share.max()], device=devices),
    ]
