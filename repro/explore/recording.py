"""What a run shows: which blocks change hands in each step, what was decided in sentences, and the counters.

The counters are those of the experiment saturated_queue, counted in the same steps. The blocks follow from the
scheduler's own log of events: nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from repro.engine.events import Event
from repro.engine.memory.contiguous import ChunkAllocator
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.explore.settings import Settings

#: parts of the pool, as in Fig. 2: fields of MemoryUsage
PIECES = ("token_states", "reserved", "internal", "rounding", "free")
SAMPLE_EVERY = 10  # steps between two looks at where the slots are, as in saturated_queue


class Recording:
    """Sees each step once it is decided. `groups` are the requests in the queue so far, by number."""

    def __init__(self, settings: Settings, scheduler: Scheduler, groups: dict[int, SequenceGroup]) -> None:
        self.settings, self.scheduler, self.groups = settings, scheduler, groups
        #: (step, "admit", request, stored tokens, runs of blocks), (step, "append", request, block), (step, "free",
        #: request): a chunk is a run of slots
        self.changes: list[list[Any]] = []
        self.sentences: list[tuple[int, str]] = []
        self.preempted: list[int] = []  # the step of each preemption
        self.sequences: list[int] = []
        self.waiting: list[int] = []
        self.usage: list[list[int]] = []  # slots a piece, a line for every SAMPLE_EVERY steps
        self.head: list[list[int]] = []  # (step, request, needed, free, largest piece), when one of them changes
        self._held: dict[int, int] = {}  # request -> blocks or slots
        self._head_of_queue: tuple[int, str] | None = None
        self._tokens = self._preemptions = self._discarded = self._blocked = self._most_empty = 0
        self._shares: dict[str, list[float]] = {piece: [] for piece in PIECES}

    def step(self, output: SchedulerOutput, events: Iterable[Event]) -> None:
        """Note one step; `events` are those since the last one."""
        step, scheduler = output.iteration, self.scheduler
        for event in events:
            self._note(event)
        self.sequences.append(scheduler.running.num_seqs)
        self.waiting.append(len(scheduler.waiting))
        stored = list(scheduler.stored_lengths(step))
        is_blocked = self._look_at_head(step)
        counts = step >= self.settings.warmup_steps
        if step % SAMPLE_EVERY == 0:
            usage = scheduler.manager.usage(stored)
            self.usage.append([getattr(usage, piece) for piece in PIECES])
            if counts:
                for piece, values in self._shares.items():
                    values.append(100 * getattr(usage, piece) / self.settings.kv_slots)
        if counts:
            self._tokens += scheduler.running.num_seqs
            self._preemptions += len(output.preempted)
            self._discarded += sum(victim.generated_before for victim in output.preempted)
            self._blocked += is_blocked
            if self.settings.is_paged:
                size = self.settings.block_size
                empty = (self._held[group.request.request_id] * size - length for group, length in stored)
                self._most_empty = max(self._most_empty, *empty, 0)

    def counters(self) -> dict[str, float]:
        """Tokens a step, preemptions and output tokens that they discard, % of the steps in which fragmentation blocks
        the queue, the most slots without a token at a sequence's end, and where the slots are (% of the pool)."""
        shares = {piece: math.fsum(values) / len(values) if values else 0 for piece, values in self._shares.items()}
        return {
            "tokens_per_step": self._tokens / self.settings.steps,
            "delivered_tokens": self._tokens,
            "preemptions": self._preemptions,
            "discarded_tokens": self._discarded,
            "blocked_pct": 100 * self._blocked / self.settings.steps,
            "empty_slots_most": self._most_empty,
            **shares,
        }

    def _note(self, event: Event) -> None:
        number, detail = event.request_id, event.detail
        group = self.groups[number]
        if event.kind == "admit":
            table = self.scheduler.manager.block_table(group.seqs[0])
            self._held[number] = len(table)
            stored = group.num_stored(event.iteration)
            if self.settings.is_paged:
                runs = _runs(table)
                took = f"{_count(len(table), 'block')} for {_count(stored, 'token')}"
            else:
                runs = [table[0], len(table)]
                reserved = self.scheduler.manager.reserved_tokens(group)
                rounded = "" if reserved == len(table) else f", rounded up to {len(table):,}"
                took = f"{reserved:,} slots reserved for its prompt of {_count(group.request.prompt_tokens, 'token')}"
                took += f" and its output{rounded}; its chunk begins at slot {table[0]:,}"
            again = " again" if group.num_preemptions else ""
            self._change(event.iteration, "admit", number, stored, runs, f"Request {number} starts{again}: {took}.")
        elif event.kind == "append" and group in self.scheduler.running:  # else it was driven out in the same step
            self._held[number] += 1
            self.changes.append(
                [event.iteration, "append", number, self.scheduler.manager.block_table(group.seqs[0])[-1]]
            )
        elif event.kind == "preempt":
            freed = self._held.pop(number)
            self.preempted.append(event.iteration)
            who = "It is itself" if detail["requester"] == number else f"Request {number} is"
            text = (
                f"No block is free for the next token of request {detail['requester']}. {who} driven out: "
                f"{_count(freed, 'block')} are freed, {_count(detail['tokens'], 'token')} must be computed again."
            )
            self._change(event.iteration, "free", number, text)
        elif event.kind == "finish":
            unit = "block" if self.settings.is_paged else "slot"
            freed = _count(self._held.pop(number), unit)
            text = f"Request {number} is done after {_count(detail['tokens'], 'token')}: {freed} are freed."
            self._change(event.iteration, "free", number, text)

    def _change(self, step: int, kind: str, *what: Any) -> None:
        *values, sentence = what
        self.changes.append([step, kind, *values])
        self.sentences.append((step, sentence))

    def _look_at_head(self, step: int) -> bool:
        """Note why the first in the queue waits; whether it does although enough slots are free."""
        scheduler = self.scheduler
        if not scheduler.waiting:
            self._head_of_queue = None
            return False
        group, is_full = scheduler.waiting[0], scheduler.running.num_seqs >= self.settings.max_num_seqs
        number, manager = group.request.request_id, scheduler.manager
        if self.settings.is_paged:
            needed, unit = manager.blocks_needed(group, group.num_stored(step)), "block"
            free = largest = manager.num_free_blocks
        else:
            needed, unit = manager.chunk_blocks(group) * len(group.seqs), "slot"
            free, largest = manager.num_free_blocks, largest_piece(manager.allocator)
        if not self.head or self.head[-1][1:] != [number, needed, free, largest]:
            self.head.append([step, number, needed, free, largest])
        is_blocked = not is_full and largest < needed <= free
        why = "cap" if is_full else "pieces" if is_blocked else "room"
        if (number, why) != self._head_of_queue:
            self._head_of_queue = number, why
            asks = f"it needs {_count(needed, unit)}"
            reason = {
                "cap": f"{self.settings.max_num_seqs} sequences run, and no more may",
                "pieces": f"{asks} in one piece; {free:,} are free, but the largest piece has {largest:,}",
                "room": f"{asks}, and {free:,} are free",
            }
            self.sentences.append((step, f"Request {number} waits: {reason[why]}."))
        return is_blocked


def largest_piece(allocator: ChunkAllocator) -> int:
    """The largest chunk that could be handed out now, in slots."""
    if hasattr(allocator, "largest_run"):
        return allocator.largest_run
    size = 1 << allocator.num_free.bit_length()
    while size and not allocator.can_allocate(size, 1):
        size //= 2
    return size


def _runs(table: list[int]) -> list[int]:
    """Block numbers as pairs of a first one and a length, negative for a run that goes down: 7 8 9 3 2 is 7 3, 3 -2."""
    runs: list[int] = []
    first, length, way = table[0], 1, 0
    for block in table[1:]:
        if block - first == length * (way or 1) or (not way and first - block == 1):
            way = way or block - first
            length += 1
        else:
            runs += first, length * (way or 1)
            first, length, way = block, 1, 0
    return [*runs, first, length * (way or 1)]


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
