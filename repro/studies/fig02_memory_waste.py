"""Fig. 2 and Fig. 13: what the K/V pool holds while a system is saturated, and how many requests it batches.

Both replay a trace through the real scheduler and memory manager and average over the hour in which requests arrive,
without the drain after it. What the pool holds hardly depends on speed once requests queue up, so these numbers test
the allocators, not the cost model; vLLM's two bars of Fig. 13 are the exception (see docs/fidelity.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from repro.engine.systems import System, system
from repro.harness.experiment import Point
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.metrics import PIECES, BatchAverage, UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies.common import check_positive, check_seeds, check_serving, check_systems, deployment_of, trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

CAPTION = {
    "fig02_memory_waste": "Fig. 2: what the K/V pool of OPT-13B holds on average over a saturated hour (ShareGPT, 4 "
    "req/s). Only "
    'token states are useful. The hatched part, which the paper books under "external & others", is the '
    "buddy allocator's rounding to powers of two: most of that bar for Pow2 and Oracle.",
    "fig13_batched_requests": "Fig. 13: requests batched on average over the hour. The Orcas are limited by memory "
    "and hardly "
    "depend on speed; vLLM at 2 req/s sits at the edge of saturation, where a little more or less "
    "speed moves its bar a lot, and 30 req/s on Alpaca lies beyond its saturation in Fig. 12.",
}


@dataclass(frozen=True)
class Params:
    """Rates in req/s. `kv_slots` replaces Table 1's pool; `lengths` is a CSV file of pairs in place of ShareGPT's."""

    systems: tuple[str, ...] = ("orca-max", "orca-pow2", "orca-oracle", "vllm")
    model: str = "opt-13b"
    usage_rate: float = 4.0
    batch_rate_sharegpt: float = 2.0
    batch_rate_alpaca: float = 30.0
    duration_s: float = 3600.0
    seeds: tuple[int, ...] = (0, 1, 2)
    profile: str = "a100-2023"
    block_size: int = 16
    kv_slots: int | None = None
    lengths: str | None = None

    def __post_init__(self) -> None:
        check_systems(self.systems)
        check_seeds(self.seeds)
        for name in ("usage_rate", "batch_rate_sharegpt", "batch_rate_alpaca", "duration_s"):
            check_positive(name, getattr(self, name))
        check_serving(self.model, self.profile, self.block_size, self.kv_slots)


def points(params: Params) -> list[Point]:
    runs = [
        ("fig02", "sharegpt", params.usage_rate),
        ("fig13a", "sharegpt", params.batch_rate_sharegpt),
        ("fig13b", "alpaca", params.batch_rate_alpaca),
    ]
    return [
        Point(
            saturated_run,
            {
                "part": part,
                "system": system(name),
                "model": params.model,
                "workload": workload,
                "rate": rate,
                "duration_s": params.duration_s,
                "seed": seed,
                "profile": params.profile,
                "block_size": params.block_size,
                "kv_slots": params.kv_slots,
                "lengths": params.lengths,
            },
            weight=rate if name == "vllm" else rate / 2,
        )
        for part, workload, rate in runs
        for name in params.systems
        for seed in params.seeds
    ]


def saturated_run(
    part: str,
    system: System,
    model: str,
    workload: str,
    rate: float,
    duration_s: float,
    seed: int,
    profile: str,
    block_size: int,
    kv_slots: int | None,
    lengths: str | None,
) -> dict[str, Any]:
    """One trace through one system: mean use of the pool (%) and mean number of running requests, while requests
    arrive."""
    deployment = deployment_of(model, kv_slots)
    trace = trace_of(workload, rate, duration_s, seed, lengths)
    usage, batch = UsageSamples(0.0, duration_s), BatchAverage(0.0, duration_s)
    costs = cost_model(
        profile, deployment, block_size, anchor=f"{model}/{workload}" if profile == "a100-2023" else None
    )
    served = serve(system, deployment, trace, costs, block_size, observers=(usage, batch))
    return {
        "part": part,
        "system": system.name,
        "model": model,
        "workload": workload,
        "rate": rate,
        "seed": seed,
        "evidence": "replayed",
        "device": costs.name,
        "trace_hash": trace.hash,
        "requests": len(trace),
        "equals_paper_trace": trace.card.equals_paper_trace,
        "batched_requests": batch.mean,
        "preemptions": served.engine.scheduler.num_preemptions,
        **{piece: 100 * usage.mean(piece) for piece in PIECES},
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    defaults = params == replace(Params(), seeds=params.seeds, lengths=params.lengths)
    with plotting.house():
        usage = rows[rows["part"] == "fig02"]
        pieces, (axis,) = plotting.panels(
            [f"{params.model}, ShareGPT, {params.usage_rate:g} req/s"], width=7.2, height=3.6
        )
        plotting.memory_bars(axis, usage, paper=paper.figure("fig2") if defaults else None)
        axis.set_ylabel("KV cache (%)")
        plotting.memory_legend(pieces, with_paper=defaults)
        plotting.footer(
            pieces,
            usage,
            with_paper=defaults,
            note="Right, hollow: the paper's bar, whose last piece is both grey pieces of ours",
        )
        panels = [("fig13a", "ShareGPT", params.batch_rate_sharegpt), ("fig13b", "Alpaca", params.batch_rate_alpaca)]
        batches, axes = plotting.panels([f"{label}, {rate:g} req/s" for _, label, rate in panels], width=4.2)
        for axis, (part, _, _) in zip(axes, panels):
            printed = PAPER_BATCHES[part] if defaults else None
            plotting.bars(axis, rows[rows["part"] == part], "batched_requests", paper=printed, digits=2)
            axis.set_ylabel("batched requests")
        plotting.footer(batches, rows[rows["part"] != "fig02"], with_paper=defaults)
    return {"fig02_memory_waste": pieces, "fig13_batched_requests": batches}


#: Fig. 13 prints its bars' values.
PAPER_BATCHES = {
    "fig13a": {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "vllm": 30.42},
    "fig13b": {"orca-max": 7.00, "orca-pow2": 43.24, "orca-oracle": 72.75, "vllm": 132.44},
}


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params != replace(Params(), seeds=params.seeds, lengths=params.lengths):
        return []  # other parameters than the paper's say nothing about its claims
    usage = rows[rows["part"] == "fig02"].groupby("system")
    outside = (
        rows[rows["part"] == "fig02"].assign(external=lambda r: r["rounding"] + r["free"]).groupby("system")["external"]
    )
    orcas = [name for name in params.systems if name != "vllm"]

    def spread(groups: Any, systems: Any) -> dict[str, Any]:
        return {
            "ours": {s: groups.mean()[s] for s in systems},
            "interval": {s: [groups.min()[s], groups.max()[s]] for s in systems},
        }

    last_block = (usage["reserved"].mean() + usage["internal"].mean())["vllm"]
    wasted = {name: 100 - usage["token_states"].mean()[name] for name in params.systems}
    rounding = {name: round(float(usage["rounding"].mean()[name]), 1) for name in orcas}
    batches = {part: rows[rows["part"] == part].groupby("system")["batched_requests"] for part in ("fig13a", "fig13b")}
    sharegpt = batches["fig13a"].mean()
    return [
        Judgement("fig2-token-states", evidence="replayed", **spread(usage["token_states"], params.systems)),
        Judgement("fig2-reservation", evidence="replayed", **spread(usage["reserved"], orcas)),
        Judgement("fig2-internal", evidence="replayed", **spread(usage["internal"], orcas)),
        Judgement(
            "fig2-external-and-others",
            evidence="replayed",
            **spread(outside, params.systems),
            note=f"Of this, rounding to powers of two is {rounding} points; for vLLM all of it is free blocks.",
        ),
        Judgement(
            "waste-under-4-percent",
            last_block,
            "replayed",
            note=f"Slots of last blocks that hold no token, the only waste that paging has. Counting the blocks that "
            f"are free for the moment, {wasted['vllm']:.1f} % hold no token.",
        ),
        Judgement(
            "waste-60-80", [min(wasted[name] for name in orcas), max(wasted[name] for name in orcas)], "replayed"
        ),
        Judgement(
            "fig13-sharegpt",
            evidence="replayed",
            **spread(batches["fig13a"], params.systems),
            note="vLLM's bar depends on speed: at 2 req/s the modelled system is at the edge of saturation.",
        ),
        Judgement(
            "fig13-alpaca",
            evidence="replayed",
            **spread(batches["fig13b"], params.systems),
            note="vLLM saturates before 30 req/s in the paper's own Fig. 12d (28.06 req/s).",
        ),
        Judgement(
            "more-requests-batched",
            {
                "vs-oracle": sharegpt["vllm"] / sharegpt["orca-oracle"],
                "vs-max": sharegpt["vllm"] / sharegpt["orca-max"],
            },
            "replayed",
        ),
    ]
