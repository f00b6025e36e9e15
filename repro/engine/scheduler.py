"""Which sequences run in the next iteration: first come, first served, with preemption (§4.5).

The scheduler is given a memory (KVCacheManager) and says what to run (SchedulerOutput). It never reads a clock, touches
a device, or sees a token: the same lines decide in simulation, on a CPU and on a GPU, for vLLM and every baseline."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from repro.engine import policies
from repro.engine.events import Event
from repro.engine.memory.interface import CacheOp, KVCacheManager
from repro.engine.running import RunningSet
from repro.engine.scheduler_config import Batching, PreemptionMode, SchedulerConfig
from repro.engine.sequence import Request, Sequence, SequenceGroup, Status, by_rank
from repro.errors import UserError


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
    per sequence that reads them); `prefills` run their prompts in the same pass. `chunks` are parts of prompts that
    lack the prompt's end: they give no token (`repro.engine.chunked`). `num_prefill_tokens` counts both. `preempted`
    says who was driven out, and for whom."""

    iteration: int
    decodes: list[SequenceGroup] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    chunks: list[Prefill] = field(default_factory=list)
    cache_ops: list[CacheOp] = field(default_factory=list)
    preempted: dict[SequenceGroup, SequenceGroup] = field(default_factory=dict)
    num_decode_seqs: int = 0
    context_tokens: int = 0
    num_prefill_tokens: int = 0
    num_iterations: int = 1


class Scheduler:
    """`add` requests; then per iteration `schedule`, run the output, `update`.

    A variant overrides what it decides otherwise: `check` (what is refused), `admit` and `may_start` (who starts),
    `holders` and `withdraw` (who can be driven out, and how)."""

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
        self.waiting: deque[SequenceGroup] = deque()  # in the order of the queue: by rank
        self.running = RunningSet(manager.block_size if manager.grows else None)
        self.swapped: list[SequenceGroup] = []  # by rank
        self.num_preemptions = 0
        self._log = log
        self._fresh: list[SequenceGroup] = []  # their prompt has just run, and several sequences share its last block
        self._pending_ops: list[CacheOp] = []  # copies that belong to the next iteration
        self._served: set[SequenceGroup] = set()  # they have got the slot of this iteration, so they run in it

    # Requests

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. UserError if it could not run to its end even alone."""
        group = SequenceGroup(request)
        self.check(group)
        if not self.manager.fits(group):
            raise UserError(
                f"{request} does not fit into an empty pool of {self.manager.num_blocks} blocks of "
                f"{self.manager.block_size}; use a larger pool or a shorter request"
            )
        group.rank = policies.rank(self.config.order, group, self.iteration, self.config.oracle)
        if self.waiting and self.waiting[-1].rank > group.rank:
            insort(self.waiting, group, key=by_rank)
        else:
            self.waiting.append(group)
        self.record("arrive", group)
        return group

    def abort(self, group: SequenceGroup) -> list[SequenceGroup]:
        """Take a request back between two iterations, whatever its state; its memory is free at once. Others may end by
        that, and are returned: those of a static batch that have waited for this one alone.

        ValueError if it is not here, or no more."""
        if group.status is Status.SWAPPED:
            self.swapped.remove(group)
            self.manager.free_swapped(group)
        elif group in self.holders():
            blocks = set().union(*(self.manager.block_table(seq) for seq in group.seqs))
            self._pending_ops = [op for op in self._pending_ops if op.dst not in blocks]
            self.withdraw(group)
            self.manager.free(group)
        else:
            self.waiting.remove(group)
        group.status = Status.FINISHED
        self.record("abort", group)
        return self._finish([])

    def check(self, group: SequenceGroup) -> None:
        """UserError if the group is beyond the caps of an iteration."""
        request, limit, most = group.request, self.config.max_num_batched_tokens, self.config.max_num_seqs
        if limit is not None and request.prompt_tokens > limit:
            raise UserError(
                f"{request}: its prompt of {request.prompt_tokens} tokens does not fit into an iteration of "
                f"max_num_batched_tokens = {limit}; raise that cap"
            )
        if len(group.seqs) > most:
            raise UserError(f"{request} has more sequences than max_num_seqs = {most}; raise that cap")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.swapped)

    @property
    def admits_on_arrival(self) -> bool:
        """Whether a request arriving now could change the next decision: not while others wait before it."""
        is_next = not self.waiting or self.config.order is not policies.first_come
        return is_next and not self.swapped and not (self.running and self.config.batching is Batching.REQUEST)

    # One iteration

    def schedule(self) -> SchedulerOutput:
        """Decide the next iteration: slots for what runs, then swapped groups, then waiting ones."""
        output = SchedulerOutput(self.iteration)
        output.cache_ops, self._pending_ops = self._pending_ops, []
        self._reserve_slots(output)
        if not output.preempted:  # nothing starts in an iteration that had to drive something out
            self._resume_swapped(output)
        output.decodes = list(self.running)
        output.num_decode_seqs = self.running.num_seqs
        output.context_tokens = self.running.context_tokens(self.iteration)
        self.admit(output)
        return output

    def can_repeat(self, output: SchedulerOutput) -> bool:
        """Whether the next iteration could be decided like `output`: nothing started or moved, and no beams run."""
        changed = output.prefills or output.chunks or output.cache_ops or output.preempted
        return bool(output.decodes) and not (changed or self.running.beams)

    def extend(self, output: SchedulerOutput, max_iterations: int) -> None:
        """Let an output that `can_repeat` stand for up to `max_iterations` iterations that are decided just like it.

        Nothing is decided differently until a group finishes, the free blocks run out, or a request arrives that could
        start (which the caller knows): a blocked queue stays blocked while memory only gets scarcer and as many run."""
        stop = min(self.iteration + max_iterations, self.running.next_end)
        for iteration, groups in self.running.openings(self.iteration + 1, stop):
            free = self.manager.num_free_blocks
            if free < self.running.num_seqs and free < sum(len(group.seqs) for group in groups):
                stop = iteration
                break
            for group in groups:
                self._append_slots(group, iteration, output)
        output.num_iterations = stop - self.iteration

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
        ending = self.running.ending(self.iteration)  # nobody will read what would be copied for these
        self._fresh = [prefill.group for prefill in output.prefills if len(prefill.group.seqs) > 1]
        for group in self._fresh:
            if group not in ending:
                self._copy_later(group, self.manager.spread_prompt(group, group.num_stored(self.iteration - 1)))
        for group, indices in (parents or {}).items():
            if group not in ending:
                self.record("fork", group, parents=tuple(indices))
                self._copy_later(group, self.manager.fork(group, indices, group.num_stored(self.iteration - 1)))
        ended = []
        for group, seq in stopped or ():
            if len(group.seqs) == 1:  # its last one
                ended.append(group)
            else:
                self.manager.free_sequence(seq)
                self.running.drop(group, seq)
        return self._finish(ended + [group for group in ending if group not in ended] if ended else ending)

    # Running groups

    def _reserve_slots(self, output: SchedulerOutput) -> None:
        """Give running groups the slot of their next token, first come first; drive out the latest if none is left."""
        running, iteration = self.running, self.iteration
        self._served.clear()
        for group in running.writers(iteration, self._fresh):
            num_tokens = group.num_stored(iteration)
            while group in running:
                if self.manager.can_append_slots(group, num_tokens):
                    self._append_slots(group, iteration, output)
                    self._served.add(group)
                    break
                self.preempt(group, output)

    def _append_slots(self, group: SequenceGroup, iteration: int, output: SchedulerOutput) -> None:
        free = None if self._log is None else self.manager.num_free_blocks
        copies = self.manager.append_slots(group, group.num_stored(iteration))
        output.cache_ops += copies
        if free is not None and (taken := free - self.manager.num_free_blocks):
            kind = "copy" if copies else "append"
            self._log.append(Event(iteration, kind, group.request.request_id, {"blocks": taken}))

    def preempt(self, requester: SequenceGroup, output: SchedulerOutput) -> None:
        """Drive out the last in the order of the queue, or whom the policy says, so that `requester` gets a slot (it
        may be that group itself)."""
        config = self.config
        holders = [group for group in self.holders() if group not in self._served]
        victim = policies.victim(config.victim, holders, self.iteration, config.oracle)
        swap = self._swaps(victim)
        num_stored = self.withdraw(victim)
        if swap and self.manager.can_swap_out(victim):
            victim.status = Status.SWAPPED
            insort(self.swapped, victim, key=by_rank)
            ops = self.manager.swap_out(victim)
            output.cache_ops += ops
            detail = {"mode": "swap", "blocks": len(ops)}
        else:
            self.manager.free(victim)
            insort(self.waiting, victim, key=by_rank)
            detail = {"mode": "recompute", "tokens": num_stored}
        victim.num_preemptions += 1
        self.num_preemptions += 1
        output.preempted[victim] = requester
        self.record("preempt", victim, requester=requester.request.request_id, **detail)

    def _swaps(self, victim: SequenceGroup) -> bool:
        mode = self.config.preemption
        if isinstance(mode, PreemptionMode):
            return mode is PreemptionMode.SWAP or (mode is PreemptionMode.BY_GROUP and len(victim.seqs) > 1)
        return policies.swaps(mode, victim, self.iteration, self.config.oracle)

    def holders(self) -> Collection[SequenceGroup]:
        """Groups that hold GPU memory of their own, any of which can be driven out."""
        return self.running

    def withdraw(self, group: SequenceGroup) -> int:
        """Stop one of the `holders`; how many tokens each of its sequences has stored."""
        num_stored = group.num_stored(self.iteration) - 1
        self.running.leave(group, self.iteration, Status.WAITING)
        return num_stored

    # Starting and resuming

    def _resume_swapped(self, output: SchedulerOutput) -> None:
        # They ran with all that runs now, and nothing has started since: the caps need no second look.
        while self.swapped and self.manager.can_swap_in(self.swapped[0], self.swapped[0].num_stored(self.iteration)):
            group = self.swapped.pop(0)
            ops = self.manager.swap_in(group)
            output.cache_ops += ops
            self.running.enter(group, self.iteration)
            self.record("resume", group, blocks=len(ops))
            self._append_slots(group, self.iteration, output)

    def may_start(self, group: SequenceGroup) -> bool:
        """Whether the first in the queue may start, caps and memory aside. If not, nobody behind it does."""
        longest = self.config.max_padded_len
        if longest is None or not self.running:
            return True
        batch = [member.request for member in (*self.running, group)]
        return max(one.prompt_tokens for one in batch) + max(one.output_tokens for one in batch) <= longest

    def admit(self, output: SchedulerOutput) -> None:
        """Start waiting groups in their order, until one may not start or finds no room."""
        if output.preempted or self.swapped:  # preempted groups go strictly before new ones
            return
        if not self.waiting or (self.config.batching is Batching.REQUEST and self.running):
            return
        limit = self.config.max_num_batched_tokens
        budget = math.inf if limit is None else limit - self.running.num_seqs
        while self.waiting and self.may_start(group := self.waiting[0]):
            held = len(self.running) if self.config.groups_count_once else self.running.num_seqs
            if held + len(group.seqs) > self.config.max_num_seqs:
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
            self.running.enter(group, self.iteration)
            budget -= computed
            output.prefills.append(Prefill(group, num_tokens, self.manager.prefix_tokens(group)))
            output.num_prefill_tokens += computed
            self.record("admit", group, tokens=computed)

    # Ending

    def _finish(self, ended: list[SequenceGroup]) -> list[SequenceGroup]:
        """Let groups go that need no more tokens; those that went.

        A static batch computes its finished members along and returns when the last one is done."""
        if self.config.batching is Batching.REQUEST:
            for group in ended:
                self.running.complete(group)
            ended = list(self.running) if self.running.next_end is None else []
        for group in ended:
            self.running.leave(group, self.iteration, Status.FINISHED)
            self.manager.free(group)
            self.record("finish", group, tokens=min(group.generated_before, group.request.output_tokens))
        return ended

    # What others see

    def stored_lengths(self, iteration: int) -> Iterator[tuple[SequenceGroup, int]]:
        """Running groups and the tokens each of their sequences stores once `iteration` has run (see usage())."""
        for group in self.running:
            final = group.request.prompt_tokens + group.request.output_tokens - 1
            yield group, min(group.num_stored(iteration), final)

    def _copy_later(self, group: SequenceGroup, copies: list[CacheOp]) -> None:
        """Copies that follow from an iteration that has run are made at the beginning of the next one."""
        if copies:
            self._pending_ops += copies
            self.record("copy", group, blocks=len(copies))

    def record(self, kind: str, group: SequenceGroup, **detail: object) -> None:
        if self._log is not None:
            self._log.append(Event(self.iteration, kind, group.request.request_id, detail))
