"""Numbers from a run, each defined in docs/metrics.md. Observers watch while it runs; summaries read its outcomes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory.interface import MemoryUsage
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SequenceGroup

if TYPE_CHECKING:
    import pandas as pd

#: parts of a pool, as in Fig. 2: the fields of MemoryUsage that add up to its total
PIECES = ("token_states", "reserved", "internal", "rounding", "free")


class BatchAverage(Observer):
    """Time-weighted mean number of running requests between `start_s` and `stop_s` (Fig. 13)."""

    def __init__(self, start_s: float, stop_s: float) -> None:
        self.start_s, self.stop_s = start_s, stop_s
        self._requests = self._seconds = 0.0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        seconds = min(engine.clock.now, self.stop_s) - max(start_s, self.start_s)
        if seconds > 0:
            self._requests += seconds * (len(output.decodes) + len(output.prefills))
            self._seconds += seconds

    @property
    def mean(self) -> float:
        return self._requests / self._seconds if self._seconds else math.nan


class UsageSamples(Observer):
    """MemoryUsage once per `interval_s` from `start_s` to `stop_s`, as each of these moments is passed (Fig. 2).

    Equal spacing in time matters: states seen only when something happens, such as a finish, are a biased sample."""

    def __init__(self, start_s: float, stop_s: float, interval_s: float = 1.0) -> None:
        self.next_s, self.stop_s, self.interval_s = start_s, stop_s, interval_s
        self.times_s: list[float] = []
        self.samples: list[MemoryUsage] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = engine.clock.now
        if now < self.next_s:
            return
        scheduler = engine.scheduler
        last = output.iteration + output.num_iterations - 1
        self.times_s.append(now)
        self.samples.append(scheduler.manager.usage(scheduler.stored_lengths(last)))
        self.next_s += self.interval_s * (1 + (now - self.next_s) // self.interval_s)
        if self.next_s >= self.stop_s:
            self.next_s = math.inf

    def mean(self, part: str) -> float:
        """Mean of a field of MemoryUsage, as a fraction of the pool."""
        return float(np.mean([getattr(sample, part) / sample.total for sample in self.samples]))

    @property
    def timeline(self) -> pd.DataFrame:
        """The fields of MemoryUsage, in slots and blocks, against time: a row a sample, indexed by `time_s`."""
        import pandas as pd

        return pd.DataFrame(map(asdict, self.samples), index=pd.Index(self.times_s, name="time_s"))

    @property
    def saving(self) -> float:
        """Mean share of blocks saved by sharing: 1 - physical / logical (Fig. 15)."""
        return float(np.mean([1 - s.physical_blocks / s.logical_blocks for s in self.samples if s.logical_blocks]))


class TokenGaps(Observer):
    """Seconds between consecutive tokens of a request, over all requests, of iterations that end from `start_s` to
    `stop_s`; what a preemption costs is in them."""

    def __init__(self, start_s: float = 0.0, stop_s: float = math.inf) -> None:
        self.start_s, self.stop_s = start_s, stop_s
        self.seconds: list[float] = []
        self.counts: list[int] = []
        self._last_s: dict[SequenceGroup, float] = {}  # of groups that were driven out

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = engine.clock.now
        for group in output.preempted:
            if group.generated_before:
                self._last_s.setdefault(group, start_s)  # it may be driven out again before it has a token
        back = [prefill.group for prefill in output.prefills if prefill.group in self._last_s]
        returned = [now - self._last_s.pop(group) for group in back]
        if self.start_s <= now <= self.stop_s:
            self.seconds += [(now - start_s) / output.num_iterations, *returned]
            self.counts += [output.num_iterations * len(output.decodes), *[1] * len(returned)]

    @property
    def mean(self) -> float:
        return float(np.average(self.seconds, weights=self.counts))

    def quantile(self, share: float) -> float:
        """The gap that this share of all gaps does not exceed."""
        order = np.argsort(self.seconds)
        below = np.cumsum(np.asarray(self.counts)[order])
        return self.seconds[order[np.searchsorted(below, share * below[-1])]]


def normalized_latency_s(outcomes: Sequence[Outcome]) -> float:
    """Mean over requests of end-to-end latency / output length, in s/token (§6.1)."""
    return float(np.mean([outcome.normalized_latency_s for outcome in outcomes]))
