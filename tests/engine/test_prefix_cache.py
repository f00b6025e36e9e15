"""Automatic prefix caching: what is found is what was computed, whatever is freed, driven out, swapped or cut."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from fuzz import draw
from shadow import CachingShadow

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.memory.prefix_cache import CachingBlockAllocator, PrefixCachingKVCacheManager, block_hashes
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError

RUNS = 400


def run(seed: int) -> Counter[str]:
    """One random run of `fuzz` with a prefix cache, in small blocks, so that prompts have several."""
    case = draw(seed)
    usual = {"prefixes": (), "chunked": False, "order": "fcfs", "victim": "last"}
    case = replace(case, system="paged", batching="iteration", caching=True, **usual)
    asks = tuple(replace(ask, prefix=None) for ask in case.asks)
    case = replace(case, asks=asks, block_size=min(case.block_size, 4))
    scheduler = case.scheduler()
    shadow = CachingShadow(scheduler, case.seed, case.stop_rate, case.lookahead)
    seen = shadow.run([request for request in case.requests() if is_taken(scheduler, request)])
    return seen + Counter(hit=scheduler.manager.num_hit, asked=scheduler.manager.num_asked)


def is_taken(scheduler: Scheduler, request: Request) -> bool:
    group = SequenceGroup(request)
    try:
        scheduler.check(group)
    except UserError:
        return False
    return scheduler.manager.fits(group)


def test_every_token_is_where_its_table_says_whatever_is_found() -> None:
    seen = sum(map(run, range(RUNS)), Counter())
    assert seen["hit"] > 500 and seen["cached"] == seen["hit"] < seen["asked"]
    for event in ("finish", "preempt", "recompute", "swap_out", "copy", "fork", "stop", "together"):
        assert seen[event] > 10, event


def tokens(*parts: tuple[int, int]) -> list[int]:
    """A prompt of parts: first token id and length."""
    return [first + at for first, length in parts for at in range(length)]


def started(manager: PrefixCachingKVCacheManager, number: int, prompt: int, output: int = 4, n: int = 1):
    group = SequenceGroup(Request(number, 0.0, prompt, output, SamplingParams(n=n)))
    assert manager.can_allocate(group, prompt)
    manager.allocate(group, prompt)
    return group


def cache(num_blocks: int, *prompts: list[int], size: int = 4) -> PrefixCachingKVCacheManager:
    return PrefixCachingKVCacheManager(
        num_blocks, size, 0.0, hashes=lambda request: block_hashes(prompts[request.request_id], size)
    )


def test_what_is_alike_is_held_once_and_the_last_token_is_computed_all_the_same() -> None:
    same = tokens((0, 12))
    manager = cache(20, same, same, same + [99])
    first, second, third = (started(manager, number, 12 + (number == 2)) for number in range(3))
    tables = [manager.block_table(group.seqs[0]) for group in (first, second, third)]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2] and tables[0][2] != tables[1][2]
    assert tables[2][2] == tables[0][2]  # one token more than three blocks: all three are found
    assert [manager.prefix_tokens(group) for group in (first, second, third)] == [0, 8, 12]
    assert (manager.num_asked, manager.num_hit) == (37, 20)
    assert manager.num_free_blocks == 20 - 3 - 1 - 1


def test_a_block_is_found_after_its_holder_has_gone_until_it_is_used_for_something_else() -> None:
    a, b = tokens((0, 9)), tokens((100, 9))
    manager = cache(5, a, b, a, a)
    manager.free(started(manager, 0, 9))
    manager.free(started(manager, 1, 9))  # takes the two blocks that never held anything, and one of a's
    last = started(manager, 2, 9)
    assert manager.prefix_tokens(last) in (0, 4, 8) and manager.num_free_blocks == 2
    manager.free(last)
    assert manager.prefix_tokens(SequenceGroup(Request(3, 0.0, 9, 4, SamplingParams()))) == 8


def test_the_end_of_a_prompt_is_given_up_before_its_beginning() -> None:
    a = tokens((0, 13))
    manager = cache(4, a, tokens((100, 5)), a)
    manager.free(started(manager, 0, 13))
    started(manager, 1, 5)  # two blocks: the one without a hash, and a's third
    assert manager.prefix_tokens(SequenceGroup(Request(2, 0.0, 13, 4, SamplingParams()))) == 8


def test_found_blocks_that_are_free_count_as_taken() -> None:
    a = tokens((0, 8))
    manager = cache(3, a, a + tokens((50, 4)), tokens((70, 4)))
    manager.free(started(manager, 0, 8))
    started(manager, 2, 4)  # of three free blocks one; a's two are left
    assert not manager.can_allocate(SequenceGroup(Request(1, 0.0, 12, 4, SamplingParams())), 12)


def test_a_time_stamp_in_front_defeats_it_and_a_salt_keeps_apart() -> None:
    prompt = tokens((0, 64))
    stamped = [7_000_000, *prompt]
    assert set(block_hashes(prompt, 16)).isdisjoint(block_hashes(stamped, 16))
    assert set(block_hashes(prompt, 16)).isdisjoint(block_hashes(prompt, 16, b"a user"))
    assert block_hashes(prompt[:63], 16) == block_hashes(prompt, 16)[:3] and block_hashes(prompt[:15], 16) == []


def test_hashes_are_the_same_in_every_process() -> None:
    code = "from repro.engine.memory.prefix_cache import block_hashes as b; print(b(range(40), 16)[-1].hex())"
    said = {subprocess.check_output([sys.executable, "-c", code], text=True, env=None) for _ in range(2)}
    assert said == {block_hashes(range(40), 16)[-1].hex() + "\n"}


def test_a_prompt_in_chunks_is_found_as_far_as_it_is_computed() -> None:
    a = tokens((0, 20))
    manager = cache(30, a, a)
    scheduler = ChunkedPrefillScheduler(manager, ChunkedPrefillConfig(max_num_seqs=2, max_num_batched_tokens=9))
    for number in range(2):
        scheduler.add(Request(number, float(number), 20, 3, SamplingParams()))
    found = []
    while scheduler.has_work:
        output = scheduler.schedule()
        found += [prefill.num_cached for prefill in (*output.chunks, *output.prefills)]
        scheduler.update(output)
    assert found[:3] == [0, 9, 18] and found[3:] == [16] and manager.num_free_blocks == 30


def test_what_a_cache_does_not_do_is_refused() -> None:
    manager = cache(4, [])
    with pytest.raises(UserError, match="finds shared prefixes by itself"):
        manager.store_prefix("system", 32)
    allocator = CachingBlockAllocator(2)
    with pytest.raises(ValueError, match="block 0 is free and cannot be shared"):
        allocator.share([0])
    with pytest.raises(IndexError, match="3 blocks asked for, 2 free"):
        allocator.allocate_many(3)


FAULTS = {
    "a free block is taken over without being taken off the free list": (
        CachingBlockAllocator,
        "share",
        lambda self, blocks, holders=1: [
            self.ref_counts.__setitem__(block, self.ref_counts[block] + holders) for block in blocks
        ],
    ),
    "a block keeps its hash when it is handed out": (
        CachingBlockAllocator,
        "allocate",
        lambda self: (block := next(iter(self._free)), self._free.pop(block), self.ref_counts.__setitem__(block, 1))[0],
    ),
    "the whole prompt is found": (
        PrefixCachingKVCacheManager,
        "match",
        lambda self, group: [self.gpu.found[one] for one in self.hashes(group.request) if one in self.gpu.found],
    ),
    "found blocks count as free": (
        PrefixCachingKVCacheManager,
        "can_allocate",
        lambda self, group, num_tokens: self.blocks_needed(group, num_tokens) <= self.gpu.num_free,
    ),
    "blocks that are not full are found": (
        PrefixCachingKVCacheManager,
        "_keep",
        lambda self, group, first, num_tokens: [
            self.gpu.keep(block, content)
            for block, content in zip(self._tables[group.seqs[0]][1:], self.hashes(group.request))
        ],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, IndexError, ValueError, KeyError)):
        for seed in range(60):
            run(seed)
