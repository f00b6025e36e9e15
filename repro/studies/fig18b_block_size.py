"""Fig. 18b: how the block size changes latency, and its effects apart."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from repro.bench import kept
from repro.engine.systems import system
from repro.simulate.metrics import UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies.base import Figure, Judgement, Parameters, Point, Rows, house, paper, plotting, where
from repro.studies.common import (
    WORKLOAD_LABEL,
    Lengths,
    Positive,
    Seeds,
    ServingBlockSizes,
    about,
    deployment_of,
    trace_of,
)
from repro.studies.measured import GpuOrNone, kernel_rows, together

TABLES = {"kernel": ("block_size",), "served": ("workload", "effects", "block_size", "seed")}
REFERENCE = 16  # tokens: the block size of Fig. 1 and Fig. 12, on which the cost model is calibrated
#: the recorded batch that stands for a serving one: sequences of mixed lengths, OPT-13B's heads
SHAPE = {"contender": "ours", "heads": "40 x 128", "batch": 64, "context": "ragged"}
WASTE, BOTH = "last-block waste", "waste and kernel"


class Params(Parameters):
    rate_sharegpt: Positive
    rate_alpaca: Positive
    block_sizes: ServingBlockSizes
    duration_s: Positive
    seeds: Seeds
    gpu: GpuOrNone
    lengths: Lengths

    @property
    def rates(self) -> dict[str, float]:
        """workload -> its rate."""
        return {"sharegpt": self.rate_sharegpt, "alpaca": self.rate_alpaca}


def points(params: Params) -> list[Point]:
    given = kept.given(params.gpu, kept.KERNELS)
    found = [Point(kernel_times, given, "kernel")] if given else []
    relative = {row["block_size"]: row["relative"] for row in kernel_times(**given)} if given else {}
    for workload, rate in params.rates.items():
        for size in params.block_sizes:
            slower = size <= REFERENCE and relative.get(size, 0.0) >= 1.0
            for kernel in (None, relative[size]) if slower else (None,):
                run = {"workload": workload, "rate": rate, "block_size": size, "kernel": kernel}
                run |= params.pick("duration_s", "lengths")
                weight = rate * params.duration_s
                found += [Point(served_with, run | {"seed": seed}, "served", weight) for seed in params.seeds]
    return found


def kernel_times(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Recorded microseconds of the decode kernel at each block size, and over the time with blocks of 16."""
    chosen = [row for row in kernel_rows(path, evidence, "block_sizes") if SHAPE.items() <= row.items()]
    times = {row["block_size"]: float(row["us"]) for row in chosen}
    return [
        {"block_size": size, "microseconds": us, "relative": us / times[REFERENCE]}
        | about(evidence, chosen[0]["device"])
        for size, us in sorted(times.items())
    ]


def served_with(
    workload: str, rate: float, block_size: int, kernel: float | None, duration_s: float, **traced: Any
) -> dict[str, Any]:
    """Mean normalized latency (s/token) and the mean share of slots (%) in last blocks that hold no token. `kernel` is
    its time over that with blocks of 16; None leaves the kernel out. `traced` are the trace's seed and lengths."""
    deployment, trace = deployment_of("opt-13b"), trace_of(workload, rate, duration_s, **traced)
    costs = cost_model("a100-2023", deployment, block_size, anchor=f"opt-13b/{workload}")
    # What reading K/V takes by Fig. 18a; as Fig. 1's slope already holds it for blocks of 16, only the difference is
    # added.
    reading_s = cost_model("a100-2023", deployment, split="kernel").per_context_token_s
    costs = replace(costs, per_context_token_s=((kernel or 1.0) - 1) * reading_s)
    usage = UsageSamples(0.0, duration_s)
    served = serve(system("vllm"), deployment, trace, costs, block_size, observers=(usage,))
    return {
        "workload": workload,
        "rate": rate,
        "block_size": block_size,
        "effects": BOTH if kernel else WASTE,
        **about("modelled", costs.name, traced["seed"], trace),
        "latency_s_per_token": served.latency_s_per_token,
        "wasted": 100 * (usage.mean("reserved") + usage.mean("internal")),
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    kernel, served = rows["kernel"], rows["served"]
    titles = [f"{WORKLOAD_LABEL[workload]}, {rate:g} req/s" for workload, rate in params.rates.items()]
    titles = ["Last-block waste (replayed)", "Attention kernel", *titles]
    figure, axes = plotting.panels(titles, columns=2, width=4.3, height=2.8)
    vllm, with_paper = plotting.STYLE["vllm"], not params.another_run
    for workload, group in where(served, effects=WASTE).groupby("workload", sort=False):
        waste = group.groupby("block_size")["wasted"].mean()
        axes[0].plot(waste.index, waste, color=vllm.color, marker=vllm.marker, **plotting.LINE["replayed"])
        at = waste.index[-2], waste.iloc[-2]
        axes[0].annotate(WORKLOAD_LABEL[workload], at, (-6, 6), textcoords="offset points", ha="right")
    axes[0].set(ylabel="slots without a token (%)", ylim=(0, None))
    if len(kernel):
        evidence, device = kernel[["evidence", "device"]].iloc[0]
        axes[1].plot(kernel["block_size"], kernel["relative"], color=vllm.color, marker="o", **plotting.LINE[evidence])
        axes[1].set_title(f"Attention kernel ({device}, {evidence})")
    axes[1].set(ylabel=f"time over that at {REFERENCE}", ylim=(0, 1.3))
    looks = dict(zip(dict.fromkeys(served["effects"]), (vllm, plotting.other(0))))
    for axis, workload in zip(axes[2:], params.rates):
        here, drawn = where(served, workload=workload), paper.points("fig18b", workload)
        plotting.curves(axis, here, "block_size", "latency_s_per_token", by="effects", looks=looks)
        if with_paper:
            axis.plot(*zip(*drawn), "o", color=vllm.color, **plotting.PAPER)
        axis.set(ylabel="latency (s/token)", yscale="log")
        plotting.log(axis)
    for axis in axes:
        plotting.powers_of_two(axis, params.block_sizes)
    modelled = plotting.LINE["modelled"]
    handles = [
        plotting.key(f"modelled: {effects}", look.color, marker=look.marker, **modelled)
        for effects, look in looks.items()
    ]
    handles += [plotting.key("the paper", vllm.color, marker="o", **plotting.PAPER)] * with_paper
    plotting.place_legend(figure, handles)
    note = f"The kernel's own speed is charged below {REFERENCE} only" if BOTH in looks else ""
    plotting.footer(figure, together(kernel, served), with_paper=with_paper, note=note)
    return {"fig18b_block_size": figure}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    served = rows["served"].groupby(["effects", "workload", "block_size"])["latency_s_per_token"].mean()

    def ms(effects: str, sizes: Iterable[int]) -> dict[str, dict[int, float]]:
        """Latencies by workload and block size."""
        return {name: {size: 1e3 * served[effects, name][size] for size in sizes} for name in params.rates}

    found = [Judgement("fig18b-block-size", ms(WASTE, (16, 32, 64, 128, 256)), "modelled")]
    if BOTH in served:
        kernel = rows["kernel"].set_index("block_size")["relative"]
        facts = {"slower": 100 * (kernel.loc[:REFERENCE].max() - 1)}
        found += [Judgement("fig18b-small-blocks", ms(BOTH, (1, 2, 4, 8, 16)), "modelled", facts=facts)]
    return found
