"""Fig. 2 and Fig. 13: what the K/V pool holds while a system is saturated, and how many requests it batches.

Both replay a trace through the real scheduler and memory manager and average over the windows of the authors' scripts,
while requests arrive, without the drain after them. What the pool holds hardly depends on speed once requests queue up,
so these numbers test the allocators, not the cost model; vLLM's two bars of Fig. 13 are the exception (see
docs/fidelity.md)."""

from collections.abc import Iterable
from typing import Any, Self

from pydantic import model_validator

from repro.engine.systems import System, system
from repro.simulate.metrics import PIECES, BatchAverage, UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies import authors
from repro.studies.base import DataFrame, Figure, Judgement, Parameters, Point, Rows, house, paper, plotting, where
from repro.studies.common import (
    WORKLOAD_LABEL,
    BlockSize,
    Lengths,
    Model,
    Positive,
    Seeds,
    Systems,
    Window,
    about,
    check_serving,
    deployment_of,
    trace_of,
)
from repro.studies.measured import together
from repro.studies.sweep import spread

TABLES = {"pool": ("system", "seed"), "batches": ("workload", "system", "seed"), "authors": ("system", "seed")}


class Params(Parameters):
    systems: Systems
    model: Model
    usage_rate: Positive
    batch_rate_sharegpt: Positive
    batch_rate_alpaca: Positive
    usage_window_s: Window
    batch_window_s: Window
    seeds: Seeds
    profile: str
    block_size: BlockSize
    kv_slots: int | None
    lengths: Lengths

    @model_validator(mode="after")
    def _holds_a_request(self) -> Self:
        check_serving(self.model, self.profile, self.block_size, self.kv_slots)
        return self


def points(params: Params) -> list[Point]:
    runs = [
        ("pool", "sharegpt", params.usage_rate, params.usage_window_s),
        ("batches", "sharegpt", params.batch_rate_sharegpt, params.batch_window_s),
        ("batches", "alpaca", params.batch_rate_alpaca, params.batch_window_s),
    ]
    shared = params.pick("model", "profile", "block_size", "kv_slots", "lengths")
    kept = [authors.kept(authors="pool")] if not params.another_run else []
    return kept + [
        Point(
            saturated_run,
            {"system": system(name), "workload": workload, "rate": rate, "window_s": window, "seed": seed, **shared},
            table,
            weight=rate * window[1] / (1 if name == "vllm" else 2),
        )
        for table, workload, rate, window in runs
        for name in params.systems
        for seed in params.seeds
    ]


def saturated_run(
    system: System,
    model: str,
    profile: str,
    block_size: int,
    kv_slots: int | None,
    window_s: tuple[float, float],
    **traced: Any,
) -> dict[str, Any]:
    """One trace through one system: mean use of the pool (%) and mean number of running requests in a window, at whose
    end requests no longer arrive. `traced` are the other arguments of `trace_of`."""
    deployment, trace = deployment_of(model, kv_slots), trace_of(duration_s=window_s[1], **traced)
    workload, rate = traced["workload"], traced["rate"]
    usage, batch = UsageSamples(*window_s), BatchAverage(*window_s)
    anchor = f"{model}/{workload}" if profile == "a100-2023" else None
    costs = cost_model(profile, deployment, block_size, anchor=anchor)
    served = serve(system, deployment, trace, costs, block_size, observers=(usage, batch))
    return {
        "system": system.name,
        "model": model,
        "workload": workload,
        "rate": rate,
        **about("replayed", costs.name, traced["seed"], trace),
        "requests": len(trace),
        "equals_paper_trace": trace.card.equals_paper_trace,
        "batched_requests": batch.mean,
        "preemptions": served.engine.scheduler.num_preemptions,
        **{piece: 100 * usage.mean(piece) for piece in PIECES},
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    with_paper = not params.another_run
    title = f"{params.model.upper()}, ShareGPT, {params.usage_rate:g} req/s"
    shown = {title: rows["pool"]} | ({"The same on the authors' own trace": rows["authors"]} if with_paper else {})
    pieces, axes = plotting.panels(list(shown), width=5.6, height=3.6)
    for axis, table in zip(axes, shown.values()):
        plotting.memory_bars(axis, table, paper=paper.figure("fig2") if with_paper else None)
        axis.set_ylabel("KV cache (%)")
    plotting.memory_legend(pieces, with_paper=with_paper)
    note = "Above each bar: % without a token"
    if len(vllm := where(rows["pool"], system="vllm")):
        vllm = vllm.mean(numeric_only=True)
        last = vllm["reserved"] + vllm["internal"]
        note += f"; of vLLM's, {last:.1f} in last blocks and {vllm['free']:.1f} in free ones"
    note += ". The paper does not divide its grey piece" if with_paper else ""
    plotting.footer(pieces, together(*shown.values()), with_paper=with_paper, note=note)
    rates = {"sharegpt": params.batch_rate_sharegpt, "alpaca": params.batch_rate_alpaca}
    titles = [f"{WORKLOAD_LABEL[workload]}, {rate:g} req/s" for workload, rate in rates.items()]
    batches, axes = plotting.panels(titles, width=3.9)
    for axis, workload in zip(axes, rates):
        theirs = PAPER_BATCHES[workload] if with_paper else None
        plotting.bars(axis, where(rows["batches"], workload=workload), "batched_requests", paper=theirs, digits=2)
        axis.set_ylabel("batched requests")
    plotting.footer(batches, rows["batches"], with_paper=with_paper)
    return {"fig02_memory_waste": pieces, "fig13_batched_requests": batches}


#: Fig. 13 prints its bars' values.
PAPER_BATCHES = {
    "sharegpt": {"orca-max": 7.00, "orca-pow2": 9.81, "orca-oracle": 13.62, "vllm": 30.42},
    "alpaca": {"orca-max": 7.00, "orca-pow2": 43.24, "orca-oracle": 72.75, "vllm": 132.44},
}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    pool = rows["pool"].assign(external=rows["pool"]["rounding"] + rows["pool"]["free"])
    batches = {workload: where(rows["batches"], workload=workload) for workload in PAPER_BATCHES}
    orcas = [name for name in params.systems if name != "vllm"]

    def each(claim: str, table: DataFrame, column: str, systems: Iterable[str], **facts: Any) -> Judgement:
        ours, ends = ({name: found[name] for name in systems} for found in spread(table, "system", of=column))
        return Judgement(claim, ours, "replayed", ends, facts=facts)

    mean = pool.groupby("system").mean(numeric_only=True)
    wasted, last_blocks = 100 - mean["token_states"], mean["reserved"] + mean["internal"]
    rounding = {name: round(float(mean.at[name, "rounding"]), 1) for name in orcas}
    sharegpt = batches["sharegpt"].groupby("system")["batched_requests"].mean()
    gains = {f"vs-{name}": sharegpt["vllm"] / sharegpt[f"orca-{name}"] for name in ("oracle", "max")}
    unused = {"without_token": wasted["vllm"]}
    return [
        each("fig2-token-states", pool, "token_states", params.systems),
        each("fig2-reservation", pool, "reserved", orcas),
        each("fig2-internal", pool, "internal", orcas),
        each("fig2-external-and-others", pool, "external", params.systems, rounding=rounding),
        Judgement("waste-under-4-percent", last_blocks["vllm"], "replayed", facts=unused),
        Judgement("waste-60-80", [wasted[orcas].min(), wasted[orcas].max()], "replayed"),
        each("fig13-sharegpt", batches["sharegpt"], "batched_requests", params.systems),
        each("fig13-alpaca", batches["alpaca"], "batched_requests", params.systems),
        Judgement("more-requests-batched", gains, "replayed"),
    ]
