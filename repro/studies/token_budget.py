"""The token budget of chunked prefill, the batching of vLLM V1 (see `repro.engine.chunked`)."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any, Self

import numpy as np
from pydantic import model_validator

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import system
from repro.errors import UserError
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import TokenGaps
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve as run_trace
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import Count, Lengths, Positive, Rates, Seeds, Some, about, deployment_of, trace_of
from repro.workloads.chatbot import chatbot_trace

TABLES = {
    "refusals": ("budget",),
    "served": ("workload", "load", "budget", "seed"),
    "quiz": ("order", "budget"),
    "steps": ("iteration",),
}
QUIZ_BLOCKS, BLOCK_SIZE = 10_000, 16
QUIZ = {"short first": [(256, 100)] * 100 + [(8000, 100)] * 5, "long first": [(8000, 100)] * 5 + [(256, 100)] * 100}
QUIZ_BUDGETS = (512, 2048, 8192)
SHOWN = "short first", 512  # the quiz run that is drawn
#: between tokens: mean and 99.9 %; to the first token: mean and median
GAPS = ("gap_mean_ms", "gap_999_ms")
FIRST = ("first_mean_ms", "first_median_ms")


class Params(Parameters):
    rates_sharegpt: Rates
    rates_chatbot: Rates
    budgets: Annotated[tuple[Count, ...], Some]
    max_num_seqs: int
    duration_s: Positive
    seeds: Seeds
    lengths: Lengths

    @model_validator(mode="after")
    def _budgets_can_be(self) -> Self:
        if list(self.budgets) != sorted(self.budgets):
            raise UserError(f"budgets = {list(self.budgets)} must go from the smallest to the largest")
        for budget in self.budgets:
            self.config(budget)
        return self

    def config(self, budget: int) -> ChunkedPrefillConfig:
        """UserError if the budget is too small for the sequences that may run."""
        return ChunkedPrefillConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=budget)


def points(params: Params) -> list[Point]:
    shared = params.pick("duration_s", "lengths")
    loads = {"sharegpt": params.rates_sharegpt, "chatbot": params.rates_chatbot}
    runs = [
        {"workload": workload, "rate": rate, "load": load, "config": params.config(budget), "seed": seed, **shared}
        for workload, rates in loads.items()
        for load, rate in enumerate(rates)
        for budget in params.budgets
        for seed in params.seeds
    ]
    served = [Point(serve, run, "served", weight=run["rate"] * params.duration_s) for run in runs]
    quiz = [{"order": order, "budget": budget} for order in QUIZ for budget in QUIZ_BUDGETS]
    return [Point(refusals, {}, "refusals"), *served, *(Point(quiz_run, run, weight=100) for run in quiz)]


class DecodesFirst(Observer):
    """Whether every iteration ran all that had a token to continue, and prompts only with what was left of the budget.

    It goes by what earlier outputs started, finished and drove out, not by the scheduler's own lists."""

    def __init__(self, budget: int) -> None:
        self.budget, self.holds, self.num_cut = budget, True, 0
        self._pending: set[SequenceGroup] = set()
        self._left: dict[SequenceGroup, int] = {}  # output tokens still to come

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self._pending.difference_update(output.preempted)
        num_tokens = len(self._pending) + output.num_prefill_tokens
        self.num_cut += len(output.chunks)
        self.holds &= (
            set(output.decodes) == self._pending
            and num_tokens <= self.budget
            and (not output.chunks or num_tokens == self.budget)  # a prompt is cut only where the budget ends
            and not (output.preempted and output.num_prefill_tokens)
        )
        self._pending.update(prefill.group for prefill in output.prefills)
        for group in list(self._pending):
            self._left[group] = self._left.get(group, group.request.output_tokens) - output.num_iterations
            if self._left[group] == 0:
                self._pending.remove(group)


class Iterations(Observer):
    """Each iteration by itself: what it ran, the blocks in use, and the most empty slots at the end of a sequence."""

    next_s = 0.0  # no two are advanced together

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.empty_slots_most = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        manager = engine.scheduler.manager
        ran = {"decodes": output.num_decode_seqs, "prompt_tokens": output.num_prefill_tokens}
        blocks = manager.num_blocks - manager.num_free_blocks
        self.rows.append({"iteration": output.iteration, **ran, "blocks": blocks})
        for group, stored in engine.scheduler.stored_lengths(output.iteration):
            empty = len(manager.block_table(group.seqs[0])) * manager.block_size - stored
            self.empty_slots_most = max(self.empty_slots_most, empty)


def refusals() -> list[dict[str, Any]]:
    """Budgets around OPT's maximum length of 2048 tokens without chunked prefill: which are refused at start, and in
    what words."""
    rows = []
    for budget in (1024, 2048, 2049, 4096):
        message = None
        try:
            ChunkedPrefillConfig(max_num_batched_tokens=budget, max_model_len=2048, enable_chunked_prefill=False)
        except UserError as error:
            message = str(error)
        rows.append({"budget": budget, "refused": message is not None, "message": message, **about("exact")})
    return rows


def _scheduler(num_blocks: int, config: ChunkedPrefillConfig) -> ChunkedPrefillScheduler:
    return ChunkedPrefillScheduler(PagedKVCacheManager(num_blocks, BLOCK_SIZE, watermark=0.0), config)


def _counts(scheduler: ChunkedPrefillScheduler, rule: DecodesFirst) -> dict[str, Any]:
    counts = {"iterations": scheduler.iteration, "preemptions": scheduler.num_preemptions}
    return counts | {"decodes_first": rule.holds, "prompts_cut": rule.num_cut}


def serve(workload: str, rate: float, load: int, config: ChunkedPrefillConfig, **traced: Any) -> dict[str, Any]:
    """Times between tokens and to the first token (ms) of OPT-13B serving a trace to its end; `traced` are the trace's
    duration, seed and lengths."""
    deployment, budget = deployment_of("opt-13b"), config.max_num_batched_tokens
    trace = (chatbot_trace if workload == "chatbot" else partial(trace_of, workload))(rate=rate, **traced)
    costs = cost_model("a100-2023", deployment, BLOCK_SIZE, anchor="opt-13b/sharegpt")
    observers = gaps, rule = TokenGaps(), DecodesFirst(budget)
    chosen = replace(system("vllm-v1"), prefix_caching=False, scheduler=config)
    served = run_trace(chosen, deployment, trace, costs, BLOCK_SIZE, observers=observers)
    outcomes, scheduler = served.outcomes, served.engine.scheduler
    first_ms = [1e3 * (outcome.first_token_s - outcome.request.arrival_s) for outcome in outcomes]
    times = {
        "gap_mean_ms": 1e3 * gaps.mean,
        "gap_999_ms": 1e3 * gaps.quantile(0.999),
        "first_mean_ms": float(np.mean(first_ms)),
        "first_median_ms": float(np.median(first_ms)),
    }
    run = {"workload": workload, "rate": rate, "load": load, "budget": budget}
    return run | about("modelled", costs.name, traced["seed"], trace) | times | _counts(scheduler, rule)


def quiz_run(order: str, budget: int) -> dict[str, list[dict[str, Any]]]:
    """The 105 requests to their end; the run that is drawn also iteration by iteration."""
    config = ChunkedPrefillConfig(max_num_seqs=128, max_num_batched_tokens=budget, max_model_len=8192)
    scheduler = _scheduler(QUIZ_BLOCKS, config)
    observers = watch, rule = Iterations(), DecodesFirst(budget)
    requests = [Request(number, 0.0, *lengths, SamplingParams()) for number, lengths in enumerate(QUIZ[order])]
    # Nothing arrives later, so what is counted does not depend on how long an iteration takes.
    executor = SimulatedExecutor(cost_model("datasheet", deployment_of("opt-13b")))
    Engine(scheduler, executor, observers=observers).run(requests)
    common = {"order": order, "budget": budget, **about("replayed")}
    blocks = {"most_blocks": max(row["blocks"] for row in watch.rows), "empty_slots_most": watch.empty_slots_most}
    steps = [row | common for row in watch.rows] if (order, budget) == SHOWN else []
    return {"quiz": [common | _counts(scheduler, rule) | blocks], "steps": steps}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    served, names = rows["served"], {"sharegpt": "ShareGPT", "chatbot": "Chatbot"}
    shown = {"between tokens": GAPS, "to the first token": FIRST}
    titles = [f"{name}: {what}" for what in shown for name in names.values()]
    figure, axes = plotting.panels(titles, columns=2, width=4.2, height=2.8)
    for axis, (columns, workload) in zip(axes, product(shown.values(), names)):
        _times(axis, where(served, workload=workload), columns)
    handles = [
        plotting.swatch(", ".join(_rates(group, names)), plotting.other(load).color)
        for load, group in served.groupby("load")
    ]
    handles += [
        plotting.key("mean", marker="o", linestyle=""),
        plotting.key("above: 99.9 %, below: median", marker="D", linestyle=""),
        plotting.key("modelled", **plotting.LINE["modelled"]),
    ]
    plotting.place_legend(figure, [*handles, *plotting.seeds_band(served)])
    plotting.footer(figure, served)
    return {"token_budget": figure, "token_budget_steps": _steps(rows["steps"])}


def _rates(rows: DataFrame, names: dict[str, str]) -> list[str]:
    pairs = rows[["workload", "rate"]].drop_duplicates().itertuples(index=False)
    return [f"{names[workload]} at {rate:g} req/s" for workload, rate in pairs]


def _times(axis: Axes, rows: DataFrame, columns: tuple[str, ...]) -> None:
    for load, group in rows.groupby("load"):
        for column, marker in zip(columns, "oD"):
            looks = {"vllm": plotting.Style(plotting.other(load).color, marker)}
            plotting.curves(axis, group.assign(system="vllm"), "budget", column, looks=looks)
    plotting.powers_of_two(axis, sorted(set(rows["budget"])), "token budget")
    axis.set(ylabel="ms", yscale="log")
    plotting.log(axis)


def _steps(rows: DataFrame) -> Figure:
    title = "100 requests of 256 + 100 tokens, then 5 of 8,000 + 100"
    figure, (axis,) = plotting.panels([title], width=7.6, height=2.9)
    drawn = {"decodes": rows["decodes"], "prompt tokens": rows["prompt_tokens"]}
    colors = [plotting.other(number).color for number in (0, 7)]
    axis.stackplot(rows["iteration"], *drawn.values(), step="post", colors=colors)
    axis.axhline(SHOWN[1], color="#333333", linewidth=1)
    axis.annotate(f"the budget: {SHOWN[1]}", (180, SHOWN[1]), (-3, 4), textcoords="offset points", ha="right")
    axis.set(xlabel="iteration", ylabel="tokens", xlim=(0, 180), ylim=(0, 1.15 * SHOWN[1]))
    plotting.place_legend(figure, [plotting.swatch(name, color) for name, color in zip(drawn, colors)])
    plotting.footer(figure, rows, note="The first 180 iterations")
    return figure


def judge(rows: Rows, params: Params) -> list[Judgement]:
    served, quiz, (least, *_, most) = rows["served"], rows["quiz"], params.budgets
    iterations, cut = (int(served[name].sum() + quiz[name].sum()) for name in ("iterations", "prompts_cut"))
    broken = int((~served["decodes_first"]).sum() + (~quiz["decodes_first"]).sum())
    means = served.groupby(["workload", "rate", "load", "budget"], sort=False)[[*GAPS, *FIRST]].mean()
    change = means.xs(most, level="budget") / means.xs(least, level="budget")
    easy = change.xs(0, level="load")
    found = "; ".join(
        f"{workload} at {rate:g} req/s " + ", ".join(f"x{ratio:.2f}" for ratio in ratios)
        for (workload, rate, _), ratios in zip(change.index, change.to_numpy())
    )
    refused = rows["refusals"].set_index("budget")["refused"].astype(bool).map({True: "refused", False: "taken"})
    trade = {"time between tokens": easy["gap_mean_ms"].min(), "time to first token": easy["first_mean_ms"].max()}
    held = {"budgets": ", ".join(map(str, QUIZ_BUDGETS)), "most_blocks": int(quiz["most_blocks"].max())}
    counted = {"iterations": iterations, "runs": len(served) + len(quiz), "cut": cut}
    changes = {"least": least, "most": most, "found": found}
    return [
        Judgement("v1-decode-first", {"runs that break it": broken, "prompts cut": cut}, "replayed", facts=counted),
        Judgement("v1-budget-tradeoff", trade, "modelled", facts=changes),
        Judgement("v1-budget-below-max-len", refused.to_dict(), "exact"),
        Judgement("quiz-run", {"preemptions": int(quiz["preemptions"].max())}, "replayed", facts=held),
        Judgement("last-block-bound", int(quiz["empty_slots_most"].max()), "replayed"),
    ]
