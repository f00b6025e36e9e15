"""Watches an engine and says of each request where its time went (see `repro.feed.receipt`).

    receipts = repro.Receipts()
    repro.serve("vllm", "opt-13b", trace, observers=(receipts,))
    print(receipts.of(7)); repro.to_frame(receipts)

Each moment of a request's life has one cause, so the causes add up. What is charged to whom is a rule, the same for a
real engine and a simulated one. It needs no model of what an iteration costs:

- An iteration that computes some of a request's prompt counts as `prompt` for it as a whole, whatever else runs in it.
  If a part of that had been stored before, that share of the tokens is `recomputed`; once a request has had a token,
  all of it is.
- An iteration with prompts takes the decoding requests longer. `others_prompts` is what it took beyond the mean of the
  latest unbroken run of iterations without a prompt, of equally many sequences; before there was one, it is nothing.
- While the queue stands still, those in it wait for room. The time is charged to the request whose end let it move; if
  nobody ended, to the longest prompt of the iteration before. Of the stretches in a request's wait, the longest count.

An iteration costs what changes in it, not what runs: all that decode have the same share of it, so sums are kept for
all of them together. Merged iterations give bit for bit what single ones give."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from repro import display
from repro.checks import shown
from repro.engine.loop import Engine
from repro.engine.scheduler import Batching, Prefill, Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup, Status
from repro.errors import UserError
from repro.feed.receipt import (
    CAUSES,
    OTHERS_PROMPTS,
    OWN_STEPS,
    PREEMPTED,
    PROMPT,
    QUEUED,
    RECOMPUTED,
    STALLED,
    SWAPPED,
    Receipt,
)
from repro.feed.standstills import Standstills
from repro.history.watching import OfOneRun


class _Life:
    """A request that has been scheduled. Its time until `since_s` has been charged; since then `cause` lasts, which is
    due to `culprit`. `prompts_s` and `idle_s` are the engine's sums when it began to decode the last time. `stored` is
    how many tokens of each of its sequences have ever been stored."""

    __slots__ = (
        *("request", "causes", "culprits", "cause", "culprit", "since_s", "prompts_s", "idle_s"),
        *("stored", "has_token", "num_preemptions", "recomputed_tokens", "cached_tokens"),
    )

    def __init__(self, request: Request, behind: dict[int, float], cached_tokens: int) -> None:
        self.request, self.cached_tokens = request, cached_tokens
        self.causes = dict.fromkeys(CAUSES, 0.0)
        self.culprits = {QUEUED: behind} if behind else {}
        self.cause, self.culprit, self.since_s = QUEUED, None, request.arrival_s
        self.prompts_s = self.idle_s = 0.0
        self.stored = self.num_preemptions = self.recomputed_tokens = 0
        self.has_token = False

    def receipt(self) -> Receipt:
        request, culprits = self.request, {cause: dict(found) for cause, found in self.culprits.items()}
        about = request.request_id, request.arrival_s, self.since_s - request.arrival_s
        counts = self.num_preemptions, self.recomputed_tokens, self.cached_tokens
        return Receipt(*about, dict(self.causes), culprits, *counts)


class Receipts(OfOneRun):
    """Give it to an engine as an observer, before anything has run. It keeps the receipts of all that have ended, until
    `end` fetches them, as whoever feeds an engine does.

    UserError, in the run, if the engine has run before, or if it has watched another one, which had other requests of
    these numbers."""

    def __init__(self) -> None:
        self._is_static = False  # it has static batches
        self._lives: dict[int, _Life] = {}  # of those that have not ended
        self._ended: dict[int, _Life] = {}
        self._decoding: dict[SequenceGroup, _Life] = {}
        self._swapped: dict[SequenceGroup, _Life] = {}
        self._now_s = 0.0  # so far the sums go
        self._prompts_s = 0.0  # what iterations took longer because of prompts
        self._idle_s = 0.0  # between iterations
        self._alone = _Alone()
        self._queue = Standstills()
        self._prompts: list[Prefill] = []  # of the last iteration

    # What comes of it

    def of(self, request_id: int) -> Receipt:
        """The receipt of a request that has ended. UserError if there is none, or no more."""
        self._note_ended()
        if request_id not in self._ended:
            raise UserError(f"there is no receipt of request {shown(request_id)}: it has not run, or has not ended")
        return self._ended[request_id].receipt()

    def __iter__(self) -> Iterator[Receipt]:
        """Those of all that have ended, in that order."""
        self._note_ended()
        return (life.receipt() for life in list(self._ended.values()))

    def __len__(self) -> int:
        self._note_ended()
        return len(self._ended)

    def rows(self) -> list[dict[str, Any]]:
        """All of them as rows of a table, for pandas."""
        return [receipt.row() for receipt in self]

    def _repr_html_(self) -> str:
        """Where time went, cause by cause, and the first and last receipts."""
        rows = self.rows()
        means = {cause: sum(row[f"{cause}_s"] for row in rows) / len(rows) for cause in CAUSES if rows}
        said = ", ".join(f"{cause.replace('_', ' ')} {seconds:.3g} s" for cause, seconds in means.items() if seconds)
        return display.table(f"{len(rows):,} receipts; on average: {said or 'nothing yet'}", rows)

    def end(self, request: Request, at_s: float) -> Receipt:
        """The receipt of a request that has ended at this moment, by the engine's clock; it is let go. Who takes a
        request back must say so here, because an engine tells its observers of iterations alone."""
        self._note_ended()
        life = self._ended.pop(request.request_id, None)
        if life is None:
            self._queue.let_move(request.request_id)
            life = self._lives.pop(request.request_id, None) or self._new(request, 0)
        self._charge(life, max(at_s, life.since_s))
        return life.receipt()

    # An iteration

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        super().observe(engine, output, start_s)
        scheduler, now_s = engine.scheduler, engine.clock.now
        # Those that decoded do so again, unless one has ended, was driven out, or was swapped in.
        if self._swapped or output.preempted or len(output.decodes) != len(self._decoding):
            self._note_ended()
        if self._is_static:
            self._note_complete(scheduler)
        self._idle_s += start_s - self._now_s
        self._now_s = start_s
        if output.preempted:
            self._drive_out(output)
        if self._swapped:
            self._resume()
        prompts = [*output.chunks, *output.prefills]
        if prompts:
            self._prompts_s += self._alone.beyond(now_s - start_s)
        else:
            self._alone.add(output, start_s, now_s, self._idle_s)
        self._now_s = now_s
        for chunk in output.chunks:
            self._compute(chunk, start_s)
        for prefill in output.prefills:
            self._decode(prefill.group, self._compute(prefill, start_s))
        stands = scheduler.waiting or scheduler.swapped or self._is_static  # for those in it, or who would come now
        self._queue.note(bool(stands), not scheduler.waiting, start_s)
        self._prompts = prompts

    def begin(self, engine: Engine) -> None:
        self._is_static = engine.scheduler.config.batching is Batching.REQUEST

    # What becomes of requests

    def _new(self, request: Request, cached_tokens: int) -> _Life:
        """One that has waited in the queue until now."""
        return _Life(request, self._queue.behind(request.arrival_s), cached_tokens)

    def _compute(self, prompt: Prefill, start_s: float) -> _Life:
        """A prompt, or a part of it, has been computed, for the first time or again."""
        request, start, end = prompt.group.request, prompt.num_cached, prompt.num_tokens
        life = self._lives.get(request.request_id)
        if life is None or life.cause is PREEMPTED:
            self._queue.move(start_s, self._prompts)
        if life is None:
            life = self._lives[request.request_id] = self._new(request, start)
        self._charge(life, start_s)
        seconds, again = self._now_s - start_s, max(0, min(end, life.stored) - start)
        again_s = seconds if life.has_token else seconds * again / (end - start)
        life.recomputed_tokens += again
        life.causes[RECOMPUTED] += again_s
        life.causes[PROMPT] += seconds - again_s
        life.stored = max(life.stored, end)
        life.since_s, life.cause, life.culprit = self._now_s, STALLED, None  # until the next part
        return life

    def _decode(self, group: SequenceGroup, life: _Life) -> None:
        """It decodes from now on."""
        life.cause, life.has_token = OWN_STEPS, True
        life.prompts_s, life.idle_s = self._prompts_s, self._idle_s
        self._decoding[group] = life

    def _drive_out(self, output: SchedulerOutput) -> None:
        for group, requester in output.preempted.items():
            life = self._lives[group.request.request_id]
            if self._decoding.pop(group, None) is not None:  # the newest token's K/V was not stored yet
                life.stored = max(life.stored, group.num_stored(output.iteration) - 1)
            cause = SWAPPED if group.status is Status.SWAPPED else PREEMPTED
            self._turn(life, cause, requester.request.request_id)
            life.num_preemptions += 1
            if life.cause is SWAPPED:
                self._swapped[group] = life

    def _resume(self) -> None:
        for group in [group for group in self._swapped if group.status is Status.RUNNING]:
            self._turn(self._swapped[group], OWN_STEPS)
            self._decode(group, self._swapped.pop(group))

    def _note_complete(self, scheduler: Scheduler) -> None:
        """Members of a static batch that need no more tokens have been complete since the last iteration."""
        incomplete = set(scheduler.running.ending(math.inf))
        for group, life in self._decoding.items():
            if life.cause is OWN_STEPS and group not in incomplete:
                self._turn(life, STALLED)

    def _note_ended(self) -> None:
        """Whoever has ended did so at the end of the last iteration."""
        finished = Status.FINISHED
        ended = [group for group in self._decoding if group.status is finished]
        if self._swapped:
            ended += [group for group in self._swapped if group.status is finished]
        if not ended:
            return
        lives = [self._decoding.pop(group, None) or self._swapped.pop(group) for group in ended]
        if len(lives) == 1:
            last = lives[0].request.request_id
        elif any(life.cause is STALLED for life in lives):  # a static batch, which was done when its last one was
            last = max(lives, key=lambda life: (life.cause is OWN_STEPS, life.since_s)).request.request_id
            for life in lives:
                life.culprit = last if life.cause is STALLED and life.request.request_id != last else None
        else:
            last = max(ended, key=_size).request.request_id
        self._queue.let_move(last)
        for life in lives:
            self._turn(life, STALLED if life.cause is OWN_STEPS else life.cause)
            # It may have been fetched already: its last token was there before its static batch was done.
            if self._lives.pop(life.request.request_id, None) is not None:
                self._ended[life.request.request_id] = life

    def _turn(self, life: _Life, cause: str, culprit: int | None = None) -> None:
        """From now on it is this that lasts."""
        self._charge(life, self._now_s)
        life.cause, life.culprit = cause, culprit

    def _charge(self, life: _Life, until_s: float) -> None:
        """Charge what has passed since the last time."""
        seconds = until_s - life.since_s
        if life.cause is OWN_STEPS:
            prompts_s = self._prompts_s - life.prompts_s
            idle_s = self._idle_s - life.idle_s + max(0.0, until_s - self._now_s)
            life.causes[OTHERS_PROMPTS] += prompts_s
            life.causes[STALLED] += idle_s
            seconds = max(0.0, seconds - prompts_s - idle_s)  # below 0 by an error of rounding
        life.causes[life.cause] += seconds
        if life.culprit is not None and seconds:
            found = life.culprits.setdefault(life.cause, {})
            found[life.culprit] = found.get(life.culprit, 0.0) + seconds
        life.since_s = until_s


class _Alone:
    """How long an iteration without a prompt takes: the mean of the latest unbroken run of those that decoded equally
    many sequences."""

    def __init__(self) -> None:
        self._num_seqs = self._count = 0  # no sequences: the run has been broken
        self._since_s = self._until_s = 0.0  # idle time aside

    def add(self, output: SchedulerOutput, start_s: float, now_s: float, idle_s: float) -> None:
        if output.num_decode_seqs != self._num_seqs:
            self._num_seqs = output.num_decode_seqs
            if not self._num_seqs:
                return
            self._since_s, self._count = start_s - idle_s, 0
        self._until_s = now_s - idle_s
        self._count += output.num_iterations

    def beyond(self, seconds: float) -> float:
        """What an iteration with prompts took longer; it breaks the run."""
        self._num_seqs = 0
        return max(0.0, seconds - (self._until_s - self._since_s) / self._count) if self._count else 0.0


def _size(group: SequenceGroup) -> int:
    return group.num_stored(0) * len(group.seqs)
