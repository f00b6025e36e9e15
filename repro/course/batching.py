"""Lesson 5: batching by iterations, with a token budget: decodes first, then prompts, cut where the budget ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items

from repro.course.grading import Ask, Case, Grade, grade, unchosen
from repro.course.shadow import Fault, Shadow
from repro.course.shadow import run as run_all
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import SchedulerOutput

#: (requests that decode, [(request, prompt tokens that are left)], budget) -> request -> tokens in the next iteration
NextBatch = Callable[[list[int], list[tuple[int, int]], int], dict[int, int]]
#: (the first token to compute, counted from 0, the prompt's length, the budget that is left) -> where the chunk ends
ChunkEnd = Callable[[int, int, int], int]


def _config(case: Case) -> ChunkedPrefillConfig:
    return ChunkedPrefillConfig(max_num_seqs=len(case.asks), max_num_batched_tokens=case.budget)


def _manager(case: Case) -> PagedKVCacheManager:
    """Room for everybody: this lesson is about time."""
    return PagedKVCacheManager(case.num_blocks, case.block_size, 0.0)


def _cases(example: Items[Ask], budget: int) -> list[Case]:
    cases = [Case(tuple(example), 64, 4, budget=budget)]
    for seed in range(100):
        rng = random.Random(seed)
        asks = [
            unchosen(rng.randint(1, 20), rng.randint(1, 8), arrival=rng.randint(0, 6)) for _ in range(rng.randint(1, 4))
        ]
        cases.append(Case(tuple(asks), 64, 4, budget=rng.randint(len(asks), 12), seed=seed))
    return cases


class _Asking(ChunkedPrefillScheduler):
    """The engine's scheduler, which asks the student before each iteration what it is going to run, and compares."""

    def __init__(self, case: Case, next_batch: NextBatch) -> None:
        super().__init__(_manager(case), _config(case))
        self.next_batch = next_batch

    def schedule(self) -> SchedulerOutput:
        decodes = [group.request.request_id for group in self.running]
        prompts = [(group.request.request_id, group.request.prompt_tokens - done) for group, done in self._prompts()]
        budget = self.config.max_num_batched_tokens
        said = self.next_batch(list(decodes), list(prompts), budget)
        output = super().schedule()
        right = dict.fromkeys(decodes, 1)
        for part in (*output.prefills, *output.chunks):
            right[part.group.request.request_id] = part.num_tokens - part.num_cached
        _compare({who: count for who, count in said.items() if count}, right, decodes, dict(prompts), budget, output)
        return output

    def _prompts(self) -> list[tuple]:
        """Who has a prompt to compute, in their order, and how many tokens of it are computed."""
        return [*self.prefilling.items(), *((group, 0) for group in self.waiting)]


def _compare(
    said: dict[int, int],
    right: dict[int, int],
    decodes: list[int],
    prompts: dict[int, int],
    budget: int,
    output: SchedulerOutput,
) -> None:
    """Fault if the student's batch is another one than the engine's; the rule says in which way."""
    now = f"Iteration {output.iteration}: the budget is {budget}, and your batch is {said}"
    strangers = [who for who in said if who not in decodes and who not in prompts]
    if strangers:
        raise Fault("stranger", f"{now}, but request {strangers[0]} has nothing to run")
    if sum(said.values()) > budget:
        raise Fault("budget", f"{now}, which is {sum(said.values())} tokens")
    for who in decodes:
        if said.get(who) != 1:
            raise Fault("starved", f"{now}: request {who} decodes and needs 1 token of it; it gets {said.get(who, 0)}")
    for who, count in said.items():
        if who in prompts and count > prompts[who]:
            raise Fault("beyond", f"{now}, but only {prompts[who]} prompt tokens of request {who} are left")
    if said != right:
        rule = "idle" if sum(said.values()) < sum(right.values()) else "order"
        raise Fault(rule, f"{now}; first come, first served it is {right}")


def grade_next_batch(next_batch: NextBatch) -> Grade:
    """Ask for the batch of each iteration of many traces. The engine's own decisions are the answer."""

    def play(case: Case) -> None:
        run_all(Shadow(_Asking(case, next_batch)), case.requests())

    return grade("the next batch", play, _cases([unchosen(3, 4), unchosen(12, 2, arrival=1)], budget=6))


class _Cutting(ChunkedPrefillScheduler):
    """The engine's scheduler, which cuts prompts where the student says."""

    def __init__(self, case: Case, chunk_end: ChunkEnd) -> None:
        super().__init__(_manager(case), _config(case))
        self.chunk_end = chunk_end

    def end_of_chunk(self, start: int, total: int, budget: int) -> int:
        return self.chunk_end(start, total, budget)


def grade_chunk_end(chunk_end: ChunkEnd) -> Grade:
    """Run many traces whose prompts are cut where the student says."""

    def play(case: Case) -> None:
        run_all(Shadow(_Cutting(case, chunk_end)), case.requests())

    return grade("where a prompt is cut", play, _cases([unchosen(9, 2), unchosen(4, 3)], budget=6))
