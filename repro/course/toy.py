"""The engine at toy size: requests of a few tokens, and an iteration that takes one second and computes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request
from repro.sampling_params import SamplingParams


class Ticking(Executor):
    """Each iteration takes a second, so that seconds are iterations."""

    def execute(self, output: SchedulerOutput) -> StepResult:
        return StepResult([1.0] * output.num_iterations)


class Batches(Observer):
    """Remembers how many tokens each request computes in each iteration: `rows`, by iteration."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, int]] = {}

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        row = {f"request {group.request.request_id}": len(group.seqs) for group in output.decodes}
        for part in (*output.prefills, *output.chunks):
            row[f"request {part.group.request.request_id}"] = part.num_tokens - part.num_cached
        self.rows[output.iteration] = row


def request(number: int, prompt: int, output: int, n: int = 1, arrival: int = 0) -> Request:
    """A request of so many tokens and `n` samples, which comes in iteration `arrival`."""
    return Request(number, float(arrival), prompt, output, SamplingParams(n=n))


def run(scheduler: Scheduler, requests: Iterable[Request], observers: Iterable[Observer] = ()) -> None:
    """The requests, which are sorted by arrival, to the end of the last one."""
    Engine(scheduler, Ticking(), observers=observers).run(requests)
