"""Time as the engine sees it: virtual time that a cost model spends, or the real one."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod


class Clock(ABC):
    """Seconds since the run began."""

    @property
    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def spend(self, durations_s: list[float]) -> None:
        """Iterations took this long, one after the other."""

    @abstractmethod
    def wait_until(self, moment: float) -> None: ...


class VirtualClock(Clock):
    now = 0.0

    def spend(self, durations_s: list[float]) -> None:
        for seconds in durations_s:  # not sum(), whose rounding depends on the version of Python
            self.now += seconds

    def wait_until(self, moment: float) -> None:
        self.now = max(self.now, moment)


class WallClock(Clock):
    """Real time, which passes by itself."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self._start

    def spend(self, durations_s: list[float]) -> None:
        pass

    def wait_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now))
