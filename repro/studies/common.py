"""What the studies of serving runs share: checks of their parameters, and where lengths come from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from repro.engine.config import DEPLOYMENTS, Deployment, check_block_size, lookup
from repro.engine.errors import UserError
from repro.engine.systems import system
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import a100_2023, cost_model
from repro.workloads import Trace, make_trace


def check_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UserError(f"{name} = {value} must be a finite number above 0")


def check_some(name: str, values: Iterable[object]) -> None:
    values = list(values)
    if not values:
        raise UserError(f"{name} = [] leaves nothing to run; give at least one")
    if len(set(values)) != len(values):
        raise UserError(f"{name} = {values} names one of them twice")


def check_seeds(seeds: tuple[int, ...]) -> None:
    check_some("seeds", seeds)
    if min(seeds) < 0:
        raise UserError(f"seeds = {list(seeds)}: seeds are whole numbers from 0 up")


def check_systems(names: tuple[str, ...]) -> None:
    check_some("systems", names)
    for name in names:
        system(name)


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


def trace_of(workload: str, rate: float, duration_s: float, seed: int, lengths: str | None) -> Trace:
    """The trace of a run. A file of lengths stands in for the ShareGPT-like workload; Alpaca keeps its own."""
    return make_trace(workload, rate, duration_s, seed, lengths if workload == "sharegpt" else None)
