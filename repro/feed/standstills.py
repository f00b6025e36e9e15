"""When a queue stood still, and whose end let it move again."""

from __future__ import annotations

import math
from bisect import bisect
from operator import itemgetter

from repro.engine.scheduler import Prefill

#: so many of the stretches in a request's wait are named
KEPT = 3


class Standstills:
    """Stretches in which somebody waited and nobody started. Kept are those among the `KEPT` longest since any moment,
    which are few; all are let go when nobody waits."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # it has stood still
        self._mover: int | None = None  # who has ended meanwhile, the latest
        # By end: [end, seconds, who let it move, how many later ones are as long].
        self._stretches: list[list[float]] = []

    def let_move(self, request_id: int) -> None:
        """A request has gone, and left room."""
        self._mover = request_id

    def move(self, at_s: float, before: list[Prefill]) -> None:
        """Somebody starts now. If nobody has gone meanwhile, the prompts of the iteration `before` have left no room
        until now: that is due to the longest of them."""
        if self._since_s is None:
            return
        mover = self._mover
        if mover is None and before:
            longest = max(before, key=lambda prompt: prompt.num_tokens - prompt.num_cached)
            mover = longest.group.request.request_id
        if mover is not None:
            seconds, is_superseded = at_s - self._since_s, False
            for one in self._stretches:
                if one[1] <= seconds:
                    one[3] += 1
                    is_superseded |= one[3] == KEPT
            if is_superseded:
                self._stretches = [one for one in self._stretches if one[3] < KEPT]
            self._stretches.append([at_s, seconds, mover, 0])
        self._since_s = None

    def note(self, stands: bool, is_empty: bool, at_s: float) -> None:
        """Whether it stands still from now on, for those in it and those who come; whether nobody waits."""
        if is_empty and self._stretches:
            self._stretches = []
        if not stands:
            self._since_s = None
        elif self._since_s is None:
            self._since_s, self._mover = at_s, None

    def behind(self, since_s: float) -> dict[int, float]:
        """For one who has waited since then: who let the queue move, and the seconds; the longest stretches."""
        if not self._stretches:
            return {}
        since = self._stretches[bisect(self._stretches, [since_s, math.inf]) :]
        if since and since[0][0] - since[0][1] < since_s:  # it came in the middle
            since[0] = [since[0][0], since[0][0] - since_s, since[0][2]]
        since.sort(key=itemgetter(1), reverse=True)
        found: dict[int, float] = {}
        for _, seconds, mover, *_ in since[:KEPT]:
            found[mover] = found.get(mover, 0.0) + seconds
        return found
