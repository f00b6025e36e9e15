"""The block tables of a run over time: what changed in each iteration, and now and then all of them.

A table is named by a number: 2k is the k-th sequence's on the GPU, 2k + 1 its blocks on the CPU. `sequences` says which
request each one belongs to, and its place in it. Frames are iterations, counted from the first that was seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter

#: frames between two looks at all tables
KEYFRAME_EVERY = 256

Tables = dict[int, list[int]]


class TableLog:
    """`deltas` are [frame, table, entries kept, new entries ...], in order; a table without entries is none.
    `keyframes` are (frame, all tables), read from the memory manager and not from the deltas."""

    def __init__(self) -> None:
        self.sequences: list[tuple[int, int]] = []
        self.deltas: list[list[int]] = []
        self.keyframes: list[tuple[int, Tables]] = []
        self.now: Tables = {}

    def name(self, request: int, place: int) -> int:
        """The number of a new sequence's table on the GPU."""
        self.sequences.append((request, place))
        return 2 * len(self.sequences) - 2

    def request(self, table: int) -> int:
        return self.sequences[table >> 1][0]

    def note(self, frame: int, found: Mapping[int, list[int]]) -> list[int]:
        """All tables of this frame; which of them are not as before."""
        now = self.now
        changed = [table for table, blocks in found.items() if now.get(table) != blocks]
        changed += [table for table in now if table not in found]
        for table in changed:
            self._change(frame, table, found.get(table, []))
        if frame % KEYFRAME_EVERY == 0:
            self.keyframes.append((frame, {table: list(blocks) for table, blocks in found.items()}))
        return changed

    def _change(self, frame: int, table: int, blocks: list[int]) -> None:
        before = self.now.pop(table, [])
        kept = next((index for index, pair in enumerate(zip(before, blocks)) if pair[0] != pair[1]), None)
        kept = min(len(before), len(blocks)) if kept is None else kept
        self.deltas.append([frame, table, kept, *blocks[kept:]])
        if blocks:
            self.now[table] = list(blocks)

    def at(self, frame: int) -> Tables:
        """All tables of a frame: those of the keyframe before it, and what has changed since."""
        since, tables = self.keyframes[bisect_right(self.keyframes, frame, key=itemgetter(0)) - 1]
        tables = dict(tables)
        first = bisect_right(self.deltas, since, key=itemgetter(0))
        for _, table, kept, *new in self.deltas[first : bisect_right(self.deltas, frame, key=itemgetter(0))]:
            blocks = tables.pop(table, [])[:kept] + new
            if blocks:
                tables[table] = blocks
        return tables
