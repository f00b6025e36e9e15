"""Runs nothing: says how long an iteration would take, and that every sequence got its next token."""

from __future__ import annotations

import math
import sys
from itertools import islice
from typing import TYPE_CHECKING

from repro.engine.executor import Executor, StepResult
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.simulate.cost_model import CostModel

if TYPE_CHECKING:
    from repro.engine.executor import ParentChoices


class SimulatedExecutor(Executor):
    """Virtual time from a cost model. Outputs have exactly the lengths of the trace.

    Which beams survive is no matter of time: `beams` says it (see repro.simulate.beams). Without it every beam
    continues itself."""

    def __init__(self, cost_model: CostModel, beams: ParentChoices | None = None) -> None:
        self.cost_model = cost_model
        self.beams = beams
        self._foreseen: tuple[SchedulerOutput | None, list[float]] = None, []

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        if math.isinf(until_s):
            return sys.maxsize
        durations = []
        for seconds in self.cost_model.step_times(output):
            durations.append(seconds)
            now_s += seconds
            if now_s >= until_s:
                break
        self._foreseen = output, durations
        return len(durations)

    def execute(self, output: SchedulerOutput) -> StepResult:
        foreseen, durations = self._foreseen
        if foreseen is output:
            del durations[output.num_iterations :]
        else:
            durations = list(islice(self.cost_model.step_times(output), output.num_iterations))
        parents: dict[SequenceGroup, list[int]] = {}
        if self.beams is not None:
            for group in (*output.decodes, *(prefill.group for prefill in output.prefills)):
                # The prompt's iteration gave the first token; decoding steps are counted from there, recomputed ones
                # too.
                step = group.num_generated(output.iteration) - 1
                if group.is_beam and step >= 0:
                    chosen = self.beams.parents(group.request.request_id, len(group.seqs), step)
                    if chosen is not None:
                        parents[group] = chosen
        return StepResult(durations, parents)
