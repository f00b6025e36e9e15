"""What happens to requests in each iteration, found from outside: who starts, is driven out, returns, ends, waits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from repro.engine.memory.interface import OpKind
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.scheduler_config import Batching
from repro.engine.sequence import SequenceGroup, Status
from repro.history import sentences
from repro.words import count

START, RECOMPUTE, SWAP, RESUME = "start", "recompute", "swap", "resume"
COPY, STALL, END = "copy", "stall", "end"


class Happening(NamedTuple):
    """`frame` counts iterations. A request that ends does so at the end of its frame. A stall's request is the next one
    in the queue, and the sentence says why it waits."""

    frame: int
    kind: str
    request: int
    sentence: str


class Happenings(list[Happening]):
    """In order. `stalled` has, of each frame, whether somebody waits and nobody starts."""

    def __init__(self) -> None:
        super().__init__()
        self.stalled: list[bool] = []
        self._on_gpu: set[int] = set()  # who held memory there in the last frame, by number
        self._on_cpu: set[int] = set()
        self._waits: int | None = None  # who was next and waited

    def end(self, frame: int, group: SequenceGroup, blocks: int) -> None:
        """A request has ended with a frame; so many blocks were its own."""
        request, held = group.request, count(blocks, "block")
        tokens = min(group.generated_before, request.output_tokens)
        if tokens < request.output_tokens:
            said = sentences.ends_early(request.request_id, tokens, request.output_tokens, held)
        else:
            said = sentences.ends(request.request_id, tokens, held)
        self._add(frame, END, group, said)

    def note(
        self,
        frame: int,
        scheduler: Scheduler,
        output: SchedulerOutput,
        freed: Mapping[SequenceGroup, int],
        owners: Mapping[int, Counter[int]],
    ) -> None:
        """A frame. `freed` has of each one driven out how many blocks had been its own, `owners` who holds which."""
        holders = {group.request.request_id: group for group in scheduler.holders()}
        for victim, requester in output.preempted.items():
            self._driven_out(frame, scheduler, output, victim, requester, freed[victim])
        fresh = [group for number, group in holders.items() if number not in self._on_gpu]
        for group in fresh:
            took = _took(scheduler, group, output.iteration)
            if group.request.request_id in self._on_cpu:
                self._add(frame, RESUME, group, sentences.returns(group.request.request_id, took))
            else:
                said = sentences.starts(group.request.request_id, bool(group.num_preemptions), took)
                self._add(frame, START, group, said)
        self._on_gpu, self._on_cpu = set(holders), {group.request.request_id for group in scheduler.swapped}
        copies: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for op in output.cache_ops:
            if op.kind is OpKind.COPY and op.dst in owners:
                copies[next(iter(owners[op.dst]))].append((op.src, op.dst))
        for number, pairs in copies.items():
            self._add(frame, COPY, holders[number], sentences.copied(number, pairs, scheduler.manager.shares))
        self._look_at_queue(frame, scheduler, output, bool(fresh))

    def _driven_out(
        self,
        frame: int,
        scheduler: Scheduler,
        output: SchedulerOutput,
        victim: SequenceGroup,
        requester: SequenceGroup,
        freed: int,
    ) -> None:
        blocks, asks = count(freed, "block"), requester.request.request_id
        kind, then = SWAP, sentences.moves_out(blocks)
        if victim.status is not Status.SWAPPED:
            kind, then = RECOMPUTE, sentences.freed(blocks, victim.num_stored(output.iteration) - 1)
        what = "next token" if requester in scheduler.running else "next tokens"
        self._add(frame, kind, victim, sentences.driven_out(victim.request.request_id, asks, what, then))

    def _look_at_queue(self, frame: int, scheduler: Scheduler, output: SchedulerOutput, started: bool) -> None:
        queue = scheduler.swapped or scheduler.waiting
        stalled = bool(queue) and not started
        self.stalled.append(stalled)
        if output.preempted:  # then nobody starts; why somebody goes on waiting is seen in the next frame
            return
        head = queue[0].request.request_id if stalled else None
        if stalled and head != self._waits:
            self._add(frame, STALL, queue[0], sentences.waits(head, _why(scheduler, queue[0])))
        self._waits = head

    def _add(self, frame: int, kind: str, group: SequenceGroup, sentence: str) -> None:
        self.append(Happening(frame, kind, group.request.request_id, sentence))


def _took(scheduler: Scheduler, group: SequenceGroup, iteration: int) -> str:
    """What a group has been given that starts now."""
    manager, tables = scheduler.manager, [scheduler.manager.block_table(seq) for seq in group.seqs]
    stored = dict(scheduler.stored_lengths(iteration))[group]
    if manager.grows:
        return sentences.took_blocks(len(set().union(*tables)), "block", stored)
    reserved = manager.cdiv(manager.reserved_tokens(group))
    one = sentences.took_chunk(reserved, len(tables[0]), tables[0][0], "block", group.request.prompt_tokens)
    return one if len(tables) == 1 else f"{one}; so for each of its {len(tables)} sequences"


def _why(scheduler: Scheduler, group: SequenceGroup) -> str:
    """Why the next one does not start or return."""
    manager, config, tokens = scheduler.manager, scheduler.config, group.num_stored(scheduler.iteration)
    if group.status is Status.SWAPPED:
        return sentences.cannot_return(manager.num_free_blocks, manager.watermark_blocks)
    if config.batching is Batching.REQUEST and scheduler.running:
        return "a static batch runs to its end"
    running = len(scheduler.running) if config.groups_count_once else scheduler.running.num_seqs
    running += len(scheduler.holders()) - len(scheduler.running)  # prompts under way
    if running + len(group.seqs) > config.max_num_seqs:
        return sentences.is_full(config.max_num_seqs)
    if not scheduler.may_start(group):
        return "it is held back"
    if not manager.can_allocate(group, tokens):
        free = manager.num_free_blocks
        if manager.grows:
            needed = manager.blocks_needed(group, tokens)
            return sentences.needs(needed, "block", free) + sentences.must_stay_free(manager.watermark_blocks)
        needed, largest = manager.chunk_blocks(group), sentences.largest_piece(manager.allocator)
        return sentences.needs(needed * len(group.seqs), "block", free, largest if needed <= free else None)
    return "the tokens of this iteration are spent"
