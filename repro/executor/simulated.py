"""Runs nothing: says how long an iteration would take, and that every sequence got its next token."""

from __future__ import annotations

import math
import sys
from itertools import islice

from repro.executor.cost_model import CostModel
from repro.executor.interface import Executor, StepResult
from repro.scheduler import SchedulerOutput


class SimulatedExecutor(Executor):
    """Virtual time from a cost model. Outputs have exactly the lengths of the trace."""

    def __init__(self, cost_model: CostModel) -> None:
        self.cost_model = cost_model

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        if math.isinf(until_s):
            return sys.maxsize
        for count, seconds in enumerate(self.cost_model.step_times(output), start=1):
            now_s += seconds
            if now_s >= until_s:
                return count
        raise AssertionError("step_times never ends")

    def execute(self, output: SchedulerOutput) -> StepResult:
        return StepResult(list(islice(self.cost_model.step_times(output), output.num_iterations)))
