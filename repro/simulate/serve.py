"""One serving run in virtual time, as one call: a system, a deployment, a trace, a cost model.

    run = serve("vllm", "opt-13b", make_trace("sharegpt", rate=2.0, duration_s=60.0, seed=0), usage_every_s=1.0)
    run.latency_s_per_token; run.usage

Studies are built from these functions; what a run returns is numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from repro import display
from repro.checks import instance, lookup, number, several, user_facing, whole
from repro.engine.config import DEPLOYMENTS, GIB, Deployment, check_block_size
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.sequence import SamplingParams
from repro.engine.systems import System
from repro.errors import UserError
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe, Setup, joining
from repro.simulate import profiles
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import UsageSamples, normalized_latency_s
from repro.simulate.panels import system_for
from repro.simulate.prompts import PREFIX, hashes_of, requests_of
from repro.workloads import Trace

if TYPE_CHECKING:
    import pandas as pd

    from repro.engine.executor import ParentChoices

#: CPU memory for swapped groups, per GPU (the authors' setting)
SWAP_SPACE_BYTES = 20 * GIB


def trace_seconds(model: str, system: str = "vllm") -> float:
    """How long the authors' traces are: an hour, but 15 minutes for OPT-175B (§6.1) except with FasterTransformer."""
    return 900.0 if model == "opt-175b" and system != "faster-transformer" else 3600.0


@dataclass(frozen=True, repr=False)
class Served:
    """A finished run: outcomes in the order of the trace, and the engine as it stands at the end.

    `made` is what it was made from. `log` and `samples` are what was recorded on the way, None if that was not asked
    for."""

    outcomes: list[Outcome]
    engine: Engine
    made: Recipe
    log: list[Event] | None = None
    samples: UsageSamples | None = None

    def __repr__(self) -> str:
        """A run in one line: its log can be long."""
        return (
            f"{len(self.outcomes):,} requests, finished after {self.engine.clock.now:,.0f} s: mean normalized latency "
            f"{self.latency_s_per_token:.3g} s/token, {self.engine.scheduler.num_preemptions:,} preemptions"
        )

    def rows(self, of: str = "requests") -> list[dict[str, Any]]:
        """As rows of a table: of its "requests", in the order of the trace, or of its "events". UserError for events
        that were not recorded."""
        asked = lookup("table", {"requests": lambda: self.outcomes, "events": lambda: self.events}, of)
        return [one.row() for one in asked()]

    def to_frame(self, of: str = "requests") -> pd.DataFrame:
        """The same rows for pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows(of))

    def _repr_html_(self) -> str:
        return display.indexed(repr(self), len(self.outcomes), lambda number: self.outcomes[number].row())

    @property
    def recipe(self) -> Recipe:
        """What it takes to run it again."""
        return replace(self.made, events=self.log, outcomes=self.outcomes)

    @user_facing
    def memory_map(self) -> MemoryMap:
        """Who held which block of the memory in each iteration: the run is made again, watched.

        UserError if it comes out otherwise: a policy of its own then does not decide the same for the same requests."""
        return self.recipe.memory_map()

    @property
    def latency_s_per_token(self) -> float:
        """Mean normalized latency of all requests, in s/token (§6.1)."""
        return normalized_latency_s(self.outcomes)

    @property
    def events(self) -> list[Event]:
        """What the scheduler decided, in order (see repro.engine.events). UserError if it was not recorded."""
        if self.log is None:
            raise UserError("this run recorded no events; ask for them with serve(..., log=[])")
        return self.log

    @property
    def usage(self) -> pd.DataFrame:
        """The pool over time, as UsageSamples.timeline. UserError if it was not sampled."""
        if self.samples is None:
            raise UserError("this run did not sample its pool; ask for it with serve(..., usage_every_s=1.0)")
        return self.samples.timeline


@user_facing
def serve(
    system: System | str,
    deployment: Deployment | str,
    trace: Trace,
    cost_model: CostModel | None = None,
    block_size: int = 16,
    sampling: SamplingParams = SamplingParams(),
    observers: Iterable[Observer] = (),
    log: list[Event] | None = None,
    shared_prefix_tokens: int = 0,
    beams: ParentChoices | None = None,
    usage_every_s: float | None = None,
    hashes: Hashes | None = None,
) -> Served:
    """Run a trace to the end of its last request.

    `system` may be a name of SYSTEMS, which is then set up as in the paper for the trace's workload (only
    FasterTransformer's batch limit depends on it), and `deployment` one of DEPLOYMENTS. The default `cost_model` is the
    deployment's under the profile a100-2023 with no anchor, which is what Fig. 12's panels add to an iteration;
    FasterTransformer, another program, has a step of its own. `log` is filled with the scheduler's events. The pool is
    sampled every `usage_every_s` seconds.

    All prompts begin with the same `shared_prefix_tokens` tokens (part of their length). A system that can share stores
    their full blocks once, before the first request (§4.4); the others compute and hold them for each request, and one
    with a prefix cache finds them by what they hold: `hashes`, by default nothing else that is alike but the samples of
    a prompt. Beam search needs `beams`, which says where they continue.

    UserError for an unknown name or an argument of another kind, if the pool cannot hold one of the requests at its
    full length, or if beam search comes without `beams`."""
    instance("trace", trace, Trace, "a Trace, such as repro.make_trace makes")
    if not isinstance(deployment, Deployment):
        deployment = lookup("deployment", DEPLOYMENTS, deployment)
    block_size = check_block_size(block_size)
    instance("sampling", sampling, SamplingParams, "a SamplingParams")
    if log is not None:
        instance("log", log, list, "a list, which the events are added to")
    whole("shared_prefix_tokens", shared_prefix_tokens)
    if sampling.use_beam_search and not hasattr(beams, "parents"):
        raise UserError(
            "a simulated beam search must be told which beams survive; give it repro.simulate.beams.recording(...)"
        )
    if usage_every_s is not None:
        number("usage_every_s", usage_every_s, 0, above=True)
    if cost_model is not None and not hasattr(cost_model, "step_times"):
        instance("cost_model", cost_model, CostModel, "what repro.cost_model(profile, deployment) makes")
    samples = None if usage_every_s is None else UsageSamples(0.0, math.inf, usage_every_s)
    watching = [*several("observers", observers, Observer, "a list of Observers"), *([samples] if samples else [])]
    asked = _Asked(deployment, trace, cost_model, sampling, shared_prefix_tokens, beams, (block_size, hashes))
    made = asked.recipe(system, block_size)
    ran = made.run(log, watching)
    return Served(list(ran.outcomes.values()), ran.engine, made, log, samples)


@dataclass(frozen=True)
class _Asked:
    """What was asked of `serve`, but for the system and its blocks; `hashes` are of blocks of this size."""

    deployment: Deployment
    trace: Trace
    cost_model: CostModel | None
    sampling: SamplingParams
    shared_prefix_tokens: int
    beams: ParentChoices | None
    hashes: tuple[int, Hashes | None]

    def recipe(self, system: System | str, block_size: int) -> Recipe:
        """The run with this system and blocks of this size, in the deployment's slots."""
        deployment, costs = self.deployment, self.cost_model
        if not isinstance(system, System):
            system = system_for(system, deployment, self.trace.name)
        if costs is None and system.name == "faster-transformer":
            costs = profiles.faster_transformer_costs(deployment)
        elif costs is None:
            is_beam = self.sampling.use_beam_search
            costs = profiles.cost_model("a100-2023", deployment, block_size, beam_search=is_beam)
        system = system.for_length(deployment.model.max_model_len)
        block_bytes = block_size * deployment.model.kv_bytes_per_token // deployment.num_gpus
        size, hashes = self.hashes
        if hashes is not None and size != block_size:
            raise UserError(f"block_size = {block_size}: the run was given hashes of blocks of {size} tokens")
        width = self.sampling.n if system.splits_samples else 1
        prefix_id = PREFIX if self.shared_prefix_tokens else None
        setup = Setup(
            system,
            deployment.num_blocks(block_size),
            block_size,
            deployment.model.max_model_len,
            SWAP_SPACE_BYTES // block_bytes,
            hashes or hashes_of(self.shared_prefix_tokens, block_size, width),
            (prefix_id, self.shared_prefix_tokens) if prefix_id else None,
        )
        requests = requests_of(self.trace, self.sampling, prefix_id, system.splits_samples)
        return Recipe(setup, joining(requests), SimulatedExecutor(costs, self.beams), remade=self.recipe)


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
