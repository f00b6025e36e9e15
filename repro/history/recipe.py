"""All that a run's decisions follow from, so that it can be run again, as it was or with something changed.

Scheduler and memory are deterministic. They ask for nothing but who comes and goes, and when; for lengths; for what
blocks hold; and for which beams survive."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from repro.engine.events import Event
from repro.engine.executor import Executor
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import KVCacheManager
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import Request
from repro.engine.systems import System
from repro.errors import UserError
from repro.history.memory_map import MemoryMap


@dataclass(frozen=True)
class Setup:
    """A system over a pool. `num_cpu_blocks` take swapped groups; `hashes` says what blocks of this size hold, if it
    is known; `prefix` is stored before the first request: its name and its tokens."""

    system: System
    num_blocks: int
    block_size: int
    max_model_len: int
    num_cpu_blocks: int = 0
    hashes: Hashes | None = None
    prefix: tuple[str, int] | None = None

    def manager(self) -> KVCacheManager:
        """A memory that holds nothing but the prefix, where it can be shared. UserError for a prefix cache that cannot
        know what it finds."""
        if self.system.prefix_caching and self.hashes is None:
            raise UserError("prefix_caching = True: this run does not know what its blocks hold")
        sizes = self.num_blocks, self.block_size, self.max_model_len, self.num_cpu_blocks
        manager = self.system.manager(*sizes, *([self.hashes] if self.hashes else []))
        if self.prefix and manager.shares and not self.system.prefix_caching:
            manager.store_prefix(*self.prefix)
        return manager

    def scheduler(self, log: list[Event] | None = None) -> Scheduler:
        """Over such a memory."""
        return self.system.decide(self.manager(), log)


class Turn(NamedTuple):
    """At this moment a request joins; without `request` the one of this number is taken back."""

    moment: float
    request_id: int
    request: Request | None


def joining(requests: Iterable[Request]) -> list[Turn]:
    """Each request joins when it arrives."""
    return [Turn(request.arrival_s, request.request_id, request) for request in requests]


def _known_so_only(system: System | str, block_size: int) -> Recipe:
    raise UserError("this run is not known with another system, or with blocks of another size")


@dataclass(frozen=True)
class Recipe:
    """`turns` say who joins and who goes, in this order, by the clock that the executor moves. Its times are seconds,
    or, with `in_iterations`, iterations.

    `events` is what was decided, and `outcomes` what came of it, if that is known. `lengths` are the tokens of each
    request's outputs, where these are not its own. `remade` makes the recipe for another system, or for blocks of
    another size, where that can be."""

    setup: Setup
    turns: Items[Turn] = field(repr=False)
    executor: Executor
    events: Items[Event] | None = field(default=None, repr=False)
    outcomes: Items[Outcome] | None = field(default=None, repr=False)
    in_iterations: bool = False
    lengths: Mapping[int, Items[int]] | None = field(default=None, repr=False)
    remade: Callable[[System | str, int], Recipe] = field(default=_known_so_only, repr=False)

    @property
    def unit(self) -> str:
        """Of all times."""
        return "iterations" if self.in_iterations else "s"

    @functools.cached_property
    def joined(self) -> dict[int, float]:
        """When each request joined."""
        return {turn.request_id: turn.moment for turn in self.turns if turn.request is not None}

    @functools.cached_property
    def _requests(self) -> dict[int, Request]:
        return {turn.request_id: turn.request for turn in self.turns if turn.request is not None}

    def lengths_of(self, number: int) -> Items[int]:
        """The tokens of each of a request's outputs."""
        request = self._requests[number]
        return [request.output_tokens] * request.sampling.n if self.lengths is None else self.lengths[number]

    def run(
        self,
        log: list[Event] | None = None,
        observers: Iterable[Observer] = (),
        scheduler: Scheduler | None = None,
        taken_back: Callable[[Request, float], object] = lambda request, at_s: None,
    ) -> Rerun:
        """Run it again, to the end of the last request; with a `scheduler` that was made otherwise, if one is given.
        `taken_back` is told of requests that do not come to their end, and when."""
        scheduler = self.setup.scheduler(log) if scheduler is None else scheduler
        engine, outcomes = Engine(scheduler, self.executor, observers=observers), dict[int, Outcome]()
        with _collector_paused():
            for moment, request_id, request in self.turns:
                while scheduler.has_work and engine.clock.now < moment:
                    engine.step(moment)
                engine.clock.wait_until(moment)
                if request is not None:
                    outcomes[request_id] = engine.add(request)
                elif math.isnan(outcomes[request_id].finish_s):  # it may have ended before it was taken back
                    engine.abort(request_id)
                    taken_back(outcomes[request_id].request, engine.clock.now)
            while scheduler.has_work:
                engine.step()
        return Rerun(engine, outcomes)

    def memory_map(self) -> MemoryMap:
        """Who held which block in each iteration. The run is made again, watched.

        UserError if it comes out otherwise: a policy of its own then does not decide the same for the same requests."""
        memory, log = MemoryMap(), list[Event]()
        memory.unit = self.unit
        self.check(self.run(log, (memory,)), log)
        return memory

    def check(self, again: Rerun, log: Items[Event]) -> None:
        """UserError if a run that was made again is not the one that was."""
        differs = self.events is not None and decisions(self.events) != decisions(log)
        if self.outcomes is not None:
            differs = differs or list(again.outcomes.values()) != list(self.outcomes)
        if differs:
            raise UserError(
                "the run came out otherwise when it was run again; give a MemoryMap() to the first one as an observer"
            )


class Rerun(NamedTuple):
    """The engine as it stands at the end, and what came of each request, by its number."""

    engine: Engine
    outcomes: dict[int, Outcome]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: a run makes many objects, no cycles, and scanning takes a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def decisions(log: Iterable[Event]) -> list[Event]:
    """Without arrivals, which decide nothing: one that cannot start may be noted later where iterations are merged."""
    return [event for event in log if event.kind != "arrive"]
