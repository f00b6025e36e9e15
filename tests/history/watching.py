"""Random runs that a memory map watches, beside somebody who looks at everything in every iteration."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from audit import COSTS, Stopping
from fuzz import Case

from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.memory.prefix_cache import Hashes, PrefixCachingKVCacheManager, block_hashes
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, Sequence, SequenceGroup, Status
from repro.errors import UserError
from repro.history.memory_map import ByRequest, MemoryMap


class Looker(Observer):
    """Keeps all tables of the memory manager, in every iteration, and bills every single slot."""

    def __init__(self) -> None:
        self.tables: list[tuple[ByRequest, ByRequest]] = []  # on the GPU, on the CPU
        self.stored: list[dict[int, int]] = []
        self.cached: list[set[int]] = []
        self.usage: list[tuple[int, int]] = []  # slots with a token, and free
        self.slot_s: Counter[object] = Counter()
        self.token_slot_s: Counter[object] = Counter()
        self.seen: Counter[str] = Counter()
        self.prefix: frozenset[int] = frozenset()  # blocks of declared prefixes
        self.last: tuple[float, dict[int, SequenceGroup]] | None = None  # when the last iteration ended, and who was in

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        scheduler = engine.scheduler
        manager, size = scheduler.manager, scheduler.manager.block_size
        here: ByRequest = {}
        there: ByRequest = {}
        for group in scheduler.holders():
            here[group.request.request_id] = {_place(seq): list(manager.block_table(seq)) for seq in group.seqs}
        for group in scheduler.swapped:
            stays = manager.prefix_tokens(group) // size
            whole = {_place(seq): list(manager.block_table(seq)) for seq in group.seqs}
            there[group.request.request_id] = {place: table[stays:] for place, table in whole.items()}
            if stays:
                here[group.request.request_id] = {place: table[:stays] for place, table in whole.items()}
        self.tables.append((here, there))
        stored = list(scheduler.stored_lengths(output.iteration))
        self.stored.append({group.request.request_id: tokens for group, tokens in stored})
        found = set(manager.gpu.found.values()) if isinstance(manager, PrefixCachingKVCacheManager) else set()
        self.cached.append({block for block in found if not manager.gpu.ref_counts[block]})
        usage = manager.usage(stored)
        self.usage.append((usage.token_states, usage.free))
        groups = {group.request.request_id: group for group in (*scheduler.holders(), *scheduler.swapped)}
        if self.last is not None:
            self._bill_gap(start_s, manager.num_blocks, size, found)
        self.last = engine.clock.now, groups
        self._bill(engine.clock.now - start_s, here, self.stored[-1], manager.num_blocks, size, self.cached[-1])
        self._note(scheduler, output)

    def _bill_gap(self, start_s: float, num_blocks: int, size: int, found: set[int]) -> None:
        """Between two iterations: as in the last one, but that those who have ended hold nothing."""
        last_s, groups = self.last
        here = {
            request: tables
            for request, tables in self.tables[-2][0].items()
            if groups[request].status is not Status.FINISHED
        }
        held = {block for tables in here.values() for table in tables.values() for block in table}
        self._bill(start_s - last_s, here, self.stored[-2], num_blocks, size, found - held)

    def _bill(self, seconds: float, here: ByRequest, stored: dict, num_blocks: int, size: int, cached: set) -> None:
        holders: dict[int, list[tuple[int, int]]] = {}  # block -> request and tokens, of each reference
        for request, tables in here.items():
            for table in tables.values():
                for index, block in enumerate(table):
                    tokens = max(0, min(size, stored.get(request, 0) - index * size))
                    holders.setdefault(block, []).append((request, tokens))
        for block in range(num_blocks):
            references = holders.get(block, ())
            if block in self.prefix:
                self.slot_s["prefix"] += size * seconds
            elif references:
                for request, tokens in references:
                    self.slot_s[request] += size * seconds / len(references)
                    self.token_slot_s[request] += tokens * seconds / len(references)
            else:
                self.slot_s["cache" if block in cached else "nobody"] += size * seconds

    def _note(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """What happened, so that a test can say that all of it did."""
        seen = self.seen
        seen["swapped"] += sum(group.status is Status.SWAPPED for group in output.preempted)
        seen["recomputed"] += sum(group.status is Status.WAITING for group in output.preempted)
        seen["copied"] += len(output.cache_ops)
        seen["beams"] += len(scheduler.running.beams)
        seen["parts of prompts"] += len(output.chunks)
        seen["contiguous"] += not scheduler.manager.grows
        seen["cached"] += len(self.cached[-1])
        tables = [(request, set().union(*one.values())) for request, one in self.tables[-1][0].items()]
        seen["prefix used"] += any(self.prefix & blocks for _, blocks in tables)
        shared = Counter(block for _, blocks in tables for block in blocks - self.prefix)
        seen["shared by requests"] += max(shared.values(), default=0) > 1


def _place(seq: Sequence) -> int:
    return int(seq.seq_id.rpartition(".")[2])


class Beams:
    """Which beams survive, drawn anew for each step."""

    def parents(self, request_id: int, width: int, step: int) -> list[int]:
        rng = random.Random(f"{request_id} {step}")
        survivors = rng.sample(range(width), rng.randint(1, width))
        return [beam if beam in survivors else rng.choice(survivors) for beam in range(width)]


class Watched(Engine):
    """A random run; requests are taken back now and then."""

    def __init__(self, case: Case, memory: MemoryMap | None, *, together: bool = False) -> None:
        self.rng, self.log = random.Random(case.seed), list[Event]()
        executor = Stopping(COSTS, random.Random(case.seed), 0.0 if together else case.stop_rate, together)
        executor.beams, self.looker = Beams(), Looker()
        scheduler = case.scheduler(self.log)
        if case.caching:
            scheduler.manager.hashes = hashes_of(scheduler.manager.block_size)
        watching = () if memory is None else (memory, self.looker)
        super().__init__(scheduler, executor, observers=watching)
        blocks: list[int] = []
        for prefix_id, num_tokens in case.prefixes:
            with suppress(UserError):
                scheduler.manager.store_prefix(prefix_id, num_tokens)
                blocks += scheduler.manager.prefix_blocks(prefix_id)
        self.looker.prefix = frozenset(blocks)
        self.abort_rate = 0.0 if together else case.abort_rate
        self.requests = [
            replace(one, arrival_s=one.arrival_s / 20) for one in case.requests() if self._takes(case, one)
        ]

    def _takes(self, case: Case, request: Request) -> bool:
        scheduler = self.scheduler
        length = len(self.log)
        try:
            scheduler.add(request)
        except UserError:
            return False
        scheduler.waiting.clear()
        del self.log[length:]
        return True

    def step(self, next_arrival_s: float) -> None:
        if self._unfinished and self.rng.random() < self.abort_rate:
            self.abort(self.rng.choice(list(self._unfinished)).request.request_id)
        if self.scheduler.has_work:
            super().step(next_arrival_s)


def hashes_of(block_size: int) -> Hashes:
    """Prompts of requests with numbers that are both even or both odd begin alike."""

    def hashes(request: Request) -> list[bytes]:
        prompt = [request.request_id % 2] * min(16, request.prompt_tokens)
        rest = request.prompt_tokens + request.output_tokens - len(prompt)
        own = range(100 + 1000 * request.request_id, 100 + 1000 * request.request_id + rest)
        return block_hashes([*prompt, *own], block_size)

    return hashes
