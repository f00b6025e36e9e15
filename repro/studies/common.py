"""What the studies share: the types of their parameters, what every row says of itself, deployments and traces."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field

from repro.checks import lookup
from repro.engine.config import DEPLOYMENTS, Deployment, check_block_size
from repro.engine.systems import system
from repro.errors import UserError
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import a100_2023, cost_model
from repro.workloads import WORKLOADS, Trace, length_source, make_trace

_Items = TypeVar("_Items", bound="tuple[Any, ...]")


def _some(values: _Items) -> _Items:
    if not values:
        raise ValueError("leaves nothing to run; give at least one")
    if len(set(values)) != len(values):
        raise ValueError("names one of them twice")
    return values


def _system(name: str) -> str:
    return system(name).name


def lengths_of(workload: str, **options: Any) -> AfterValidator:
    """Of the type of a source of lengths, as for `length_source`: read when a run is opened, so that a bad file is
    found before any work."""

    def read(source: str | None) -> str | None:
        if source is not None:
            length_source(workload, source, **options)
        return source

    return AfterValidator(read)


def named(kind: str, known: Iterable[str]) -> AfterValidator:
    """Of the type of a name: one of those that are known."""
    return AfterValidator(lambda name: lookup(kind, dict.fromkeys(known, name), name))


#: a list with at least one entry, none twice: `Annotated[tuple[...], Some]`
Some = AfterValidator(_some)
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Model = Annotated[str, named("model", DEPLOYMENTS)]
BlockSize = Annotated[int, AfterValidator(check_block_size)]
Seeds = Annotated[tuple[Seed, ...], Some]
Rates = Annotated[tuple[Positive, ...], Some]
Systems = Annotated[tuple[Annotated[str, AfterValidator(_system)], ...], Some]
Workloads = Annotated[tuple[Annotated[str, named("workload", WORKLOADS)], ...], Some]

Lengths = Annotated[str | None, lengths_of("sharegpt")]


def _window(window: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= window[0] < window[1]:
        raise ValueError("is no window; its start must be at least 0 s and lie before its end")
    return window


#: from when to when (s) something is averaged; requests arrive from 0 to the end of it
Window = Annotated[tuple[float, float], AfterValidator(_window)]

WORKLOAD_LABEL = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}


def about(
    evidence: str, device: str | None = None, seed: int | None = None, trace: Trace | None = None
) -> dict[str, Any]:
    """What every row says of itself: its kind of evidence, what it ran on, its seed, and the hash of its trace."""
    return {"evidence": evidence, "device": device, "seed": seed, "trace_hash": trace and trace.hash}


def deployment_of(model: str, kv_slots: int | None = None) -> Deployment:
    """A row of Table 1, with another pool if `kv_slots` says so."""
    deployment = lookup("model", DEPLOYMENTS, model)
    return deployment if kv_slots is None else replace(deployment, kv_slots=kv_slots)


def check_serving(model: str, profile: str, block_size: int, kv_slots: int | None) -> None:
    """Refuse what could not serve one request of the model's maximum length."""
    check_block_size(block_size)
    deployment = deployment_of(model, kv_slots)
    longest = deployment.model.max_model_len
    # 1 % of the blocks is vLLM's watermark, which admission keeps free.
    if 0.99 * deployment.num_blocks(block_size) * block_size < longest:
        raise UserError(
            f"kv_slots = {deployment.kv_slots} cannot hold one request of {longest} tokens, the most that {model} "
            f"takes (1 % of the pool is kept free); use at least {math.ceil(longest / 0.99) + block_size}"
        )
    cost_model(profile, deployment, block_size)


def _serving(size: int) -> int:
    check_serving("opt-13b", "a100-2023", size, None)
    return size


#: with which OPT-13B serves in the pool of Table 1
ServingBlockSizes = Annotated[tuple[Annotated[BlockSize, AfterValidator(_serving)], ...], Some]


def costs_of_samples(workload: str, beam_search: bool = False) -> CostModel:
    """OPT-13B's cost model where requests have several sequences (§6.3): with what the profile says of requests and of
    beams."""
    return cost_model(
        "a100-2023",
        deployment_of("opt-13b"),
        anchor=f"opt-13b/{workload}",
        per_request_ms=a100_2023()["per_request_ms"],
        beam_search=beam_search,
    )


def trace_of(
    workload: str, rate: float, duration_s: float, seed: int, lengths: str | None, arrivals: str = "poisson"
) -> Trace:
    """The trace of a run. A file of lengths stands in for the ShareGPT-like workload; Alpaca keeps its own."""
    lengths = lengths if workload == "sharegpt" else None
    return make_trace(workload, rate, duration_s, seed, lengths, arrivals=arrivals)
