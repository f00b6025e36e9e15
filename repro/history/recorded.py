"""A run whose executor is not at hand, such as a real model's: a recipe from what was decided, and how outputs ended.

It is gone through once, with requests joining and leaving in the iterations in which they did. That must give the same
decisions. It also says when, by the clock of whoever says how long an iteration takes, each of them came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

from repro.engine.events import Event
from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine, Observer
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup
from repro.engine.systems import System, system
from repro.errors import UserError
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe, Setup, Turn, decisions

#: of a request and one of its steps, or one of its iterations: the beam that each of its beams continues
Parents = dict[tuple[int, int], list[int]]


@dataclass(frozen=True)
class Ends:
    """The tokens of each of a request's outputs, and whether something else than their limit ended it."""

    lengths: Items[int]
    stopped: Items[bool]


class Forced(Executor):
    """Outputs end where they did, and beams continue where they did, by their steps. An iteration takes as long as
    `timing` says; without it, 1."""

    def __init__(self, ends: Mapping[int, Ends], parents: Parents, timing: Executor | None = None) -> None:
        self._ends, self._parents, self._timing = ends, parents, timing

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = StepResult([1.0] if self._timing is None else self._timing.execute(output).durations_s)
        for group in (*output.decodes, *(prefill.group for prefill in output.prefills)):
            if (parents := self._continued(group, output.iteration)) is not None:
                result.parents[group] = parents
            result.stopped += [(group, seq) for seq in group.seqs if self._stops(group, seq.seq_id, output.iteration)]
        return result

    def _continued(self, group: SequenceGroup, iteration: int) -> list[int] | None:
        return self._parents.get((group.request.request_id, group.num_generated(iteration)))

    def _stops(self, group: SequenceGroup, name: str, iteration: int) -> bool:
        ends, sample = self._ends[group.request.request_id], int(name.rpartition(".")[2])
        count = group.num_generated(iteration) + 1
        return ends.stopped[sample] and count == ends.lengths[sample] < group.request.output_tokens


class ByIteration(Forced):
    """Beams continue where they did by the iterations of `events`, for a run whose requests join and leave in these;
    `by_step` notes by which of their steps."""

    def __init__(self, ends: Mapping[int, Ends], events: Iterable[Event], timing: Executor | None = None) -> None:
        super().__init__(ends, {}, timing)
        forks = [event for event in events if event.kind == "fork"]
        self._forks = {(event.request_id, event.iteration - 1): list(event.detail["parents"]) for event in forks}
        self.by_step = Parents()

    def _continued(self, group: SequenceGroup, iteration: int) -> list[int] | None:
        parents = self._forks.get((group.request.request_id, iteration))
        if parents is not None:
            self.by_step[group.request.request_id, group.num_generated(iteration)] = parents
        return parents


@dataclass(frozen=True)
class Recorded:
    """`events` are all of the scheduler's, arrivals too. `timing` says how long an iteration takes, if anybody can;
    `hashes` what blocks of a size hold, if it is known; `times_s` when each iteration began and ended."""

    setup: Setup
    requests: Items[Request]
    events: list[Event] = field(repr=False)
    ends: Mapping[int, Ends] = field(repr=False)
    timing: Executor | None = None
    hashes: Callable[[int], Hashes] | None = None
    times_s: Items[tuple[float, float]] = field(default=(), repr=False)

    def recipe(self) -> Recipe:
        """UserError if it comes out otherwise."""
        turns, executor = self._again(self.timing)
        return self._made(turns, Forced(self.ends, executor.by_step, self.timing))

    def memory_map(self) -> MemoryMap:
        """Who held which block in each iteration, at the times at which they were. UserError as above."""
        memory = MemoryMap()
        memory.unit = "s" if self.times_s or self.timing else "iterations"
        self._again(_Times(self.times_s) if self.times_s else self.timing, (memory,), self.times_s)
        return memory

    def _made(self, turns: list[Turn], executor: Executor) -> Recipe:
        lengths = {number: ends.lengths for number, ends in self.ends.items()}
        recipe = Recipe(self.setup, turns, executor, self.events, None, self.timing is None, lengths)

        def remade(chosen: System | str, block_size: int) -> Recipe:
            setup, size = self.setup, self.setup.block_size
            if block_size != size and (self.timing is not None or self.hashes is None):
                raise UserError(f"block_size = {block_size}: this run is known in blocks of {size} tokens only")
            chosen = system(chosen) if isinstance(chosen, str) else chosen
            changed = {"system": chosen.for_length(setup.max_model_len), "block_size": block_size}
            if block_size != size:
                changed["num_blocks"] = setup.num_blocks * size // block_size
                changed["num_cpu_blocks"] = setup.num_cpu_blocks * size // block_size
                changed["hashes"] = self.hashes(block_size)
            return replace(recipe, setup=replace(setup, **changed), events=None)

        return replace(recipe, remade=remade)

    def _again(
        self, timing: Executor | None, observers: Iterable[Observer] = (), times_s: Items[tuple[float, float]] = ()
    ) -> tuple[list[Turn], ByIteration]:
        """Through the run once; who joined and went, and when by the clock that `timing` moves. With `times_s` an
        iteration begins no earlier than it did."""
        executor, log = ByIteration(self.ends, self.events, timing), list[Event]()
        engine = Engine(self.setup.scheduler(log), executor, observers=observers)
        by_id, turns = {request.request_id: request for request in self.requests}, list[Turn]()
        try:
            for event in self.events:
                if event.kind not in ("arrive", "abort"):
                    continue
                _step_to(engine, event.iteration, times_s)
                request = by_id[event.request_id] if event.kind == "arrive" else None
                if request is not None and not engine.scheduler.has_work and self.timing is not None:
                    engine.clock.wait_until(request.arrival_s)
                turns.append(Turn(engine.clock.now, event.request_id, request))
                if request is not None:
                    engine.add(request)
                else:
                    engine.abort(event.request_id)
            _step_to(engine, math.inf, times_s)
        except (UserError, RuntimeError):  # it has taken another way; the comparison says so
            log.clear()
        if decisions(log) != decisions(self.events):
            caching = " A prefix cache that knew earlier prompts does so; see reset_prefix_cache."
            raise UserError(
                "the run came out otherwise when it was run again, so it cannot be shown."
                + (caching if self.setup.system.prefix_caching else "")
            )
        return turns, executor


def _step_to(engine: Engine, iteration: float, times_s: Items[tuple[float, float]]) -> None:
    while engine.scheduler.iteration < iteration and engine.scheduler.has_work:
        if times_s:
            engine.clock.wait_until(times_s[engine.scheduler.iteration][0])
        engine.step()


class _Times(Executor):
    """Iterations begin and end when they did."""

    def __init__(self, times_s: Items[tuple[float, float]]) -> None:
        self._times_s = times_s

    def execute(self, output: SchedulerOutput) -> StepResult:
        start_s, end_s = self._times_s[output.iteration]
        return StepResult([end_s - start_s])
