"""What an engine asks of whatever runs an iteration: a cost model, a CPU, a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Sequence, SequenceGroup


@dataclass(slots=True)
class StepResult:
    """What came out of one SchedulerOutput.

    `durations_s` has one entry per iteration that ran; `parents` re-parents beams; `stopped` lists sequences that ended
    before their length limit."""

    durations_s: list[float]
    parents: dict[SequenceGroup, list[int]] = field(default_factory=dict)
    stopped: list[tuple[SequenceGroup, Sequence]] = field(default_factory=list)


class Executor(ABC):
    @abstractmethod
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Apply `cache_ops` in order, then run prefills and decodes, `num_iterations` times."""

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        """How many iterations like `output` would begin before `until_s`, if known in advance; the first begins now."""
        return 1


class ParentChoices(Protocol):
    """Where a simulation gets its beams' parents from."""

    def parents(self, request_id: int, width: int, step: int) -> list[int] | None:
        """The beam that each beam continues after decoding step `step` (0 is the first one); None if each its own.
        Survivors keep their places: parents[p] == p for every p in the list."""
