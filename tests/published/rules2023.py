"""What vLLM 0.1.7 decides otherwise than our scheduler, each as a setting on top of it.

With all settings on, our scheduler and memory manager have to decide as 0.1.7 does, step by step. With one off, what
differs is that setting's doing. Each setting says in one line what 0.1.7 does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

from published.same import Ends
from repro.engine.memory import PagedKVCacheManager
from repro.engine.running import RunningSet
from repro.engine.scheduler import Prefill, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Sequence, SequenceGroup, Status, by_rank

SWAP_SPACE_FULL = "swap space is full"
ONE_LEFT = "a group that lost sequences waits to be computed again"
#: more than any run has
NO_LIMIT = 10**9


@dataclass(frozen=True)
class Rules2023:
    """The settings; `KINDS` has what each stands for."""

    free_block_each: bool = True
    prompts_apart: bool = True
    singles_uncounted: bool = True
    outgrown_dropped: bool = True
    full_swap_fails: bool = True
    one_left_fails: bool = True

    def without(self, name: str) -> Rules2023:
        return replace(self, **{name: False})


KINDS = {
    "free_block_each": "wants a free block for each sequence of a group that goes on, also where none is needed",
    "prompts_apart": "runs prompts in steps of their own, and decodes wait meanwhile",
    "singles_uncounted": "counts a request of one sequence as none against max_num_seqs when it starts",
    "outgrown_dropped": "drops a preempted request that has outgrown max_num_batched_tokens, without an answer",
    "full_swap_fails": "fails when swap space is full",
    "one_left_fails": "fails when a preempted group of several sequences with one left would start again",
}
#: nothing of 0.1.7: our scheduler as it is
OURS = Rules2023(**dict.fromkeys(KINDS, False))


class Manager2023(PagedKVCacheManager):
    """Our manager with 0.1.7's questions. `may_resume` is the scheduler's say in swapping in."""

    rules = Rules2023()

    def may_resume(self, group: SequenceGroup) -> bool:
        return True

    def can_append_slots(self, group: SequenceGroup, num_tokens: int) -> bool:
        if self.rules.free_block_each:
            return len(group.seqs) <= self.num_free_blocks
        return super().can_append_slots(group, num_tokens)

    def can_swap_in(self, group: SequenceGroup, num_tokens: int) -> bool:
        room = super().can_swap_in(group, num_tokens)
        if self.rules.free_block_each:
            needed = len(self._movable_blocks(group)) + len(group.seqs) + self.watermark_blocks
            room = needed <= self.num_free_blocks
        return room and self.may_resume(group)

    def can_swap_out(self, group: SequenceGroup) -> bool:
        room = super().can_swap_out(group)
        if not room and self.rules.full_swap_fails:
            raise Ends(SWAP_SPACE_FULL)
        return room


class _AllWrite(RunningSet):
    """Asks for every running group, not only for those whose next token takes a block."""

    def writers(self, iteration: int, fresh: object = ()) -> list[SequenceGroup]:
        return sorted(self, key=by_rank)


class Scheduler2023(Scheduler):
    """Our scheduler with 0.1.7's rules, as far as `rules` has them. Its own methods do what no rule touches."""

    def __init__(self, manager: Manager2023, config: SchedulerConfig, rules: Rules2023) -> None:
        super().__init__(manager, config)
        self.rules = manager.rules = rules
        self.most_seqs = config.max_num_seqs
        manager.may_resume = self._may_resume
        if rules.free_block_each:
            self.running = _AllWrite(manager.block_size)
        self.dropped: list[SequenceGroup] = []
        self._prompts_only = False
        self._prefills: list[Prefill] = []  # what this step starts
        self.held_back: list[SequenceGroup] = []  # they run, but not in a step of prompts

    # Prompts apart

    def schedule(self) -> SchedulerOutput:
        if not self.rules.prompts_apart:
            return super().schedule()
        self._prompts_only = True
        if not self.swapped:
            ran = list(self.running)
            output = SchedulerOutput(self.iteration)
            self._admit(output)
            if output.prefills:
                # A running group gets a token an iteration, so what waits a step has to leave for it.
                for group in ran:
                    self.running.leave(group, self.iteration, Status.WAITING)
                self.held_back = ran
                return output
        self._prompts_only = False
        return super().schedule()

    def update(
        self,
        output: SchedulerOutput,
        parents: dict[SequenceGroup, list[int]] | None = None,
        stopped: list[tuple[SequenceGroup, Sequence]] | None = None,
    ) -> list[SequenceGroup]:
        fresh = self._fresh if self._prompts_only else []
        ended = super().update(output, parents, stopped)
        self._fresh = fresh + self._fresh  # a copy on write that waited for the step of prompts
        for group in self.held_back:
            self.running.enter(group, self.iteration)
        self.held_back = []
        return ended

    def admit(self, output: SchedulerOutput) -> None:
        if not self.rules.prompts_apart:
            self._admit(output)

    # Who starts

    def _admit(self, output: SchedulerOutput) -> None:
        """Start waiting groups, and drop those that are to be dropped when their turn comes."""
        plain = self.config
        for group in self._to_drop():
            place = self.waiting.index(group)
            behind = [self.waiting.pop() for _ in range(len(self.waiting) - place)][::-1]
            self._admit_within(output, plain)
            reached = not self.waiting
            self.waiting.extend(behind)
            if not reached:
                return
            self._check_start(group)
            self.waiting.popleft()
            group.status = Status.FINISHED
            self.dropped.append(group)
        self._admit_within(output, plain)

    def _admit_within(self, output: SchedulerOutput, plain: SchedulerConfig) -> None:
        changes: dict[str, object] = {}
        if self.rules.prompts_apart:  # the whole budget is for prompts
            left = plain.max_num_batched_tokens or NO_LIMIT
            changes["max_num_batched_tokens"] = left - output.num_prefill_tokens + self.running.num_seqs
        if self.rules.singles_uncounted:  # may_start counts
            changes["max_num_seqs"] = NO_LIMIT
        self.config = SimpleNamespace(**vars(plain) | changes)
        self._prefills = output.prefills
        try:
            super().admit(output)
        finally:
            self.config = plain

    def _to_drop(self) -> Iterator[SequenceGroup]:
        if self.rules.outgrown_dropped:
            limit = self.config.max_num_batched_tokens or NO_LIMIT
            yield from [group for group in self.waiting if group.num_stored(self.iteration) > limit]

    def may_start(self, group: SequenceGroup) -> bool:
        self._check_start(group)
        several = group.request.sampling.n > 1
        if not self.rules.singles_uncounted:
            return True
        new_singles = sum(prefill.group.request.sampling.n == 1 for prefill in self._prefills)
        return self.running.num_seqs - new_singles + (len(group.seqs) if several else 0) <= self.most_seqs

    def _check_start(self, group: SequenceGroup) -> None:
        if self.rules.one_left_fails and group.request.sampling.n > 1 and group.num_preemptions:
            raise Ends(ONE_LEFT)

    def _may_resume(self, group: SequenceGroup) -> bool:
        """0.1.7 asks again, as its cap may have been passed; it counts a swapped group only if that has beams."""
        if not self.rules.singles_uncounted:
            return True
        return self.running.num_seqs + (len(group.seqs) if group.is_beam else 0) <= self.most_seqs
