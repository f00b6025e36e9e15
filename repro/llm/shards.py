"""Tensor parallelism (§4.6, after Megatron-LM): which part of each weight a GPU holds, and where parts are added up.

Queries, keys, values and the first matrices of a feed-forward layer are split by columns: each GPU has some of the
heads, and of the hidden units. The matrices behind them are split by rows, and what they give is added up over all
GPUs: two sums a layer. Embeddings, norms and the head are whole on every GPU: all compute the same logits, and need no
third kind of message. All begin a pass with rank 0's tokens, so that only rank 0 has to sample.

A model is made without storage, and gets its weights one module at a time, cut as soon as they are there. So no GPU,
and no host, holds more than its part and one whole matrix. Random weights are drawn by the names of modules: each is
the same matrix, cut in other places, for any number of GPUs."""

import datetime
import hashlib
import itertools
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from repro.errors import UserError

#: after so long a rank that waits for another one gives up
TIMEOUT = datetime.timedelta(minutes=5)
#: architectures for which transformers has no plan; names are those of its own plans
_OWN_PLANS = {
    "opt": {
        **{f"decoder.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    }
}
_WHOLE = "replicated_with_grad_allreduce"  # transformers' word for the norms of single heads
_HEADS = ("num_heads", "num_key_value_heads")


class Part(NamedTuple):
    """Part `rank` of `size` equal ones."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        return slice(length // self.size * self.rank, length // self.size * (self.rank + 1))


class Ranks:
    """The processes that hold a model's parts, as one of them sees them: NCCL between GPUs, gloo between CPUs.

    They meet at a store that rank 0 opens, and every one calls the same operations in the same order. RuntimeError if
    another one has ended, or does not come for TIMEOUT."""

    def __init__(self, part: Part, device: torch.device, store: torch.distributed.Store) -> None:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast: not to be had on every host
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # give up, and leave the process alone
        self.part = part
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self.group = torch.distributed.ProcessGroupNCCL(store, *part, options)
        else:
            self.group = torch.distributed.ProcessGroupGloo(store, *part, TIMEOUT)
        self._sum, self._first = torch.distributed.AllreduceOptions(), torch.distributed.BroadcastOptions()
        self._sum.asyncOp = self._first.asyncOp = False  # on the current stream, also while a graph is captured
        self._first.rootRank = 0
        self.number = next(_NUMBERS)
        _RANKS[self.number] = self
        self.share(torch.zeros(1, dtype=torch.int64, device=device))  # all are there

    def add_up(self, x: Tensor) -> None:
        """Put the sum over all ranks in place of each one's tensor; the same bits everywhere."""
        self.group.allreduce([x], self._sum).wait()

    def share(self, x: Tensor) -> None:
        """Put rank 0's tensor in place of each one's."""
        self.group.broadcast([x], self._first).wait()


_NUMBERS = itertools.count()
# An operator, so that torch.compile sees one opaque call (see `attention`). It takes no objects, so ranks have numbers.
_RANKS: "weakref.WeakValueDictionary[int, Ranks]" = weakref.WeakValueDictionary()
_LIBRARY = torch.library.Library("repro", "FRAGMENT")
_LIBRARY.define("add_up(Tensor(a!) x, int ranks) -> ()")
_LIBRARY.impl("add_up", lambda x, ranks: _RANKS[ranks].add_up(x), "CompositeExplicitAutograd")
torch.library.register_fake("repro::add_up", lambda x, ranks: None, lib=_LIBRARY)


class RowParallel(nn.Module):
    """A projection of which each rank has some rows of the matrix (columns of `weight`): parts are added up, then the
    bias, once."""

    def __init__(self, part: nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self.bias = part.weight, part.bias
        self._ranks, self._number = ranks, ranks.number

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight)
        torch.ops.repro.add_up(out, self._number)
        return out if self.bias is None else out + self.bias


def without_storage(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def plan_of(model: PreTrainedModel, name: str, num_gpus: int) -> dict[str, str]:
    """Modules that are split over GPUs, and how: "colwise" or "rowwise". Looks at shapes only.

    UserError if the architecture has no such plan, or if its heads or its hidden units do not divide by the number."""
    config = model.config.get_text_config()
    given = _OWN_PLANS.get(config.model_type, getattr(config, "base_model_tp_plan", None)) or {}
    styles = {pattern: style for pattern, style in given.items() if style != _WHOLE}
    prefix = re.escape(f"{model.base_model_prefix}.")
    patterns = {re.compile(prefix + re.escape(one).replace(r"\*", r"\d+")): style for one, style in styles.items()}
    plan = {}
    for path, module in model.named_modules():
        for pattern, style in patterns.items():
            if pattern.fullmatch(path) and isinstance(module, nn.Linear):
                plan[path] = style
    kinds = {(path.rpartition(".")[2], style) for path, style in plan.items()}
    planned = {(one.rpartition(".")[2], style) for one, style in styles.items()}
    if not plan or kinds != planned or not set(styles.values()) <= {"colwise", "rowwise"}:
        raise UserError(
            f"model {name!r} ({config.model_type}) cannot be split over GPUs: its layers are not all plain projections "
            "split by columns or rows; use num_gpus=1, or a model such as OPT, LLaMA or Qwen"
        )
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    counts = {f"{kv_heads} K/V heads": kv_heads, f"{heads} heads": heads}
    for path, style in plan.items():
        weight = model.get_submodule(path).weight
        counts[f"{path}'s {weight.shape[style == 'rowwise']} units"] = weight.shape[style == "rowwise"]
    for what, count in counts.items():
        if count % num_gpus:
            divisors = [str(one) for one in range(1, kv_heads + 1) if not kv_heads % one and not heads % one]
            raise UserError(
                f"num_gpus = {num_gpus}: the {what} of {name} cannot be split evenly over so many; "
                f"use one of {', '.join(divisors)}"
            )
    return plan


def fill(
    model: PreTrainedModel,
    plan: dict[str, str],
    part: Part,
    device: torch.device,
    weights: Callable[[str, nn.Module], dict[str, Any]],
) -> None:
    """Give a model without storage its part of the weights. `weights` has those of a module by its path, whole (or
    slices of a file, which are read as they are cut)."""
    made: dict[int, nn.Parameter] = {}  # tied weights are made once
    for path, module in model.named_modules():
        own = {name: one for name, one in module.named_parameters(recurse=False) if id(one) not in made}
        if module._buffers:  # tables of angles and the like, which no file has
            for name, one in module._buffers.items():
                module._buffers[name] = None if one is None else _unset(one, device)
            model._init_weights(module)
            _check_set(path, module._buffers)
        found = weights(path, module) if own else {}
        for name, empty in own.items():
            cut = _cut(plan.get(path), name, part, empty.shape)
            value = found[name][cut].to(device, empty.dtype, copy=True)
            made[id(empty)] = nn.Parameter(value, requires_grad=False)
        for name, one in module.named_parameters(recurse=False):
            setattr(module, name, made.get(id(one), one))
        if path in plan:
            module.out_features, module.in_features = module.weight.shape
        if hasattr(module, "layer_idx"):
            for name in _HEADS:
                if hasattr(module, name):
                    setattr(module, name, getattr(module, name) // part.size)


def _unset(like: Tensor, device: torch.device) -> Tensor:
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0, device=device)


def _check_set(path: str, values: dict[str, Tensor | None]) -> None:
    for name, one in values.items():
        if one is not None and one.isnan().any():
            raise ValueError(f"transformers does not say how {path}.{name} begins")


def _cut(style: str | None, name: str, part: Part, shape: torch.Size) -> tuple[slice, ...]:
    """The part of a module's weight or bias that a rank holds."""
    if style is None or (style == "rowwise" and name == "bias"):
        return tuple(slice(None) for _ in shape)
    if style == "colwise":
        return (part.of(shape[0]), *(slice(None) for _ in shape[1:]))
    return slice(None), part.of(shape[1])


def drawn(model: PreTrainedModel, name: str, seed: int, device: torch.device) -> Callable[[str, nn.Module], dict]:
    """Random weights as transformers begins them, each module's from a generator of its own: seed, model and path.

    Equal on equal devices, whatever the number of GPUs."""

    @torch.no_grad()
    def weights(path: str, module: nn.Module) -> dict[str, Tensor]:
        empty = {key: one for key, one in module._parameters.items() if one is not None}
        for key, one in empty.items():
            setattr(module, key, nn.Parameter(_unset(one, device), requires_grad=False))
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {name} {path}".encode()).digest()[:8], "little"))
            model._init_weights(module)
        whole = {key: module._parameters[key] for key in empty}
        _check_set(path, whole)
        module._parameters.update(empty)
        return whole

    return weights


def read(files: list[Path], prefix: str) -> Callable[[str, nn.Module], dict[str, Any]]:
    """Weights of a checkpoint's safetensors files: of each only what is cut from it is read.

    Names are those of the model, or those of its base model (without `prefix`)."""
    place = {name: file for file in map(_opened, files) for name in file.keys()}  # noqa: SIM118 - no mapping

    def weights(path: str, module: nn.Module) -> dict[str, Any]:
        found = {}
        for key, _ in module.named_parameters(recurse=False):
            names = [f"{path}.{key}", f"{path}.{key}".removeprefix(f"{prefix}.")]
            name = next((one for one in names if one in place), None)
            if name is None:
                raise ValueError(f"its safetensors files have no {names[0]}")
            found[key] = place[name].get_slice(name)
        return found

    return weights


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")


def join(model: PreTrainedModel, plan: dict[str, str], ranks: Ranks) -> None:
    """Let a model's part compute what the whole does, together with the others."""
    for path, style in plan.items():
        if style == "rowwise":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, RowParallel(model.get_submodule(path), ranks))
    model.get_input_embeddings().register_forward_pre_hook(lambda module, given: ranks.share(given[0]))
