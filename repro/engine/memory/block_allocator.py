"""Fixed-size blocks with reference counts: the whole of paged allocation (§4.2-4.3).

Any free block serves any request, so there is no external fragmentation by construction."""

from __future__ import annotations

from collections.abc import Iterable


class BlockAllocator:
    """Blocks 0 .. num_blocks-1. A block is free exactly when its reference count is 0.

    The free list is a stack: the block freed last is used first (its contents are the warmest in the cache)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """One block with reference count 1. IndexError if there is none: callers ask first."""
        block = self._free.pop()
        self.ref_counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """`count` blocks, in the order in which `allocate` would give them. IndexError if there are fewer."""
        if count > len(self._free):
            raise IndexError(f"{count} blocks asked for, {len(self._free)} free")
        kept = len(self._free) - count
        blocks = self._free[kept:][::-1]
        del self._free[kept:]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`; the last one frees a block."""
        ref_counts = self.ref_counts
        for block in blocks:
            count = ref_counts[block]
            if count < 1:
                raise ValueError(f"block {block} is freed twice")
            ref_counts[block] = count - 1
            if count == 1:
                self._free.append(block)

    def share(self, blocks: Iterable[int], holders: int = 1) -> None:
        """Add `holders` references to each of `blocks`, which are in use."""
        for block in blocks:
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is free and cannot be shared")
            self.ref_counts[block] += holders
