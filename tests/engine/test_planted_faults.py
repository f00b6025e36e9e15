"""Faults planted into the memory managers and the scheduler: the random runs of fuzz.py notice every one of them.

A check that nothing can fail is no check. Each fault is one that a person could make; the search has as many runs to
find it as the suite makes without it, and what it finds is made small.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fuzz import fault, first_failure, smallest

from repro.engine.chunked import ChunkedPrefillScheduler
from repro.engine.memory import CacheOp, ContiguousKVCacheManager, OpKind, PagedKVCacheManager
from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.memory.buddy import BuddyAllocator
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager
from repro.engine.running import RunningSet
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Sequence, SequenceGroup

RUNS = 800

Patch = Callable[[pytest.MonkeyPatch], None]
PLANTED: dict[str, Patch] = {}


def planted(patch: Patch) -> Patch:
    PLANTED[patch.__name__.replace("_", " ")] = patch
    return patch


# Block allocator and block tables


@planted
def a_shared_block_is_written_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def append(self: PagedKVCacheManager, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        if (num_tokens - 1) % self.block_size == 0:
            for seq in group.seqs:
                self._tables[seq].append(self.gpu.allocate())
        return []

    monkeypatch.setattr(PagedKVCacheManager, "append_slots", append)


@planted
def the_copy_on_write_is_not_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    append = PagedKVCacheManager.append_slots
    monkeypatch.setattr(PagedKVCacheManager, "append_slots", lambda *arguments: append(*arguments)[1:])


@planted
def a_block_is_free_although_others_refer_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: BlockAllocator, blocks: list[int]) -> None:
        for block in blocks:
            if self.ref_counts[block]:
                self.ref_counts[block] = 0
                self._free.append(block)

    monkeypatch.setattr(BlockAllocator, "release", release)


@planted
def a_fork_does_not_count_its_references(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = PagedKVCacheManager.fork

    def forked(self: PagedKVCacheManager, *arguments: object) -> list[CacheOp]:
        share, self.gpu.share = self.gpu.share, lambda blocks, holders=1: None
        try:
            return fork(self, *arguments)
        finally:
            self.gpu.share = share

    monkeypatch.setattr(PagedKVCacheManager, "fork", forked)


@planted
def the_last_block_of_a_sequence_is_never_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def free(self: PagedKVCacheManager, seq: Sequence) -> None:
        self.gpu.release(self._tables.pop(seq)[:-1])

    monkeypatch.setattr(PagedKVCacheManager, "free_sequence", free)


@planted
def the_watermark_is_forgotten_at_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(self: PagedKVCacheManager, group: SequenceGroup, num_tokens: int) -> bool:
        return self.blocks_needed(group, num_tokens) <= self.num_free_blocks

    monkeypatch.setattr(PagedKVCacheManager, "can_allocate", can)


@planted
def every_request_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCacheManager, "fits", lambda self, group: True)


@planted
def a_diverged_group_shares_its_whole_prompt_when_it_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PagedKVCacheManager.layout

    def shared(self: PagedKVCacheManager, group: SequenceGroup, num_tokens: int) -> tuple[int, int, int]:
        prefix, common, own = layout(self, group, num_tokens)
        return (prefix, common + 1, own - 1) if own else (prefix, common, own)

    monkeypatch.setattr(PagedKVCacheManager, "layout", shared)


# Swapping


@planted
def swap_space_is_taken_for_endless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCacheManager, "can_swap_out", lambda self, group: True)


@planted
def a_swap_in_forgets_the_room_for_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def can(self: PagedKVCacheManager, group: SequenceGroup, num_tokens: int) -> bool:
        return len(self._movable_blocks(group)) <= self.num_free_blocks

    monkeypatch.setattr(PagedKVCacheManager, "can_swap_in", can)


@planted
def copies_are_made_before_swaps(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def sorted_ops(self: Scheduler) -> SchedulerOutput:
        output = schedule(self)
        output.cache_ops.sort(key=lambda op: op.kind is not OpKind.COPY)
        return output

    monkeypatch.setattr(Scheduler, "schedule", sorted_ops)


@planted
def swapped_blocks_come_back_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = PagedKVCacheManager.swap_in

    def reversed_targets(self: PagedKVCacheManager, group: SequenceGroup) -> list[CacheOp]:
        ops = swap_in(self, group)
        return [op._replace(dst=other.dst) for op, other in zip(ops, ops[::-1])]

    monkeypatch.setattr(PagedKVCacheManager, "swap_in", reversed_targets)


# Contiguous memory


@planted
def a_buddy_merges_with_one_that_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BuddyAllocator.release

    def merged(self: BuddyAllocator, start: int) -> None:
        size = self._sizes[start]
        release(self, start)
        if size < self.max_chunk and start in self._free[size] and start % (2 * size) == 0:
            del self._free[size][start]
            self._free[2 * size][start] = None

    monkeypatch.setattr(BuddyAllocator, "release", merged)


@planted
def the_prompt_is_not_copied_to_the_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContiguousKVCacheManager, "spread_prompt", lambda self, group, num_tokens: [])


@planted
def copies_that_wait_for_the_next_iteration_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_copy_later", lambda self, group, copies: None)


# The scheduler


@planted
def the_earliest_is_driven_out(monkeypatch: pytest.MonkeyPatch) -> None:
    first = lambda self: [min(self.running, key=lambda group: group.request.request_id)]  # noqa: E731
    monkeypatch.setattr(Scheduler, "holders", first)


@planted
def a_short_request_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler.admit

    def shortest_first(self: Scheduler, output: SchedulerOutput) -> None:
        self.waiting = type(self.waiting)(sorted(self.waiting, key=lambda group: group.request.output_tokens))
        admit(self, output)

    monkeypatch.setattr(Scheduler, "admit", shortest_first)


@planted
def requests_start_while_others_are_swapped_out(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def blind(self: Scheduler) -> SchedulerOutput:
        swapped, self.swapped = self.swapped, []
        output = schedule(self)
        self.swapped = sorted(swapped + self.swapped, key=lambda group: group.request.request_id)
        return output

    monkeypatch.setattr(Scheduler, "schedule", blind)


@planted
def a_preempted_request_loses_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def lossy(self: Scheduler, requester: SequenceGroup, output: SchedulerOutput) -> None:
        preempt(self, requester, output)
        next(reversed(output.preempted)).generated_before -= 1

    monkeypatch.setattr(Scheduler, "preempt", lossy)


@planted
def requests_end_one_token_early(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = RunningSet.ending
    monkeypatch.setattr(RunningSet, "ending", lambda self, iteration: ending(self, iteration + 1))


@planted
def iterations_are_advanced_together_past_the_last_free_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(self: Scheduler, output: SchedulerOutput, max_iterations: int) -> None:
        output.num_iterations = min(max_iterations, self.running.next_end - self.iteration)

    monkeypatch.setattr(Scheduler, "extend", extend)


@planted
def the_queue_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Scheduler.admit

    def lazy(self: Scheduler, output: SchedulerOutput) -> None:
        if self.num_preemptions == 0:
            admit(self, output)

    monkeypatch.setattr(Scheduler, "admit", lazy)


@planted
def a_refused_request_stays_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def added(self: Scheduler, request: object) -> SequenceGroup:
        try:
            return add(self, request)
        except ValueError:
            self.waiting.append(SequenceGroup(request))
            raise

    monkeypatch.setattr(Scheduler, "add", added)


# What came after the paper: policies, requests taken back, prompts in parts, a prefix cache


@planted
def one_that_has_its_slot_is_driven_out(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def forgetful(self: Scheduler, requester: SequenceGroup, output: SchedulerOutput) -> None:
        self._served.clear()
        preempt(self, requester, output)

    monkeypatch.setattr(Scheduler, "preempt", forgetful)


@planted
def a_request_taken_back_keeps_its_swap_space(monkeypatch: pytest.MonkeyPatch) -> None:
    def free_swapped(self: PagedKVCacheManager, group: SequenceGroup) -> None:
        prefix = self.prefix_tokens(group) // self.block_size
        for seq in group.seqs:
            self.gpu.release(self._tables.pop(seq)[:prefix])

    monkeypatch.setattr(PagedKVCacheManager, "free_swapped", free_swapped)


@planted
def a_request_taken_back_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = Scheduler.abort

    def lazy(self: Scheduler, group: SequenceGroup) -> list[SequenceGroup]:
        return [] if group in self.running else abort(self, group)

    monkeypatch.setattr(Scheduler, "abort", lazy)


@planted
def a_static_batch_waits_for_one_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler._finish
    monkeypatch.setattr(Scheduler, "_finish", lambda self, ended: finish(self, ended) if ended else [])


@planted
def a_later_request_does_not_find_its_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def at_the_end(self: Scheduler, request: object) -> SequenceGroup:
        group = add(self, request)
        self.waiting.remove(group)
        self.waiting.append(group)
        return group

    monkeypatch.setattr(Scheduler, "add", at_the_end)


@planted
def a_part_of_a_prompt_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = ChunkedPrefillScheduler._compute

    def skipping(self: ChunkedPrefillScheduler, output: SchedulerOutput, group: SequenceGroup, start: int, end: int):
        compute(self, output, group, start, end)
        if group in self.prefilling and start:
            self.prefilling[group] += 1

    monkeypatch.setattr(ChunkedPrefillScheduler, "_compute", skipping)


@planted
def a_prompt_under_way_cannot_be_driven_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedPrefillScheduler, "holders", Scheduler.holders)


@planted
def prompts_under_way_wait_for_one_another_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = Scheduler.preempt

    def patient(self: Scheduler, requester: SequenceGroup, output: SchedulerOutput) -> None:
        if requester in getattr(self, "prefilling", ()):
            raise AssertionError("nobody makes room")
        preempt(self, requester, output)

    monkeypatch.setattr(Scheduler, "preempt", patient)


@planted
def a_block_is_found_before_all_of_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = PrefixCachingKVCacheManager._keep
    monkeypatch.setattr(
        PrefixCachingKVCacheManager,
        "_keep",
        lambda self, group, first, num_tokens: keep(
            self, group, first, len(self._tables[group.seqs[0]]) * self.block_size
        ),
    )


@pytest.mark.parametrize("name", PLANTED)
def test_the_search_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    failing = first_failure(range(RUNS))
    assert failing is not None, f"{RUNS} random runs do not notice that {name}"
    least = smallest(failing)
    assert fault(least) is not None and len(least.asks) <= 4, least
