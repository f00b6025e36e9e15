"""The buddy allocator against a bitmap of blocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.engine.memory.buddy import BuddyAllocator


class BuddyBitmap:
    """The rules of a buddy allocator, without free lists: a chunk of size s is free if it starts at a multiple of s in
    one of the initial chunks, and none of its blocks is in use."""

    def __init__(self, num_blocks: int, max_chunk: int) -> None:
        self.max_chunk = max_chunk
        self.used = [False] * num_blocks
        self.initial, start, size = [], 0, max_chunk
        while start < num_blocks:
            size = min(size, 1 << ((num_blocks - start).bit_length() - 1))
            self.initial.append((start, size))
            start += size

    def chunks(self, size: int) -> list[int]:
        """Starts of the possible chunks of this size that are wholly free."""
        return [
            first + offset
            for first, length in self.initial
            for offset in range(0, length - size + 1, size)
            if not any(self.used[first + offset : first + offset + size])
        ]

    def largest(self) -> dict[int, list[int]]:
        """Free chunks that are not part of a larger free one: what merging must have left."""
        found: dict[int, list[int]] = {}
        covered: set[int] = set()
        size = self.max_chunk
        while size:
            starts = [start for start in self.chunks(size) if start not in covered]
            covered.update(block for start in starts for block in range(start, start + size))
            if starts:
                found[size] = starts
            size //= 2
        return found


def free_chunks(buddy: BuddyAllocator) -> dict[int, list[int]]:
    return {size: sorted(starts) for size, starts in buddy._free.items() if starts}


@settings(max_examples=150)
@given(st.integers(1, 70), st.integers(0, 5), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=60))
def test_buddy_allocator_agrees_with_a_bitmap(num_blocks: int, log_chunk: int, steps: list[tuple[int, int]]) -> None:
    buddy, bitmap = BuddyAllocator(num_blocks, 1 << log_chunk), BuddyBitmap(num_blocks, 1 << log_chunk)
    held: dict[int, int] = {}
    for log_size, choice in steps:
        size = 1 << log_size
        if choice % 3 == 0 and held:
            start = sorted(held)[choice % len(held)]
            buddy.release(start)
            size = held.pop(start)
            bitmap.used[start : start + size] = [False] * size
        elif size > buddy.max_chunk or not bitmap.chunks(size):
            assert not buddy.can_allocate(size)
            with pytest.raises(MemoryError):
                buddy.allocate(size)
        else:
            assert buddy.can_allocate(size)
            # the smallest free chunk that fits is split, and its lower half used
            source = min(chunk for chunk in bitmap.largest() if chunk >= size)
            start = buddy.allocate(size)
            assert start in bitmap.largest()[source]
            held[start] = size
            bitmap.used[start : start + size] = [True] * size
        assert free_chunks(buddy) == bitmap.largest()
        assert buddy.num_free == bitmap.used.count(False)
        for exponent in range(log_chunk + 2):
            room = len(bitmap.chunks(1 << exponent))
            assert buddy.can_allocate(1 << exponent, room)
            assert not buddy.can_allocate(1 << exponent, room + 1)
    for start in list(held):
        buddy.release(start)
    assert free_chunks(buddy) == BuddyBitmap(num_blocks, 1 << log_chunk).largest()


def test_the_pool_of_opt_13b_starts_as_the_authors_had_it() -> None:
    chunks = free_chunks(BuddyAllocator(15_728 // 16, 2048 // 16))
    assert {size * 16: len(starts) for size, starts in chunks.items()} == {
        2048: 7,
        1024: 1,
        256: 1,
        64: 1,
        32: 1,
        16: 1,
    }


def test_buddy_frees_last_in_first_out_and_never_twice() -> None:
    buddy = BuddyAllocator(8, 2)
    starts = [buddy.allocate(2) for _ in range(4)]
    for start in starts:
        buddy.release(start)
    assert [buddy.allocate(2) for _ in range(4)] == starts[::-1]
    buddy.release(starts[0])
    with pytest.raises(KeyError):
        buddy.release(starts[0])
    with pytest.raises(ValueError, match="power of two"):
        BuddyAllocator(8, 3)


def test_rounding_to_chunks() -> None:
    assert [BuddyAllocator.rounded(count) for count in (1, 2, 3, 4, 5, 8, 9, 127, 128, 129)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        16,
        128,
        128,
        256,
    ]
