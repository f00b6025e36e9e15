"""The block allocator against reference counts and a stack, kept by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.engine.memory.block_allocator import BlockAllocator


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from("amsrR"), st.integers(0, 11), st.integers(0, 4)), max_size=80),
)
def test_block_allocator_agrees_with_reference_counts_and_a_stack(num_blocks: int, steps: list[tuple]) -> None:
    allocator = BlockAllocator(num_blocks)
    counts = [0] * num_blocks
    stack = list(reversed(range(num_blocks)))

    def drop(block: int) -> None:
        counts[block] -= 1
        if not counts[block]:
            stack.append(block)

    for action, index, count in steps:
        used = [block for block in range(num_blocks) if counts[block]]
        if action == "a" and stack:
            block = stack.pop()
            assert allocator.allocate() == block
            counts[block] = 1
        elif action == "m" and count <= len(stack):
            expected = [stack.pop() for _ in range(count)]
            assert allocator.allocate_many(count) == expected
            for block in expected:
                counts[block] = 1
        elif action == "s" and used:
            allocator.share([used[index % len(used)]], count)
            counts[used[index % len(used)]] += count
        elif action == "r" and used:
            allocator.release([used[index % len(used)]])
            drop(used[index % len(used)])
        elif action == "R":
            allocator.release(used)
            for block in used:
                drop(block)
        assert allocator.ref_counts == counts
        assert allocator.num_free == len(stack) == counts.count(0)


def test_block_allocator_refuses_what_would_corrupt_it() -> None:
    allocator = BlockAllocator(2)
    first = allocator.allocate()
    with pytest.raises(IndexError):
        allocator.allocate_many(2)
    assert allocator.num_free == 1 and allocator.ref_counts[first] == 1  # all or nothing
    second = allocator.allocate()
    with pytest.raises(IndexError):
        allocator.allocate()
    allocator.release([second])
    with pytest.raises(ValueError, match="freed twice"):
        allocator.release([second])
    with pytest.raises(ValueError, match="cannot be shared"):
        allocator.share([second])
    assert allocator.allocate() == second  # freed last, used first
