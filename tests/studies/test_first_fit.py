"""The first-fit allocator against a map of the pool, and its manager: what is rounded, what fits, what fragmentation
does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.engine.memory import ContiguousKVCacheManager, reserve_oracle
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.studies.first_fit import FirstFitAllocator


def free_runs(taken: list[bool]) -> list[tuple[int, int]]:
    """(start, length) of each free run, read off the map."""
    runs, start = [], None
    for place, used in enumerate([*taken, True]):
        if used and start is not None:
            runs.append((start, place - start))
            start = None
        elif not used and start is None:
            start = place
    return runs


@settings(max_examples=200)
@given(st.integers(1, 60), st.integers(0, 2**32))
def test_it_agrees_with_a_map_of_the_pool(num_blocks, seed):
    rng = random.Random(seed)
    allocator, taken, held = FirstFitAllocator(num_blocks), [False] * num_blocks, {}
    for _ in range(60):
        size = rng.randint(1, max(1, num_blocks // 3))
        fitting = [start for start, length in free_runs(taken) if length >= size]
        assert allocator.can_allocate(size) == bool(fitting)
        count = rng.randint(1, 4)
        assert allocator.can_allocate(size, count) == (sum(length // size for _, length in free_runs(taken)) >= count)
        if held and (not fitting or rng.random() < 0.5):
            start = rng.choice(list(held))
            allocator.release(start)
            size = held.pop(start)
            taken[start : start + size] = [False] * size
        elif fitting:
            assert allocator.allocate(size) == fitting[0]  # the first, from its beginning
            taken[fitting[0] : fitting[0] + size] = [True] * size
            held[fitting[0]] = size
        else:
            with pytest.raises(MemoryError):
                allocator.allocate(size)
        assert allocator.num_free == taken.count(False)
        assert allocator.largest_run == max((length for _, length in free_runs(taken)), default=0)
    for start in held:
        allocator.release(start)
    assert allocator.can_allocate(num_blocks)


def group(number: int, prompt: int, output: int, n: int = 1) -> SequenceGroup:
    return SequenceGroup(Request(number, 0.0, prompt, output, SamplingParams(n=n)))


def memory(num_blocks: int, max_model_len: int, round_up: bool = False) -> ContiguousKVCacheManager:
    allocator = FirstFitAllocator(num_blocks, round_up)
    return ContiguousKVCacheManager(
        num_blocks, 1, reservation=reserve_oracle, max_model_len=max_model_len, allocator=allocator
    )


@pytest.mark.parametrize("round_up, chunk", [(False, 13), (True, 16)])
def test_chunks_have_the_reserved_length_or_the_next_power_of_two(round_up, chunk):
    manager = memory(40, max_model_len=20, round_up=round_up)
    one = group(0, 10, 3, n=2)
    assert manager.chunk_blocks(one) == chunk
    manager.allocate(one, 10)
    assert [manager.block_table(seq) for seq in one.seqs] == [list(range(chunk)), list(range(chunk, 2 * chunk))]
    usage = manager.usage([(one, 10)])  # adds up, or raises
    assert (usage.token_states, usage.rounding, usage.free) == (20, 2 * (chunk - 13), 40 - 2 * chunk)
    manager.free(one)
    assert manager.num_free_blocks == manager.allocator.largest_run == 40


def test_enough_free_slots_in_pieces_are_not_enough():
    manager = memory(30, max_model_len=30)
    groups = [group(number, 9, 1) for number in range(3)]
    for one in groups:
        manager.allocate(one, 9)
    manager.free(groups[0])
    manager.free(groups[2])
    large = group(3, 11, 1)
    assert manager.fits(large) and not manager.can_allocate(group(4, 20, 1), 20)
    assert (manager.num_free_blocks, manager.allocator.largest_run, manager.can_allocate(large, 11)) == (20, 10, False)
    manager.free(groups[1])
    assert manager.can_allocate(large, 11) and not manager.fits(group(5, 16, 15, n=2))
