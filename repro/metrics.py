"""Numbers from a run, each defined in docs/metrics.md. Observers watch while it runs; summaries read its outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from repro.engine import Engine, Outcome
from repro.memory.interface import MemoryUsage
from repro.scheduler import SchedulerOutput


class BatchAverage:
    """Time-weighted mean number of running requests between `start_s` and `stop_s` (Fig. 13)."""

    def __init__(self, start_s: float, stop_s: float) -> None:
        self.start_s, self.stop_s = start_s, stop_s
        self._requests = self._seconds = 0.0

    def __call__(self, engine: Engine, output: SchedulerOutput, start: float) -> None:
        seconds = min(engine.clock.now, self.stop_s) - max(start, self.start_s)
        if seconds > 0:
            self._requests += seconds * (len(output.decodes) + len(output.prefills))
            self._seconds += seconds

    @property
    def mean(self) -> float:
        return self._requests / self._seconds if self._seconds else math.nan


class UsageSamples:
    """MemoryUsage once per `interval_s` between `start_s` and `stop_s`, at the first iteration that ends after it (Fig. 2)."""

    def __init__(self, start_s: float, stop_s: float, interval_s: float = 1.0) -> None:
        self.stop_s, self.interval_s = stop_s, interval_s
        self._next = start_s
        self.samples: list[MemoryUsage] = []

    def __call__(self, engine: Engine, output: SchedulerOutput, start: float) -> None:
        now = engine.clock.now
        if self._next <= now < self.stop_s:
            self._next += self.interval_s * math.ceil((now - self._next) / self.interval_s + 1e-9)
            scheduler = engine.scheduler
            last = output.iteration + output.num_iterations - 1
            self.samples.append(scheduler.manager.usage(scheduler.stored_lengths(last)))

    def mean(self, part: str) -> float:
        """Mean of a field of MemoryUsage, as a fraction of the pool."""
        return float(np.mean([getattr(sample, part) / sample.total for sample in self.samples]))

    @property
    def saving(self) -> float:
        """Mean share of blocks saved by sharing: 1 - physical / logical (Fig. 15)."""
        return float(np.mean([1 - s.physical_blocks / s.logical_blocks for s in self.samples if s.logical_blocks]))


def normalized_latency_s(outcomes: Sequence[Outcome]) -> float:
    """Mean over requests of end-to-end latency / output length, in s/token (§6.1)."""
    return float(np.mean([outcome.normalized_latency_s for outcome in outcomes]))
