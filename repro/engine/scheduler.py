"""Which sequences run in the next iteration: first come, first served, with preemption (§4.5).

The scheduler is told what memory there is (a KVCacheManager) and says what to run (SchedulerOutput). It never reads a
clock, touches a device, or sees a token, so the same lines decide in simulation, on a CPU and on a GPU, for vLLM and
for every baseline. Its work per iteration depends on what changes, not on the batch: which sequences cross a block
boundary follows from their lengths modulo the block size, and when one finishes is known when it starts.
"""

from __future__ import annotations

import enum
import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from repro.engine.errors import UserError
from repro.engine.events import Event
from repro.engine.memory.interface import CacheOp, KVCacheManager
from repro.engine.sequence import Request, Sequence, SequenceGroup, Status


class Batching(enum.Enum):
    ITERATION = "iteration"  # Orca and vLLM: requests join and leave between any two iterations
    REQUEST = "request"  # FasterTransformer: a batch is formed, runs until all have finished, and returns together


class PreemptionMode(enum.Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    BY_GROUP = "by_group"  # the authors' rule: swap a group of several sequences, recompute a single one


@dataclass(frozen=True)
class SchedulerConfig:
    """Caps of one iteration. `max_num_batched_tokens` counts prompt tokens and decoding sequences together."""

    batching: Batching = Batching.ITERATION
    preemption: PreemptionMode = PreemptionMode.BY_GROUP
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = 2560

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise UserError(f"max_num_seqs = {self.max_num_seqs} must be at least 1")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise UserError(f"max_num_batched_tokens = {self.max_num_batched_tokens} must be at least 1, or None")
        if self.max_num_batched_tokens is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise UserError(
                f"max_num_seqs = {self.max_num_seqs} is more than max_num_batched_tokens = "
                f"{self.max_num_batched_tokens}, but each running sequence takes a token of an iteration; lower the "
                "first or raise the second"
            )


@dataclass(slots=True)
class Prefill:
    """Compute K/V of a group's first `num_tokens` tokens, of which the first `num_cached` are stored already."""

    group: SequenceGroup
    num_tokens: int
    num_cached: int


@dataclass(slots=True)
class SchedulerOutput:
    """One iteration (or `num_iterations` equal ones): first `cache_ops` in order, then the forward pass.

    `decodes` run one token a sequence, over `context_tokens` stored tokens in all (in the first iteration, counted once
    per sequence that reads them); `prefills` run their prompts in the same pass.
    """

    iteration: int
    decodes: list[SequenceGroup] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    cache_ops: list[CacheOp] = field(default_factory=list)
    preempted: list[SequenceGroup] = field(default_factory=list)
    num_decode_seqs: int = 0
    context_tokens: int = 0
    num_prefill_tokens: int = 0
    num_iterations: int = 1


class Scheduler:
    """`add` requests; then per iteration `schedule`, run the output, `update`."""

    def __init__(
        self, manager: KVCacheManager, config: SchedulerConfig = SchedulerConfig(), log: list[Event] | None = None
    ) -> None:
        if config.batching is Batching.REQUEST and manager.grows:
            raise UserError(
                "request-level batching computes finished members along, which would go on taking memory; it needs a "
                "manager that reserves everything at admission (contiguous), not a paged one"
            )
        self.manager = manager
        self.config = config
        self.iteration = 0
        self.waiting: deque[SequenceGroup] = deque()
        self.running: dict[SequenceGroup, None] = {}  # in order of admission
        self.swapped: list[SequenceGroup] = []  # in order of arrival
        self.num_seqs = 0
        self.num_preemptions = 0
        self._log = log
        self._context_base = 0  # sum over running sequences of (stored tokens - iteration): a constant while they run
        self._due: list[dict[SequenceGroup, None]] = [{} for _ in range(manager.block_size)]
        self._fresh: dict[SequenceGroup, None] = {}  # several sequences that share all, the last block too
        self._beams: dict[SequenceGroup, None] = {}  # forks share last blocks at any time
        self._finish_at: dict[int, dict[SequenceGroup, None]] = {}
        self._finish_times: list[int] = []  # heap of the keys above
        self._pending_ops: list[CacheOp] = []  # copies that belong to the next iteration

    # Requests

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. UserError if it could not run to its end even alone."""
        group = SequenceGroup(request)
        limit = self.config.max_num_batched_tokens
        if limit is not None and request.prompt_tokens > limit:
            raise UserError(
                f"request {request.request_id}: its prompt of {request.prompt_tokens} tokens does not fit into an "
                f"iteration of max_num_batched_tokens = {limit}; raise that cap"
            )
        if len(group.seqs) > self.config.max_num_seqs:
            raise UserError(
                f"request {request.request_id} has {len(group.seqs)} sequences, more than max_num_seqs = "
                f"{self.config.max_num_seqs}"
            )
        if not self.manager.fits(group):
            raise UserError(
                f"request {request.request_id} of {request.prompt_tokens} + {request.output_tokens} tokens x "
                f"{len(group.seqs)} sequences does not fit into an empty pool of {self.manager.num_blocks} blocks of "
                f"{self.manager.block_size}; use a larger pool or a shorter request"
            )
        self.waiting.append(group)
        self._record("arrive", group)
        return group

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.swapped)

    @property
    def admits_on_arrival(self) -> bool:
        """Whether a request arriving now could change the next decision: not while others wait before it."""
        return not self.waiting and not self.swapped and not (self.running and self.config.batching is Batching.REQUEST)

    # One iteration

    def schedule(self) -> SchedulerOutput:
        """Decide the next iteration: slots for what runs, then swapped groups, then waiting ones."""
        output = SchedulerOutput(self.iteration)
        output.cache_ops, self._pending_ops = self._pending_ops, []
        self._reserve_slots(output)
        may_start = not output.preempted  # nothing starts in an iteration that had to drive something out
        if may_start:
            self._resume_swapped(output)
        output.decodes = list(self.running)
        output.num_decode_seqs = self.num_seqs
        output.context_tokens = self._context_base + self.iteration * self.num_seqs
        if may_start and not self.swapped:  # preempted groups go strictly before new ones
            self._admit(output)
        return output

    def can_repeat(self, output: SchedulerOutput) -> bool:
        """Whether the iteration after `output` could be decided just like it: nothing started or moved, and no
        beams."""
        return bool(output.decodes) and not (output.prefills or output.cache_ops or output.preempted or self._beams)

    def extend(self, output: SchedulerOutput, max_iterations: int) -> None:
        """Let an output that `can_repeat` stand for up to `max_iterations` iterations that are decided just like it.

        Nothing is decided differently until a group finishes, the free blocks run out, or a request arrives that could
        start (which the caller knows): a blocked queue stays blocked while memory only gets scarcer and as many run.
        """
        last = min(max_iterations, self._next_finish() - self.iteration)
        for iteration in range(self.iteration + 1, self.iteration + last):
            due = self._due[iteration % self.manager.block_size]
            if due:
                if sum(len(group.seqs) for group in due) > self.manager.num_free_blocks:
                    break
                for group in sorted(due, key=_arrival_order):
                    self._append(group, iteration, output)
            output.num_iterations += 1

    def update(
        self,
        output: SchedulerOutput,
        parents: dict[SequenceGroup, list[int]] | None = None,
        stopped: list[tuple[SequenceGroup, Sequence]] | None = None,
    ) -> list[SequenceGroup]:
        """Account for an iteration that ran; the groups that it finished.

        `parents` re-parents the beams of a group (see KVCacheManager.fork); `stopped` are sequences that ended before
        their length limit, by a stop token."""
        self.iteration += output.num_iterations
        ending = self._finish_at.get(self.iteration, ())  # nobody will read what would be copied for these
        for prefill in output.prefills:
            group = prefill.group
            if len(group.seqs) > 1 and group not in ending:
                self._fresh[group] = None
                self._copy_later(group, self.manager.spread_prompt(group, prefill.num_tokens))
        for group, indices in (parents or {}).items():
            if group not in ending:
                self._record("fork", group, parents=tuple(indices))
                self._copy_later(group, self.manager.fork(group, indices, group.num_stored(self.iteration - 1)))
        ended = [group for group, seq in stopped or () if self._stop(group, seq)]
        ended += self._finish_at.pop(self.iteration, ())
        if self.config.batching is Batching.REQUEST:
            # A static batch computes its finished members along and returns when the last one is done.
            ended = [] if self._finish_at else list(self.running)
        for group in ended:
            self._finish(group)
        return ended

    # Running groups

    def _reserve_slots(self, output: SchedulerOutput) -> None:
        """Give running groups the slot of their next token, first come first; drive out the latest when none is
        left."""
        due = self._due[self.iteration % self.manager.block_size]
        if self._fresh or self._beams:
            due = due | self._fresh | self._beams
            self._fresh = {}
        for group in sorted(due, key=_arrival_order):
            num_tokens = group.num_stored(self.iteration)
            while group in self.running:
                if self.manager.can_append_slots(group, num_tokens):
                    self._append(group, self.iteration, output)
                    break
                self._preempt(max(self.running, key=_arrival_order), group, output)

    def _append(self, group: SequenceGroup, iteration: int, output: SchedulerOutput) -> None:
        free = self.manager.num_free_blocks
        copies = self.manager.append_slots(group, group.num_stored(iteration))
        output.cache_ops += copies
        if self._log is not None and (taken := free - self.manager.num_free_blocks):
            self._log.append(
                Event(iteration, "copy" if copies else "append", group.request.request_id, {"blocks": taken})
            )

    def _copy_later(self, group: SequenceGroup, copies: list[CacheOp]) -> None:
        """Copies that follow from an iteration that has run are made at the beginning of the next one."""
        if copies:
            self._pending_ops += copies
            self._record("copy", group, blocks=len(copies))

    def _preempt(self, victim: SequenceGroup, requester: SequenceGroup, output: SchedulerOutput) -> None:
        mode = self.config.preemption
        swap = mode is PreemptionMode.SWAP or (mode is PreemptionMode.BY_GROUP and len(victim.seqs) > 1)
        self._leave(victim)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        output.preempted.append(victim)
        stored = victim.request.prompt_tokens + victim.num_generated(0) - 1
        if swap and self.manager.can_swap_out(victim):
            ops = self.manager.swap_out(victim)
            output.cache_ops += ops
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=_arrival_order)
            self._record("preempt", victim, requester=requester.request.request_id, mode="swap", blocks=len(ops))
        else:
            self.manager.free(victim)
            victim.status = Status.WAITING
            place = 0
            while place < len(self.waiting) and _arrival_order(self.waiting[place]) < _arrival_order(victim):
                place += 1
            self.waiting.insert(place, victim)
            self._record("preempt", victim, requester=requester.request.request_id, mode="recompute", tokens=stored)

    # Starting and resuming

    def _resume_swapped(self, output: SchedulerOutput) -> None:
        # They ran with all that runs now, and nothing has started since: the caps need no second look.
        while self.swapped:
            group = self.swapped[0]
            if not self.manager.can_swap_in(group, group.num_stored(self.iteration)):
                return
            self.swapped.pop(0)
            ops = self.manager.swap_in(group)
            output.cache_ops += ops
            self._enter(group)
            self._record("resume", group, blocks=len(ops))
            self._append(group, self.iteration, output)

    def _admit(self, output: SchedulerOutput) -> None:
        if self.config.batching is Batching.REQUEST and self.running:
            return
        limit = self.config.max_num_batched_tokens
        budget = math.inf if limit is None else limit - self.num_seqs
        while self.waiting:
            group = self.waiting[0]
            if self.num_seqs + len(group.seqs) > self.config.max_num_seqs:
                return
            num_tokens = group.num_stored(self.iteration)
            computed = self.manager.tokens_to_compute(group, num_tokens)
            # A preempted group may have outgrown the budget: it must still be able to return, so one always may.
            if computed > budget and (output.prefills or not group.num_preemptions):
                return
            if not self.manager.can_allocate(group, num_tokens):
                return
            self.waiting.popleft()
            self.manager.allocate(group, num_tokens)
            self._enter(group)
            budget -= computed
            output.prefills.append(Prefill(group, num_tokens, self.manager.prefix_tokens(group)))
            output.num_prefill_tokens += computed
            self._record("admit", group, tokens=computed)

    # Bookkeeping of the running set

    def _enter(self, group: SequenceGroup) -> None:
        request = group.request
        group.offset += self.iteration
        group.status = Status.RUNNING
        self.running[group] = None
        self.num_seqs += len(group.seqs)
        self._context_base += len(group.seqs) * (request.prompt_tokens - group.offset)
        if self.manager.grows:
            self._due[(group.offset + 1 - request.prompt_tokens) % self.manager.block_size][group] = None
        if group.is_beam:
            self._beams[group] = None
        finish = group.offset + request.output_tokens
        if finish not in self._finish_at:
            self._finish_at[finish] = {}
            heapq.heappush(self._finish_times, finish)
        self._finish_at[finish][group] = None

    def _leave(self, group: SequenceGroup) -> None:
        request = group.request
        del self.running[group]
        self.num_seqs -= len(group.seqs)
        self._context_base -= len(group.seqs) * (request.prompt_tokens - group.offset)
        if self.manager.grows:
            del self._due[(group.offset + 1 - request.prompt_tokens) % self.manager.block_size][group]
        self._fresh.pop(group, None)
        self._beams.pop(group, None)
        self._forget_finish(group)
        group.offset -= self.iteration

    def _finish(self, group: SequenceGroup) -> None:
        self._leave(group)
        self.manager.free(group)
        group.status = Status.FINISHED
        self._record("finish", group, tokens=min(group.num_generated(0), group.request.output_tokens))

    def _stop(self, group: SequenceGroup, seq: Sequence) -> bool:
        """End one sequence before its limit. True if it was the last one, so that the group has ended, too."""
        if len(group.seqs) == 1:
            self._forget_finish(group)
            return True
        fresh = group in self._fresh
        self._leave(group)
        self.manager.free_sequence(seq)
        group.seqs.remove(seq)
        self._enter(group)
        if fresh:
            self._fresh[group] = None
        return False

    def _forget_finish(self, group: SequenceGroup) -> None:
        finish = group.offset + group.request.output_tokens
        groups = self._finish_at.get(finish, {})
        groups.pop(group, None)
        if not groups:
            self._finish_at.pop(finish, None)

    def _next_finish(self) -> int:
        while self._finish_times[0] not in self._finish_at:
            heapq.heappop(self._finish_times)
        return self._finish_times[0]

    def stored_lengths(self, iteration: int) -> Iterator[tuple[SequenceGroup, int]]:
        """Running groups and the tokens each of their sequences stores once `iteration` has run (see usage())."""
        for group in self.running:
            final = group.request.prompt_tokens + group.request.output_tokens - 1
            yield group, min(group.num_stored(iteration), final)

    def _record(self, kind: str, group: SequenceGroup, **detail: object) -> None:
        if self._log is not None:
            self._log.append(Event(self.iteration, kind, group.request.request_id, detail))


def _arrival_order(group: SequenceGroup) -> tuple[float, int]:
    return group.request.arrival_s, group.request.request_id
