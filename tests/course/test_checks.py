"""No check of the course is passed by doing nothing, by an answer that is right for its example alone, or by another
mistake than the planted one."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable

import pytest

from repro.course import batching, block_tables, copy_on_write, preemption, prefix_caching, waste
from repro.engine.memory import CacheOp, OpKind
from repro.engine.sequence import Status


def tables(opens: Callable[[int, int], bool]) -> type[block_tables.Manager]:
    class Manager(block_tables.Manager):
        def append_slots(self, group, num_tokens):
            for seq in group.seqs:
                if opens(num_tokens, self.block_size):
                    self._tables[seq].append(self.gpu.allocate())
            return []

    return Manager


def sharing(copies: Callable[[int], bool]) -> type[copy_on_write.Manager]:
    """Copies where `copies` says so of the reference count."""

    class Manager(copy_on_write.Manager):
        def append_slots(self, group, num_tokens):
            ops = []
            for seq in group.seqs:
                table = self._tables[seq]
                if (num_tokens - 1) % self.block_size == 0:
                    table.append(self.gpu.allocate())
                elif copies(self.gpu.ref_counts[table[-1]]):
                    ops.append(CacheOp(OpKind.COPY, table[-1], self.gpu.allocate()))
                    self.gpu.release([table[-1]])
                    table[-1] = ops[-1].dst
            return ops

    return Manager


def move(op: CacheOp, gpu: list, cpu: list) -> None:
    source = cpu if op.kind is OpKind.SWAP_IN else gpu
    target = cpu if op.kind is OpKind.SWAP_OUT else gpu
    target[op.dst] = list(source[op.src])


def in_order(ops: list[CacheOp], gpu: list, cpu: list, last: OpKind | None = None) -> None:
    for op in sorted(ops, key=lambda op: op.kind is last):
        move(op, gpu, cpu)


def without_a_copy(ops: list[CacheOp], gpu: list, cpu: list) -> None:
    for op in ops:
        (cpu if op.kind is OpKind.SWAP_OUT else gpu)[op.dst] = (cpu if op.kind is OpKind.SWAP_IN else gpu)[op.src]


def withdrawing(stored: int, back: bool = True) -> type[preemption.Scheduler]:
    class Withdrawing(preemption.Scheduler):
        def withdraw(self, group):
            num_stored = group.num_stored(self.iteration) - 1
            if back:
                self.running.leave(group, self.iteration, Status.WAITING)
            group.generated_before += stored
            return num_stored

    return Withdrawing


def fitting(extra: int) -> type[preemption.Manager]:
    class Fitting(preemption.Manager):
        def fits(self, group):
            tokens = group.request.prompt_tokens + group.request.output_tokens + extra
            return self.cdiv(tokens) <= self.num_blocks

    return Fitting


def batch(decodes: list[int], prompts: list[tuple[int, int]], budget: int, most: int = 99, cut: int = 0) -> dict:
    made = dict.fromkeys(decodes, 1)
    left = budget - len(decodes)
    for request, tokens in prompts[:most]:
        made[request] = min(tokens, left - cut) if tokens > left else tokens
        left -= made[request]
    return made


def hashes(tokens: list[int], size: int, end: int = 0, seed: Callable[[int], object] = lambda at: b"") -> list[bytes]:
    made, before = [], b""
    for start in range(0, len(tokens) - size + 1 + end, size):
        text = f"{before!r} {seed(start)!r} {tokens[start : start + size]}"
        made.append(before := hashlib.sha256(text.encode()).digest())
    return made


def find(contents: list, found: dict, num_tokens: int, size: int) -> list[int]:
    asked = contents[: (num_tokens - 1) // size]
    return [found[content] for content in itertools.takewhile(found.__contains__, asked)]


def without_looking_at_gaps(contents: list, found: dict, num_tokens: int, size: int) -> list[int]:
    return [found[content] for content in contents[: (num_tokens - 1) // size] if content in found]


COUNT = itertools.count()
#: the check, an answer, and the rule that it breaks
WRONG = [
    (waste.grade_account, lambda *lengths: None, "books"),
    (waste.grade_account, lambda stored, final, planned, held: dict.fromkeys(("used",), stored), "books"),
    (waste.grade_reserve, lambda asked, longest: 0, "raises"),
    (waste.grade_reserve, lambda asked, longest: asked.output_tokens, "raises"),
    (waste.grade_reserve, lambda asked, longest: 2 * asked.max_tokens, "waste"),
    (block_tables.grade_slot_of, lambda position, table, size: (table[position // 4], position % 4), "place"),
    (block_tables.grade_slot_of, lambda position, table, size: (position // size, position % size), "place"),
    (block_tables.grade_append_slots, type("Manager", (block_tables.Manager,), {}), "missing"),
    (block_tables.grade_append_slots, object, "missing"),
    (block_tables.grade_append_slots, tables(lambda number, size: False), "table"),
    (block_tables.grade_append_slots, tables(lambda number, size: True), "table"),
    (block_tables.grade_append_slots, tables(lambda number, size: (number - 1) % 4 == 0), "table"),
    (copy_on_write.grade_append_slots, sharing(lambda count: False), "shared write"),
    (copy_on_write.grade_append_slots, sharing(lambda count: count == 2), "shared write"),
    (copy_on_write.grade_append_slots, sharing(lambda count: True), "raises"),
    (copy_on_write.grade_apply, lambda ops, gpu, cpu: None, "contents"),
    (copy_on_write.grade_apply, without_a_copy, "contents"),
    (copy_on_write.grade_apply, lambda *given: in_order(*given, last=OpKind.SWAP_OUT), "contents"),
    (preemption.grade_victim, lambda groups: None, "raises"),
    (preemption.grade_victim, lambda groups: max(groups, key=lambda group: group.num_generated), "order"),
    (preemption.grade_withdraw, type("Withdrawing", (preemption.Scheduler,), {}), "missing"),
    (preemption.grade_withdraw, withdrawing(1), "lost token"),
    (preemption.grade_withdraw, withdrawing(0, back=False), "raises"),
    (preemption.grade_fits, fitting(-2), "standstill"),
    (preemption.grade_fits, fitting(0), "refused"),
    (batching.grade_next_batch, lambda decodes, prompts, budget: {}, "idle"),
    (batching.grade_next_batch, lambda decodes, prompts, budget: None, "raises"),
    (batching.grade_next_batch, lambda decodes, prompts, budget: batch(decodes, prompts, 6), "idle"),
    (batching.grade_next_batch, lambda *given: batch(*given, most=1), "idle"),
    (batching.grade_next_batch, lambda *given: batch(*given, cut=-1), "budget"),
    (batching.grade_next_batch, lambda *given: {**batch(*given), 99: 1}, "stranger"),
    (batching.grade_next_batch, lambda decodes, prompts, budget: batch(decodes, prompts[::-1], budget), "order"),
    (batching.grade_chunk_end, lambda start, total, budget: start, "nothing to compute"),
    (batching.grade_chunk_end, lambda start, total, budget: start + budget, "beyond"),
    (batching.grade_chunk_end, lambda start, total, budget: min(total, start + 6), "budget"),
    (prefix_caching.grade_block_hashes, lambda tokens, size: [], "full blocks"),
    (prefix_caching.grade_block_hashes, lambda tokens, size: hashes(tokens, size, end=1), "full blocks"),
    (prefix_caching.grade_block_hashes, lambda *given: hashes(*given, seed=lambda at: next(COUNT)), "never found"),
    (prefix_caching.grade_block_hashes, lambda tokens, size: [(at, tokens[at]) for at in range(0, 4, 2)], "raises"),
    (prefix_caching.grade_find, lambda *given: None, "raises"),
    (prefix_caching.grade_find, lambda *given: [], "hits"),
    (prefix_caching.grade_find, lambda contents, found, number, size: find(contents, found, number - 1, size), "hits"),
    (prefix_caching.grade_find, without_looking_at_gaps, "hits"),
    (prefix_caching.grade_can_start, lambda needed, found, counts, free: False, "waits in vain"),
    (prefix_caching.grade_can_start, lambda needed, found, counts, free: True, "no block"),
    (prefix_caching.grade_can_start, lambda needed, found, counts, free: needed + len(found) <= free, "waits in vain"),
]


@pytest.mark.parametrize(("check", "answer", "rule"), WRONG)
def test_another_wrong_answer_is_refused_too(check, answer, rule: str) -> None:
    assert (said := check(answer)).rule == rule, said


def test_what_the_engine_cannot_use_is_told_from_what_raises() -> None:
    class Forgetful(copy_on_write.Manager):
        def append_slots(self, group, num_tokens):
            pass

    class Raising(copy_on_write.Manager):
        def append_slots(self, group, num_tokens):
            self.gpu.release([99])

    said = copy_on_write.grade_append_slots(Forgetful).found
    assert said.startswith("The engine cannot use what your code returned (TypeError")
    said = copy_on_write.grade_append_slots(Raising).found
    assert said.startswith("Your code raises IndexError") and "in append_slots, line " in said
