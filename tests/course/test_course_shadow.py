"""The course's shadow store is silent on the engine as it is, and speaks, by the rule that is broken, on one that is
not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from repro.course.grading import Ask, Case, drawn, fault, grade, smaller, unchosen
from repro.course.prefix_caching import drawn as drawn_alike
from repro.course.shadow import Fault, Shadow, run
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.memory import CacheOp, PagedKVCacheManager
from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager, block_hashes
from repro.engine.running import RunningSet
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig

RUNS = 150


def play(case: Case) -> None:
    """A trace on the engine: swapping where there is swap space, in chunks where there is a budget, with a prefix cache
    where prompts have tokens."""
    ids: dict[int, list[int]] = {}
    sizes = case.num_blocks, case.block_size, 0.0, case.cpu_blocks
    if any(None not in ask.prompt for ask in case.asks):
        hashes = lambda request: block_hashes(ids[request.request_id], case.block_size)
        manager = PrefixCachingKVCacheManager(*sizes, hashes=hashes)
    else:
        manager = PagedKVCacheManager(*sizes)
    if case.budget:
        config = ChunkedPrefillConfig(max_num_seqs=case.budget, max_num_batched_tokens=case.budget)
        scheduler = ChunkedPrefillScheduler(manager, config)
    else:
        mode = PreemptionMode.SWAP if case.cpu_blocks else PreemptionMode.RECOMPUTE
        scheduler = Scheduler(manager, SchedulerConfig(preemption=mode))
    run(Shadow(scheduler, case.seed, ids=ids), case.requests())


def cases() -> Iterator[Case]:
    for seed in range(RUNS):
        yield drawn(seed, sequences=3, swap=True, tight=True)
        yield drawn(seed, sequences=3, tight=True)
        yield replace(drawn(seed, tight=True), budget=5)
        yield drawn_alike(seed, tight=True)
        yield replace(drawn_alike(seed, tight=True), budget=5)


def test_it_is_silent_on_the_engine_as_it_is() -> None:
    assert grade("the engine", play, cases()).rule is None


def forgotten_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockAllocator, "release", lambda self, blocks: None)


def early_free(patch: pytest.MonkeyPatch) -> None:
    def release(self: BlockAllocator, blocks: list[int]) -> None:
        for block in blocks:
            if self.ref_counts[block]:
                self.ref_counts[block] = 0
                self._free.append(block)

    patch.setattr(BlockAllocator, "release", release)


def no_copy(patch: pytest.MonkeyPatch) -> None:
    append = PagedKVCacheManager.append_slots
    patch.setattr(PagedKVCacheManager, "append_slots", lambda *arguments: append(*arguments)[1:])


def one_block_for_all(patch: pytest.MonkeyPatch) -> None:
    def allocate(self: BlockAllocator) -> int:
        self.ref_counts[0] += 1
        return 0

    patch.setattr(BlockAllocator, "allocate", allocate)


def swapped_back_in_another_order(patch: pytest.MonkeyPatch) -> None:
    swap_in = PagedKVCacheManager.swap_in

    def reversed_targets(self: PagedKVCacheManager, group: object) -> list[CacheOp]:
        ops = swap_in(self, group)
        return [op._replace(dst=other.dst) for op, other in zip(ops, ops[::-1])]

    patch.setattr(PagedKVCacheManager, "swap_in", reversed_targets)


def found_too_early(patch: pytest.MonkeyPatch) -> None:
    keep = PrefixCachingKVCacheManager._keep

    def kept(self: PrefixCachingKVCacheManager, group: object, first: int, num_tokens: int) -> None:
        keep(self, group, first, len(self._tables[group.seqs[0]]) * self.block_size)

    patch.setattr(PrefixCachingKVCacheManager, "_keep", kept)


def ends_one_token_early(patch: pytest.MonkeyPatch) -> None:
    ending = RunningSet.ending
    patch.setattr(RunningSet, "ending", lambda self, iteration: ending(self, iteration + 1))


def skipped_part(patch: pytest.MonkeyPatch) -> None:
    compute = ChunkedPrefillScheduler._compute

    def skipping(self: ChunkedPrefillScheduler, output: object, group: object, start: int, end: int) -> None:
        compute(self, output, group, start, end)
        if group in self.prefilling and start:
            self.prefilling[group] += 1

    patch.setattr(ChunkedPrefillScheduler, "_compute", skipping)


def stands_still(patch: pytest.MonkeyPatch) -> None:
    admit = Scheduler.admit
    lazy = lambda self, output: None if self.num_preemptions else admit(self, output)
    patch.setattr(Scheduler, "admit", lazy)


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (forgotten_release, "references"),
        (early_free, "contents"),
        (no_copy, "contents"),
        (one_block_for_all, "shared write"),
        (swapped_back_in_another_order, "contents"),
        (found_too_early, "contents"),
        (ends_one_token_early, "length"),
        (skipped_part, "contents"),
        (stands_still, "standstill"),
    ],
)
def test_it_names_the_rule_that_a_planted_fault_breaks(plant, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    grades = grade("the engine", play, cases())
    assert grades.rule == rule, grades
    assert "Iteration" in grades.found and "request" in grades.shown


def test_the_trace_shown_is_the_smallest_that_breaks_the_same_rule() -> None:
    """One rule is broken by three tokens of output, another by a second request: neither is taken for the other."""

    def wrong(case: Case) -> None:
        if len(case.asks) > 2:
            raise Fault("many", "three requests")
        if any(ask.output > 2 for ask in case.asks):
            raise Fault("long", "three tokens")

    large = Case((unchosen(5, 9, n=3, beam=True, arrival=2), unchosen(4, 4)), 20, 4, 10, 8)
    found = grade("", wrong, [large])
    assert found.rule == "long"
    assert found.shown.endswith(
        ": 1 block of 4 slots, 1 in CPU memory; at most 1 token an iteration. request 0: 1 + 3 tokens."
    )
    assert grade("", wrong, [replace(large, asks=large.asks * 2)]).rule == "many"
    least = Case((Ask((None,), 1),), 1, 4)
    assert list(smaller(least)) == []


def test_what_raises_is_a_fault_with_its_line() -> None:
    def broken(case: Case) -> None:
        return case.asks[9]

    said = fault(broken, drawn(0, sequences=1))
    assert said.rule == "raises" and ", in broken, line " in str(said) and "IndexError" in str(said)
