"""One live line that says how far an experiment is: done, elapsed, and how long the rest will take.

The line is tqdm's, as text and redrawn in place: on a terminal several times a second, in a notebook every few seconds.
The time left is estimated from the points' relative costs."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from tqdm import tqdm

_SECONDS_BETWEEN = {True: 0.2, False: 3.0}  # by: is it a terminal


class Progress(tqdm):
    """The progress of one experiment's points.

    `total` counts all points, `kept` those finished in earlier runs; `weight` is the cost of those still to compute."""

    monitor_interval = 0  # no thread beside the workers'
    _lock = threading.RLock()  # no lock between processes either: only the parent writes

    def __init__(self, stem: str, total: int, kept: int, weight: float, stream: TextIO | None = None) -> None:
        self._stem, self._points, self._done, self._kept = stem, total, kept, kept
        stream = stream or (sys.stderr if sys.stderr.isatty() else sys.stdout)
        interval = _SECONDS_BETWEEN[stream.isatty()]
        size = {"ncols": 100, "nrows": 20}  # else tqdm asks the terminal, and shows nothing in one that has none
        super().__init__(total=weight, file=stream, mininterval=interval, miniters=0, delay=interval, **size)
        self.delay = 0  # it has kept the first line back; the last one comes at once
        self._time = time.monotonic  # tqdm's own clock can jump
        self.start_t = self.last_print_t = self._time()

    def advance(self, weight: float) -> None:
        """Count one more finished point of the given cost."""
        self._done += 1
        self.update(weight)

    def show(self) -> None:
        """Redraw the line if the last time is long enough ago."""
        self.update(0)

    def __str__(self) -> str:
        """The line; once closed: what is there now, and what of it was computed."""
        elapsed, computed = self._time() - self.start_t, self._done - self._kept
        line = f"{self._stem}: {self._done}/{self._points} points"
        if not self.disable:
            left = f"about {duration(elapsed * (self.total - self.n) / self.n)} left" if self.n else ""
            return f"{line}, {duration(elapsed)} elapsed, {left or 'time left not known yet'}"
        if computed:
            line += f", {computed} computed in {duration(elapsed)}"
        if self._done < self._points:
            return f"{line}, {self._points - self._done} missing"
        return line if computed else f"{line}, all kept from earlier runs"


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
