"""One live line that says how far an experiment is: done, elapsed, and how long the rest will take.

On a terminal the line is redrawn in place; anywhere else (a notebook, a log) a new line appears every few seconds at
most. The time left is estimated from the points' relative costs, with a clock that cannot jump.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

_SECONDS_BETWEEN = {True: 0.2, False: 3.0}  # by: is it a terminal


class Progress:
    """The progress of one experiment's points.

    `total` counts all points, `kept` those finished in earlier runs; `weight` is the cost of those still to compute.
    """

    def __init__(self, stem: str, total: int, kept: int, weight: float, stream: TextIO | None = None) -> None:
        self._stem, self._total, self._done, self._kept = stem, total, kept, kept
        self._weight, self._weight_done = weight, 0.0
        self._stream = stream or (sys.stderr if sys.stderr.isatty() else sys.stdout)
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._shown = self._start

    def advance(self, weight: float) -> None:
        """Count one more finished point of the given cost."""
        self._done += 1
        self._weight_done += weight

    def show(self) -> None:
        """Print the line if the last one is old enough."""
        now = time.monotonic()
        if now - self._shown >= _SECONDS_BETWEEN[self._live] and self._done < self._total:
            self._shown = now
            self._print(self._line(now - self._start), end="" if self._live else "\n")

    def close(self) -> None:
        """Print the last line: what is there now, and what of it was computed."""
        elapsed = time.monotonic() - self._start
        computed = self._done - self._kept
        parts = [f"{self._done}/{self._total} points"]
        if computed:
            parts.append(f"{computed} computed in {duration(elapsed)}")
        if self._done < self._total:
            parts.append(f"{self._total - self._done} missing")
        elif not computed:
            parts.append("all kept from earlier runs")
        self._print(f"{self._stem}: {', '.join(parts)}", end="\n")

    def _line(self, elapsed: float) -> str:
        left = elapsed * (self._weight - self._weight_done) / self._weight_done if self._weight_done else None
        return f"{self._stem}: {self._done}/{self._total} points, {duration(elapsed)} elapsed, " + (
            f"about {duration(left)} left" if left is not None else "time left not known yet"
        )

    def _print(self, line: str, end: str) -> None:
        print(f"\r{line}\x1b[K" if self._live else line, end=end, file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
