"""One serving run in virtual time, as one call: a system, a deployment, a trace, a cost model.

Studies are built from these functions; what a run returns is numbers only.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.engine.config import GIB, Deployment
from repro.engine.errors import UserError
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import System
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import normalized_latency_s
from repro.workloads import Trace

if TYPE_CHECKING:
    from repro.engine.executor import ParentChoices

#: CPU memory for swapped groups, per GPU (the authors' setting)
SWAP_SPACE_BYTES = 20 * GIB


def trace_seconds(model: str) -> float:
    """How long the authors' traces are: an hour, but 15 minutes for OPT-175B (§6.1)."""
    return 900.0 if model == "opt-175b" else 3600.0


@dataclass(frozen=True)
class Served:
    """A finished run: outcomes in the order of the trace, and the engine as it stands at the end."""

    outcomes: list[Outcome]
    engine: Engine

    @property
    def latency_s_per_token(self) -> float:
        return normalized_latency_s(self.outcomes)


def requests_of(trace: Trace, sampling: SamplingParams, prefix_id: str | None = None) -> Iterator[Request]:
    lengths = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    for index, (arrival, prompt, output) in enumerate(lengths):
        yield Request(index, arrival, prompt, output, sampling, prefix_id)


def serve(
    system: System,
    deployment: Deployment,
    trace: Trace,
    cost_model: CostModel,
    block_size: int = 16,
    sampling: SamplingParams = SamplingParams(),
    observers: Iterable[Observer] = (),
    log: list[Event] | None = None,
    shared_prefix_tokens: int = 0,
    beams: ParentChoices | None = None,
) -> Served:
    """Run a trace to the end of its last request.

    All prompts begin with the same `shared_prefix_tokens` tokens (part of their length). A system that can share stores
    their full blocks once, before the first request (§4.4); the others compute and hold them for each request. Beam
    search needs `beams`, which says where they continue.

    UserError if the pool cannot hold one of the requests at its full length, or beam search comes without `beams`.
    """
    if sampling.use_beam_search and beams is None:
        raise UserError(
            "a simulated beam search must be told which beams survive; give it repro.simulate.beams.recording(...)"
        )
    block_bytes = block_size * deployment.model.kv_bytes_per_token // deployment.num_gpus
    manager = system.manager(
        deployment.num_blocks(block_size), block_size, deployment.model.max_model_len, SWAP_SPACE_BYTES // block_bytes
    )
    prefix_id = "shared" if shared_prefix_tokens else None
    if prefix_id and isinstance(manager, PagedKVCacheManager):
        manager.store_prefix(prefix_id, shared_prefix_tokens)
    engine = Engine(
        Scheduler(manager, system.scheduler, log), SimulatedExecutor(cost_model, beams), observers=observers
    )
    with _collector_paused():
        return Served(engine.run(requests_of(trace, sampling, prefix_id)), engine)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile: a run makes many objects and no cycles, and scanning them takes a third
    of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def crossing(latency: Callable[[float], float], start: float, level: float = 0.5, precision: float = 0.01) -> float:
    """The rate at which a latency curve reaches `level` (s/token), bracketed to within `precision`.

    The bracket is widened from `start` by steps of a quarter, then narrowed around the place where a straight line
    between the logarithms of its ends would cross. Returns its geometric middle."""

    def excess(rate: float) -> float:
        return math.log(latency(rate) / level)

    low = high = start
    above_low = above_high = excess(start)
    while above_low > 0:
        high, above_high = low, above_low
        low /= 1.25
        above_low = excess(low)
    while above_high <= 0:
        low, above_low = high, above_high
        high *= 1.25
        above_high = excess(high)
    side = 1
    while high / low > 1 + precision:
        width = math.log(high / low)
        # A little to one side of the guess, then to the other: if the guess is good, these two are the new bracket.
        place = width * above_low / (above_low - above_high) - side * 0.45 * math.log1p(precision)
        rate = low * math.exp(min(max(place, 0.1 * width), 0.9 * width))
        above = excess(rate)
        if above > 0:
            high, above_high, side = rate, above, 1
        else:
            low, above_low, side = rate, above, -1
    return (low * high) ** 0.5
