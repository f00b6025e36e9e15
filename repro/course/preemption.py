"""Lesson 4: preemption (§4.5). Who is driven out, what it keeps, and who must never be let in."""

from __future__ import annotations

from repro.course.grading import Case, Grade, drawn, grade, unchosen
from repro.course.shadow import Fault, Shadow, run
from repro.engine import scheduler as engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.policies import Victim
from repro.engine.scheduler import PreemptionMode, SchedulerConfig
from repro.engine.sequence import SequenceGroup

RECOMPUTE = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE)


class Scheduler(engine.Scheduler):
    """The engine's scheduler without `withdraw`, which the student writes."""

    def withdraw(self, group: SequenceGroup) -> int:
        raise NotImplementedError("withdraw is the task")


class Manager(PagedKVCacheManager):
    """The engine's paged memory without `fits`, which the student writes."""

    def fits(self, group: SequenceGroup) -> bool:
        raise NotImplementedError("fits is the task")


def _manager(case: Case) -> PagedKVCacheManager:
    return PagedKVCacheManager(case.num_blocks, case.block_size, 0.0)


def _tight() -> list[Case]:
    return [drawn(seed, tight=True) for seed in range(100)]


def grade_victim(victim: Victim) -> Grade:
    """Run pools that are too small for all, with the student's choice of whom to drive out."""

    def play(case: Case) -> None:
        config = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE, victim=victim)
        run(Shadow(engine.Scheduler(_manager(case), config), case.seed), case.requests())

    return grade("the victim", play, [Case((unchosen(4, 6), unchosen(4, 6)), num_blocks=4, block_size=4), *_tight()])


def grade_withdraw(student: type[Scheduler]) -> Grade:
    """Run pools that are too small for all, under the student's way of stopping a request."""

    def play(case: Case) -> None:
        run(Shadow(student(_manager(case), RECOMPUTE), case.seed), case.requests())

    example = Case((unchosen(3, 6), unchosen(3, 6)), num_blocks=4, block_size=4)
    return grade("withdraw", play, [example, *_tight()], student, Scheduler, "withdraw")


def grade_fits(student: type[Manager]) -> Grade:
    """Submit requests that fit and requests that never do. What is let in must end, and what fits must be let in."""

    def play(case: Case) -> None:
        for request, _ in case.requests():
            group = SequenceGroup(request)
            if _manager(case).fits(group) and not student(case.num_blocks, case.block_size, 0.0).fits(group):
                text = f"Request {request.request_id} is refused, though an empty pool can take it to its end"
                raise Fault("refused", text)
        run(Shadow(engine.Scheduler(student(case.num_blocks, case.block_size, 0.0), RECOMPUTE)), case.requests())

    example = Case((unchosen(3, 8),), num_blocks=2, block_size=4)
    small = [Case(case.asks, 1 + case.seed % 4, case.block_size, seed=case.seed) for case in _tight()]
    return grade("fits", play, [example, *small], student, Manager, "fits")
