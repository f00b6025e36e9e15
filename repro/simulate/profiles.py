"""Cost models from data: the calibrated A100 of 2023, and what a datasheet alone would promise.

`a100-2023` reads repro/simulate/a100-2023.toml, in which every number names its source. `datasheet` knows only the
vendor's rates (repro.engine.config.DEVICES): an iteration reads all weights and the context once, and prompts run at
the full matrix rate."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from repro.checks import flag, lookup, number, user_facing
from repro.engine.config import DEPLOYMENTS, GB, MODELS, Deployment, check_block_size
from repro.simulate.cost_model import CostModel, PaddedCostModel

PROFILES = ("a100-2023", "datasheet")


@cache
def a100_2023() -> Mapping[str, Any]:
    """The profile's numbers as they stand in its file."""
    return tomllib.loads(resources.files("repro.simulate").joinpath("a100-2023.toml").read_text(encoding="utf-8"))


def context_splits() -> tuple[str, ...]:
    """Ways to divide Fig. 1's slope between sequences and context tokens; the first one is what curves use."""
    return tuple(a100_2023()["context_splits"])


@user_facing
def cost_model(
    profile: str,
    deployment: Deployment | str,
    block_size: int = 16,
    *,
    anchor: str | None = None,
    split: str = "sequence",
    prefill_efficiency: float | None = None,
    prefill_shape: str | None = None,
    anchor_ms: float | None = None,
    per_request_ms: float = 0.0,
    beam_search: bool = False,
) -> CostModel:
    """The cost model of a deployment under a named profile.

    `anchor` names a panel of Fig. 12, such as "opt-13b/sharegpt", whose anchor is added to the fixed cost (`anchor_ms`
    gives its value directly); `split` and `prefill_efficiency` (share of the datasheet's matrix rate) change the two
    assumptions; `prefill_shape` "h200" lets few prompt tokens run at a smaller share, as they do on that GPU.
    `per_request_ms` moves as much of the cost of a sequence to its request, which matters where requests
    have several sequences. `beam_search` adds what its steps cost. All seven only mean something for "a100-2023".
    UserError for unknown names and impossible values."""
    lookup("cost profile", dict.fromkeys(PROFILES), profile)
    if not isinstance(deployment, Deployment):
        deployment = lookup("deployment", DEPLOYMENTS, deployment)
    check_block_size(block_size)
    flag("beam_search", beam_search)
    device, model, gpus = deployment.device, deployment.model, deployment.num_gpus
    block_bytes = block_size * model.kv_bytes_per_token / gpus
    weight_read_s = model.weight_bytes / gpus / device.bytes_per_s
    context_s = model.kv_bytes_per_token / gpus / device.bytes_per_s
    flops_per_s = gpus * device.flops_per_s
    copy_s = 2 * block_bytes / device.bytes_per_s
    if profile == "datasheet":
        name, prefill_s = f"datasheet-{device.name}", model.flops_per_token / flops_per_s
        swap_s = block_bytes / device.link_bytes_per_s
        return CostModel(name, weight_read_s, 0.0, 0.0, context_s, prefill_s, weight_read_s, copy_s, swap_s)
    data = a100_2023()
    decode = data["decode"]
    efficiency = data["prefill_efficiency"] if prefill_efficiency is None else prefill_efficiency
    number("prefill_efficiency", efficiency, 0, 1, above=True)
    shape = () if prefill_shape is None else lookup("prefill shape", data["prefill_shapes"], prefill_shape)
    if anchor_ms is not None:
        number("anchor_ms", anchor_ms, -1e9)
    else:
        anchor_ms = 0.0 if anchor is None else lookup("split", lookup("anchor", data["anchors_ms"], anchor), split)
    read_ms = lookup("split", data["context_splits"], split) * 1e3 * context_s
    per_token_ms = min(read_ms, decode["per_seq_ms"] / decode["context_tokens"])
    per_seq_ms = max(0.0, decode["per_seq_ms"] - per_token_ms * decode["context_tokens"])
    number("per_request_ms", per_request_ms, 0, per_seq_ms)
    if beam_search:
        anchor_ms += data["beam_step_ms"]
    layers = model.num_layers / MODELS[decode["model"]].num_layers
    transfer_s = layers * sum(data["swap_ms_per_block"].values()) / 2 / 1e3  # what is swapped out comes in again
    swap_s = block_bytes / (data["link_gb_per_s"] * GB) + transfer_s
    prefill_s = model.flops_per_token / (flops_per_s * efficiency)
    iteration_ms = (decode["fixed_ms"] * layers + anchor_ms, per_seq_ms - per_request_ms, per_request_ms, per_token_ms)
    seconds = (*(ms / 1e3 for ms in iteration_ms), prefill_s, weight_read_s, copy_s, swap_s)
    return CostModel("a100-2023", *seconds, prefill_shape=tuple(map(tuple, shape)))


def faster_transformer_costs(deployment: Deployment, extra_ms: float | None = None) -> PaddedCostModel:
    """A step of FasterTransformer, a program of its own: weights and padded context at the datasheet's bandwidth,
    prompts beyond that at the assumed share of the matrix rate, and a fixed extra, by default the calibrated one.

    A model without a calibrated extra has OPT-13B's, times layers / 40."""
    data, model = a100_2023(), deployment.model
    if extra_ms is None:
        known = data["faster_transformer_extra_ms"]["authors"]
        layers = model.num_layers / MODELS["opt-13b"].num_layers
        extra_ms = known.get(model.name, known["opt-13b"] * layers)
    bare = cost_model("datasheet", deployment)
    changed = {
        "name": "a100-2023",
        "fixed_s": bare.weight_read_s + extra_ms / 1e3,
        "per_prefill_token_s": bare.per_prefill_token_s / data["prefill_efficiency"],
    }
    return PaddedCostModel(**vars(bare) | changed)
