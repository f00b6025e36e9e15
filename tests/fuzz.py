"""Random runs of the whole engine, as many as are asked for; `make fuzz` is 20,000.

    python tests/fuzz.py --runs 20000 --seed 0

A run's number is its seed: it decides the system, the pool (from one block up), the block size, the caps, the swap
space, the way of decoding, preempting and batching, and the requests, some of which can never fit. The shadow store
(shadow.py) and the replay of the event log (event_log.py) check it after every step. A run that fails is made as small
as it can be and printed as a `Case` that a regression test can hold.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from event_log import check_log
from shadow import CachingShadow, Shadow, arrival

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.events import Event
from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine, Outcome
from repro.engine.memory import (
    ContiguousKVCacheManager,
    KVCacheManager,
    PagedKVCacheManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager
from repro.engine.policies import last_in_order
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.harness.progress import Progress

RESERVATIONS = {"max": reserve_max, "pow2": reserve_pow2, "oracle": reserve_oracle}
VICTIMS = {
    "last": last_in_order,
    "first": lambda groups: groups[0],
    "most_generated": lambda groups: max(groups, key=lambda group: group.num_generated),
}
#: a run has so few tokens that it takes milliseconds; one that takes this long does not end
PATIENCE_S = 30


@dataclass(frozen=True)
class Ask:
    """One request: tokens, sequences, and when it comes (in iterations)."""

    prompt: int
    output: int
    n: int = 1
    beam: bool = False
    prefix: str | None = None
    arrival: int = 0
    priority: int = 0


@dataclass(frozen=True)
class Case:
    """A run, completely. `system` is "paged" or one of RESERVATIONS; the caps None are none. `chunked`: by the
    scheduler of V1, whose prompts are cut at `threshold`; `caching`: with a prefix cache; `order` and `victim`: by
    these policies; `abort_rate`: how often a request is taken back before a step."""

    asks: tuple[Ask, ...]
    system: str = "paged"
    block_size: int = 1
    num_blocks: int = 1
    max_model_len: int = 100
    cpu_blocks: int = 0
    watermark: float = 0.0
    preemption: str = "by_group"
    batching: str = "iteration"
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    prefixes: tuple[tuple[str, int], ...] = ()
    stop_rate: float = 0.0
    lookahead: int = 1
    seed: int = 0
    chunked: bool = False
    threshold: int = 0
    caching: bool = False
    order: str = "fcfs"
    victim: str = "last"
    abort_rate: float = 0.0

    def manager(self) -> KVCacheManager:
        if self.system == "paged":
            sizes = self.num_blocks, self.block_size, self.watermark, self.cpu_blocks
            return (
                PrefixCachingKVCacheManager(*sizes, hashes=lambda _: ())
                if self.caching
                else PagedKVCacheManager(*sizes)
            )
        return ContiguousKVCacheManager(
            self.num_blocks, self.block_size, reservation=RESERVATIONS[self.system], max_model_len=self.max_model_len
        )

    def config(self) -> SchedulerConfig:
        policies = {"order": self.order, "victim": VICTIMS[self.victim], "oracle": self.order == "shortest_output"}
        caps = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        if self.chunked:
            cuts = {"max_model_len": self.max_model_len, "long_prefill_token_threshold": self.threshold}
            return ChunkedPrefillConfig(**caps, **policies, **cuts)
        return SchedulerConfig(Batching(self.batching), PreemptionMode(self.preemption), **caps, **policies)

    def scheduler(self, log: list[Event] | None = None) -> Scheduler:
        return (ChunkedPrefillScheduler if self.chunked else Scheduler)(self.manager(), self.config(), log)

    def rank(self, request: Request) -> tuple[float, ...]:
        """Its place in the queue, as the order's name says."""
        names = {"priority": "priority", "shortest_prompt": "prompt_tokens", "shortest_output": "output_tokens"}
        first = (getattr(request, names[self.order]),) if self.order in names else ()
        return (*first, *arrival(request))

    def requests(self) -> list[Request]:
        asks = sorted(self.asks, key=lambda ask: ask.arrival)
        return [
            Request(
                number,
                float(ask.arrival),
                ask.prompt,
                ask.output,
                SamplingParams(n=ask.n, use_beam_search=ask.beam),
                ask.prefix,
                ask.priority,
            )
            for number, ask in enumerate(asks)
        ]


def draw(seed: int) -> Case:
    """The run with this number."""
    rng = random.Random(seed)
    system = rng.choice(("paged", "paged", "paged", *RESERVATIONS))
    paged = system == "paged"
    num_blocks = rng.choice((1, 2, 3, rng.randint(4, 12), rng.randint(4, 12), rng.randint(12, 60)))
    batched = rng.choice((None, None, rng.randint(8, 60)))
    seqs = rng.choice((256, 256, 4, 6))
    block_size = rng.choice((1, 2, 4, 8, 16))
    case = Case(
        (Ask(1, 1),),
        system,
        block_size,
        num_blocks,
        100 if paged else rng.randint(2, max(2, min(block_size * num_blocks, 100))),
        rng.choice((0, 2, num_blocks, 200)) if paged else 0,
        rng.choice((0.0, 0.0, 0.01, 0.2)) if paged else 0.0,
        rng.choice([mode.value for mode in PreemptionMode]),
        "iteration" if paged else rng.choice([way.value for way in Batching]),
        seqs if batched is None else min(seqs, batched),
        batched,
        (("short", rng.randint(0, 6)), ("long", rng.randint(7, 20))) if paged and rng.random() < 0.3 else (),
        rng.choice((0.0, 0.0, 0.02)),
        rng.choice((1, 4, 1000)),
        seed,
    )
    case = replace(case, asks=tuple(_asks(case, rng)))
    return _varied(case, random.Random(f"more {seed}"))


def _varied(case: Case, rng: random.Random) -> Case:
    """Half of the runs as they are; the others with what came after the paper."""
    if rng.random() < 0.5:
        return case
    case = replace(
        case,
        order=rng.choice(("fcfs", "fcfs", "priority", "shortest_prompt", "shortest_output")),
        victim=rng.choice(("last", "last", *VICTIMS)),
        abort_rate=rng.choice((0.0, 0.0, 0.03, 0.2)),
        asks=tuple(replace(ask, priority=rng.randint(-2, 2)) for ask in case.asks),
    )
    if (
        case.system == "paged" and case.victim != "last" and rng.random() < 0.5
    ):  # one that runs is swapped, not the last
        case = replace(case, preemption="swap", cpu_blocks=max(case.cpu_blocks, case.num_blocks))
    if case.system == "paged" and rng.random() < 0.6:
        single = tuple(replace(ask, n=1, beam=False, prefix=None) for ask in case.asks)
        case = replace(case, caching=True, prefixes=(), block_size=min(case.block_size, 4))
        case = replace(case, asks=tuple(replace(ask, prefix=None) for ask in case.asks))
        if rng.random() < 0.7:
            budget = rng.choice((rng.randint(1, 8), rng.randint(8, 40), 150))
            case = replace(case, chunked=True, max_num_batched_tokens=budget, asks=single, preemption="recompute")
            case = replace(case, threshold=rng.choice((0, rng.randint(1, 6))), caching=rng.random() < 0.7)
            case = replace(case, max_num_seqs=min(case.max_num_seqs, budget), cpu_blocks=0)
    return case


def _asks(case: Case, rng: random.Random) -> Iterator[Ask]:
    """Requests that mostly fit into the empty pool, and not beside others; some never do."""
    decoding = rng.choice(("single", "parallel", "beam", "mixed"))
    longest = max(2, min(case.block_size * case.num_blocks, case.max_model_len, rng.choice((20, 60))))
    arrival = 0
    for _ in range(rng.randint(1, 16)):
        arrival += rng.choice((0, 0, 0, 1, 2, 5))
        kind = rng.choice(("single", "parallel", "beam")) if decoding == "mixed" else decoding
        width = 1 if kind == "single" else rng.randint(2, 4)
        output = rng.choice((1, 2, rng.randint(1, longest), longest * 3 // 4, longest - 1))
        prompt = rng.randint(1, max(1, rng.choice((longest - output, longest // 4))))
        ask = Ask(prompt, output, width, kind == "beam", rng.choice((None, *dict(case.prefixes))), arrival)
        while rng.random() < 0.95 and ask != (least := replace(ask, prompt=1, output=1, n=1, beam=False)):
            if not _refused(replace(case, asks=(ask,))):
                break
            shorter = replace(ask, prompt=-(-ask.prompt // 2), output=-(-ask.output // 2))
            ask = shorter if shorter != ask else least
        yield ask


def _refused(case: Case) -> bool:
    scheduler = case.scheduler()
    for prefix_id, num_tokens in case.prefixes:
        with suppress(UserError):
            scheduler.manager.store_prefix(prefix_id, num_tokens)
    try:
        scheduler.add(case.requests()[0])
    except UserError:
        return True
    return False


class ShadowExecutor(Executor):
    """Runs an engine's outputs on the shadow store; every iteration takes one second."""

    def __init__(self, shadow: Shadow) -> None:
        self.shadow = shadow

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return max(1, int(min(self.shadow.random.randint(1, self.shadow.lookahead), until_s - now_s)))

    def execute(self, output: SchedulerOutput) -> StepResult:
        return StepResult([1.0] * output.num_iterations, *self.shadow.execute(output))


class CheckedEngine(Engine):
    """Looks at the shadow store again after every step, and counts the steps."""

    def __init__(self, shadow: Shadow) -> None:
        super().__init__(shadow.scheduler, ShadowExecutor(shadow))
        self.shadow = shadow
        self.most_iterations = 0
        self.abort_rate, self.aborted = 0.0, set[int]()
        execute, update = self.executor.execute, self.scheduler.update

        def executed(output: SchedulerOutput) -> StepResult:
            self._output = output
            return execute(output)

        def updated(*arguments: object) -> list:
            self._ended = update(*arguments)
            return self._ended

        self.executor.execute, self.scheduler.update = executed, updated

    def add(self, request: Request) -> Outcome:
        outcome = super().add(request)
        self.shadow.register(next(reversed(self._unfinished)))
        return outcome

    def step(self, next_arrival_s: float) -> None:
        if self.abort_rate and self.shadow.random.random() < self.abort_rate and self._unfinished:
            rare = self.scheduler.swapped or list(getattr(self.scheduler, "prefilling", ()))  # states seldom met
            group = self.shadow.random.choice(rare or list(self._unfinished))
            self.shadow.abort(group, lambda: self.abort(group.request.request_id))
            self.aborted.add(group.request.request_id)
        if not self.scheduler.has_work:
            return
        super().step(next_arrival_s)
        self.shadow.account(self._output, self._ended)
        # Every iteration gives some request a token, and no token is generated twice; or it computes some of a prompt.
        assert self.scheduler.iteration <= self.most_iterations, "livelock"


def run(case: Case) -> Counter[str]:
    """One run, checked at every step; what happened in it. AssertionError, or what else a fault raises, if it fails."""
    log: list[Event] = []
    kind = CachingShadow if case.caching else Shadow
    shadow = kind(case.scheduler(log), case.seed, case.stop_rate, case.lookahead)
    shadow.rank = case.rank
    for prefix_id, num_tokens in case.prefixes:
        try:
            shadow.store_prefix(prefix_id, num_tokens)
        except UserError:  # no room for it
            shadow.seen["no prefix"] += 1
    requests = [request for request in case.requests() if _is_taken(shadow.scheduler, request)]
    shadow.seen["refused"] = len(case.asks) - len(requests)
    engine = CheckedEngine(shadow)
    engine.most_iterations = sum(request.output_tokens for request in requests)
    if case.chunked:
        prompts = sum(request.prompt_tokens + request.output_tokens + 2 for request in requests)
        engine.most_iterations += (1 + len(requests)) * prompts
    engine.abort_rate = case.abort_rate
    outcomes = engine.run(requests)
    shadow._check_everything_is_returned()
    if not case.chunked:  # whose decisions the shadow store checks alone
        last = case.victim == "last"
        check_log(
            log, requests, case.config(), not case.stop_rate, {r.request_id: case.rank(r) for r in requests}, last
        )
    _check_outcomes(outcomes, requests, log, engine.aborted)
    shadow.seen["swapped above the pool"] += shadow.max_swapped_blocks > case.num_blocks
    shadow.seen["one block"] += case.num_blocks == 1 and bool(requests)
    return shadow.seen


def _is_taken(scheduler: Scheduler, request: Request) -> bool:
    """Whether the request is taken; if it is not, nothing of it is left. The scheduler is as before in either case."""
    length = len(scheduler._log)
    try:
        scheduler.add(request)
    except UserError:
        assert not scheduler.has_work and len(scheduler._log) == length
        return False
    scheduler.waiting.clear()
    del scheduler._log[length:]
    return True


def _check_outcomes(outcomes: list[Outcome], requests: list[Request], log: list[Event], aborted: set[int]) -> None:
    preemptions = Counter(event.request_id for event in log if event.kind == "preempt")
    assert [outcome.request for outcome in outcomes] == requests
    for outcome in outcomes:
        if outcome.request.request_id in aborted:
            assert math.isnan(outcome.finish_s)
        else:
            assert outcome.request.arrival_s + 1 <= outcome.first_token_s <= outcome.finish_s
        assert outcome.num_preemptions == preemptions[outcome.request.request_id]


def fault(case: Case) -> BaseException | None:
    """What a run fails with, if it does."""
    try:
        run(case)
    except Exception as error:  # noqa: BLE001 - whatever a fault raises
        return error
    return None


def first_failure(seeds: Sequence[int], show: Callable[[Counter[str]], None] = lambda seen: None) -> Case | None:
    """The first of these runs that fails; `show` is told what happened in each that does not."""
    for seed in seeds:
        case = draw(seed)
        try:
            show(run(case))
        except Exception:  # noqa: BLE001
            return case
    return None


def smallest(case: Case, fails: Callable[[Case], bool] = lambda case: fault(case) is not None) -> Case:
    """A case that still fails and of which no part can be left out or made smaller."""
    while True:
        smaller = next((candidate for candidate in _simpler(case) if _is_sound(candidate) and fails(candidate)), None)
        if smaller is None:
            return case
        case = smaller


def _is_sound(case: Case) -> bool:
    try:
        case.manager()
        case.config()
        case.requests()
    except UserError:
        return False
    return True


def _simpler(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the largest steps first."""
    asks = case.asks
    if len(asks) > 1:
        yield from (replace(case, asks=asks[:index] + asks[index + 1 :]) for index in range(len(asks)))
    for index, ask in enumerate(asks):
        for name, least in (("n", 1), ("prompt", 1), ("output", 1), ("arrival", 0), ("priority", 0)):
            for value in _lower(getattr(ask, name), least):
                changed = replace(ask, **{name: value}, **({"beam": False} if (name, value) == ("n", 1) else {}))
                yield replace(case, asks=(*asks[:index], changed, *asks[index + 1 :]))
        for changes in ({"beam": False}, {"prefix": None}):
            if getattr(ask, next(iter(changes))):
                yield replace(case, asks=(*asks[:index], replace(ask, **changes), *asks[index + 1 :]))
        for output in _lower(ask.output, 1):  # and those that come later come so much earlier
            sooner = ask.output - output
            later = [replace(other, arrival=max(0, other.arrival - sooner)) for other in asks]
            later[index] = replace(ask, output=output)
            yield replace(case, asks=tuple(later))
    for index in range(len(case.prefixes)):
        yield replace(case, prefixes=case.prefixes[:index] + case.prefixes[index + 1 :])
    usual = Case(asks)
    names = ("stop_rate", "watermark", "max_num_batched_tokens", "max_num_seqs", "preemption", "batching")
    for name in (*names, "abort_rate", "order", "victim", "threshold", "caching", "chunked"):
        if getattr(case, name) != getattr(usual, name):
            yield replace(case, **{name: getattr(usual, name)})
    for name, least in (
        ("lookahead", 1),
        ("block_size", 1),
        ("num_blocks", 1),
        ("max_model_len", 2),
        ("cpu_blocks", 0),
        ("seed", 0),
    ):
        for value in _lower(getattr(case, name), least):
            yield replace(case, **{name: value})


def _lower(value: int, least: int) -> list[int]:
    return sorted({number for number in (least, value // 2, value - 1) if least <= number < value})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20_000, help="how many (default 20,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first run's number")
    options = parser.parse_args(arguments)
    progress = Progress("fuzz", [("run", 1.0)] * options.runs)
    progress.start("run", "run", 1.0)
    seen: Counter[str] = Counter()

    def give_up(*_: object) -> None:
        raise AssertionError(f"a run does not end within {PATIENCE_S} s")

    def show(happened: Counter[str]) -> None:
        seen.update(happened)
        progress.finish("run")
        progress.start("run", "run", 1.0)
        progress.show()
        signal.alarm(PATIENCE_S)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    found = first_failure(range(options.seed, options.seed + options.runs), show)
    signal.alarm(0)
    progress.close()
    print("what happened: " + ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items())))
    if found is None:
        return 0
    least = smallest(found)
    print(
        f"run {found.seed} fails; again: python tests/fuzz.py --runs 1 --seed {found.seed}\n"
        f"as small as it gets:\n{least}"
    )
    traceback.print_exception(fault(least))
    return 1


if __name__ == "__main__":
    sys.exit(main())
