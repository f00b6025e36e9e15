"""The batching of vLLM V1: decodes first, then as much of the prompts as a token budget allows.

Each iteration has a budget of tokens. Every running sequence gets its next token out of it first; what is left goes to
prompts, first come, first served, and a prompt that does not fit is cut: the rest of it follows in the next iterations.
A long prompt then delays the others' next tokens by one budget's worth of work, not by all of its own.

Memory follows the work: a paged prompt gets the blocks of one chunk at a time, as in V1 (a contiguous one holds its
whole reservation from the first chunk on). When a running sequence finds no block, the newest is driven out and
recomputed later; there is no swapping. At most one prompt is under way, it was admitted last, and so it is the newest.
If it finds no blocks for its next chunk it waits with what it has.

Like `repro.engine.scheduler`, this knows neither time nor tokens' values. It schedules requests of one sequence: V1
treats n samples as n requests. Only the simulated executor runs it: the real one samples after every prefill, and a
chunk has nothing to sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from repro.checks import flag, user_facing, whole
from repro.engine.events import Event
from repro.engine.memory.interface import KVCacheManager
from repro.engine.scheduler import Batching, PreemptionMode, Prefill, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.errors import UserError


@user_facing
@dataclass(frozen=True)
class ChunkedPrefillConfig(SchedulerConfig):
    """`max_num_batched_tokens` is the token budget of an iteration; `max_model_len` bounds prompt + output (tokens).

    Without `enable_chunked_prefill` a prompt runs whole or waits. The budget must then be more than any prompt could
    take."""

    preemption: PreemptionMode = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: int | None = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.max_num_batched_tokens
        if budget is None:
            raise UserError("max_num_batched_tokens = None: chunked prefill needs a token budget, such as 2048")
        if self.batching is not Batching.ITERATION or self.preemption is not PreemptionMode.RECOMPUTE:
            raise UserError(
                f"batching = {self.batching.value}, preemption = {self.preemption.value}: this scheduler knows only "
                "batching by iteration and preemption by recomputation"
            )
        whole("max_model_len", self.max_model_len, 1)
        flag("enable_chunked_prefill", self.enable_chunked_prefill)
        if not self.enable_chunked_prefill and budget <= self.max_model_len:
            raise UserError(
                f"max_num_batched_tokens = {budget} is not greater than max_model_len = {self.max_model_len}, and "
                "without chunked prefill a prompt of that length could never run; set enable_chunked_prefill, or "
                f"raise max_num_batched_tokens above {self.max_model_len}"
            )


@dataclass(slots=True)
class ChunkedOutput(SchedulerOutput):
    """`chunks` are parts of prompts that lack the prompt's end: they give no token. The end of a prompt is in
    `prefills`.

    `num_prefill_tokens` counts both."""

    chunks: list[Prefill] = field(default_factory=list)


class ChunkedPrefillScheduler(Scheduler):
    """Used like `Scheduler`. `prefilling` is the group whose prompt is under way, with `num_computed` tokens of it
    stored."""

    output_type = ChunkedOutput

    def __init__(
        self,
        manager: KVCacheManager,
        config: ChunkedPrefillConfig = ChunkedPrefillConfig(),
        log: list[Event] | None = None,
    ) -> None:
        super().__init__(manager, config, log)
        self.config: ChunkedPrefillConfig = config
        self.prefilling: SequenceGroup | None = None
        self.num_computed = 0

    def check(self, group: SequenceGroup) -> None:
        """UserError if the group has several sequences or is longer than `max_model_len`."""
        request = group.request
        if len(group.seqs) > 1:
            raise UserError(
                f"{request}: chunked prefill takes one sequence a request; submit {len(group.seqs)} requests instead"
            )
        if request.prompt_tokens + request.output_tokens > self.config.max_model_len:
            raise UserError(
                f"{request} is longer than max_model_len = {self.config.max_model_len}; shorten it or raise that"
            )

    @property
    def has_work(self) -> bool:
        return self.prefilling is not None or super().has_work

    def can_repeat(self, output: ChunkedOutput) -> bool:
        return super().can_repeat(output) and not output.chunks

    def stored_lengths(self, iteration: int) -> Iterator[tuple[SequenceGroup, int]]:
        yield from super().stored_lengths(iteration)
        if self.prefilling is not None:
            yield self.prefilling, self.num_computed

    # Prompts

    def admit(self, output: ChunkedOutput) -> None:
        """Give prompts what decodes have left of the budget: first the one under way, then waiting ones."""
        budget = self.config.max_num_batched_tokens - self.running.num_seqs
        self._start(output, budget - self._continue(output, budget))

    def _continue(self, output: ChunkedOutput, budget: int) -> int:
        """The next chunk of the prompt under way, if there is budget and memory for it; the tokens that it takes."""
        group = self.prefilling
        if group is None or budget == 0:
            return 0
        start, end = self.num_computed, min(self.num_computed + budget, group.num_stored(self.iteration))
        size = self.manager.block_size
        first_of_blocks = range(self.manager.cdiv(start) * size + 1, end + 1, size)  # token numbers, counted from 1
        if self.manager.grows and len(first_of_blocks) > self.manager.num_free_blocks:
            return 0
        for num_tokens in first_of_blocks:
            self.manager.append_slots(group, num_tokens)
        if self.manager.grows and first_of_blocks:
            self.record("append", group, blocks=len(first_of_blocks))
        self._compute(output, group, start, end)
        return end - start

    def _start(self, output: ChunkedOutput, budget: int) -> None:
        """Waiting groups in their order, until one has to be cut or does not fit."""
        most = self.config.max_num_seqs
        while self.waiting and self.prefilling is None and budget > 0 and self.running.num_seqs < most:
            group = self.waiting[0]
            cached, total = self.manager.prefix_tokens(group), group.num_stored(self.iteration)
            end = min(cached + budget, total)
            if end < total and not self.config.enable_chunked_prefill:
                return
            if not self.manager.can_allocate(group, end):
                return
            self.waiting.popleft()
            self.manager.allocate(group, end)
            self.record("admit", group, tokens=end - cached)
            self._compute(output, group, cached, end)
            budget -= end - cached

    def _compute(self, output: ChunkedOutput, group: SequenceGroup, start: int, end: int) -> None:
        """Schedule tokens start .. end - 1 of a prompt; with its last one the group starts to run."""
        output.num_prefill_tokens += end - start
        if end < group.num_stored(self.iteration):
            self.prefilling, self.num_computed = group, end
            output.chunks.append(Prefill(group, end, start))
        else:
            self.prefilling = None
            self.running.enter(group, self.iteration)
            output.prefills.append(Prefill(group, end, start))

    def withdraw_latest(self) -> tuple[SequenceGroup, int]:
        if self.prefilling is None:
            return super().withdraw_latest()
        group, self.prefilling = self.prefilling, None  # it started last
        return group, self.num_computed
