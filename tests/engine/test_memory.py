"""The managers against recounting by hand.

What managers do under a scheduler is tested in test_shadow_store; here is what they promise call by call.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from loads import DECODINGS, Load, contiguous, loads, paged
from shadow import Shadow

from repro.engine.memory import (
    CacheOp,
    ContiguousKVCacheManager,
    KVCacheManager,
    MemoryUsage,
    OpKind,
    PagedKVCacheManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError


def group_of(
    prompt: int, output: int = 8, n: int = 1, beam: bool = False, prefix_id: str | None = None
) -> SequenceGroup:
    return SequenceGroup(Request(0, 0.0, prompt, output, SamplingParams(n=n, use_beam_search=beam), prefix_id))


def tables(manager: KVCacheManager, group: SequenceGroup) -> list[list[int]]:
    return [list(manager.block_table(seq)) for seq in group.seqs]


# Paged manager


@pytest.mark.parametrize("size", (1, 2, 4, 16))
def test_a_block_is_taken_exactly_when_the_last_one_is_full(size: int) -> None:
    manager, group = PagedKVCacheManager(64, size), group_of(5, 40)
    manager.allocate(group, 5)
    for num_tokens in range(5, 45):
        if num_tokens > 5:
            assert manager.append_slots(group, num_tokens) == []
        assert len(manager.block_table(group.seqs[0])) == manager.cdiv(num_tokens) == (num_tokens + size - 1) // size
        assert manager.num_free_blocks == 64 - manager.cdiv(num_tokens)
    manager.free(group)
    assert manager.num_free_blocks == 64


def test_parallel_samples_share_the_prompt_and_copy_its_last_block_on_write() -> None:
    """Fig. 8: of three holders of the partly filled block two copy it, and the last one writes in place."""
    manager, group = PagedKVCacheManager(16, 4), group_of(6, n=3)
    manager.allocate(group, 6)
    before = tables(manager, group)
    assert before[0] == before[1] == before[2] and manager.num_free_blocks == 14
    ops = manager.append_slots(group, 7)
    after = tables(manager, group)
    full, last = before[0]
    assert {table[0] for table in after} == {full} and len({table[1] for table in after}) == 3
    assert after[2][1] == last
    assert ops == [CacheOp(OpKind.COPY, last, after[0][1]), CacheOp(OpKind.COPY, last, after[1][1])]
    assert manager.append_slots(group, 8) == []
    assert manager.append_slots(group, 9) == [] and manager.num_free_blocks == 16 - 1 - 3 - 3
    manager.free_sequence(group.seqs.pop())
    assert manager.num_free_blocks == 16 - 1 - 2 - 2
    manager.free(group)
    assert manager.num_free_blocks == 16


def test_a_full_last_block_is_shared_without_any_copy() -> None:
    manager, group = PagedKVCacheManager(16, 4), group_of(8, n=3)
    manager.allocate(group, 8)
    assert manager.append_slots(group, 9) == []
    assert manager.num_free_blocks == 16 - 2 - 3


def test_fork_shares_everything_and_writes_copy() -> None:
    """Fig. 9: beams 1 and 3 continue beam 0, beam 2 survives; what only the losers held is free at once."""
    manager, group = PagedKVCacheManager(32, 4), group_of(4, 20, n=4, beam=True)
    manager.allocate(group, 4)
    for num_tokens in range(5, 11):
        manager.append_slots(group, num_tokens)
    assert manager.num_free_blocks == 32 - 1 - 4 * 2
    old = tables(manager, group)
    assert manager.fork(group, [0, 0, 2, 0], 10) == []
    assert tables(manager, group) == [old[0], old[0], old[2], old[0]]
    assert manager.num_free_blocks == 32 - 1 - 2 * 2
    ops = manager.append_slots(group, 11)
    assert [op.kind for op in ops] == [OpKind.COPY] * 2 and {op.src for op in ops} == {old[0][-1]}
    assert len({table[-1] for table in tables(manager, group)}) == 4
    assert {table[1] for table in tables(manager, group)} == {old[0][1], old[2][1]}  # full blocks stay shared


def test_a_sequence_can_be_forked_into_another_group() -> None:
    """As decoding algorithms do that are made of fork, append and free (§5.2)."""
    manager, parent, child = PagedKVCacheManager(3, 4), group_of(6), group_of(6)
    manager.allocate(parent, 6)
    manager.fork_sequence(parent.seqs[0], child.seqs[0])
    assert tables(manager, child) == tables(manager, parent) and manager.num_free_blocks == 1
    first, last = tables(manager, parent)[0]
    [copy] = manager.append_slots(child, 7)
    assert copy == CacheOp(OpKind.COPY, last, copy.dst) and tables(manager, child) == [[first, copy.dst]]
    assert manager.append_slots(parent, 7) == [] and tables(manager, parent) == [[first, last]]
    manager.free(parent)
    assert manager.num_free_blocks == 1
    manager.free(child)
    assert manager.num_free_blocks == 3


def test_fork_needs_no_free_block_and_keeps_survivors_in_place() -> None:
    manager, group = PagedKVCacheManager(5, 2, watermark=0), group_of(2, 20, n=4, beam=True)
    manager.allocate(group, 2)
    manager.append_slots(group, 3)
    assert manager.num_free_blocks == 0
    manager.fork(group, [3, 3, 3, 3], 3)
    assert manager.num_free_blocks == 3


@pytest.mark.parametrize("parents", ([1, 0, 2], [1, 2, 2], [0, 0], [0, 0, 1]))
@pytest.mark.parametrize(
    "build",
    (
        lambda: PagedKVCacheManager(8, 2),
        lambda: ContiguousKVCacheManager(32, 2, reservation=reserve_oracle, max_model_len=16),
    ),
)
def test_a_beam_step_in_which_a_parent_loses_its_place_is_refused_before_anything_changes(
    build: Callable[[], KVCacheManager], parents: list[int]
) -> None:
    manager, group = build(), group_of(3, n=3, beam=True)
    manager.allocate(group, 3)
    before, free = tables(manager, group), manager.num_free_blocks
    with pytest.raises(ValueError, match="parents"):
        manager.fork(group, parents, 3)
    assert tables(manager, group) == before and manager.num_free_blocks == free


def test_admission_leaves_the_watermark_free() -> None:
    manager = PagedKVCacheManager(100, 4, watermark=0.05)
    assert manager.watermark_blocks == 5
    assert manager.can_allocate(group_of(95 * 4), 95 * 4)
    assert not manager.can_allocate(group_of(95 * 4 + 1), 95 * 4 + 1)
    group = group_of(95 * 4)
    manager.allocate(group, 95 * 4)
    assert manager.can_append_slots(group, 95 * 4 + 1)  # growth may use it


def test_what_fits_is_what_an_empty_pool_can_take_to_the_end() -> None:
    manager = PagedKVCacheManager(10, 4, watermark=0.1)
    assert manager.fits(group_of(20, 17)) and not manager.fits(group_of(20, 18))  # stores 36 tokens, not 37
    assert manager.fits(group_of(8, 5, n=7)) and not manager.fits(group_of(8, 5, n=8))  # 2 + n x 1 blocks, 1 kept free
    manager.store_prefix("p", 8)
    assert manager.fits(group_of(20, 9)) and not manager.fits(group_of(20, 10))  # 7 blocks beside the prefix
    assert manager.fits(group_of(20, 17, prefix_id="p")) and not manager.fits(group_of(20, 18, prefix_id="p"))


def test_swap_moves_each_shared_block_once_and_back_all_or_nothing() -> None:
    manager, group = PagedKVCacheManager(12, 4, watermark=0, num_cpu_blocks=5), group_of(10, 20, n=3)
    manager.allocate(group, 10)
    manager.append_slots(group, 11)
    before = tables(manager, group)
    distinct = {block for table in before for block in table}
    assert manager.can_swap_out(group) and len(distinct) == 5
    ops = manager.swap_out(group)
    assert {op.src for op in ops} == distinct and len(ops) == len({op.dst for op in ops}) == 5
    assert {op.kind for op in ops} == {OpKind.SWAP_OUT}
    assert manager.num_free_blocks == 12 and manager.cpu.num_free == 0
    moved = {op.src: op.dst for op in ops}
    assert tables(manager, group) == [[moved[block] for block in table] for table in before]
    other = group_of(28, 8)
    manager.allocate(other, 28)  # 5 blocks free: just enough for the group
    assert manager.can_swap_in(group, 12)
    manager.append_slots(other, 29)
    assert not manager.can_swap_in(group, 12)
    manager.free(other)
    back = {op.src: op.dst for op in manager.swap_in(group)}
    assert tables(manager, group) == [[back[moved[block]] for block in table] for table in before]
    assert sorted(manager.gpu.ref_counts, reverse=True)[:5] == [3, 3, 1, 1, 1]
    assert manager.cpu.num_free == 5


def test_swap_in_counts_the_next_token_and_the_watermark() -> None:
    manager, group = PagedKVCacheManager(10, 4, watermark=0.1, num_cpu_blocks=10), group_of(8, 20, n=2)
    manager.allocate(group, 8)
    manager.swap_out(group)
    other = group_of(4, 40)
    manager.allocate(other, 4)
    for num_tokens in range(5, 21):
        manager.append_slots(other, num_tokens)
    assert manager.num_free_blocks == 5 and manager.can_swap_in(group, 9)  # 2 blocks, a new one each, 1 left
    manager.append_slots(other, 21)
    assert not manager.can_swap_in(group, 9)


def test_too_little_swap_space_is_said_in_advance() -> None:
    manager, group = PagedKVCacheManager(8, 4, num_cpu_blocks=1), group_of(8)
    manager.allocate(group, 8)
    assert not manager.can_swap_out(group)
    with pytest.raises(IndexError):
        manager.swap_out(group)
    assert manager.num_free_blocks == 6 and manager.cpu.num_free == 1


def test_a_stored_prefix_is_shared_by_requests_and_outlives_them() -> None:
    manager = PagedKVCacheManager(20, 4, num_cpu_blocks=20)
    assert manager.store_prefix("de-en", 11) == 8  # whole blocks
    prefix = manager.prefix_blocks("de-en")
    first, second = group_of(13, prefix_id="de-en"), group_of(10, n=2, prefix_id="de-en")
    for group in (first, second):
        assert manager.prefix_tokens(group) == 8
        manager.allocate(group, group.request.prompt_tokens)
    assert manager.tokens_to_compute(first, 13) == 5 and manager.tokens_to_compute(second, 10) == 2
    assert all(table[:2] == prefix for table in tables(manager, first) + tables(manager, second))
    assert [manager.gpu.ref_counts[block] for block in prefix] == [4, 4]
    assert manager.num_free_blocks == 20 - 2 - 2 - 1
    ops = manager.swap_out(first)
    assert len(ops) == 2 and not {op.src for op in ops} & set(prefix)  # the prefix stays
    manager.swap_in(first)
    manager.free(first)
    manager.free(second)
    assert [manager.gpu.ref_counts[block] for block in prefix] == [1, 1] and manager.num_free_blocks == 18


def test_the_last_prompt_token_is_always_computed() -> None:
    manager = PagedKVCacheManager(20, 4)
    manager.store_prefix("p", 16)
    for prompt, cached in ((1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16), (40, 16)):
        assert manager.prefix_tokens(group_of(prompt, prefix_id="p")) == cached
    assert manager.prefix_tokens(group_of(40)) == manager.prefix_tokens(group_of(40, prefix_id="other")) == 0


def test_recomputing_a_diverged_group_shares_the_prompts_full_blocks_only() -> None:
    manager, group = PagedKVCacheManager(30, 4), group_of(10, 20, n=3)
    assert manager.tokens_to_compute(group, 10) == 10
    assert manager.tokens_to_compute(group, 15) == 8 + 3 * 7
    assert manager.blocks_needed(group, 15) == 2 + 3 * 2
    manager.allocate(group, 15)
    assert manager.num_free_blocks == 30 - 8
    assert manager.append_slots(group, 16) == []
    single = group_of(10, 20)
    assert manager.tokens_to_compute(single, 15) == 15 and manager.blocks_needed(single, 15) == 4


@settings(max_examples=60)
@given(loads("mixed"))
def test_can_append_slots_is_exact(load: Load) -> None:
    """Neither refuses what would work (a needless preemption) nor allows what fails half-way."""

    class Exact(PagedKVCacheManager):
        def can_append_slots(self, group: SequenceGroup, num_tokens: int) -> bool:
            answer = super().can_append_slots(group, num_tokens)
            trial = PagedKVCacheManager(self.num_blocks, self.block_size)
            trial.gpu, trial._tables = (
                copy.deepcopy(self.gpu),
                {seq: list(table) for seq, table in self._tables.items()},
            )
            try:
                trial.append_slots(group, num_tokens)
                works = True
            except IndexError:
                works = False
            assert answer == works
            return answer

    def exact(load: Load, num_blocks: int) -> KVCacheManager:
        return Exact(num_blocks, load.block_size, load.watermark, load.cpu_blocks)

    Shadow(load.scheduler(exact, load.config(PreemptionMode.BY_GROUP)), load.seed, load.stop_rate).run(load.requests)


# Contiguous manager


def test_reservations() -> None:
    request = group_of(100, 65).request
    assert reserve_max(request, 2048) == 2048
    assert reserve_oracle(request, 2048) == 65
    assert reserve_pow2(request, 2048) == 128
    assert [reserve_pow2(group_of(1, output).request, 2048) for output in (1, 2, 3, 64, 1025)] == [1, 2, 4, 64, 2048]


@pytest.mark.parametrize(
    "reservation, planned, blocks", ((reserve_max, 2048, 128), (reserve_pow2, 228, 16), (reserve_oracle, 165, 16))
)
def test_each_sequence_gets_one_run_of_consecutive_blocks(reservation, planned: int, blocks: int) -> None:
    manager, group = ContiguousKVCacheManager(983, 16, reservation=reservation), group_of(100, 65, n=2)
    assert manager.reserved_tokens(group) == planned  # prompt + r, at most 2048
    manager.allocate(group, 100)
    first, second = tables(manager, group)
    assert first == list(range(first[0], first[0] + blocks)) and second == list(range(second[0], second[0] + blocks))
    assert not set(first) & set(second) and manager.num_free_blocks == 983 - 2 * blocks
    assert manager.can_append_slots(group, 164) and manager.append_slots(group, 164) == []
    manager.free(group)
    assert manager.num_free_blocks == 983


def test_contiguous_beams_and_samples_copy_the_blocks_in_use() -> None:
    manager, group = (
        ContiguousKVCacheManager(64, 4, reservation=reserve_oracle, max_model_len=32),
        group_of(9, 8, n=3, beam=True),
    )
    manager.allocate(group, 9)
    a, b, c = tables(manager, group)
    copies = [CacheOp(OpKind.COPY, src, dst) for target in (b, c) for src, dst in zip(a[:3], target[:3])]
    assert manager.spread_prompt(group, 9) == copies
    assert manager.fork(group, [1, 1, 2], 13) == [CacheOp(OpKind.COPY, src, dst) for src, dst in zip(b[:4], a[:4])]
    assert tables(manager, group) == [a, b, c]


def test_a_reservation_that_does_not_cover_the_output_is_refused() -> None:
    manager = ContiguousKVCacheManager(128, 16, reservation=lambda request, limit: 10)
    with pytest.raises(UserError, match="must cover the output"):
        manager.fits(group_of(100, 12))
    assert manager.fits(group_of(100, 11))  # the last token's K/V is never stored


def test_contiguous_fits_looks_at_an_empty_pool() -> None:
    manager = ContiguousKVCacheManager(24, 16, reservation=reserve_oracle, max_model_len=2048)
    group = group_of(200, 57)  # 257 tokens: 17 blocks, rounded to 32
    assert not manager.fits(group) and not manager.can_allocate(group, 200)
    small = group_of(200, 56)
    manager.allocate(small, 200)
    assert manager.fits(group_of(200, 56)) and not manager.can_allocate(group_of(200, 56), 200)
    assert not manager.fits(group_of(200, 56, n=2))  # a second chunk of 16 blocks does not exist
    assert manager.can_allocate(group_of(64, 64), 64) and not manager.can_allocate(group_of(64, 65), 64)


def test_contiguous_memory_does_not_swap() -> None:
    manager, group = (ContiguousKVCacheManager(64, 4, reservation=reserve_oracle, max_model_len=32), group_of(9, 8))
    manager.allocate(group, 9)
    assert not manager.can_swap_out(group) and not manager.can_swap_in(group, 9)
    with pytest.raises(NotImplementedError, match="Contiguous"):
        manager.swap_out(group)


# Bad input


@pytest.mark.parametrize(
    "build, message",
    (
        (lambda: PagedKVCacheManager(0), "0"),
        (lambda: PagedKVCacheManager(8, 3), "block"),
        (lambda: PagedKVCacheManager(8, 512), "block"),
        (lambda: PagedKVCacheManager(8, watermark=1.0), "watermark"),
        (lambda: PagedKVCacheManager(8, watermark=-0.1), "watermark"),
        (lambda: PagedKVCacheManager(8, num_cpu_blocks=-1), "num_cpu_blocks"),
        (lambda: ContiguousKVCacheManager(0, reservation=reserve_max), "0"),
        (lambda: PagedKVCacheManager(4, 4).store_prefix("p", 16), "p"),
    ),
)
def test_bad_input_is_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build()


def test_a_prefix_is_stored_once_and_only_where_there_is_room() -> None:
    manager = PagedKVCacheManager(8, 4)
    manager.store_prefix("p", 8)
    with pytest.raises(UserError, match="already"):
        manager.store_prefix("p", 8)
    manager.allocate(group_of(20), 20)
    with pytest.raises(UserError, match="2 blocks"):
        manager.store_prefix("q", 8)


# Usage


def recount(manager: KVCacheManager, output: SchedulerOutput, shadow: Shadow) -> MemoryUsage:
    """Slot by slot: who uses it now, who will, and who holds it for nothing."""
    size = manager.block_size
    prefix = (
        {block for prefix_id in shadow._prefixes for block in manager.prefix_blocks(prefix_id)} if shadow.paged else ()
    )
    kind = {(block, slot): "token_states" for block in prefix for slot in range(size)}
    logical = physical = 0
    held = set(prefix)
    for group in shadow.scheduler.running:
        request = group.request
        final = (
            request.prompt_tokens + request.output_tokens - shadow.paged
        )  # a reservation includes the last token's slot
        for seq in group.seqs:
            table = manager.block_table(seq)
            stored = min(len(shadow.history[seq]), request.prompt_tokens + request.output_tokens - 1)
            planned = len(table) * size if shadow.paged else manager.reserved_tokens(group)
            held.update(table)
            logical += len(table)
            for position in range(len(table) * size):
                slot = table[position // size], position % size
                state = (
                    "token_states"
                    if position < stored
                    else "reserved"
                    if position < min(final, planned)
                    else "internal"
                    if position < planned
                    else "rounding"
                )
                assert kind.setdefault(slot, state) == state
    physical = len(held)
    counts = Counter(kind.values())
    return MemoryUsage(
        manager.num_blocks * size,
        counts["token_states"],
        counts["reserved"],
        counts["internal"],
        counts["rounding"],
        (manager.num_blocks - physical) * size,
        logical,
        physical,
    )


class Recounting(Shadow):
    """Compares usage() with a recount after every iteration."""

    def _check_contents(self, output: SchedulerOutput) -> None:
        super()._check_contents(output)
        last = output.iteration + output.num_iterations - 1
        usage = self.manager.usage(self.scheduler.stored_lengths(last))
        assert usage == recount(self.manager, output, self)
        self.seen["internal"] += usage.internal
        self.seen["reserved"] += usage.reserved
        self.seen["rounding"] += usage.rounding


@pytest.mark.parametrize(
    "kind, decoding",
    [("paged", decoding) for decoding in DECODINGS]
    + [(kind, decoding) for kind in ("max", "pow2", "oracle") for decoding in ("single", "mixed")],
)
def test_usage_is_what_a_recount_finds(kind: str, decoding: str) -> None:
    builds = {
        "paged": paged,
        "max": contiguous(reserve_max),
        "pow2": contiguous(reserve_pow2),
        "oracle": contiguous(reserve_oracle),
    }
    build = builds[kind]
    seen: Counter[str] = Counter()

    @settings(max_examples=20)
    @given(loads(decoding))
    def check(load: Load) -> None:
        batching = Batching.REQUEST if kind != "paged" and load.seed % 2 else Batching.ITERATION
        shadow = Recounting(
            load.scheduler(build, load.config(PreemptionMode.BY_GROUP, batching)),
            load.seed,
            0.0 if batching is Batching.REQUEST else load.stop_rate,
            load.lookahead,
        )
        for prefix_id, num_tokens in load.prefixes.items():
            shadow.store_prefix(prefix_id, num_tokens)
        seen.update(shadow.run(load.requests))

    check()
    assert seen["reserved"]
    assert bool(seen["internal"]) == (kind != "oracle")  # the oracle wastes nothing but what the buddy rounds up
    assert bool(seen["rounding"]) == (kind != "paged")


def test_a_usage_that_does_not_add_up_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="add up"):
        MemoryUsage(10, 5, 2, 1, 0, 1, 1, 1)
    with pytest.raises(AssertionError, match="add up"):
        MemoryUsage(10, 12, -2, 0, 0, 0, 1, 1)
