"""The groups that run, and what follows from their lengths alone.

A running sequence gets one token an iteration. So once a group has entered, it is known in which iterations its tokens
open a new block, when it reaches its length, and how many tokens it has stored by then. An iteration costs only what
changes in it, and many can be advanced together (`Scheduler.extend`). Memory and policy are not known here."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from repro.engine.sequence import Sequence, SequenceGroup, Status, by_rank

Entry = tuple[int, int, SequenceGroup]  # the iteration in which a group ends, its running number, the group


class RunningSet(dict[SequenceGroup, Entry]):
    """Running groups in the order in which they entered. `block_size` None: memory that does not grow by the token.

    `num_seqs` counts their live sequences; `beams` are the groups that search for beams."""

    def __init__(self, block_size: int | None) -> None:
        super().__init__()
        self.num_seqs = 0
        self.beams: dict[SequenceGroup, None] = {}
        self._grows = block_size is not None
        self._calendar: list[Entry] = []  # sorted
        self._numbers = itertools.count()
        self._ahead = 0  # sum over sequences of (stored tokens - iteration), which is constant while they run
        # Iteration modulo the block size -> whose tokens open blocks then, in the order of the queue.
        self._opening: list[list[SequenceGroup]] = [[] for _ in range(block_size or 1)]

    # Who runs

    def enter(self, group: SequenceGroup, iteration: int) -> None:
        """Let a group run from `iteration` on."""
        group.status, group.running_since = Status.RUNNING, iteration
        request, num_seqs = group.request, len(group.seqs)
        ahead = request.prompt_tokens + group.generated_before - iteration
        self.num_seqs += num_seqs
        self._ahead += num_seqs * ahead
        if self._grows:
            insort(self._opening[(1 - ahead) % len(self._opening)], group, key=by_rank)
        if request.sampling.use_beam_search:
            self.beams[group] = None
        end = request.prompt_tokens + request.output_tokens - ahead
        self[group] = entry = (end, next(self._numbers), group)
        insort(self._calendar, entry)

    def leave(self, group: SequenceGroup, iteration: int, status: Status) -> None:
        """Take a group out before `iteration`; what becomes of it is its `status`."""
        ahead = group.num_stored(0)
        num_seqs = len(group.seqs)
        self.num_seqs -= num_seqs
        self._ahead -= num_seqs * ahead
        if self._grows:
            self._opening[(1 - ahead) % len(self._opening)].remove(group)
        if self.beams:
            self.beams.pop(group, None)
        self.complete(group)
        del self[group]
        group.generated_before += iteration - group.running_since
        group.status, group.running_since = status, None

    def drop(self, group: SequenceGroup, seq: Sequence) -> None:
        """Take one of several sequences out of a group that goes on without it."""
        group.seqs.remove(seq)
        self.num_seqs -= 1
        self._ahead -= group.num_stored(0)

    # When they end

    def complete(self, group: SequenceGroup) -> None:
        """Note that a group needs no more tokens. It stays until it leaves: a static batch computes it along."""
        entry = self[group]
        place = bisect_left(self._calendar, entry)
        if place < len(self._calendar) and self._calendar[place] is entry:
            del self._calendar[place]

    def ending(self, iteration: int) -> list[SequenceGroup]:
        """Groups that have their full length when `iteration` begins, but for those noted as complete."""
        if not self._calendar or self._calendar[0][0] > iteration:
            return []
        return [group for _, _, group in self._calendar[: bisect_left(self._calendar, (iteration + 1,))]]

    @property
    def next_end(self) -> int | None:
        """The first iteration that begins with a group at its full length; None if all are complete."""
        return self._calendar[0][0] if self._calendar else None

    # What an iteration takes

    def context_tokens(self, iteration: int) -> int:
        """Tokens stored once `iteration` has run, counted for each sequence."""
        return self._ahead + iteration * self.num_seqs

    def writers(self, iteration: int, fresh: Iterable[SequenceGroup] = ()) -> list[SequenceGroup]:
        """Groups whose next token may take a block, by rank: it opens one, or goes where several sequences share
        (`fresh` groups, whose prompt was the last iteration's, and beams)."""
        opening = self._opening[iteration % len(self._opening)]
        if not fresh and not self.beams:
            return opening.copy()
        return sorted({*opening, *self.beams, *(group for group in fresh if group in self)}, key=by_rank)

    def openings(self, start: int, stop: int) -> Iterator[tuple[int, list[SequenceGroup]]]:
        """The iterations from `start` to before `stop` in which tokens open blocks, and whose, by rank."""
        for iteration in range(start, stop) if self._grows else ():
            if opening := self._opening[iteration % len(self._opening)]:
                yield iteration, opening
