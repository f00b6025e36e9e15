"""The batching of vLLM V1: decodes first, then as much of the prompts as a token budget allows.

Each iteration has a budget of tokens. Every running sequence gets its next token out of it first; what is left goes to
prompts, first come, first served, and a prompt that does not fit is cut: the rest of it follows in the next iterations.
A long prompt then delays the others' next tokens by one budget's worth of work, not by all of its own.

Memory follows the work: a paged prompt gets the blocks of one chunk at a time, as in V1 (a contiguous one holds its
whole reservation from the first chunk on). When a running sequence finds no block, the newest is driven out and
recomputed later; there is no swapping. A prompt starts only if all of it would fit now, and takes its blocks chunk by
chunk. If it finds none for the next one, the last of the prompts under way is driven out: with one, that is itself.

Like `repro.engine.scheduler`, this knows neither time nor tokens' values. It schedules requests of one sequence: V1
treats n samples as n requests (`samples_of`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from repro.checks import flag, user_facing, whole
from repro.engine.events import Event
from repro.engine.memory.interface import KVCacheManager
from repro.engine.scheduler import Prefill, Scheduler, SchedulerOutput
from repro.engine.scheduler_config import Batching, PreemptionMode, SchedulerConfig
from repro.engine.sequence import Request, SequenceGroup
from repro.errors import UserError


@user_facing
@dataclass(frozen=True)
class ChunkedPrefillConfig(SchedulerConfig):
    """`max_num_batched_tokens` is the token budget of an iteration; `max_model_len` bounds prompt + output (tokens).

    Without `enable_chunked_prefill` a prompt runs whole or waits. The budget must then be more than any prompt could
    take. A prompt longer than `long_prefill_token_threshold` (0: none is) takes no more than that of an iteration, so
    that others run beside it."""

    preemption: PreemptionMode = PreemptionMode.RECOMPUTE
    max_num_batched_tokens: int | None = 2048
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0

    @property
    def longest_prompt(self) -> int | None:
        """Any: prompts are cut."""
        return None

    def __post_init__(self) -> None:
        super().__post_init__()
        budget = self.max_num_batched_tokens
        if budget is None:
            raise UserError("max_num_batched_tokens = None: chunked prefill needs a token budget, such as 2048")
        if self.batching is not Batching.ITERATION or self.preemption is not PreemptionMode.RECOMPUTE:
            raise UserError(
                f"batching = {self.batching.value}, preemption = {getattr(self.preemption, 'value', self.preemption)}: "
                "this scheduler knows only batching by iteration and preemption by recomputation"
            )
        whole("max_model_len", self.max_model_len, 1)
        flag("enable_chunked_prefill", self.enable_chunked_prefill)
        threshold = whole("long_prefill_token_threshold", self.long_prefill_token_threshold)
        if threshold and not self.enable_chunked_prefill:
            raise UserError(
                f"long_prefill_token_threshold = {threshold} cuts prompts, which needs enable_chunked_prefill; give 0"
            )
        if not self.enable_chunked_prefill and budget <= self.max_model_len:
            raise UserError(
                f"max_num_batched_tokens = {budget} is not greater than max_model_len = {self.max_model_len}, and "
                "without chunked prefill a prompt of that length could never run; set enable_chunked_prefill, or "
                f"raise max_num_batched_tokens above {self.max_model_len}"
            )


class ChunkedPrefillScheduler(Scheduler):
    """Used like `Scheduler`. `prefilling` has the groups whose prompts are under way, in the order in which they
    started, and how many tokens of each are stored."""

    def __init__(
        self,
        manager: KVCacheManager,
        config: ChunkedPrefillConfig = ChunkedPrefillConfig(),
        log: list[Event] | None = None,
    ) -> None:
        super().__init__(manager, config, log)
        self.config: ChunkedPrefillConfig = config
        self.prefilling: dict[SequenceGroup, int] = {}

    def check(self, group: SequenceGroup) -> None:
        """UserError if the group has several sequences or beams, or is longer than `max_model_len`."""
        request = group.request
        if group.is_beam:
            raise UserError(
                f"{request}: beam search runs beams as one group, which chunked prefill does not know; use a system "
                "with the paper's scheduler, such as vllm"
            )
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
        return bool(self.prefilling) or super().has_work

    def stored_lengths(self, iteration: int) -> Iterator[tuple[SequenceGroup, int]]:
        yield from super().stored_lengths(iteration)
        yield from self.prefilling.items()

    def holders(self) -> Collection[SequenceGroup]:
        return {**self.running, **self.prefilling} if self.prefilling else self.running

    def withdraw(self, group: SequenceGroup) -> int:
        return self.prefilling.pop(group) if group in self.prefilling else super().withdraw(group)

    # Prompts

    def admit(self, output: SchedulerOutput) -> None:
        """Give prompts what decodes have left of the budget: first those under way, then waiting ones."""
        budget = self.config.max_num_batched_tokens - self.running.num_seqs
        self._served = list(self.running)  # they run in this iteration, so none of them can be driven out any more
        for group in list(self.prefilling):
            if group in self.prefilling:  # not driven out meanwhile
                budget -= self._continue(output, group, budget)
        if not output.preempted:
            self._start(output, budget)

    def end_of_chunk(self, start: int, total: int, budget: int) -> int:
        """Where a chunk ends that begins with token `start` of `total`."""
        threshold = self.config.long_prefill_token_threshold
        return min(total, start + (min(budget, threshold) if threshold else budget))

    def _continue(self, output: SchedulerOutput, group: SequenceGroup, budget: int) -> int:
        """The next chunk of a prompt under way, if there is budget and memory for it; the tokens that it takes."""
        if budget == 0:
            return 0
        start = self.prefilling[group]
        end = self.end_of_chunk(start, group.num_stored(self.iteration), budget)
        size = self.manager.block_size
        first_of_blocks = range(self.manager.cdiv(start) * size + 1, end + 1, size)  # token numbers, counted from 1
        while self.manager.grows and len(first_of_blocks) > self.manager.num_free_blocks:
            self.preempt(group, output)
            if group not in self.prefilling:
                return 0
        for num_tokens in first_of_blocks:
            self.manager.append_slots(group, num_tokens)
        if self.manager.grows and first_of_blocks:
            self.record("append", group, blocks=len(first_of_blocks))
        self._compute(output, group, start, end)
        return end - start

    def _start(self, output: SchedulerOutput, budget: int) -> None:
        """Waiting groups in their order, until one finds no budget or no memory."""
        most = self.config.max_num_seqs
        while self.waiting and budget > 0 and self.running.num_seqs + len(self.prefilling) < most:
            if not self.may_start(group := self.waiting[0]):
                return
            cached, total = self.manager.prefix_tokens(group), group.num_stored(self.iteration)
            end = self.end_of_chunk(cached, total, budget)
            if end < total and not self.config.enable_chunked_prefill:
                return
            if not self.manager.can_allocate(group, total):
                return
            self.waiting.popleft()
            self.manager.allocate(group, end)
            self.record("admit", group, tokens=end - cached)
            self._compute(output, group, cached, end)
            budget -= end - cached

    def _compute(self, output: SchedulerOutput, group: SequenceGroup, start: int, end: int) -> None:
        """Schedule tokens start .. end - 1 of a prompt; with its last one the group starts to run."""
        output.num_prefill_tokens += end - start
        self._served.append(group)
        if end < group.num_stored(self.iteration):
            self.prefilling[group] = end
            output.chunks.append(Prefill(group, end, start))
        else:
            self.prefilling.pop(group, None)
            self.running.enter(group, self.iteration)
            output.prefills.append(Prefill(group, end, start))


def samples_of(request: Request, first_id: int) -> list[Request]:
    """The requests, numbered from `first_id`, as which V1 runs a request of several samples. Beams stay together."""
    if request.sampling.use_beam_search:
        return [replace(request, request_id=first_id)]
    one = replace(request.sampling, n=1)
    return [replace(request, request_id=first_id + index, sampling=one) for index in range(request.sampling.n)]
