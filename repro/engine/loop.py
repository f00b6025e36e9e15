"""The main loop: requests arrive, the scheduler decides, the executor runs, the clock moves.

The engine is the only part that knows the time. With a VirtualClock it replays hours in seconds; with a WallClock the
same loop serves for real."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from repro import display
from repro.checks import several
from repro.engine.clock import Clock, VirtualClock
from repro.engine.executor import Executor
from repro.engine.scheduler import Prefill, Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup
from repro.errors import UserError


@dataclass(slots=True)
class Outcome:
    """When a request got its first token and its last one (seconds), and how often it was driven out."""

    request: Request
    first_token_s: float = math.nan
    finish_s: float = math.nan
    num_preemptions: int = 0

    @property
    def normalized_latency_s(self) -> float:
        """End-to-end latency over output length, in s/token (§6.1)."""
        return (self.finish_s - self.request.arrival_s) / self.request.output_tokens

    def row(self) -> dict[str, Any]:
        """As a row of a table: the request's own columns first."""
        times = {name: getattr(self, name) for name in ("first_token_s", "finish_s", "normalized_latency_s")}
        return {**self.request.row(), **times, "num_preemptions": self.num_preemptions}

    def _repr_html_(self) -> str:
        return display.fields(str(self.request), self.row())


class Observer:
    """Watches a run. Iterations are not advanced together beyond `next_s`, so that it sees the state of that moment."""

    next_s: float = math.inf

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        """Called after each output has run and before it is accounted for; `engine.clock.now` is its end."""
        raise NotImplementedError


class Engine:
    """Runs a list of requests, sorted by arrival, to the end of the last one."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock | None = None, observers: Iterable[Observer] = ()
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock or VirtualClock()
        self.observers = several("observers", observers, Observer, "a list of Observers")
        self._unfinished: dict[SequenceGroup, Outcome] = {}

    def add(self, request: Request) -> Outcome:
        """Queue a request. UserError if it can never fit."""
        outcome = Outcome(request)
        self._unfinished[self.scheduler.add(request)] = outcome
        return outcome

    def abort(self, request_id: int) -> None:
        """Take a request back between two steps, waiting, running or swapped; its outcome stays without an end.

        UserError if there is none of this number, or no more."""
        group = next((one for one in self._unfinished if one.request.request_id == request_id), None)
        if group is None:
            raise UserError(f"request {request_id} is not here: it was never added, or it has ended")
        ended = self.scheduler.abort(group)
        self._unfinished.pop(group).num_preemptions = group.num_preemptions
        self._note(self.clock.now, [], ended)

    def run(self, requests: Iterable[Request], until_s: float = math.inf) -> list[Outcome]:
        """Outcomes of the requests that have arrived, in their order; what runs at `until_s` is left unfinished.

        UserError if a request can never fit, when its turn comes."""
        outcomes, arrivals = [], iter(requests)
        upcoming = next(arrivals, None)
        while (upcoming is not None or self.scheduler.has_work) and self.clock.now < until_s:
            while upcoming is not None and upcoming.arrival_s <= self.clock.now:
                outcomes.append(self.add(upcoming))
                upcoming = next(arrivals, None)
            if self.scheduler.has_work:
                self.step(math.inf if upcoming is None else upcoming.arrival_s)
            else:
                self.clock.wait_until(upcoming.arrival_s)
        return outcomes

    def step(self, next_arrival_s: float = math.inf) -> None:
        """One iteration, or as many equal ones as begin before the next arrival."""
        start = self.clock.now
        output = self.scheduler.schedule()
        self._repeat(output, start, next_arrival_s)
        result = self.executor.execute(output)
        self.clock.spend(result.durations_s)
        for observer in self.observers:
            observer.observe(self, output, start)
        self._note(self.clock.now, output.prefills, self.scheduler.update(output, result.parents, result.stopped))

    def _repeat(self, output: SchedulerOutput, start_s: float, next_arrival_s: float) -> None:
        """Let the output stand for all iterations that would be like it and concern no arrival and no observer.

        RuntimeError if a scheduler's rules let nothing run for good."""
        if not (output.num_decode_seqs or output.num_prefill_tokens or output.preempted) and next_arrival_s == math.inf:
            raise RuntimeError(f"nothing can run, now or later: {[*self.scheduler.swapped, *self.scheduler.waiting]}")
        if self.scheduler.can_repeat(output):
            until = next_arrival_s if self.scheduler.admits_on_arrival else math.inf
            until = min([until, *[observer.next_s for observer in self.observers]])
            self.scheduler.extend(output, self.executor.lookahead(output, start_s, until))

    def _note(self, now_s: float, prefills: list[Prefill], finished: list[SequenceGroup]) -> None:
        """Who has got the first token now, and who the last one."""
        for prefill in prefills:
            outcome = self._unfinished[prefill.group]
            if math.isnan(outcome.first_token_s):
                outcome.first_token_s = now_s
        for group in finished:
            outcome = self._unfinished.pop(group)
            outcome.finish_s = now_s
            outcome.num_preemptions = group.num_preemptions
