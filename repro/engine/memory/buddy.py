"""The buddy allocator under the Orca baselines: power-of-two chunks of consecutive blocks.

A pool that is no power of two starts as its largest chunks first: as many of `max_chunk` as fit, then the binary pieces
of the rest (15,728 slots of OPT-13B are 7 x 2048 + 1024 + 256 + 64 + 32 + 16). The smallest free chunk that fits is
split; freed buddies merge. Sizes and positions are in blocks; requests and slots are not known here."""

from __future__ import annotations


class BuddyAllocator:
    """Hands out chunks of 1, 2, 4 ... `max_chunk` blocks. Free lists are stacks (last freed, first used)."""

    def __init__(self, num_blocks: int, max_chunk: int) -> None:
        if max_chunk < 1 or max_chunk & (max_chunk - 1):
            raise ValueError(f"max_chunk = {max_chunk} must be a power of two")
        self.num_blocks = num_blocks
        self.max_chunk = max_chunk
        # size -> stack of starts (a dict keeps the order and finds a buddy in constant time)
        self._free: dict[int, dict[int, None]] = {1 << log: {} for log in range(max_chunk.bit_length())}
        self._sizes: dict[int, int] = {}  # start of an allocated chunk -> its size
        start, size = 0, max_chunk
        while start < num_blocks:
            while start + size > num_blocks:
                size //= 2
            self._free[size][start] = None
            start += size
        self.num_free = num_blocks

    @staticmethod
    def rounded(count: int) -> int:
        """The chunk size that serves `count` blocks: the next power of two. Here Orca's chunks are rounded up."""
        return 1 << (count - 1).bit_length()

    def capacity(self, size: int) -> int:
        """How many chunks of this size an empty pool holds: its initial chunks are the pool's binary digits."""
        return self.num_blocks // size if size <= self.max_chunk else 0

    def can_allocate(self, size: int, count: int = 1) -> bool:
        """Whether `count` chunks of `size` blocks (a power of two) each are free at the same time."""
        fitting = 0
        chunk = size
        while chunk <= self.max_chunk and fitting < count:
            fitting += len(self._free[chunk]) * (chunk // size)
            chunk *= 2
        return fitting >= count

    def allocate(self, size: int) -> int:
        """The start of a chunk of exactly `size` blocks (a power of two). MemoryError if none is free."""
        chunk = size
        while chunk <= self.max_chunk and not self._free[chunk]:
            chunk *= 2
        if chunk > self.max_chunk:
            raise MemoryError(f"no free chunk of {size} blocks")
        start, _ = self._free[chunk].popitem()
        while chunk > size:  # keep the lower half, free the upper one
            chunk //= 2
            self._free[chunk][start + chunk] = None
        self._sizes[start] = size
        self.num_free -= size
        return start

    def release(self, start: int) -> None:
        """Free the chunk that starts at `start`, merging with its buddy as long as that is free, too."""
        size = self._sizes.pop(start)
        self.num_free += size
        # Initial chunks start at multiples of their size and only get smaller, so no chunk of another initial chunk can
        # ever stand where a buddy would: below max_chunk the free lists alone decide what merges.
        while size < self.max_chunk and (start ^ size) in self._free[size]:
            del self._free[size][start ^ size]
            start &= ~size
            size *= 2
        self._free[size][start] = None
