"""Contiguous memory without a buddy system: the first free run that is long enough, of just the length asked for.

The other classical way to give each sequence one chunk. Nothing is rounded up unless asked for, so all that is lost
besides the reservation itself is external fragmentation: slots that are free, but not in one piece. Which lengths to
reserve is the memory manager's policy; sequences and time are not known here."""

from bisect import insort

from repro.engine.memory.buddy import BuddyAllocator


class FirstFitAllocator:
    """Blocks 0 .. num_blocks-1, for a ContiguousKVCacheManager. Free runs are kept in order of their start; freed
    neighbours merge. With `round_up` a run's length is the next power of two."""

    def __init__(self, num_blocks: int, round_up: bool = False) -> None:
        self.num_blocks = num_blocks
        self.round_up = round_up
        self.num_free = num_blocks
        self._runs: list[tuple[int, int]] = [(0, num_blocks)]  # (start, length), neither empty nor touching
        self._sizes: dict[int, int] = {}  # start of an allocated run -> its length

    @property
    def largest_run(self) -> int:
        return max((length for _, length in self._runs), default=0)

    def rounded(self, count: int) -> int:
        """The length of the run that serves `count` blocks."""
        return BuddyAllocator.rounded(count) if self.round_up else count

    def capacity(self, size: int) -> int:
        """How many runs of this size an empty pool holds."""
        return self.num_blocks // size

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
