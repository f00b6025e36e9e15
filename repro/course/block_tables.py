"""Lesson 2: block tables (§4.2, §4.3). Where a token lies, and when a sequence needs another block."""

from __future__ import annotations

import random
from collections.abc import Callable

from repro.course.grading import Case, Grade, ask_all, drawn, grade, unchosen
from repro.course.shadow import Fault, Shadow, run
from repro.engine.memory import CacheOp, PagedKVCacheManager
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import SequenceGroup
from repro.words import count

SlotOf = Callable[[int, list[int], int], tuple[int, int]]


class Manager(PagedKVCacheManager):
    """The engine's paged memory without `append_slots`, which the student writes."""

    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        raise NotImplementedError("append_slots is the task")


def grade_slot_of(slot_of: SlotOf) -> Grade:
    """Ask for the place of many tokens, the first ones first."""
    rng = random.Random(0)
    places = [(size, position) for size in (4, 2, 1) for position in range(12)]
    places += [(rng.choice((8, 16)), rng.randrange(200)) for _ in range(50)]
    questions = []
    for size, position in places:
        table = rng.sample(range(300), position // size + 1)
        asked = f"position {position} (the first is 0), blocks of {size} slots, block table {table}"
        questions.append(((position, table, size), (table[position // size], position % size), asked))
    return ask_all("where a token lies", "place", slot_of, questions)


def grade_append_slots(student: type[Manager]) -> Grade:
    """Let sequences grow token by token under the student's manager, then run whole traces."""

    def play(case: Case) -> None:
        _token_by_token(student(64, case.block_size, 0.0), case)
        run(Shadow(Scheduler(student(case.num_blocks, case.block_size, 0.0)), case.seed), case.requests())

    example = Case((unchosen(3, 4), unchosen(2, 3)), num_blocks=8, block_size=4)
    cases = [example, *map(drawn, range(40)), *(drawn(seed, tight=True) for seed in range(40))]
    return grade("append_slots", play, cases, student, Manager, "append_slots")


def _token_by_token(manager: Manager, case: Case) -> None:
    """One request after the other, without a scheduler: `append_slots` is asked for each token, not only where a block
    opens. Fault if a table is not as long as its tokens need, or if two of its entries are one block."""
    for request, _ in case.requests():
        group = SequenceGroup(request)
        manager.allocate(group, request.prompt_tokens)
        for num_tokens in range(request.prompt_tokens + 1, request.prompt_tokens + request.output_tokens):
            manager.append_slots(group, num_tokens)
            table, right = manager.block_table(group.seqs[0]), manager.cdiv(num_tokens)
            if len(table) != right or len(set(table)) != right:
                text = f"After token number {num_tokens} of request {request.request_id} its block table is {table}"
                which = ", no two of them the same" if right > 1 else ""
                raise Fault("table", f"{text}; {num_tokens} tokens lie in {count(right, 'block')}{which}")
        manager.free(group)
