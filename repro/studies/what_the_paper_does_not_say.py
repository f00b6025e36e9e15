"""What the paper leaves open or states in two ways: both readings, and our number beside them.

Every item is a sentence, a bar or a curve of the paper that another part of it, or the rules that it gives, reads
differently. Nothing is decided here; where a choice had to be made elsewhere, the other choice is shown. The numbers
are the paper's own curves (repro.report.paper), arithmetic, and short runs of functions that other studies own; their
notebooks have the seeds and the sensitivity that this one leaves out. The words are in `both_readings`, the pictures in
`both_readings_drawn`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import requests_of, serve
from repro.studies import (
    fig02_memory_waste,
    fig12_basic_sampling,
    fig15_sharing,
    fig17_chatbot,
    fig19_preemption,
    sweep,
)
from repro.studies.both_readings import MODELS, draw_table
from repro.studies.both_readings_drawn import draw_plots
from repro.studies.common import check_positive, check_seeds, check_some, deployment_of, trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: Fig. 2's rate (req/s), at which memory is never enough
SATURATED = 4.0
#: the smallest case we know in which the blocks swapped out outnumber the pool: one block holds one token
SWAP_CASE = {"num_requests": 8, "prompt_tokens": 1, "output_tokens": 22, "num_blocks": 24}
ORCAS = ("orca-max", "orca-pow2", "orca-oracle")


class Params(Parameters):
    """Rates (req/s) around those of Fig. 13; `max_seconds` caps the traces, which otherwise are as long as the
    authors'."""

    rates_sharegpt: tuple[float, ...]
    rates_alpaca: tuple[float, ...]
    max_seconds: float
    seed: int
    precision: float

    @model_validator(mode="after")
    def _possible(self) -> Params:
        for name in ("rates_sharegpt", "rates_alpaca"):
            check_some(name, getattr(self, name))
            for rate in getattr(self, name):
                check_positive(name, rate)
        check_positive("max_seconds", self.max_seconds)
        check_positive("precision", self.precision)
        check_seeds((self.seed,))
        return self


def points(params: Params) -> list[Point]:
    seconds, seed = params.max_seconds, params.seed
    pool = {
        "model": "opt-13b",
        "duration_s": seconds,
        "seed": seed,
        "profile": "a100-2023",
        "block_size": 16,
        "kv_slots": None,
        "lengths": None,
    }
    filled = [("fig02", "sharegpt", SATURATED, name) for name in (*ORCAS, "vllm")]
    filled += [("fig13a", "sharegpt", rate, "vllm") for rate in params.rates_sharegpt]
    filled += [("fig13b", "alpaca", rate, "vllm") for rate in params.rates_alpaca]
    result = [
        Point(
            fig02_memory_waste.saturated_run,
            pool | {"part": part, "workload": workload, "rate": rate, "system": system(name)},
            weight=rate * seconds,
        )
        for part, workload, rate, name in filled
    ]
    result += [Point(until_completed, {"duration_s": seconds, "seed": seed}, weight=4 * SATURATED * seconds)]
    result += [
        Point(swapped_out, SWAP_CASE | {"num_cpu_blocks": cpu}, weight=0.1) for cpu in (1000, SWAP_CASE["num_blocks"])
    ]
    result += [
        Point(swapped_in_service, {"rate": rate, "duration_s": seconds, "seed": seed}, weight=rate * seconds)
        for rate in (fig19_preemption.Params.rates[0], SATURATED)
    ]
    result += [Point(fig19_preemption.alone, {}, weight=0.1)]
    sharing = fig15_sharing.setup_of("parallel", "alpaca", 2, min(seconds, 600.0), seed)
    result += [Point(fig15_sharing.saving, {"setup": sharing, "rate": 20.0}, weight=10 * seconds)]
    # The points of Fig. 12 with these very arguments, of which we take one seed and three systems.
    for model in MODELS:
        for name in ("orca-max", "orca-oracle", "vllm"):
            panel = f"{model}/sharegpt"
            result += fig12_basic_sampling.crossings(panel, name, seconds, None, (seed,), params.precision)
    for workload, rate in (("sharegpt", 2.01), ("alpaca", 30.1)):
        result += sweep.points(
            [fig12_basic_sampling.setup_of(f"opt-13b/{workload}", "vllm", seconds, None, seed)], [rate]
        )
    chatbots = [
        fig17_chatbot.setup_of(name, seconds, None, seed, conversations)
        for conversations in (fig17_chatbot.STATED, "2 rounds")
        for name in (*ORCAS, "vllm")
    ]
    result += sweep.crossings(chatbots, 0.8, params.precision)
    return result


def _row(part: str, **values: Any) -> dict[str, Any]:
    return {"part": part, "evidence": "replayed", "device": None, "seed": None, "trace_hash": None, **values}


class UntilCompleted(Scheduler):
    """§4.5 to the letter: once a request was preempted, new ones wait until all that were are completed."""

    def _admit(self, output: SchedulerOutput) -> None:
        preempted = [group for group in self.waiting if group.num_preemptions]
        if not preempted and not any(group.num_preemptions for group in (*self.running, *self.swapped)):
            return super()._admit(output)
        fresh = [group for group in self.waiting if not group.num_preemptions]
        self.waiting = deque(preempted)  # all of them arrived before the fresh ones: first come, first served
        super()._admit(output)
        self.waiting.extend(fresh)


def until_completed(duration_s: float, seed: int) -> dict[str, Any]:
    """Fig. 2's run of vLLM with `UntilCompleted`: token states, % of the pool."""
    deployment, chosen = deployment_of("opt-13b"), system("vllm")
    trace = trace_of("sharegpt", SATURATED, duration_s, seed, None)
    costs = cost_model("a100-2023", deployment, anchor="opt-13b/sharegpt")
    manager = chosen.manager(deployment.num_blocks(16), 16, deployment.model.max_model_len)
    usage = UsageSamples(0.0, duration_s)
    engine = Engine(UntilCompleted(manager, chosen.scheduler), SimulatedExecutor(costs), observers=(usage,))
    engine.run(requests_of(trace, SamplingParams()), until_s=duration_s)
    return _row(
        "until completed",
        system="vllm",
        rate=SATURATED,
        seed=seed,
        device=costs.name,
        trace_hash=trace.hash,
        token_states=100 * usage.mean("token_states"),
    )


def swapped_out(
    num_requests: int, prompt_tokens: int, output_tokens: int, num_blocks: int, num_cpu_blocks: int
) -> list[dict[str, Any]]:
    """Equal requests that arrive together, always swapped: blocks held on the GPU and in swap space, step by step."""
    manager = PagedKVCacheManager(num_blocks, 1, num_cpu_blocks=num_cpu_blocks)
    scheduler = Scheduler(manager, SchedulerConfig(preemption=PreemptionMode.SWAP))
    for index in range(num_requests):
        scheduler.add(Request(index, 0.0, prompt_tokens, output_tokens, SamplingParams()))
    rows = []
    while scheduler.has_work:
        output = scheduler.schedule()
        rows.append(
            _row(
                "swap",
                step=output.iteration,
                num_blocks=num_blocks,
                num_cpu_blocks=num_cpu_blocks,
                on_gpu=num_blocks - manager.gpu.num_free,
                swapped=num_cpu_blocks - manager.cpu.num_free,
            )
        )
        scheduler.update(output)
    return rows


class PeakSwapped(Observer):
    """The most blocks in swap space after any iteration."""

    def __init__(self) -> None:
        self.blocks = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        cpu = engine.scheduler.manager.cpu
        self.blocks = max(self.blocks, cpu.num_blocks - cpu.num_free)


def swapped_in_service(rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """ShareGPT on OPT-13B, always swapped: the most blocks in swap space, and the pool's."""
    deployment, peak = deployment_of("opt-13b"), PeakSwapped()
    trace = trace_of("sharegpt", rate, duration_s, seed, None)
    costs = cost_model("a100-2023", deployment, anchor="opt-13b/sharegpt")
    serve(system("vllm").with_scheduler(preemption=PreemptionMode.SWAP), deployment, trace, costs, observers=(peak,))
    return _row(
        "swap in service",
        rate=rate,
        seed=seed,
        device=costs.name,
        trace_hash=trace.hash,
        num_blocks=deployment.num_blocks(16),
        swapped=peak.blocks,
    )


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    with plotting.house():
        return {"what_the_paper_does_not_say": draw_table(rows), "both_readings": draw_plots(rows)}


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params != replace(Params(), seed=params.seed):
        return []
    case = rows[rows["part"] == "swap"]
    peaks = case.groupby("num_cpu_blocks")["swapped"].max()
    served = rows[rows["part"] == "swap in service"]
    pool, room = SWAP_CASE["num_blocks"], max(peaks.index)
    return [
        Judgement(
            "swap-bounded-by-gpu",
            bool((case["swapped"] <= case["num_blocks"]).all() and (served["swapped"] <= served["num_blocks"]).all()),
            "replayed",
            note="{num_requests} requests of {prompt_tokens} + {output_tokens} tokens on {num_blocks} blocks of one "
            "slot".format(**SWAP_CASE)
            + f" have up to {peaks[room]:.0f} blocks swapped out if the swap space takes them: what was swapped out "
            "stays while others grow into the blocks that it left. It holds where the swap space is no larger than "
            f"the pool ({pool} blocks: at most {peaks[pool]:.0f}). Serving ShareGPT on OPT-13B, always swapping: "
            + ", ".join(
                f"at most {row.swapped:.0f} of {row.num_blocks:.0f} blocks at {row.rate:g} req/s"
                for row in served.itertuples()
            )
            + ".",
        )
    ]
