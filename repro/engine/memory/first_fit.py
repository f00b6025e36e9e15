"""Contiguous memory without a buddy system: the first free run that is long enough, of just the length asked for.

The other classical way to give each sequence one chunk. Nothing is rounded up unless asked for, so all that is lost
besides the reservation itself is external fragmentation: slots that are free, but not in one piece. Which lengths to
reserve is the caller's policy (`Reservation`); sequences and time are not known to the allocator."""

from __future__ import annotations

from bisect import insort

from repro.engine.memory.buddy import BuddyAllocator
from repro.engine.memory.contiguous import ContiguousKVCacheManager, Reservation
from repro.engine.sequence import SequenceGroup


class FirstFitAllocator:
    """Blocks 0 .. num_blocks-1. Free runs are kept in order of their start; freed neighbours merge."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._runs: list[tuple[int, int]] = [(0, num_blocks)]  # (start, length), neither empty nor touching
        self._sizes: dict[int, int] = {}  # start of an allocated run -> its length

    @property
    def largest_run(self) -> int:
        return max((length for _, length in self._runs), default=0)

    def can_allocate(self, size: int, count: int = 1) -> bool:
        """Whether `count` runs of `size` blocks each are free at the same time."""
        return sum(length // size for _, length in self._runs) >= count

    def allocate(self, size: int) -> int:
        """The start of a run of exactly `size` blocks: the beginning of the first one that is long enough. MemoryError
        if none."""
        for index, (start, length) in enumerate(self._runs):
            if length >= size:
                self._runs[index : index + 1] = [(start + size, length - size)] if length > size else []
                self._sizes[start] = size
                self.num_free -= size
                return start
        raise MemoryError(f"no free run of {size} blocks")

    def release(self, start: int) -> None:
        """Free the run that starts at `start`, merging it with what is free on either side."""
        size = self._sizes.pop(start)
        self.num_free += size
        insort(self._runs, (start, size))
        index = self._runs.index((start, size))
        for left in (index, index - 1):  # first with the right neighbour, then with the left one
            if 0 <= left < len(self._runs) - 1 and sum(self._runs[left]) == self._runs[left + 1][0]:
                self._runs[left : left + 2] = [(self._runs[left][0], self._runs[left][1] + self._runs[left + 1][1])]


class FirstFitKVCacheManager(ContiguousKVCacheManager):
    """A run of prompt + reservation slots per sequence; with `round_up` its length is the next power of two."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 1,
        *,
        reservation: Reservation,
        max_model_len: int,
        round_up: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, reservation=reservation, max_model_len=max_model_len)
        self.round_up = round_up
        self.buddy = FirstFitAllocator(num_blocks)  # the same questions, another answer

    @property
    def largest_run(self) -> int:
        """Blocks of the largest free piece."""
        return self.buddy.largest_run

    def _chunk(self, group: SequenceGroup) -> int:
        blocks = self.cdiv(self.reserved_tokens(group))
        return BuddyAllocator.rounded(blocks) if self.round_up else blocks

    def fits(self, group: SequenceGroup) -> bool:
        return self.num_blocks // self._chunk(group) >= len(group.seqs)

    def blocks_needed(self, group: SequenceGroup) -> int:
        """Blocks that the group takes, each sequence in one run."""
        return self._chunk(group) * len(group.seqs)
