"""One live line that says how far a long piece of work is: done, elapsed, and how long the rest will take.

Every stage has it: an experiment's points, what is measured on a GPU, the fuzzer. On a terminal and in a notebook the
line is redrawn in place, as plain text; in a log it is a line a minute. The time left is told only where most of what
is left is of a kind that was seen before: a guess that is wrong by a factor of fifty is worse than none."""

from __future__ import annotations

import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from typing import TextIO

_WIDTH = 110  # characters
_SECONDS_BETWEEN = {"terminal": 0.2, "notebook": 3.0, "log": 60.0}


class Progress:
    """The progress of pieces of work. Each has a kind and a cost: within a kind, time goes with the cost.

    `todo` has the kind and cost of those that are left; `kept` the kind, seconds and cost of those done earlier."""

    def __init__(
        self,
        name: str,
        todo: Sequence[tuple[str, float]],
        kept: Sequence[tuple[str, float, float]] = (),
        workers: int = 1,
        stream: TextIO | None = None,
    ) -> None:
        self._name, self._workers = name, workers
        self._done = self._kept = len(kept)
        self._total = len(kept) + len(todo)
        self._todo, self._seconds, self._cost = Counter[str](), Counter[str](), Counter[str]()  # by kind
        for kind, cost in todo:
            self._todo[kind] += cost
        for kind, seconds, cost in kept:
            self._seconds[kind] += seconds
            self._cost[kind] += cost
        self._running: dict[str, tuple[str, float, float, str]] = {}  # key -> kind, cost, since when, and label
        self._stream = stream or (sys.stderr if sys.stderr.isatty() else sys.stdout)
        self._where = _where(self._stream)
        self._start = self._last = time.monotonic()
        self._drawn = 0  # characters of the line as it stands
        self._closed = False

    def start(self, key: str, kind: str, cost: float, label: str = "") -> None:
        """A piece is begun; `label` is its name in the line, if that is not its key."""
        self._running[key] = kind, cost, time.monotonic(), label or key

    def finish(self, key: str, seconds: float | None = None) -> None:
        """A piece is finished; it took `seconds`, or (None) the time since its start."""
        kind, cost, since, _ = self._running.pop(key)
        self._done += 1
        self._todo[kind] -= cost
        self._seconds[kind] += time.monotonic() - since if seconds is None else seconds
        self._cost[kind] += cost

    def give_up(self, *keys: str) -> None:
        """Pieces ended without a result; without keys, all that were begun."""
        for key in keys or list(self._running):
            del self._running[key]

    def show(self) -> None:
        """Redraw the line if the last time is long enough ago."""
        if time.monotonic() - self._last >= _SECONDS_BETWEEN[self._where]:
            self._last = time.monotonic()
            self._draw(str(self))

    def say(self, text: str) -> None:
        """A line of its own, above the live one."""
        self._draw(text, end="\n")

    def close(self) -> None:
        """The last state, for good."""
        if not self._closed:
            self._closed = True
            self._draw(str(self), end="\n")

    def _draw(self, text: str, end: str = "") -> None:
        live = self._where != "log"
        self._stream.write(f"\r{text:{self._drawn}}{end}" if live else f"{text}\n")
        self._stream.flush()
        self._drawn = 0 if end else len(text)

    def __str__(self) -> str:
        """The line; once closed: what is there now, and what of it was computed."""
        elapsed, computed = duration(time.monotonic() - self._start), self._done - self._kept
        line = f"{self._name}: {self._done}/{self._total} points"
        if not self._closed:
            left = self._left()
            line += f", {elapsed} elapsed, " + ("time left not known yet" if left is None else f"{_about(left)} left")
            if left is None and self._running:
                line += f"; at work: {next(iter(self._running.values()))[3]}"
            return textwrap.shorten(line, _WIDTH, placeholder=" ...")
        if computed:
            line += f", {computed} computed in {elapsed}"
        if self._done < self._total:
            return f"{line}, {self._total - self._done} missing"
        return line if computed else f"{line}, all kept from earlier runs"

    def _left(self) -> float | None:
        """Seconds until all is done; None while they would be a guess."""
        rates = {kind: self._seconds[kind] / cost for kind, cost in self._cost.items() if cost}
        unseen = sum(cost for kind, cost in self._todo.items() if kind not in rates)
        if not rates or unseen > 0.5 * self._todo.total():
            return None
        usual = self._seconds.total() / self._cost.total()
        work = sum(cost * rates.get(kind, usual) for kind, cost in self._todo.items())
        now = time.monotonic()
        expected = [(cost * rates.get(kind, usual), now - since) for kind, cost, since, _ in self._running.values()]
        work -= sum(min(whole, passed) for whole, passed in expected)
        return max(work / self._workers, *(whole - passed for whole, passed in expected), 0.0)


def _where(stream: TextIO) -> str:
    if stream.isatty():
        return "terminal"
    return "notebook" if type(stream).__module__.startswith("ipykernel") else "log"


def _about(seconds: float) -> str:
    """Seconds as exactly as they can be foretold."""
    if seconds < 5:
        return "a few seconds"
    unit = 5 if seconds < 60 else 30 if seconds < 600 else 60
    return "about " + duration(unit * round(seconds / unit)).replace(" min 0 s", " min")


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
