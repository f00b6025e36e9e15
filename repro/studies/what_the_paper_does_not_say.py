"""What the paper leaves open or states in two ways: both readings, and our number beside them.

Every item is a sentence, a bar or a curve of the paper that another part of it, or the rules that it gives, reads
differently. Nothing is decided here; where a choice had to be made elsewhere, the other choice is shown. The numbers
are the paper's own curves (repro.report.paper), arithmetic, and short runs of functions that other studies own; their
notebooks have the seeds and the sensitivity that this one leaves out. The table's words are in open_questions.yaml, its
numbers and the pictures in `both_readings`."""

from dataclasses import replace
from typing import Any, ClassVar

from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import system
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.prompts import requests_of
from repro.simulate.serve import serve
from repro.studies import fig02_memory_waste, fig12_basic_sampling, fig15_sharing, fig17_chatbot, sweep
from repro.studies import fig19_preemption as fig19
from repro.studies.base import DataFrame, Figure, Judgement, Parameters, Point, Rows, house
from repro.studies.both_readings import MODELS, draw_plots, items
from repro.studies.common import Positive, Rates, Seed, about, deployment_of, trace_of

TABLES = {
    "pool": ("system",),
    "batches": ("workload", "rate"),
    "until_completed": ("system",),
    "swap": ("num_cpu_blocks", "step"),
    "served_swapping": ("rate",),
    "alone": ("way", "block_size"),
    "saving": ("workload", "width"),
    "crossing": ("panel", "system"),
    "latency": ("panel", "duration_s"),
    "chatbot": ("conversations", "system"),
}
SATURATED = 4.0  # req/s, Fig. 2's: memory is never enough
#: the smallest case we know in which the blocks swapped out outnumber the pool: one block holds one token
SWAP_CASE = {"num_requests": 8, "prompt_tokens": 1, "output_tokens": 22, "num_blocks": 24}
ORCAS = ("orca-max", "orca-pow2", "orca-oracle")


class Params(Parameters):
    rates_sharegpt: Rates
    rates_alpaca: Rates
    max_seconds: Positive
    seed: Seed
    precision: Positive
    free: ClassVar = ("seed",)


def points(params: Params) -> list[Point]:
    seconds, run = params.max_seconds, {"duration_s": params.max_seconds, "seed": params.seed}
    usage, batch = (min(300.0, seconds / 3), min(900.0, seconds)), (min(600.0, seconds / 6), seconds)
    filled = [("pool", "sharegpt", SATURATED, name, usage) for name in (*ORCAS, "vllm")]
    filled += [("batches", "sharegpt", rate, "vllm", batch) for rate in params.rates_sharegpt]
    filled += [("batches", "alpaca", rate, "vllm", batch) for rate in params.rates_alpaca]
    pool = {"model": "opt-13b", "profile": "a100-2023", "block_size": 16, "kv_slots": None, "lengths": None}
    result = []
    for table, workload, rate, name, window in filled:
        served = {"workload": workload, "rate": rate, "system": system(name), "window_s": window, "seed": params.seed}
        result += [Point(fig02_memory_waste.saturated_run, pool | served, table, weight=rate * window[1])]
    result += [Point(until_completed, run, "until_completed", weight=4 * SATURATED * seconds)]
    for num_cpu_blocks in (1000, SWAP_CASE["num_blocks"]):
        result += [Point(swapped_out, SWAP_CASE | {"num_cpu_blocks": num_cpu_blocks}, "swap", weight=0.1)]
    for rate in (fig19.PAPER_RATE, SATURATED):
        result += [Point(swapped_in_service, run | {"rate": rate}, "served_swapping", weight=rate * seconds)]
    result += [Point(fig19.alone, {}, "alone", weight=0.1)]
    # Points of Fig. 15, 12 and 17, of which we take one seed and few systems.
    sharing = fig15_sharing.setup_of("parallel", "alpaca", 2, min(seconds, 600.0), params.seed)
    result += [Point(fig15_sharing.saving, {"setup": sharing, "rate": 20.0, "from_s": 0.0}, "saving", 10 * seconds)]
    for model in MODELS:
        for name in ("orca-max", "orca-oracle", "vllm"):
            one = f"{model}/sharegpt", name, seconds, None, (params.seed,), params.precision
            result += fig12_basic_sampling.crossings(*one)
    for workload, rate in (("sharegpt", 2.01), ("alpaca", 30.1)):
        for duration_s in dict.fromkeys((min(600.0, seconds), seconds)):  # Fig. 18b's and 19b's script, and Fig. 12's
            served = fig12_basic_sampling.setup_of(f"opt-13b/{workload}", "vllm", duration_s, None, params.seed)
            labels = {**served.labels, "duration_s": duration_s}
            result += sweep.points([replace(served, labels=labels)], [rate])
    chatbots = [
        fig17_chatbot.setup_of(name, seconds, None, params.seed, conversations)
        for conversations in (fig17_chatbot.CURVES, "2 rounds")
        for name in (*ORCAS, "vllm")
    ]
    found = sweep.crossings(chatbots, 0.8, params.precision)
    return result + [replace(point, table="chatbot") for point in found]


class UntilCompleted(Scheduler):
    """§4.5 to the letter: once a request was preempted, new ones wait until all that were are completed."""

    def may_start(self, group: SequenceGroup) -> bool:
        # Preempted ones arrived before all that never ran: if one is waiting, it is the first in the queue.
        return group.num_preemptions > 0 or not any(other.num_preemptions for other in self.running)


def until_completed(duration_s: float, seed: int) -> dict[str, Any]:
    """Fig. 2's run of vLLM with `UntilCompleted`: token states, % of the pool."""
    deployment, chosen = deployment_of("opt-13b"), system("vllm")
    trace = trace_of("sharegpt", SATURATED, duration_s, seed, None)
    costs = cost_model("a100-2023", deployment, anchor="opt-13b/sharegpt")
    manager = chosen.manager(deployment.num_blocks(16), 16, deployment.model.max_model_len)
    usage = UsageSamples(0.0, duration_s)
    engine = Engine(UntilCompleted(manager, chosen.scheduler), SimulatedExecutor(costs), observers=(usage,))
    engine.run(requests_of(trace, SamplingParams()), until_s=duration_s)
    found = {"system": "vllm", "rate": SATURATED, "token_states": 100 * usage.mean("token_states")}
    return found | about("replayed", costs.name, seed, trace)


def swapped_out(
    num_requests: int, prompt_tokens: int, output_tokens: int, num_blocks: int, num_cpu_blocks: int
) -> list[dict[str, Any]]:
    """Equal requests that arrive together, always swapped: blocks held on the GPU and in swap space, step by step."""
    manager = PagedKVCacheManager(num_blocks, 1, num_cpu_blocks=num_cpu_blocks)
    scheduler = Scheduler(manager, SchedulerConfig(preemption=PreemptionMode.SWAP))
    for index in range(num_requests):
        scheduler.add(Request(index, 0.0, prompt_tokens, output_tokens, SamplingParams()))
    sizes = {"num_blocks": num_blocks, "num_cpu_blocks": num_cpu_blocks, **about("replayed")}
    rows = []
    while scheduler.has_work:
        output = scheduler.schedule()
        held = {"on_gpu": num_blocks - manager.gpu.num_free, "swapped": num_cpu_blocks - manager.cpu.num_free}
        rows.append({"step": output.iteration, **sizes, **held})
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
    found = {"rate": rate, "num_blocks": deployment.num_blocks(16), "swapped": peak.blocks}
    return found | about("replayed", costs.name, seed, trace)


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    return {"both_readings": draw_plots(rows, not params.another_run)}


def tables(rows: Rows, params: Params) -> dict[str, DataFrame]:
    return {"what_the_paper_does_not_say": items(rows)}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    case, served = rows["swap"], rows["served_swapping"]
    share = max(float((100 * table["swapped"] / table["num_blocks"]).max()) for table in (case, served))
    left = rows["until_completed"]["token_states"].mean()
    peaks = case.groupby("num_cpu_blocks")["swapped"].max()
    text = "at most {0.swapped:.0f} of {0.num_blocks:.0f} blocks at {0.rate:g} req/s"
    most = {"most": peaks[peaks.index.max()], "most_bounded": peaks[SWAP_CASE["num_blocks"]]}
    facts = SWAP_CASE | most | {"in_service": ", ".join(map(text.format, served.itertuples()))}
    return [
        Judgement("swap-bounded-by-gpu", share, "replayed", facts=facts),
        Judgement("stop-until-completed", left, "replayed"),
    ]
