"""What a run shows: which blocks change hands in each step, what was decided in sentences, and the counters.

The counters are those of the experiment saturated_queue, counted in the same steps. The blocks follow from the
scheduler's own log of events: nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from repro.engine.events import Event
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.explore.settings import Settings
from repro.history import sentences
from repro.history.sentences import largest_piece
from repro.words import count

#: parts of the pool, as in Fig. 2: fields of MemoryUsage
PIECES = ("token_states", "reserved", "internal", "rounding", "free")
SAMPLE_EVERY = 10  # steps between two looks at where the slots are, as in saturated_queue


class Recording:
    """Sees each step once it is decided. `groups` are the requests in the queue so far, by number."""

    def __init__(self, settings: Settings, scheduler: Scheduler, groups: dict[int, SequenceGroup]) -> None:
        self.settings, self.scheduler, self.groups = settings, scheduler, groups
        # (step, "admit", request, stored tokens, `runs`), (step, "append", request, block), (step, "free", request);
        # of a chunk the one run is its first slot and its length.
        self.changes: list[list[Any]] = []
        self.sentences: list[tuple[int, str]] = []  # (step, what was decided)
        self.preempted: list[int] = []  # the step of each preemption
        self.sequences: list[int] = []  # that run, in each step
        self.waiting: list[int] = []  # requests, in each step
        self.usage: list[list[int]] = []  # slots in each of PIECES, in every SAMPLE_EVERY-th step
        self._unit = "block" if settings.is_paged else "slot"
        self._held: dict[int, int] = {}  # request -> blocks or slots
        self._why_it_waits: tuple[int, bool, bool] | None = None
        self._discarded = self._blocked = self._most_empty = 0

    def step(self, output: SchedulerOutput, events: Iterable[Event]) -> None:
        """Note one step; `events` are those since the last one."""
        for event in events:
            self._note(event)
        step, scheduler, warmup = output.iteration, self.scheduler, self.settings.warmup_steps
        self.sequences.append(scheduler.running.num_seqs)
        self.waiting.append(len(scheduler.waiting))
        self.preempted += [step] * len(output.preempted)
        is_blocked = self._look_at_head(step)
        if step % SAMPLE_EVERY == 0:
            usage = scheduler.manager.usage(scheduler.stored_lengths(step))
            self.usage.append([getattr(usage, piece) for piece in PIECES])
        if step >= warmup:
            self._discarded += sum(victim.generated_before for victim in output.preempted)
            self._blocked += is_blocked
        if step == warmup:
            for group in scheduler.running:
                self._note_empty(group, step)

    def _note_empty(self, group: SequenceGroup, step: int) -> None:
        """Slots without a token at a sequence's end; they are most when it has just got blocks."""
        if self.settings.is_paged and step >= self.settings.warmup_steps:
            empty = self._held[group.request.request_id] * self.settings.block_size - group.num_stored(step)
            self._most_empty = max(self._most_empty, empty)

    def counters(self) -> dict[str, float]:
        """Tokens a step, preemptions and output tokens that they discard, % of the steps in which fragmentation blocks
        the queue, the most slots without a token at a sequence's end, and where the slots are (% of the pool)."""
        warmup, steps, slots = self.settings.warmup_steps, self.settings.steps, self.settings.kv_slots
        delivered, counted = sum(self.sequences[warmup:]), self.usage[-(-warmup // SAMPLE_EVERY) :]
        means = [math.fsum(100 * value / slots for value in column) / len(column) for column in zip(*counted)]
        return {
            "tokens_per_step": delivered / steps,
            "delivered_tokens": delivered,
            "preemptions": sum(step >= warmup for step in self.preempted),
            "discarded_tokens": self._discarded,
            "blocked_pct": 100 * self._blocked / steps,
            "empty_slots_most": self._most_empty,
            **dict(zip(PIECES, means)),
        }

    def _note(self, event: Event) -> None:
        step, number, detail = event.iteration, event.request_id, event.detail
        group, manager, unit = self.groups[number], self.scheduler.manager, self._unit
        if event.kind == "admit":
            table, stored = manager.block_table(group.seqs[0]), group.num_stored(step)
            self._held[number] = len(table)
            pieces = runs(table) if unit == "block" else [table[0], len(table)]
            self.changes.append([step, "admit", number, stored, pieces])
            self._note_empty(group, step)
            took = sentences.took_blocks(len(table), unit, stored)
            if unit == "slot":
                reserved, prompt = manager.reserved_tokens(group), group.request.prompt_tokens
                took = sentences.took_chunk(reserved, len(table), table[0], unit, prompt)
            self.sentences.append((step, sentences.starts(number, bool(group.num_preemptions), took)))
        elif event.kind == "append" and group in self.scheduler.running:  # else it was driven out in the same step
            self._held[number] += 1
            self.changes.append([step, "append", number, manager.block_table(group.seqs[0])[-1]])
            self._note_empty(group, step)
        elif event.kind in ("preempt", "finish"):
            self.changes.append([step, "free", number])
            held, tokens = count(self._held.pop(number), unit), detail["tokens"]
            text = sentences.ends(number, tokens, held)
            if event.kind == "preempt":
                then = sentences.freed(held, tokens)
                text = sentences.driven_out(number, detail["requester"], "next token", then)
            self.sentences.append((step, text))

    def _look_at_head(self, step: int) -> bool:
        """Say why the first in the queue waits, once; whether it does although enough slots are free."""
        scheduler, manager, most = self.scheduler, self.scheduler.manager, self.settings.max_num_seqs
        if not scheduler.waiting:
            self._why_it_waits = None
            return False
        group, free = scheduler.waiting[0], manager.num_free_blocks
        if self.settings.is_paged:
            needed, largest = manager.blocks_needed(group, group.num_stored(step)), free
        else:
            needed, largest = manager.chunk_blocks(group), largest_piece(manager.allocator)
        is_full = scheduler.running.num_seqs >= most
        is_blocked = not is_full and largest < needed <= free
        head = group.request.request_id, is_full, is_blocked
        if head != self._why_it_waits:
            self._why_it_waits = head
            why = sentences.needs(needed, self._unit, free, largest if is_blocked else None)
            why = sentences.is_full(most) if is_full else why
            self.sentences.append((step, sentences.waits(head[0], why)))
        return is_blocked


def runs(table: list[int]) -> list[int]:
    """Block numbers as pairs of a first one and a length, negative for a run that goes down: 7 8 9 3 2 is 7 3, 3 -2."""
    found: list[int] = []
    first, last, way = table[0], table[0], 0
    for block in table[1:]:
        if (step := block - last) in (1, -1) and way in (0, step):
            way = step
        else:
            found += first, last - first + way or 1
            first, way = block, 0
        last = block
    return [*found, first, last - first + way or 1]
