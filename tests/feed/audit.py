"""Receipts again, by looking at every request in every single iteration; and random runs of an engine to audit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from fuzz import Case

from repro.engine.events import Event
from repro.engine.executor import StepResult
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.scheduler import Batching, SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup, Status
from repro.errors import UserError
from repro.feed.receipt import CAUSES, Receipt
from repro.feed.receipts import Receipts
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor

#: awkward numbers; prompts take long
COSTS = CostModel("test", 0.0262, 0.00041, 0.00022, 1.3e-6, 0.0017, 0.001, 0.0003, 0.0011)


class Audit(Observer):
    """The same definitions with no thought for time. Knows each group from when it is added; no merged iterations."""

    def __init__(self) -> None:
        self.causes: dict[SequenceGroup, dict[str, float]] = {}
        self.last_s: dict[SequenceGroup, float] = {}  # so far it is charged
        self.stored: Counter[SequenceGroup] = Counter()  # the most tokens that it has ever stored
        self.again: Counter[SequenceGroup] = Counter()
        self.decoded: set[SequenceGroup] = set()  # it has had a token
        self.started: set[SequenceGroup] = set()
        self.alone: list[float] = []  # the latest run of iterations without a prompt
        self.num_seqs: int | None = None  # of it; None: it has been broken
        self.out: set[SequenceGroup] = set()  # it was driven out, and has not come back
        self.was_running: set[SequenceGroup] = set()
        self.stopped: set[object] = set()  # sequences, in an earlier iteration
        self.seen: Counter[str] = Counter()

    def add(self, group: SequenceGroup) -> None:
        self.causes[group] = dict.fromkeys(CAUSES, 0.0)
        self.last_s[group] = group.request.arrival_s

    def state(self, group: SequenceGroup) -> str:
        """What a request does between two iterations."""
        if group.status is Status.SWAPPED:
            return "swapped"
        if group not in self.started:
            return "queued"
        if group.status is Status.RUNNING or group not in self.out:
            return "stalled"
        return "preempted"

    def charge(self, group: SequenceGroup, cause: str, until_s: float) -> None:
        self.causes[group][cause] += until_s - self.last_s[group]
        self.last_s[group] = until_s

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now_s, seconds = engine.clock.now, engine.clock.now - start_s
        assert output.num_iterations == 1
        prompts = {prompt.group: prompt for prompt in (*output.chunks, *output.prefills)}
        mean_s = sum(self.alone) / len(self.alone) if self.alone else seconds
        decodes = set(output.decodes)
        for group in self.causes:
            if group.status is Status.FINISHED or group.request.arrival_s > start_s:
                continue
            if group in self.was_running:
                self.charge(group, "stalled", start_s)  # no time has passed in virtual time, but when all was idle
            if group in output.preempted:
                self.out.add(group)
                self.seen["driven out"] += 1
            if group in prompts:
                prompt = prompts[group]
                self.charge(group, self.state(group), start_s)
                self.started.add(group)
                self.out.discard(group)
                again = max(0, min(prompt.num_tokens, self.stored[group]) - prompt.num_cached)
                share = 1.0 if group in self.decoded else again / (prompt.num_tokens - prompt.num_cached)
                self.again[group] += again
                self.seen["partly again"] += 0 < share < 1
                self.causes[group]["recomputed"] += share * seconds
                self.causes[group]["prompt"] += (1 - share) * seconds
                self.stored[group] = max(self.stored[group], prompt.num_tokens)
            elif group in decodes:
                if group not in self.was_running:
                    self.charge(group, "swapped", start_s)
                static = engine.scheduler.config.batching is Batching.REQUEST
                has_stopped = all(seq in self.stopped for seq in group.seqs)
                if static and (has_stopped or group.num_generated(output.iteration) >= group.request.output_tokens):
                    self.causes[group]["stalled"] += seconds
                    self.seen["held"] += 1
                else:
                    extra = max(0.0, seconds - mean_s) if prompts else 0.0
                    self.causes[group]["others_prompts"] += extra
                    self.causes[group]["own_steps"] += seconds - extra
                self.stored[group] = max(self.stored[group], group.num_stored(output.iteration))
            else:
                self.causes[group][self.state(group)] += now_s - self.last_s[group]
            self.last_s[group] = now_s
        self.decoded |= {prefill.group for prefill in output.prefills}
        self.stopped = set(engine.executor.stopped)
        self.was_running = {*output.decodes, *(prefill.group for prefill in output.prefills)}
        if prompts or not output.num_decode_seqs:
            self.num_seqs = None
        else:
            if output.num_decode_seqs != self.num_seqs:
                self.alone, self.num_seqs = [], output.num_decode_seqs
            self.alone.append(seconds)


class Stopping(SimulatedExecutor):
    """Some sequences stop early; iterations are advanced together where nobody can."""

    def __init__(self, cost_model: CostModel, rng: random.Random, stop_rate: float, together: bool) -> None:
        super().__init__(cost_model)
        self.rng, self.stop_rate, self.together = rng, stop_rate, together
        self.stopped: set[object] = set()

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return super().lookahead(output, now_s, until_s) if self.together else 1

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = super().execute(output)
        if self.stop_rate:
            for group in (*output.decodes, *(prefill.group for prefill in output.prefills)):
                last = group.num_generated(output.iteration) + 1 >= group.request.output_tokens
                if not group.is_beam and not last:
                    gone = [one for one in group.seqs if one not in self.stopped and self.rng.random() < self.stop_rate]
                    self.stopped.update(gone)
                    result.stopped += [(group, seq) for seq in gone]
        return result


class Audited(Engine):
    """An engine whose requests are taken back now and then, and that says so."""

    def __init__(self, case: Case, log: list[Event] | None, together: bool, audit: bool) -> None:
        rng = random.Random(case.seed)
        stop_rate = 0.0 if together or not audit else case.stop_rate
        executor = Stopping(COSTS, rng, stop_rate, together)
        self.receipts, self.audit = Receipts(), Audit() if audit else None
        observers = (self.receipts, self.audit) if audit else (self.receipts,)
        super().__init__(case.scheduler(log), executor, observers=observers)
        self.rng, self.abort_rate = rng, case.abort_rate if audit else 0.0
        self.aborted: dict[int, tuple[Receipt, float]] = {}
        self.seen: Counter[str] = Counter()

    def add(self, request: Request) -> Outcome:
        outcome = super().add(request)
        if self.audit is not None:
            self.audit.add(next(reversed(self._unfinished)))
        return outcome

    def step(self, next_arrival_s: float) -> None:
        rare = self.scheduler.swapped or list(getattr(self.scheduler, "prefilling", ()))
        rare = rare or [one for one in self.scheduler.waiting if one.num_preemptions]
        rate = max(self.abort_rate, 0.1) if self.abort_rate and rare else self.abort_rate
        if self._unfinished and self.rng.random() < rate:
            group = self.rng.choice(rare or list(self._unfinished))
            state = self.audit.state(group)
            self.audit.charge(group, state, self.clock.now)
            self.seen[f"abort {state if group.status is not Status.RUNNING else 'running'}"] += 1
            self.abort(group.request.request_id)
            receipt = self.receipts.end(group.request, self.clock.now)
            self.aborted[group.request.request_id] = receipt, self.clock.now
        if self.scheduler.has_work:
            super().step(next_arrival_s)


def requests_of(case: Case) -> Iterator[Request]:
    """Those that are taken; some arrive at the same time, several in an iteration."""
    scheduler = case.scheduler()
    for request in case.requests():
        one = replace(request, arrival_s=request.arrival_s / 20, prefix_id=None)
        with suppress(UserError):
            scheduler.add(one)
            yield one


def audited(case: Case, requests: Sequence[Request]) -> tuple[Audited, list[Event], list[Outcome]]:
    """The case by single iterations, audited."""
    log: list[Event] = []
    engine = Audited(case, log, together=False, audit=True)
    return engine, log, engine.run(requests)
