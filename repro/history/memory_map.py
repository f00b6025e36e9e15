"""A run's memory over time: which request holds which block in each iteration, why, and who pays for it.

    memory = repro.MemoryMap()
    repro.serve("vllm", "opt-13b", trace, observers=(memory,))  # or LLM(...).generate(..., observers=(memory,))
    memory  # in a notebook: blocks by iterations, to scrub and play
    memory.save("map.html"); memory.at(120).tables; repro.to_frame(memory)

A run that nobody has watched has its map afterwards (`served.memory_map()`): it is made again.

What is kept are changes, so an iteration in which little happens takes little room. No iterations are advanced together
while a map watches: it asks to see each (`next_s`). That changes no decision and no time."""

from __future__ import annotations

import html
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import itemgetter
from os import PathLike
from pathlib import Path
from typing import Any

from repro import display
from repro.checks import whole
from repro.engine.loop import Engine
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, Sequence, SequenceGroup, Status
from repro.errors import UserError
from repro.hashing import write_atomically
from repro.history import map_page
from repro.history.happenings import Happenings
from repro.history.pages import framed
from repro.history.rent import Rent
from repro.history.tables import TableLog
from repro.history.watching import OfOneRun

#: request -> the block tables of its sequences, by their places
ByRequest = dict[int, dict[int, list[int]]]


@dataclass(frozen=True)
class Moment:
    """The memory in one iteration, which ran from `start_s` to `end_s`.

    `tables` has the block tables of each request's sequences, `swapped` those of the blocks that it has in CPU memory.
    `stored` has the tokens of each sequence of a request that runs. `cached` blocks are free, and a prefix cache can
    still find them."""

    iteration: int
    start_s: float
    end_s: float
    tables: ByRequest
    swapped: ByRequest
    stored: dict[int, int]
    cached: frozenset[int]

    def rows(self) -> list[dict[str, Any]]:
        """As rows of a table: one for each block table, and one for the part of it that is in CPU memory."""
        return [
            {
                "request_id": request,
                "sequence": place,
                "memory": memory,
                "stored_tokens": self.stored.get(request),
                "blocks": len(table),
                "block_table": list(table),
            }
            for memory, tables in (("GPU", self.tables), ("CPU", self.swapped))
            for request, places in tables.items()
            for place, table in places.items()
        ]

    def _repr_html_(self) -> str:
        rows = [row | {"block_table": display.ranges(row["block_table"])} for row in self.rows()]
        said = f"iteration {self.iteration:,}, {self.start_s:.4g} s to {self.end_s:.4g} s"
        return display.table(f"{said}: {len(rows):,} block tables", rows)


class MemoryMap(OfOneRun):
    """Give it to one engine as an observer, before anything has run. A frame is an iteration that it has seen.

    UserError, in the run, if it has watched another engine, if that has run before, or if iterations are advanced
    together all the same."""

    next_s = 0.0  # every iteration by itself

    def __init__(self) -> None:
        self.unit = "s"  # of all times; "iterations" where no clock says how long one takes
        self.num_blocks = self.block_size = 0
        self.is_paged = True
        self.prefix: tuple[int, ...] = ()  # blocks of declared prefixes, which stay for the whole run
        self.requests: dict[int, Request] = {}
        self.times_s: list[tuple[float, float]] = []  # when each frame began and ended
        self.counts: list[tuple[int, int, int]] = []  # requests that hold GPU memory, wait, are swapped, in each frame
        self.tables, self._happenings = TableLog(), Happenings()
        #: (frame, request, tokens of each sequence then, how many each later frame adds)
        self.lengths: list[tuple[int, int, int, int]] = []
        #: (frame, block): from now on a prefix cache finds a free block, or does so no more
        self.toggles: list[tuple[int, int]] = []
        self._numbers: dict[Sequence, int] = {}
        self._of: dict[int, list[int]] = defaultdict(list)  # request -> tables
        self._groups: list[SequenceGroup] = []  # with memory, on the GPU or the CPU, in the last frame
        self._length: dict[int, tuple[int, int, int]] = {}  # the last of `lengths` of a request
        self._stored: dict[int, int] = {}
        self._cached: set[int] = set()

    def __len__(self) -> int:
        """Frames."""
        return len(self.times_s)

    def __repr__(self) -> str:
        events = Counter(one.kind for one in self.happenings)
        said = ", ".join(f"{number:,} x {kind}" for kind, number in events.items())
        return f"{len(self):,} iterations, {self.num_blocks:,} blocks of {self.block_size} slots: {said}"

    # A frame

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        scheduler, frame, now_s = engine.scheduler, len(self), engine.clock.now
        super().observe(engine, output, start_s)
        if output.num_iterations != 1:
            raise UserError(f"a memory map must see each iteration; {output.num_iterations} were advanced together")
        self._note_ended()
        found = self._found(scheduler)
        if frame and start_s > self.times_s[-1][1]:
            self._rent.spend(start_s - self.times_s[-1][1], self._stored, len(found - self._rent.owners.keys()))
        self.times_s.append((start_s, now_s))
        freed = {victim: self._own_blocks(victim) for victim in output.preempted}
        self._note_tables(frame, scheduler)
        self._note_lengths(frame, scheduler)
        cached = found - self._rent.owners.keys()
        self.toggles += [(frame, block) for block in sorted(cached ^ self._cached)]
        self._cached = cached
        self._happenings.note(frame, scheduler, output, freed, self._rent.owners)
        self.counts.append((len(scheduler.holders()), len(scheduler.waiting), len(scheduler.swapped)))
        self._rent.spend(now_s - start_s, self._stored, len(cached))

    def begin(self, engine: Engine) -> None:
        manager = engine.scheduler.manager
        self.num_blocks, self.block_size = manager.num_blocks, manager.block_size
        self.is_paged = manager.grows
        if manager.grows:  # references beyond those of sequences are declared prefixes'
            references = Counter(dict(enumerate(manager.gpu.ref_counts)))
            tables = self._read(engine.scheduler)
            references.subtract(block for number, table in tables.items() if number % 2 == 0 for block in table)
            self.prefix = tuple(block for block, count in references.items() if count)
        self._rent = Rent(self.num_blocks, self.block_size, self.prefix)

    def _note_ended(self) -> None:
        """Who has ended did so with the last frame."""
        for group in [group for group in self._groups if group.status is Status.FINISHED]:
            self._happenings.end(len(self) - 1, group, self._own_blocks(group))
            self._rent.hold(group.request.request_id, [])
            self._groups.remove(group)

    def _own_blocks(self, group: SequenceGroup) -> int:
        """Blocks that nobody else holds."""
        number, owners = group.request.request_id, self._rent.owners
        held = {block for table in self._of[number] if table in self.tables.now for block in self.tables.now[table]}
        return sum(len(owners[block]) == 1 for block in held if block in owners and block not in self._rent.prefix)

    @staticmethod
    def _found(scheduler: Scheduler) -> set[int]:
        """Blocks that a prefix cache finds."""
        return set(getattr(getattr(scheduler.manager, "gpu", None), "found", {}).values())

    def _read(self, scheduler: Scheduler) -> dict[int, list[int]]:
        """The manager's own tables now, by their numbers."""
        manager, numbers, tables = scheduler.manager, self._numbers, {}
        for group in scheduler.holders():
            for seq in group.seqs:
                number = numbers.get(seq)
                tables[self._number(group, seq) if number is None else number] = manager.block_table(seq)
        for group in scheduler.swapped:
            stays = manager.prefix_tokens(group) // manager.block_size
            for seq in group.seqs:
                table, number = manager.block_table(seq), self._number(group, seq)
                tables[number + 1] = table[stays:]
                if stays:
                    tables[number] = table[:stays]
        return tables

    def _number(self, group: SequenceGroup, seq: Sequence) -> int:
        if seq not in self._numbers:
            request = group.request.request_id
            self.requests[request] = group.request
            self._numbers[seq] = number = self.tables.name(request, int(seq.seq_id.rpartition(".")[2]))
            self._of[request].append(number)
        return self._numbers[seq]

    def _note_tables(self, frame: int, scheduler: Scheduler) -> None:
        changed = self.tables.note(frame, self._read(scheduler))
        self._groups = [*scheduler.holders(), *scheduler.swapped]
        for request in dict.fromkeys(map(self.tables.request, changed)):
            now = self.tables.now
            self._rent.hold(request, [now[number] for number in self._of[request] if number in now])

    def _note_lengths(self, frame: int, scheduler: Scheduler) -> None:
        self._stored = {}
        iteration = scheduler.iteration
        for group, tokens in scheduler.stored_lengths(iteration):
            request = group.request.request_id
            self._stored[request] = tokens
            since, before, grows = self._length.get(request, (0, -1, 0))
            if tokens != before + grows * (frame - since):
                grows = int(group.running_since is not None and tokens == group.num_stored(iteration))
                self._length[request] = frame, tokens, grows
                self.lengths.append((frame, request, tokens, grows))

    # What comes of it

    @property
    def happenings(self) -> Happenings:
        """What happened to requests, in sentences. Iterations count from 0."""
        self._note_ended()
        return self._happenings

    def at(self, iteration: int) -> Moment:
        """The memory in an iteration, made again from the changes. UserError if there is none of this number."""
        self._must_have_seen()
        frame = whole("iteration", iteration, 0, len(self) - 1)
        tables: ByRequest = {}
        swapped: ByRequest = {}
        for number, table in self.tables.at(frame).items():
            request, place = self.tables.sequences[number >> 1]
            (swapped if number % 2 else tables).setdefault(request, {})[place] = table
        cached: set[int] = set()
        for _, block in self.toggles[: bisect_right(self.toggles, frame, key=itemgetter(0))]:
            cached ^= {block}
        lengths = {
            request: tokens + grows * (frame - since)
            for since, request, tokens, grows in self.lengths[: bisect_right(self.lengths, frame, key=itemgetter(0))]
        }
        stored = {request: lengths[request] for request in tables if request not in swapped}
        return Moment(frame, *self.times_s[frame], tables, swapped, stored, frozenset(cached))

    def rent(self) -> list[dict[str, Any]]:
        """Who pays for the pool, in slot-seconds (see `repro.history.rent`): a row for each request that has held
        memory, then for the prefix, the cache and nobody. They add up to the pool's slots x the time."""
        self._must_have_seen()
        return self._rent.rows()

    def html(self, first: int = 0, last: int | None = None) -> str:
        """A page of its own, without a network, of the iterations from `first` to `last` (default: all, or as many as
        a page takes, which it says). UserError for others."""
        self._must_have_seen()
        first = whole("first", first, 0, len(self) - 1)
        last = len(self) - 1 if last is None else whole("last", last, first, len(self) - 1)
        return map_page.render(self, first, last)

    def save(self, path: str | PathLike[str], first: int = 0, last: int | None = None) -> Path:
        """Write the page into a file."""
        write_atomically(Path(path), self.html(first, last).encode())
        return Path(path)

    def _repr_html_(self) -> str:
        if not len(self):
            return html.escape("a memory map that has seen no iteration yet")
        return framed(self.html(), "memory map", 860)

    def _must_have_seen(self) -> None:
        if not len(self):
            raise UserError("this memory map has seen no iteration; give it to a run: observers=(memory,)")
