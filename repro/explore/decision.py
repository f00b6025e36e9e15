"""One decision of one iteration, taken otherwise: by policies that intervene once, and else do as they did."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

from repro.checks import member, whole
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.policies import Seen
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.scheduler_config import PreemptionMode
from repro.engine.sequence import SequenceGroup
from repro.errors import UserError
from repro.history.recipe import Setup
from repro.words import count


@dataclass(frozen=True)
class Decision:
    """In iteration `at` exactly one of these: the first one driven out is `victim` (a request's number); the first one
    driven out is preempted by `preemption`; the request `hold`, which would start, does not."""

    at: int
    victim: int | None = None
    preemption: PreemptionMode | None = None
    hold: int | None = None

    @classmethod
    def of(cls, at: object, given: dict[str, Any]) -> Decision:
        """UserError for what is no such decision."""
        known = "victim, preemption, hold"
        if len(given) != 1 or next(iter(given)) not in known.split(", "):
            said = ", ".join(given) or "nothing"
            raise UserError(f"at = {at!r} changes one decision of this iteration: give one of {known}, not {said}")
        name, value = next(iter(given.items()))
        if name == "preemption":
            value = member(name, value, PreemptionMode)
            if value is PreemptionMode.BY_GROUP:
                raise UserError("preemption = 'by_group' is a rule, not a decision; with at give 'swap' or 'recompute'")
        else:
            value = whole(f"{name} (a request's number)", value)
        return cls(whole("at", at), **{name: value})

    def __str__(self) -> str:
        if self.victim is not None:
            return f"in iteration {self.at:,} request {self.victim:,} is driven out first"
        if self.preemption is not None:
            return f"in iteration {self.at:,} the first one driven out is preempted by {self.preemption.value}"
        return f"in iteration {self.at:,} request {self.hold:,} does not start"

    def check(self, log: Iterable[Event], candidates: Items[int]) -> None:
        """UserError unless this decision was there to be taken. `candidates` could be driven out first."""
        log = list(log)
        last = max((event.iteration for event in log), default=0) - 1
        if self.at > last:
            raise UserError(f"at = {self.at} is beyond the end: the run's iterations are 0 to {last:,}")
        kind = "preempt" if self.hold is None else "admit"
        there = [event for event in log if event.kind == kind and self.hold in (None, event.request_id)]
        here = [event for event in there if event.iteration == self.at]
        nearest = sorted({event.iteration for event in there}, key=lambda iteration: abs(iteration - self.at))[:3]
        others = f"; iterations that do: {', '.join(map(str, sorted(nearest)))}" if nearest else "; no iteration does"
        if not here and self.hold is None:
            raise UserError(f"at = {self.at}: this iteration drives nobody out{others}")
        if not here:
            raise UserError(f"hold = {self.hold}: iteration {self.at} does not start this request{others}")
        if self.victim is not None and self.victim not in candidates:
            said = ", ".join(map(str, candidates[:12])) + (" ..." if len(candidates) > 12 else "")
            raise UserError(f"victim = {self.victim} cannot be driven out in iteration {self.at}; choose from {said}")
        if self.hold is not None and not _others_run(log, self.at):
            raise UserError(f"hold = {self.hold}: nothing else runs in iteration {self.at}, so it would stand still")

    def check_setup(self, setup: Setup) -> None:
        """UserError if this scheduler never does so."""
        if self.preemption is not None:
            setup.system.with_scheduler(preemption=self.preemption)


def _others_run(log: Iterable[Event], at: int) -> bool:
    """Whether a request that ran before iteration `at` runs in it."""
    running: set[int] = set()
    for event in log:
        if event.iteration > at or (event.iteration == at and event.kind in ("admit", "resume")):
            break
        if event.kind in ("admit", "resume"):
            running.add(event.request_id)
        elif event.kind in ("finish", "abort", "preempt"):
            running.discard(event.request_id)
    return bool(running)


@dataclass
class Deciding(Observer):
    """Makes the scheduler of a setup that takes one decision otherwise; without `decision`, that notes who could be
    driven out first in iteration `at`. Up to there it is to be an observer of the run: each iteration is decided by
    itself."""

    at: int
    decision: Decision | None = None
    candidates: list[int] = field(default_factory=list)
    next_s: float = 0.0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        if output.iteration >= self.at:
            self.next_s = float("inf")

    def scheduler(self, setup: Setup, log: list[Event]) -> Scheduler:
        config = setup.system.scheduler
        changed: dict[str, Any] = {"victim": self._victim(config.victim)}
        if self.decision is not None and self.decision.preemption is not None:
            changed["preemption"] = self._swaps(config.preemption, self.decision.preemption)
        system = setup.system.with_scheduler(**changed)
        self._scheduler = scheduler = replace(setup, system=system).scheduler(log)
        self._is_due = True
        if self.decision is not None and self.decision.hold is not None:
            scheduler.may_start = self._may_start(scheduler.may_start, self.decision.hold)
        return scheduler

    def _victim(self, policy: Callable[[Items[Seen]], Seen]) -> Callable[[Items[Seen]], Seen]:
        @functools.wraps(policy)
        def chosen(groups: Items[Seen]) -> Seen:
            if self._scheduler.iteration == self.at and not self.candidates:
                self.candidates = [group.request_id for group in groups]
                if self.decision is not None and self.decision.victim is not None:
                    return next(group for group in groups if group.request_id == self.decision.victim)
            return policy(groups)

        return chosen

    def _swaps(self, mode: object, once: PreemptionMode) -> Callable[[Seen], bool]:
        def chosen(group: Seen) -> bool:
            if self._scheduler.iteration == self.at and self._is_due:
                self._is_due = False
                return once is PreemptionMode.SWAP
            if callable(mode):
                return mode(group)
            return mode is PreemptionMode.SWAP or (mode is PreemptionMode.BY_GROUP and group.num_seqs > 1)

        return functools.wraps(mode)(chosen) if callable(mode) else chosen

    def _may_start(self, usual: Callable[[SequenceGroup], bool], hold: int) -> Callable[[SequenceGroup], bool]:
        def may_start(group: SequenceGroup) -> bool:
            is_held = self._scheduler.iteration == self.at and group.request.request_id == hold
            return not is_held and usual(group)

        return may_start


def told(event: Event) -> str:
    """An event as a part of a sentence."""
    who, said = f"request {event.request_id:,}", event.detail
    if event.kind == "admit":
        return f"{who} starts, with {count(said['tokens'], 'token')} to compute"
    if event.kind == "append":
        return f"{who} gets {count(said['blocks'], 'block')}"
    if event.kind == "copy":
        return f"{who} has {count(said['blocks'], 'block')} copied"
    if event.kind == "resume":
        return f"{who} returns from CPU memory with {count(said['blocks'], 'block')}"
    if event.kind == "fork":
        return f"the beams of {who} go on from {', '.join(map(str, said['parents']))}"
    if event.kind == "finish":
        return f"{who} ends after {count(said['tokens'], 'token')}"
    if event.kind == "abort":
        return f"{who} is taken back"
    requester = "itself" if said["requester"] == event.request_id else f"request {said['requester']:,}"
    then = (
        f"its {count(said['blocks'], 'block')} move to CPU memory"
        if said["mode"] == "swap"
        else f"{count(said['tokens'], 'token')} must be computed again"
    )
    return f"{who} is driven out for {requester}: {then}"
