"""Lesson 3: sharing and copy-on-write (§4.4), and the order in which an executor moves blocks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from repro.course.grading import Case, Grade, drawn, grade, unchosen
from repro.course.shadow import Blocks, Shadow, run
from repro.engine.memory import CacheOp, PagedKVCacheManager
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import SequenceGroup

Apply = Callable[[Items[CacheOp], Blocks, Blocks], None]
SWAPPING = SchedulerConfig(preemption=PreemptionMode.SWAP)


class Manager(PagedKVCacheManager):
    """The engine's paged memory without `append_slots`, which the student writes."""

    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        raise NotImplementedError("append_slots is the task")


def grade_append_slots(student: type[Manager]) -> Grade:
    """Run parallel samples and beams under the student's manager."""

    def play(case: Case) -> None:
        run(Shadow(Scheduler(student(case.num_blocks, case.block_size, 0.0)), case.seed), case.requests())

    example = Case((unchosen(3, 3, n=2),), num_blocks=8, block_size=4)
    cases = [example, *(drawn(seed, sequences=3) for seed in range(60))]
    cases += [drawn(seed, sequences=3, tight=True) for seed in range(60)]
    return grade("append_slots", play, cases, student, Manager, "append_slots")


def grade_apply(apply: Apply) -> Grade:
    """Let the student move the blocks of an engine that copies and swaps; at the end, 200 random traces."""

    def play(case: Case) -> None:
        manager = PagedKVCacheManager(case.num_blocks, case.block_size, 0.0, case.cpu_blocks)
        run(Shadow(Scheduler(manager, SWAPPING), case.seed, apply), case.requests())

    cases = [drawn(seed, sequences=3, swap=True, tight=True) for seed in range(200)]
    return grade("the order of copies", play, cases)
