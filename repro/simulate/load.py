"""One serving run and what is counted in it, the same for the real engine and for its prediction.

A run has a window: what happens before it is warm-up and counts for nothing. In a saturated run all requests are there
at the start and the run ends with the window, so the queue is never empty. In a latency run requests arrive at random
(§6.1) until the window ends, and those that arrived within it are served to their end.

No device is known here; an executor and a clock are handed in."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from repro.checks import lookup
from repro.engine.clock import Clock, VirtualClock
from repro.engine.config import Deployment, check_block_size
from repro.engine.executor import Executor, ParentChoices
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import KVCacheManager
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import System, of_today, system
from repro.errors import UserError
from repro.simulate.beams import KINDS, recording
from repro.simulate.clock import QueuedClock
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import PIECES, BatchAverage, TokenGaps, UsageSamples, normalized_latency_s
from repro.simulate.panels import system_for
from repro.simulate.prompts import PREFIX, hashes_of, requests_of
from repro.simulate.step_times import StepTimes
from repro.workloads import Trace, make_trace
from repro.workloads.translation import translation_trace

BLOCK_SIZE = 16
TRANSLATION = "translation"
PREEMPTIONS = ("recompute", "swap")
#: CPU blocks for a pool's blocks; a saturated pool of the paper's has at most 0.53 of itself swapped out (blocks of
#: 256, six samples)
SWAP_SHARE = 0.6
#: requests per second of window that no system here can keep up with, so that a saturated queue never empties
FLOOD = {"sharegpt": 60.0, "alpaca": 400.0, TRANSLATION: 800.0}
#: equal parts of the window, whose spread gives the interval of its throughput
NUM_PARTS = 5
_T_95 = 2.776  # Student's t for NUM_PARTS means
#: a latency run ends at this multiple of its window's end: beyond saturation it would take as long as its backlog
END = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Load:
    """`rate` in req/s, None for a saturated run; the window lies from `warm_s` to `stop_s` (s); `n` sequences a
    request, samples or, with `beams`, a beam search; no request is longer than `max_model_len` tokens.

    `prefix_tokens`: translation's prompts all begin with as many (§6.4). `block_size` in tokens. `preemption`: always
    by this way (§4.5), None for the system's own rule. `budget`: tokens of an iteration at most, and so sequences, None
    for the system's own. `prefix_cache`: paged memory finds prefixes by their hash, whatever the system's scheduler."""

    system: str
    workload: str
    rate: float | None
    warm_s: float
    stop_s: float
    seed: int = 0
    n: int = 1
    max_model_len: int = 2048
    beams: bool = False
    prefix_tokens: int = 0
    block_size: int = BLOCK_SIZE
    preemption: str | None = None
    budget: int | None = None
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        lookup("workload", FLOOD, self.workload)
        if not 0 <= self.warm_s < self.stop_s < math.inf:
            raise UserError(f"a window from {self.warm_s} to {self.stop_s} s is none; need 0 <= warm_s < stop_s")
        if self.prefix_tokens and self.workload != TRANSLATION:
            raise UserError(
                f"prefix_tokens = {self.prefix_tokens}: prompts of {self.workload} share none; only those of "
                f"{TRANSLATION} do"
            )
        if self.preemption not in (None, *PREEMPTIONS):
            raise UserError(f"unknown preemption {self.preemption!r}; known: {', '.join(PREEMPTIONS)}")
        check_block_size(self.block_size)
        if self.beams:
            lookup("workload of recorded beams", KINDS, self.workload)
            self.parents.parents(0, self.n, 0)

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Load":
        """The run that a row was measured in, as repro.bench.kept reads it."""
        stated = {name: row[name] for name in ("system", "workload", "rate", "warm_s", "stop_s", "seed")}
        # Those that are not there are as by default.
        others = ("n", "max_model_len", "prefix_tokens", "block_size", "preemption", "budget")
        flags = {name: bool(row.get(name)) for name in ("beams", "prefix_cache")}
        return cls(**stated, **{name: row[name] for name in others if row.get(name)}, **flags)

    @property
    def kind(self) -> str:
        return "saturated" if self.rate is None else "latency"

    @cached_property
    def trace(self) -> Trace:
        """The requests. A saturated run's are all there at the start."""
        rate = FLOOD[self.workload] if self.rate is None else self.rate
        translates = self.workload == TRANSLATION
        make = partial(translation_trace, self.prefix_tokens) if translates else partial(make_trace, self.workload)
        trace = make(rate, self.stop_s, self.seed, max_model_len=self.max_model_len)
        return trace if self.rate is not None else replace(trace, arrival_s=np.zeros(len(trace)))

    @property
    def end_s(self) -> float:
        """When the run is ended, whatever has not finished."""
        return self.stop_s if self.rate is None else END * self.stop_s

    @property
    def requests(self) -> list[Request]:
        """Greedy, or random samples or beams if there are several; each exactly as long as the trace says."""
        sampling = replace(GREEDY, n=self.n)
        if self.n > 1:
            sampling = replace(sampling, use_beam_search=self.beams, temperature=float(not self.beams))
        prefix = PREFIX if self.prefix_tokens else None
        return list(requests_of(self.trace, sampling, prefix, system(self.system).splits_samples))

    @property
    def requests_a_prompt(self) -> int:
        """As many as the samples of a prompt, where each is a request of its own; their numbers follow one another."""
        return self.n if system(self.system).splits_samples else 1

    @property
    def parents(self) -> ParentChoices | None:
        """Where beams continue: replayed from a real model, as lengths are (see `beams`); None without beams."""
        return recording(KINDS[self.workload]) if self.beams else None

    def system_on(self, deployment: Deployment) -> System:
        chosen = of_today(system_for(self.system, deployment, self.workload)).for_length(self.max_model_len)
        if self.budget is not None:
            most = min(self.budget, chosen.scheduler.max_num_seqs)
            chosen = chosen.with_scheduler(max_num_batched_tokens=self.budget, max_num_seqs=most)
        if self.prefix_cache:
            chosen = replace(chosen, prefix_caching=True)
        return chosen if self.preemption is None else chosen.with_scheduler(preemption=PreemptionMode(self.preemption))

    @property
    def stored_prefix_tokens(self) -> int:
        """Tokens that are stored once for all requests before the first one; the Orcas can share nothing, and a prefix
        cache finds them by itself."""
        chosen = system(self.system)
        finds = self.prefix_cache or chosen.prefix_caching
        return self.prefix_tokens if chosen.reservation is None and not finds else 0

    def manager_on(self, deployment: Deployment, hashes: Hashes | None = None) -> KVCacheManager:
        """The memory of the run; `hashes` say what real prompts hold, where prefixes are found by that."""
        blocks, size = deployment.num_blocks(self.block_size), self.block_size
        hashes = hashes or hashes_of(self.prefix_tokens, size, self.requests_a_prompt)
        return self.system_on(deployment).manager(blocks, size, self.max_model_len, int(SWAP_SHARE * blocks), hashes)


class Window(Observer):
    """Useful tokens in equal parts of the window, iterations, and preemptions (§6.1: tokens of finished members that a
    static batch computes along are not useful). An iteration over an edge counts by the share of its time; in virtual
    time none beyond it are advanced together with those before."""

    def __init__(self, start_s: float, stop_s: float) -> None:
        self.edges = np.linspace(start_s, stop_s, NUM_PARTS + 1)
        self.next_s = start_s
        self.tokens = np.zeros(NUM_PARTS)
        self.prompt_tokens = self.iterations = 0.0
        self.waiting_at_start = self.waiting = 0
        self._before: int | None = None
        self.preemptions = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now, scheduler = engine.clock.now, engine.scheduler
        self.next_s = next((edge for edge in self.edges if edge > now), math.inf)
        if now <= self.edges[0] or start_s >= self.edges[-1]:
            return
        waiting = len(scheduler.waiting) + len(scheduler.swapped)
        if self._before is None:
            self._before, self.waiting_at_start = scheduler.num_preemptions, waiting
        useful = output.num_decode_seqs
        if scheduler.config.batching is Batching.REQUEST:
            useful = sum(
                len(group.seqs)
                for group in output.decodes
                if group.num_generated(output.iteration) < group.request.output_tokens
            )
        useful += sum(len(prefill.group.seqs) for prefill in output.prefills)
        within = np.clip(np.minimum(now, self.edges[1:]) - np.maximum(start_s, self.edges[:-1]), 0, None)
        share = within / (now - start_s)
        self.tokens += useful * output.num_iterations * share
        self.iterations += output.num_iterations * share.sum()
        self.prompt_tokens += output.num_prefill_tokens * share.sum()
        self.preemptions, self.waiting = scheduler.num_preemptions - self._before, waiting

    @property
    def rates(self) -> np.ndarray:
        """Useful tokens/s in each part."""
        return self.tokens / np.diff(self.edges)


class FirstTokens(Observer):
    """When requests that arrive from `start_s` on have their first token (s)."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.times: dict[Request, float] = {}

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = getattr(engine.clock, "known_s", engine.clock.now)
        for prefill in output.prefills:
            request = prefill.group.request
            if request.arrival_s >= self.start_s:
                self.times.setdefault(request, now)


def run(
    load: Load,
    deployment: Deployment,
    executor: Executor,
    clock: Clock,
    manager: KVCacheManager,
    requests: list[Request],
) -> dict[str, Any]:
    """Serve the load; what the window saw, as one flat row (units in the names; pool pieces are shares of the pool)."""
    scheduler = load.system_on(deployment).decide(manager)
    window, batch = Window(load.warm_s, load.stop_s), BatchAverage(load.warm_s, load.stop_s)
    usage = UsageSamples(load.warm_s, load.stop_s, interval_s=0.1)
    gaps, firsts = TokenGaps(load.warm_s, load.stop_s), FirstTokens(load.warm_s)
    engine = Engine(scheduler, executor, clock, [window, batch, usage, gaps, firsts])
    outcomes = engine.run(requests, load.end_s)
    mean, half = window.rates.mean(), _T_95 * window.rates.std(ddof=1) / math.sqrt(NUM_PARTS)
    finished = [outcome for outcome in outcomes if load.warm_s <= outcome.finish_s < load.stop_s]
    asked = asdict(load) | {"beams": int(load.beams), "prefix_cache": int(load.prefix_cache)}
    later = ("beams", "prefix_tokens", "block_size", "preemption", "budget", "prefix_cache")
    more = {name: asked.pop(name) for name in later}
    first = [seconds - request.arrival_s for request, seconds in firsts.times.items()]
    return {
        "kind": load.kind,
        **asked,
        "trace_hash": load.trace.hash,
        "tokens_per_s": mean,
        "tokens_per_s_low": mean - half,
        "tokens_per_s_high": mean + half,
        **more,
        "finished_rate": mean / (load.n * load.trace.output_tokens.mean()),
        "num_finished": len(finished),
        "mean_batch": None if math.isnan(batch.mean) else batch.mean,
        "iterations": window.iterations,
        "prompt_tokens_per_s": window.prompt_tokens / (load.stop_s - load.warm_s),
        "preemptions": window.preemptions,
        "gap_median_s": gaps.quantile(0.5) if sum(gaps.counts) else None,
        "gap_99_s": gaps.quantile(0.99) if sum(gaps.counts) else None,
        "first_token_median_s": float(np.median(first)) if first and load.rate is not None else None,
        "found_percent": 100 * manager.num_hit / manager.num_asked if manager.num_asked else None,
        "saving": usage.saving if usage.samples else None,
        **{piece: usage.mean(piece) if usage.samples else None for piece in PIECES},
        **_latency(load, outcomes),
        "mark": _mark(load, window, outcomes),
    }


def _latency(load: Load, outcomes: list[Outcome]) -> dict[str, Any]:
    """Mean normalized latency (s/token) of the requests that arrived in the window; a lower bound if some had not
    finished by the run's end (in virtual time the last iterations may lead beyond it)."""
    if load.rate is None:
        return {"latency_s_per_token": None, "num_unfinished": 0}
    asked = [outcome for outcome in outcomes if outcome.request.arrival_s >= load.warm_s]
    unfinished = [outcome for outcome in asked if not outcome.finish_s <= load.end_s]
    for outcome in unfinished:
        outcome.finish_s = load.end_s
    return {"latency_s_per_token": normalized_latency_s(asked) if asked else None, "num_unfinished": len(unfinished)}


def _mark(load: Load, window: Window, outcomes: list[Outcome]) -> str:
    """steady; queue ran empty (saturated runs); overloaded (the queue grew by a tenth of what arrived: what latency
    there is would be higher in a longer run); or too short (fewer than 40 requests arrived in the window)."""
    arrived = sum(load.warm_s <= outcome.request.arrival_s < load.stop_s for outcome in outcomes)
    if load.rate is None:
        return "steady" if window.waiting else "queue ran empty"
    if window.waiting - window.waiting_at_start > 0.1 * arrived:
        return "overloaded"
    return "steady" if arrived >= 40 else "too short"


def predict(load: Load, deployment: Deployment, steps: StepTimes) -> dict[str, Any]:
    """The same run in virtual time: scheduler and memory decide as always, `steps` says how long they take.

    On a GPU (`steps.padded`) an iteration is decided while the one before it runs, but for beams, whose next step
    depends on their tokens."""
    manager = load.manager_on(deployment)
    if load.stored_prefix_tokens:
        manager.store_prefix(PREFIX, load.stored_prefix_tokens)
    clock = QueuedClock() if steps.padded and not load.beams else VirtualClock()
    row = run(load, deployment, SimulatedExecutor(steps, load.parents), clock, manager, load.requests)
    return row | {"evidence": "modelled", "device": steps.name}
