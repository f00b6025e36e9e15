"""The token budget of chunked prefill, the batching of vLLM V1 (see `repro.engine.chunked`).

Three things that V1's tuning guide and an article on its batching say, on the project's own scheduler:

- Every pending decode comes before any prompt token, and a prompt beyond the budget is cut. An observer that knows only
  what ran before checks this at every iteration of every run.
- A small budget makes the time between tokens short, a large one the time to the first token. OPT-13B on the A100 of
  2023 serves ShareGPT and a chatbot's long prompts, each at a rate that memory bears easily and at one near saturation,
  where waiting for memory hides the rest. (What a chunk's attention over its context costs is not modelled, as for
  prompts elsewhere.)
- 100 requests of 256 + 100 tokens and 5 of 8,000 + 100 that arrive together in a pool of 10,000 blocks run without a
  preemption. This is counted, whatever a step takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import model_validator

from repro.engine.chunked import ChunkedOutput, ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.errors import UserError
from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.profiles import cost_model
from repro.simulate.serve import requests_of
from repro.studies.common import check_positive, check_seeds, check_some, deployment_of, trace_of
from repro.workloads.chatbot import chatbot_trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUIZ_BLOCKS, BLOCK_SIZE = 10_000, 16
QUIZ = {"short first": [(256, 100)] * 100 + [(8000, 100)] * 5, "long first": [(8000, 100)] * 5 + [(256, 100)] * 100}
QUIZ_BUDGETS = (512, 2048, 8192)
SHOWN = "short first", 512  # the quiz run that is drawn
COLORS = ("#0072B2", "#E69F00")
TIMES = ("gap_mean_ms", "gap_999_ms", "first_mean_ms", "first_median_ms")


class Params(Parameters):
    """Rates in req/s, the easy one first; `budgets` in tokens, from the smallest up; `max_num_seqs` sequences run at
    most."""

    rates_sharegpt: tuple[float, ...]
    rates_chatbot: tuple[float, ...]
    budgets: tuple[int, ...]
    max_num_seqs: int
    duration_s: float
    seeds: tuple[int, ...]
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        for name in ("rates_sharegpt", "rates_chatbot", "budgets"):
            check_some(name, getattr(self, name))
        for rate in (*self.rates_sharegpt, *self.rates_chatbot, self.duration_s):
            check_positive("rates_sharegpt, rates_chatbot or duration_s", rate)
        check_seeds(self.seeds)
        if list(self.budgets) != sorted(self.budgets):
            raise UserError(f"budgets = {list(self.budgets)} must go from the smallest to the largest")
        for budget in self.budgets:
            ChunkedPrefillConfig(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=budget)
        return self


def points(params: Params) -> list[Point]:
    served = [
        Point(
            serve,
            {
                "workload": workload,
                "rate": rate,
                "load": load,
                "budget": budget,
                "max_num_seqs": params.max_num_seqs,
                "duration_s": params.duration_s,
                "seed": seed,
                "lengths": params.lengths,
            },
            weight=rate * params.duration_s,
        )
        for workload, rates in (("sharegpt", params.rates_sharegpt), ("chatbot", params.rates_chatbot))
        for load, rate in enumerate(rates)
        for budget in params.budgets
        for seed in params.seeds
    ]
    quiz = [
        Point(quiz_run, {"order": order, "budget": budget}, weight=100) for order in QUIZ for budget in QUIZ_BUDGETS
    ]
    return [Point(refusals, {}), *served, *quiz]


class DecodesFirst(Observer):
    """Whether every iteration ran all that had a token to continue, and prompts only with what was left of the budget.

    It goes by what earlier outputs started, finished and drove out, not by the scheduler's own lists.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.holds = True
        self.num_cut = 0
        self._pending: set[SequenceGroup] = set()
        self._left: dict[SequenceGroup, int] = {}  # output tokens still to come

    def observe(self, engine: Engine, output: ChunkedOutput, start_s: float) -> None:
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
            tokens = output.num_iterations
            self._left[group] = self._left.get(group, group.request.output_tokens) - tokens
            if self._left[group] == 0:
                self._pending.remove(group)


class TokenGaps(Observer):
    """Seconds between consecutive tokens of a request, over all requests; what a preemption costs is in them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.counts: list[int] = []
        self._last_s: dict[SequenceGroup, float] = {}  # of groups that were driven out

    def observe(self, engine: Engine, output: ChunkedOutput, start_s: float) -> None:
        now = engine.clock.now
        for group in output.preempted:
            if group.generated_before:
                self._last_s.setdefault(group, start_s)  # it may be driven out again before it has a token
        returned = [
            now - self._last_s.pop(prefill.group) for prefill in output.prefills if prefill.group in self._last_s
        ]
        self.seconds += [(now - start_s) / output.num_iterations, *returned]
        self.counts += [output.num_iterations * len(output.decodes), *[1] * len(returned)]

    @property
    def mean(self) -> float:
        return float(np.average(self.seconds, weights=self.counts))

    def quantile(self, share: float) -> float:
        """The gap that this share of all gaps does not exceed."""
        order = np.argsort(self.seconds)
        below = np.cumsum(np.asarray(self.counts)[order])
        return self.seconds[order[np.searchsorted(below, share * below[-1])]]


class Iterations(Observer):
    """Each iteration by itself: what it ran, the blocks in use, and the most empty slots at the end of a sequence."""

    next_s = 0.0  # no two are advanced together

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.empty_slots_most = 0

    def observe(self, engine: Engine, output: ChunkedOutput, start_s: float) -> None:
        manager = engine.scheduler.manager
        self.rows.append(
            {
                "iteration": output.iteration,
                "decodes": output.num_decode_seqs,
                "prompt_tokens": output.num_prefill_tokens,
                "blocks": manager.num_blocks - manager.num_free_blocks,
            }
        )
        for group, stored in engine.scheduler.stored_lengths(output.iteration):
            empty = len(manager.block_table(group.seqs[0])) * manager.block_size - stored
            self.empty_slots_most = max(self.empty_slots_most, empty)


def refusals() -> list[dict[str, Any]]:
    """Budgets around OPT's maximum length of 2048 tokens without chunked prefill: which are refused at start, and in
    what words."""
    rows = []
    for budget in (1024, 2048, 2049, 4096):
        try:
            ChunkedPrefillConfig(max_num_batched_tokens=budget, max_model_len=2048, enable_chunked_prefill=False)
            message = None
        except UserError as error:
            message = str(error)
        rows.append(
            {
                "part": "refusal",
                "budget": budget,
                "refused": message is not None,
                "message": message,
                "evidence": "exact",
                "device": None,
                "seed": None,
                "trace_hash": None,
            }
        )
    return rows


def serve(
    workload: str,
    rate: float,
    load: int,
    budget: int,
    max_num_seqs: int,
    duration_s: float,
    seed: int,
    lengths: str | None,
) -> dict[str, Any]:
    """Times between tokens and to the first token (ms) of OPT-13B serving a trace to its end."""
    deployment = deployment_of("opt-13b")
    trace = (
        chatbot_trace(rate, duration_s, seed, lengths)
        if workload == "chatbot"
        else trace_of(workload, rate, duration_s, seed, lengths)
    )
    costs = cost_model("a100-2023", deployment, BLOCK_SIZE, anchor="opt-13b/sharegpt")
    manager = PagedKVCacheManager(deployment.num_blocks(BLOCK_SIZE), BLOCK_SIZE, watermark=0.0)
    scheduler = ChunkedPrefillScheduler(
        manager,
        ChunkedPrefillConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=deployment.model.max_model_len
        ),
    )
    gaps, rule = TokenGaps(), DecodesFirst(budget)
    outcomes = Engine(scheduler, SimulatedExecutor(costs), observers=(gaps, rule)).run(
        requests_of(trace, SamplingParams())
    )
    first_ms = [1e3 * (outcome.first_token_s - outcome.request.arrival_s) for outcome in outcomes]
    return {
        "part": "served",
        "workload": workload,
        "rate": rate,
        "load": load,
        "budget": budget,
        "seed": seed,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace.hash,
        "gap_mean_ms": 1e3 * gaps.mean,
        "gap_999_ms": 1e3 * gaps.quantile(0.999),
        "first_mean_ms": float(np.mean(first_ms)),
        "first_median_ms": float(np.median(first_ms)),
        "iterations": scheduler.iteration,
        "decodes_first": rule.holds,
        "prompts_cut": rule.num_cut,
        "preemptions": scheduler.num_preemptions,
    }


def quiz_run(order: str, budget: int) -> list[dict[str, Any]]:
    """The 105 requests to their end; the run that is drawn also iteration by iteration."""
    scheduler = ChunkedPrefillScheduler(
        PagedKVCacheManager(QUIZ_BLOCKS, BLOCK_SIZE, watermark=0.0),
        ChunkedPrefillConfig(max_num_seqs=128, max_num_batched_tokens=budget, max_model_len=8192),
    )
    watch, rule = Iterations(), DecodesFirst(budget)
    requests = [
        Request(number, 0.0, prompt, output, SamplingParams()) for number, (prompt, output) in enumerate(QUIZ[order])
    ]
    # Nothing arrives later, so what is counted does not depend on how long an iteration takes.
    Engine(
        scheduler, SimulatedExecutor(cost_model("datasheet", deployment_of("opt-13b"))), observers=(watch, rule)
    ).run(requests)
    about = {"order": order, "budget": budget, "evidence": "replayed", "device": None, "seed": None, "trace_hash": None}
    steps = [{"part": "step", **row, **about} for row in watch.rows] if (order, budget) == SHOWN else []
    return [
        {
            "part": "quiz",
            **about,
            "iterations": scheduler.iteration,
            "decodes_first": rule.holds,
            "prompts_cut": rule.num_cut,
            "preemptions": scheduler.num_preemptions,
            "most_blocks": max(row["blocks"] for row in watch.rows),
            "empty_slots_most": watch.empty_slots_most,
        },
        *steps,
    ]


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    served, steps = rows[rows["part"] == "served"], rows[rows["part"] == "step"]
    with plotting.house():
        names = {"sharegpt": "ShareGPT", "chatbot": "Chatbot"}
        figure, axes = plotting.panels(
            [f"{name}: {what}" for what in ("between tokens", "to the first token") for name in names.values()],
            columns=2,
            width=4.6,
            height=2.8,
        )
        for row, columns in enumerate((("gap_mean_ms", "gap_999_ms"), ("first_mean_ms", "first_median_ms"))):
            for axis, workload in zip(axes[2 * row :], names):
                _times(axis, served[served["workload"] == workload], columns)
        plotting.footer(figure, served)
        return {"token_budget": figure, "token_budget_steps": _steps(steps)}


def _times(axis: Axes, rows: pd.DataFrame, columns: tuple[str, str]) -> None:
    labels = {"gap_mean_ms": "mean", "gap_999_ms": "99.9 %", "first_mean_ms": "mean", "first_median_ms": "median"}
    for (rate, group), color in zip(rows.groupby("rate"), COLORS):
        for column, marker in zip(columns, "os"):
            spread = group.groupby("budget")[column].agg(["mean", "min", "max"])
            axis.fill_between(spread.index, spread["min"], spread["max"], color=color, alpha=0.18, linewidth=0)
            axis.plot(
                spread.index,
                spread["mean"],
                marker,
                color=color,
                linestyle=(0, (4, 1.5)),
                markersize=4,
                markerfacecolor=color if marker == "o" else "white",
                label=f"{labels[column]}, {rate:g} req/s",
            )
    budgets = sorted(set(rows["budget"].astype(int)))
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, list(map(str, budgets)))
    axis.set(xlabel="token budget", ylabel="ms", yscale="log")
    ticks = [
        tick for tick in (20, 50, 100, 200, 500, 1000, 2000, 5000) if axis.get_ylim()[0] <= tick <= axis.get_ylim()[1]
    ]
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    axis.legend(fontsize=7.5)


def _steps(rows: pd.DataFrame) -> Figure:
    from repro.report import plotting

    figure, (axis,) = plotting.panels(
        ["100 requests of 256 + 100 tokens, then 5 of 8,000 + 100"], width=8.0, height=2.9
    )
    axis.stackplot(
        rows["iteration"],
        rows["decodes"],
        rows["prompt_tokens"],
        step="post",
        colors=COLORS,
        labels=("decodes", "prompt tokens"),
    )
    axis.axhline(SHOWN[1], color="#4D4D4D", linewidth=1, linestyle=(0, (4, 1.5)), label="budget")
    axis.set(xlabel="iteration", ylabel="tokens", xlim=(0, 180), ylim=(0, 1.12 * SHOWN[1]))
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    plotting.footer(figure, rows, note="The first 180 iterations")
    return figure


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params != replace(Params(), seeds=params.seeds, lengths=params.lengths):
        return []  # other parameters say nothing about the claims
    runs, quiz = rows[rows["part"].isin(("served", "quiz"))], rows[rows["part"] == "quiz"]
    refused = rows[rows["part"] == "refusal"].set_index("budget")["refused"].astype(bool)
    served = rows[rows["part"] == "served"]
    change = {
        (workload, int(load)): {
            column: group.loc[group["budget"] == params.budgets[-1], column].mean()
            / group.loc[group["budget"] == params.budgets[0], column].mean()
            for column in TIMES
        }
        for (workload, load), group in served.groupby(["workload", "load"], sort=False)
    }
    easy = [ratios for (_, load), ratios in change.items() if load == 0]
    rates = {"sharegpt": params.rates_sharegpt, "chatbot": params.rates_chatbot}
    found = "; ".join(
        f"{workload} at {rates[workload][load]:g} req/s " + ", ".join(f"x{ratios[column]:.2f}" for column in TIMES)
        for (workload, load), ratios in change.items()
    )
    return [
        Judgement(
            "v1-decode-first",
            bool(runs["decodes_first"].all() and (runs["prompts_cut"] > 0).any()),
            "replayed",
            note=f"{int(runs['iterations'].sum()):,} iterations of {len(runs)} runs; a prompt was cut "
            f"{int(runs['prompts_cut'].sum()):,} times.",
        ),
        Judgement(
            "v1-budget-tradeoff",
            all(ratios["gap_mean_ms"] > 1 > ratios["first_mean_ms"] for ratios in easy),
            "modelled",
            note=f"Means, at the rates that memory bears easily. From a budget of {params.budgets[0]} to "
            f"{params.budgets[-1]} tokens "
            f"the time between tokens (mean, 99.9 %) and to the first token (mean, median) change by: {found}. Near "
            "saturation the mean time to the first token is mostly waiting for memory, and the longest gaps are "
            "preemptions.",
        ),
        Judgement(
            "v1-budget-below-max-len",
            bool((refused == (refused.index <= 2048)).all()),
            "exact",
            note="Of 1024, 2048, 2049 and 4096 tokens for a maximum of 2048 the first two are refused.",
        ),
        Judgement(
            "quiz-run",
            {"preemptions": int(quiz["preemptions"].max())},
            "replayed",
            note=f"Either order, budgets of {', '.join(map(str, QUIZ_BUDGETS))}; at most "
            f"{int(quiz['most_blocks'].max()):,} blocks "
            "in use.",
        ),
        Judgement(
            "last-block-bound",
            int(quiz["empty_slots_most"].max()),
            "replayed",
            note="At every iteration of the quiz's runs.",
        ),
    ]
