"""Random operations on two memory managers, and random runs of two schedulers: both sides are given the same.

A side is ours or a published one. It answers in plain numbers: requests and their sequences are (request, index), and
what it decides is a `Decision`. Nothing here knows which side is which, so the comparison is tested by giving it a
side of ours twice, once with a fault (tests/test_oracle.py).
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Protocol

from fuzz import Ask, Case, _asks

from published.same import Difference, Ends, Memory, Move, Renaming, equal
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import Request
from repro.errors import UserError


@dataclass
class Decision:
    """What a scheduler wants of one step. Requests by their numbers.

    `prompts` are those whose prompt runs, with its tokens. A scheduler that cuts prompts says instead how many `tokens`
    of each request run; `decodes` are then all that get a token out of it."""

    tokens: dict[int, int] = field(default_factory=dict)
    prompts: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    preempted: list[tuple[int, str]] = field(default_factory=list)  # in order, with "swap" or "recompute"
    dropped: list[int] = field(default_factory=list)
    running: dict[int, list[int]] = field(default_factory=dict)  # with the live sequences of each
    waiting: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    @property
    def does_nothing(self) -> bool:
        return not (self.tokens or self.prompts or self.decodes or self.preempted or self.dropped)


@dataclass
class Outcome:
    """What a step gave a group: the beam that each beam goes on from, and sequences that stopped early."""

    parents: list[int] | None = None
    stopped: list[int] = field(default_factory=list)


class SchedulerSide(Protocol):
    def add(self, request: Request) -> None: ...
    def schedule(self) -> Decision: ...
    def finish(self, outcomes: Mapping[int, Outcome]) -> list[int]: ...
    def memory(self) -> Memory: ...


class ManagerSide(Protocol):
    """Groups by number. `ask` answers what may be done with a group that waits, runs or is swapped out."""

    def new(self, number: int, prompt: int, width: int) -> None: ...
    def ask(self, number: int, tokens: int, state: str) -> dict[str, bool]: ...
    def allocate(self, number: int, tokens: int) -> None: ...
    def append(self, number: int, tokens: int) -> list[Move]: ...
    def fork(self, number: int, parents: list[int], tokens: int) -> None: ...
    def swap_out(self, number: int) -> list[Move]: ...
    def swap_in(self, number: int) -> list[Move]: ...
    def free_sequence(self, number: int, index: int) -> None: ...
    def free(self, number: int) -> None: ...
    def memory(self) -> Memory: ...


class OurManagerSide(ManagerSide, Protocol):
    """`ask_by_rules` answers as 0.1.7 would."""

    def ask_by_rules(self, number: int, tokens: int, state: str) -> dict[str, bool]: ...


# Schedulers


def draw(seed: int) -> Case:
    """The run with this number: little memory, all ways of preempting, samples and beams."""
    rng = random.Random(f"run {seed}")
    block_size = rng.choice((1, 2, 4, 8, 16))
    num_blocks = rng.choice((rng.randint(2, 6), rng.randint(4, 12), rng.randint(12, 60)))
    batched = rng.choice((None, None, rng.randint(8, 60)))
    preemption = rng.choice(("by_group", "by_group", "swap", "recompute"))
    most = rng.choice((256, 256, 4, 6))
    case = Case(
        (Ask(1, 1),),
        block_size=block_size,
        num_blocks=num_blocks,
        cpu_blocks=rng.choice((2, num_blocks, 400, 400)),
        watermark=rng.choice((0.0, 0.0, 0.01, 0.2)),
        preemption=preemption,
        max_num_seqs=most if batched is None else min(most, batched),
        max_num_batched_tokens=batched,
        stop_rate=rng.choice((0.0, 0.0, 0.02, 0.1)),
        seed=seed,
    )
    asks = list(_asks(case, rng))
    if preemption == "recompute":  # 0.1.7 knows it for one sequence only
        asks = [replace(ask, n=1, beam=False) for ask in asks]
    return replace(case, asks=tuple(asks))


def taken(case: Case, scheduler: Scheduler | None = None) -> list[Request]:
    """The run's requests but for those that could never run; vLLM has no such check, and they would block it."""
    scheduler, requests = scheduler or Scheduler(case.manager(), case.config()), []
    for request in case.requests():
        with suppress(UserError):
            scheduler.add(request)
            requests.append(request)
    return requests


def run(case: Case, requests: Sequence[Request], ours: SchedulerSide, theirs: SchedulerSide) -> Counter[str]:
    """One run on both sides to its end, or to where both end; what happened. Difference if they differ."""
    seen: Counter[str] = Counter()
    try:
        _run(case, requests, ours, theirs, seen)
    except Difference as difference:
        raise Difference(f"run {case.seed}, step {seen['steps']}: {difference}") from None
    except Exception as error:  # a side that cannot go on is another than the other
        raise Difference(f"run {case.seed}, step {seen['steps']}: {_raised(error)}") from error
    return seen


def _raised(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(where.filename).name}, line {where.lineno}, raised {type(error).__name__}: {error}"


def _run(
    case: Case, requests: Sequence[Request], ours: SchedulerSide, theirs: SchedulerSide, seen: Counter[str]
) -> None:
    rng = random.Random(case.seed)
    upcoming, unfinished, now = list(requests), set[int](), 0
    beams = {request.request_id for request in requests if request.sampling.use_beam_search}
    several = {request.request_id for request in requests if request.sampling.n > 1}
    renaming = Renaming()
    while unfinished or upcoming:
        if not unfinished:
            now = max(now, int(upcoming[0].arrival_s))
        while upcoming and upcoming[0].arrival_s <= now:
            request = upcoming.pop(0)
            unfinished.add(request.request_id)
            ours.add(request)
            theirs.add(request)
        decision = _decided(ours, theirs, seen)
        if decision is None:
            return
        mine, other = decision
        renaming.check(ours.memory(), theirs.memory(), mine.moves, other.moves)
        unfinished -= set(mine.dropped)
        if mine.does_nothing:
            if not upcoming:
                seen["standstills"] += 1
                return
            now = max(now, int(upcoming[0].arrival_s))
            continue
        ran = [number for number, _ in mine.prompts] + mine.decodes
        outcomes = {number: _outcome(mine.running[number], number in beams, case.stop_rate, rng) for number in ran}
        for number, _ in mine.prompts:
            outcomes[number].parents = None  # all beams come from the prompt
        finished = ours.finish(outcomes)
        equal("finished", finished, theirs.finish(outcomes))
        renaming.check(ours.memory(), theirs.memory(), [], [])
        unfinished -= set(finished)
        now += 1
        seen["steps"] += 1
        seen["finished"] += len(finished)
        seen["beam steps"] += sum(outcome.parents is not None for outcome in outcomes.values())
        seen["prompts of several sequences"] += sum(number in several for number, _ in mine.prompts)
        _note(mine, seen)


def _decided(ours: SchedulerSide, theirs: SchedulerSide, seen: Counter[str]) -> tuple[Decision, Decision] | None:
    """What both decide, or None if both end for the same reason."""
    decisions: list[Decision | str] = []
    for side in (ours, theirs):
        try:
            decisions.append(side.schedule())
        except Ends as reason:
            decisions.append(str(reason))
    mine, other = decisions
    if isinstance(mine, str) or isinstance(other, str):
        reasons = [one if isinstance(one, str) else "goes on" for one in decisions]
        equal("end", *reasons)
        seen[f"ends: {mine}"] += 1
        return None
    for one in fields(Decision):
        if one.name != "moves":
            equal(one.name.replace("_", " "), getattr(mine, one.name), getattr(other, one.name))
    return mine, other


def _outcome(live: list[int], beam: bool, stop_rate: float, rng: random.Random) -> Outcome:
    if beam:
        survivors = rng.sample(live, rng.randint(1, len(live)))
        return Outcome([index if index in survivors else rng.choice(survivors) for index in live])
    return Outcome(None, [index for index in live if rng.random() < stop_rate])


def _note(decision: Decision, seen: Counter[str]) -> None:
    seen["prompts"] += len(decision.prompts)
    seen["parts of prompts"] += len(set(decision.tokens) - set(decision.decodes))
    seen["resumed"] += len(decision.resumed)
    seen["dropped"] += len(decision.dropped)
    for _, way in decision.preempted:
        seen[f"preempted by {way}"] += 1
    for move in decision.moves:
        seen[f"blocks: {move.kind}"] += 1


# Memory managers


@dataclass
class _Group:
    tokens: int
    live: list[int]
    state: str = "waiting"


def operations(case: Case, ours: OurManagerSide, theirs: ManagerSide) -> Counter[str]:
    """200 attempts at random operations on both sides; how often each was done, and what was answered otherwise.

    What is done is what our side has room for."""
    seed, most = case.seed, case.num_blocks * case.block_size
    rng, seen, renaming = random.Random(f"operations {seed}"), Counter[str](), Renaming()
    groups: dict[int, _Group] = {}
    number = 0
    try:
        for number in range(200):
            done = _operation(number, rng, groups, ours, theirs, most, seen)
            if done is not None:
                name, mine, other = done
                seen[name] += 1
                renaming.check(ours.memory(), theirs.memory(), mine, other)
    except Difference as difference:
        raise Difference(f"run {seed}, attempt {number}: {difference}") from None
    except Exception as error:
        raise Difference(f"run {seed}, attempt {number}: {_raised(error)}") from error
    return seen


def _operation(
    number: int,
    rng: random.Random,
    groups: dict[int, _Group],
    ours: OurManagerSide,
    theirs: ManagerSide,
    most: int,
    seen: Counter[str],
) -> tuple[str, list[Move], list[Move]] | None:
    """One operation: its name and what it moved on either side; None if there was no room for it."""
    if not groups or rng.random() < 0.15:
        width = rng.choice((1, 1, 2, 3, 4))
        groups[number] = _Group(rng.randint(1, max(1, most // 3)), list(range(width)))
        for side in (ours, theirs):
            side.new(number, groups[number].tokens, width)
    number = rng.choice(list(groups))
    group = groups[number]
    may = _answers(number, group, ours, theirs, seen)
    both = (ours, theirs)
    if group.state == "waiting" and may["start"]:
        for side in both:
            side.allocate(number, group.tokens)
        group.state = "running"
        return "start", [], []
    if group.state == "swapped" and may["resume"]:
        group.state = "running"
        return "swap in", ours.swap_in(number), theirs.swap_in(number)
    if group.state != "running":
        return None
    chance = rng.random()
    if chance < 0.65 and may["append"]:
        group.tokens += 1
        return "append", ours.append(number, group.tokens), theirs.append(number, group.tokens)
    if chance < 0.75 and len(group.live) > 1:
        survivors = rng.sample(group.live, rng.randint(1, len(group.live)))
        parents = [index if index in survivors else rng.choice(survivors) for index in group.live]
        for side in both:
            side.fork(number, parents, group.tokens)
        return "fork", [], []
    if chance < 0.80 and len(group.live) > 1:
        index = group.live.pop(rng.randrange(len(group.live)))
        for side in both:
            side.free_sequence(number, index)
        return "end of a sequence", [], []
    if chance < 0.90 and may["swap out"]:
        group.state = "swapped"
        return "swap out", ours.swap_out(number), theirs.swap_out(number)
    if chance > 0.96 or not may["append"]:
        for side in both:
            side.free(number)
        if len(group.live) == 1 and rng.random() < 0.5 and group.tokens < most:
            group.state = "waiting"  # it is computed again
            return "recompute", [], []
        del groups[number]
        return "end", [], []
    return None


def _answers(
    number: int, group: _Group, ours: OurManagerSide, theirs: ManagerSide, seen: Counter[str]
) -> dict[str, bool]:
    """What may be done with a group: our answers. With the settings on, they have to be theirs."""
    mine, other = (side.ask(number, group.tokens, group.state) for side in (ours, theirs))
    for question, answer in ours.ask_by_rules(number, group.tokens, group.state).items():
        equal(f"may request {number} {question}, with settings", answer, other[question])
        seen[f"may {question}"] += 1
        seen[f"not {question}"] += mine[question] and not answer  # only they say no
        equal(f"may request {number} {question}, if they say yes", mine[question] or not answer, True)
    return mine
