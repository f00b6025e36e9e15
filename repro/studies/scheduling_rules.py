"""Rules of scheduling and memory, judged on event logs: of every system serving a trace, and of runs drawn at random.

A rule that holds in one example may fail in the next. So each log is replayed by `event_rules`, which knows the
requests and the configuration but not the scheduler, and counts how often a rule was put to the test and how often it
was broken. Beside them stand the levers that V1's guide names against preemptions, one at a time."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import OF_THE_PAPER, System
from repro.errors import UserError
from repro.simulate.beams import KINDS, Turnover, recording
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.panels import system_for
from repro.simulate.profiles import cost_model
from repro.simulate.prompts import requests_of
from repro.simulate.serve import serve
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting
from repro.studies.common import Count, Positive, Seed, Some, about, check_serving, deployment_of, trace_of
from repro.studies.event_rules import COUNTS, Replay
from repro.studies.token_budget import DecodesFirst

TABLES = {"logs": ("source", "system", "seed"), "levers": ("lever", "value", "rate")}
#: What is drawn: rule -> (what breaks it, a case in which it could break), as counted.
RULES = {
    "first come, first served": ("later_ahead", "returned_first"),
    "the same, after swapping": ("swapped_ahead", "groups_swapped"),
    "the latest arrival is preempted": ("other_victims", "preemptions"),
    "all or nothing": ("parts_lost", "groups_swapped"),
    "recomputed in one pass": ("not_one_pass", "recomputations"),
    "freed blocks serve the next": ("kept_waiting", "ended_then_started"),
    "decodes come first (V1)": ("decodes_late", "prompts_cut"),
}
MOST = ("swapped_percent", "empty_slots_most")  # the other counts are sums
NOTHING = dict.fromkeys((*COUNTS, "empty_slots_most", "decodes_late", "prompts_cut", "runs"), 0)
RUNS_A_POINT = 100
CHUNKED = "vllm V1"
#: systems served and drawn: name -> (system, changes of its scheduler)
SERVED = {name: (name, {}) for name in OF_THE_PAPER} | {"vllm, swapping": ("vllm", {"preemption": PreemptionMode.SWAP})}
WAYS = {"single": (1, False), "parallel": (4, False), "beam": (4, True)}
A_SECOND = CostModel("an iteration a second", 1.0, *[0.0] * 7)
MOST_SEQS = 256
MEMORY, SEQS, BUDGET = "kv_slots", "max_num_seqs", "max_num_batched_tokens"


class Params(Parameters):
    runs: Annotated[int, Field(ge=1, le=1_000_000)]
    rate: Positive
    seconds: Positive
    lever_rate: Positive
    lever_seconds: Positive
    kv_slots: tuple[Count, Count]
    max_num_seqs: tuple[Count, Count]
    budgets: Annotated[tuple[Count, Count], Some]
    other_budgets: tuple[Count, ...]
    budgets_for_throughput: Annotated[tuple[Count, ...], Some]
    seed: Seed
    free: ClassVar = ("seed",)

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        budgets = (*self.other_budgets, *self.budgets)
        if len(set(budgets)) < len(budgets) or self.rate == self.lever_rate:
            raise UserError(
                f"budgets = {list(self.budgets)} and other_budgets = {list(self.other_budgets)}, and rate = "
                f"{self.rate} and lever_rate = {self.lever_rate}: name each value once, or rows could not be told apart"
            )
        caps = [(self.max_num_seqs[0], budget) for budget in budgets] + [(self.max_num_seqs[1], self.budgets[0])]
        for seqs, budget in caps + [(MOST_SEQS, budget) for budget in self.budgets_for_throughput]:
            ChunkedPrefillConfig(max_num_seqs=seqs, max_num_batched_tokens=budget)
        for slots in self.kv_slots:
            check_serving("opt-13b", "a100-2023", 16, slots)
        return self


def points(params: Params) -> list[Point]:
    drawn = [
        Point(drawn_runs, {"first": first, "count": min(RUNS_A_POINT, params.runs - first)}, "logs")
        for first in range(0, params.runs, RUNS_A_POINT)
    ]
    traced = {"rate": params.rate, "duration_s": params.seconds, "seed": params.seed}
    runs = [(name, "single") for name in SERVED] + [("vllm", way) for way in WAYS if way != "single"]
    served = [Point(served_run, {"name": name, "way": way, **traced}, "logs", 2.0) for name, way in runs]
    traced |= {"duration_s": params.lever_seconds}
    before = {MEMORY: params.kv_slots[0], SEQS: params.max_num_seqs[0], BUDGET: params.budgets[0]}
    changes = [("none", 0), (MEMORY, params.kv_slots[1]), (SEQS, params.max_num_seqs[1])]
    changes += [(BUDGET, budget) for budget in (*params.other_budgets, params.budgets[1])]
    pulled = [
        {"lever": name, "value": value, "settings": before, **traced, "rate": params.lever_rate}
        for name, value in changes
    ]
    wide = before | {SEQS: MOST_SEQS}
    pulled += [{"lever": BUDGET, "value": one, "settings": wide, **traced} for one in params.budgets_for_throughput]
    return [*served, *drawn, *(Point(pull, one, "levers", 2.0) for one in pulled)]


def served_run(name: str, way: str, rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """The counts of one system that serves ShareGPT with too little memory."""
    deployment, (known, changes), (n, beams) = deployment_of("opt-13b"), SERVED[name], WAYS[way]
    trace, sampling = trace_of("sharegpt", rate, duration_s, seed, None), SamplingParams(n=n, use_beam_search=beams)
    system, costs = (
        system_for(known, deployment, "sharegpt").with_scheduler(**changes),
        cost_model("a100-2023", deployment),
    )
    log: list[Event] = []
    chosen = {"sampling": sampling, "beams": recording(KINDS["sharegpt"]) if beams else None}
    run = serve(system, deployment, trace, costs, log=log, **chosen)
    counts = Replay(requests_of(trace, sampling), run.engine.scheduler.manager, system.scheduler).run(log)
    return {
        "source": f"ShareGPT, {way}",
        "system": name,
        **about("replayed", costs.name, seed, trace),
        **NOTHING,
        **counts,
    }


def drawn_runs(first: int, count: int) -> list[dict[str, Any]]:
    """The counts of runs drawn at random, summed by system; a run's number is its seed."""
    found: dict[str, Counter[str]] = {}
    for seed in range(first, first + count):
        name, counts = drawn_run(seed)
        total = found.setdefault(name, Counter())
        for key, value in counts.items():
            total[key] = max(total[key], value) if key in MOST else total[key] + value
    return [
        {"source": "drawn", "system": name, **about("replayed", seed=first), **NOTHING, **one}
        for name, one in found.items()
    ]


class LastBlocks(Observer):
    """The most slots that any sequence left empty, iteration by iteration, in blocks of 16."""

    next_s = 0.0

    def __init__(self) -> None:
        self.most = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        manager = engine.scheduler.manager
        for group, stored in engine.scheduler.stored_lengths(output.iteration) if manager.block_size == 16 else ():
            held = max(len(manager.block_table(seq)) for seq in group.seqs) * manager.block_size
            self.most = max(self.most, held - stored)


def drawn_run(seed: int, scheduler_type: type[Scheduler] = Scheduler) -> tuple[str, dict[str, float]]:
    """One run with a small pool, short requests and caps drawn at random: its system's name, and its counts."""
    rng = random.Random(seed)
    name = rng.choice((*SERVED, "vllm", "vllm", "vllm, swapping", CHUNKED))
    size, num_blocks = rng.choice((1, 4, 16)), rng.randint(3, 24)
    longest, seqs, budget = size * num_blocks, rng.choice((4, 6, 256)), rng.choice((None, rng.randint(8, 60)))
    log: list[Event] = []
    if name == CHUNKED:
        config = ChunkedPrefillConfig(max_num_seqs=min(seqs, budget or 16), max_num_batched_tokens=budget or 16)
        scheduler: Scheduler = ChunkedPrefillScheduler(
            PagedKVCacheManager(num_blocks, size, watermark=0.0), config, log
        )
        observers: list[Any] = [DecodesFirst(config.max_num_batched_tokens)]
    else:
        known, changes = SERVED[name]
        caps = {"max_num_seqs": min(seqs, budget or seqs), "max_num_batched_tokens": budget}
        system: System = system_for(known, deployment_of("opt-13b"), "sharegpt").with_scheduler(**changes, **caps)
        manager = system.manager(num_blocks, size, min(longest, 100), rng.choice((0, num_blocks, 200)))
        scheduler = scheduler_type(manager, system.scheduler, log)
        observers = [LastBlocks()] if manager.grows else []
    requests = list(_requests(rng, longest, scheduler))
    log.clear()
    Engine(scheduler, SimulatedExecutor(A_SECOND, Turnover(0.2)), observers=observers).run(requests)
    if name == CHUNKED:
        return name, {"runs": 1, "decodes_late": not observers[0].holds, "prompts_cut": observers[0].num_cut}
    counts = Replay(requests, scheduler.manager, scheduler.config).run(log)
    return name, {"runs": 1, **counts, "empty_slots_most": observers[0].most if observers else 0}


def _requests(rng: random.Random, longest: int, scheduler: Scheduler) -> Iterator[Request]:
    """Requests that the scheduler takes, often too many for its pool; it is left as it was."""
    ways, arrival = rng.choice((["single"], ["parallel"], ["beam"], list(WAYS))), 0
    for number in range(rng.randint(2, 14)):
        arrival += rng.choice((0, 0, 1, 3))
        n, beams = WAYS[rng.choice(ways)]
        output = rng.randint(1, max(1, min(3 * longest // 4, 60)))
        prompt = rng.randint(1, max(1, min(longest - output, rng.choice((8, 60)))))
        request = Request(number, float(arrival), prompt, output, SamplingParams(n=n, use_beam_search=beams))
        try:
            scheduler.add(request)
        except UserError:
            continue
        scheduler.waiting.clear()
        yield request


def pull(lever: str, value: int, settings: dict[str, int], rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """Preemptions and output tokens/s of chunked prefill with one of its settings changed, while requests arrive."""
    settings = settings if lever == "none" else settings | {lever: value}
    deployment = deployment_of("opt-13b", settings[MEMORY])
    trace, caps = trace_of("sharegpt", rate, duration_s, seed, None), {name: settings[name] for name in (SEQS, BUDGET)}
    manager = PagedKVCacheManager(deployment.num_blocks(16), 16, watermark=0.0)
    scheduler = ChunkedPrefillScheduler(manager, ChunkedPrefillConfig(**caps))
    costs = cost_model("a100-2023", deployment, anchor="opt-13b/sharegpt")
    engine = Engine(scheduler, SimulatedExecutor(costs))
    done = [one for one in engine.run(requests_of(trace, SamplingParams()), duration_s) if one.finish_s == one.finish_s]
    tokens = sum(one.request.output_tokens for one in done) / duration_s
    found = {"preemptions": scheduler.num_preemptions, "tokens_per_s": tokens}
    return {"lever": lever, "value": value, "rate": rate, **about("modelled", costs.name, seed, trace), **found}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    logs, levers = rows["logs"], rows["levers"]
    figure, axes = plotting.panels(["Rules put to the test", "Preemptions, V1"], width=5.4, height=3.2)
    for place, (broken, tested) in enumerate(RULES.values()):
        for shift, (source, group) in zip((-0.2, 0.2), logs.groupby(logs["source"] == "drawn")):
            count, failed = (int(group[name].sum()) for name in (tested, broken))
            axes[0].barh(place + shift, count + 1, 0.36, color=plotting.other(0 if source else 7).color)
            text = f" {count:,}" + (f", broken {failed:,} times" if failed else "")
            axes[0].text(
                count + 1, place + shift, text, va="center", fontsize=7.5, color="#B3261E" if failed else "black"
            )
    axes[0].set_yticks(range(len(RULES)), list(RULES), fontsize=8)
    axes[0].set(xscale="log", xlim=(1, 1e6), xlabel="cases (log): served (pale), drawn at random (dark)")
    axes[0].invert_yaxis()
    _draw_levers(axes[1], levers[levers["rate"] == params.lever_rate])
    plotting.footer(
        figure,
        logs.drop(columns="seed"),
        note=f"{params.runs:,} runs drawn at random; OPT-13B, ShareGPT, {params.rate:g} req/s",
    )
    return {"scheduling_rules": figure}


def _draw_levers(axis: Axes, rows: DataFrame) -> None:
    names = [f"{row.lever} {row.value:,}" if row.value else "as it was" for row in rows.itertuples()]
    axis.barh(range(len(rows)), rows["preemptions"], 0.7, color=plotting.other(5).color)
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    axis.set_xlabel("preemptions")
    axis.invert_yaxis()


def judge(rows: Rows, params: Params) -> list[Judgement]:
    logs, levers = rows["logs"], rows["levers"]
    total = {name: int(logs[name].sum()) for name in (*COUNTS, "runs", "decodes_late", "prompts_cut")}
    static = logs["system"] == "faster-transformer"
    waiting, padding = (
        100 * logs.loc[static, part].sum() / logs.loc[static, whole].sum()
        for part, whole in (("idle", "sequence_iterations"), ("padded", "prompt_slots"))
    )
    others = int(logs.loc[~static, "idle"].abs().sum())
    facts = {"runs": total["runs"], "served": int((logs["source"] != "drawn").sum())}
    said = partial(Judgement, evidence="replayed", facts=facts)
    ahead = {"later ones ahead": total["later_ahead"], "swapped ones ahead of recomputed ones": total["swapped_ahead"]}
    victims = total["other_victims"]
    swaps = {"parts left or lost": total["parts_lost"], "groups of several swapped": total["groups_swapped"]}
    passes = {"not in one pass": total["not_one_pass"], "recomputations": total["recomputations"]}
    served = {"kept waiting": total["kept_waiting"], "served": total["ended_then_started"]}
    cuts = {"runs that break it": total["decodes_late"], "prompts cut": total["prompts_cut"]}
    return [
        said("fcfs-iterations", ahead | {"returned first": total["returned_first"]}),
        said("latest-arrival-preempted", {"other victims": victims, "preemptions": total["preemptions"]}),
        said("all-or-nothing", swaps),
        said("recompute-one-pass", passes),
        said("blocks-serve-next", served),
        said("static-batches", {"waiting": waiting, "padding": padding, "waiting in other systems": others}),
        said("swap-bounded-by-gpu", logs["swapped_percent"].max()),
        said("last-block-bound", int(logs["empty_slots_most"].max())),
        said("v1-decode-first", cuts),
        *_judge_levers(levers, params),
    ]


def _judge_levers(levers: DataFrame, params: Params) -> list[Judgement]:
    here = levers[levers["rate"] == params.lever_rate].set_index(["lever", "value"])["preemptions"]
    pulled = {"more memory": (MEMORY, params.kv_slots[1]), "fewer sequences": (SEQS, params.max_num_seqs[1])}
    pulled |= {"smaller budget": (BUDGET, params.budgets[1])}
    ours = {key: {"before": int(here["none", 0]), "after": int(here[lever])} for key, lever in pulled.items()}
    budgets = ", ".join(f"{count} at {budget}" for budget, count in here[BUDGET].items())
    full = levers[levers["rate"] == params.rate].set_index("value")["tokens_per_s"]
    facts = {"budgets": budgets, "rate": params.lever_rate, "before": params.budgets[0]}
    return [
        Judgement("v1-levers", ours, "modelled", facts=facts),
        Judgement("v1-budget-for-throughput", full.to_dict(), "modelled"),
    ]
