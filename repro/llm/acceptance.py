"""Whether the engine computes what a model computes: facts from running it, and no list of names.

A model is loaded under an attention of this module's own, which attends to nothing (each token gets its own value back)
and notes what it is asked for. Two passes of a few tokens then show all that the engine relies on:

- each layer attends once, through transformers' interface, with heads, keys and values of one shape;
- the mask is plainly causal at every length: no window, no chunks, nothing of the model's own;
- attention takes nothing that the kernels do not compute (capped logits, sinks, biases);
- a token meets others in attention alone: beside others, with any position among them, it is what it was. Convolutions,
  states and positions counted over the batch fail here. So do rotary embeddings that change with the longest sequence;
  up to where they change the model is taken."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

PROBE = "repro_probe"
REMEDY = "; use a decoder with plain causal attention in every layer, such as OPT, LLaMA or Qwen"
NO_INTERFACE = "does not use the attention interface of transformers, through which the kernels are reached"
#: arguments of attention that change nothing here: what the engine passes, and what only other implementations read
_HARMLESS = {"paged", "scaling", "dropout", "sliding_window", "position_ids", "cache_position", "position_embeddings"}
_HARMLESS |= {"is_causal", "use_cache", "output_attentions", "logits_to_keep"}
#: relative differences from rounding are below this; float32 is judged to the last layer, others where little adds up
_ROUNDING = {torch.float32: 1e-3}
_ROUNDING_OF_OTHERS, _CALLS_OF_OTHERS = 4e-3, 2


class NotComputed(Exception):
    """A fact that rules a model out, as the end of a sentence that begins with the model."""


@dataclass
class Probe:
    """What one pass asked of attention: the layers in order, queries, keys and values [heads, tokens, dim] of each.

    Masks are looked at (`with_masks`) where the tokens are one sequence."""

    max_model_len: int
    with_masks: bool
    layers: list[int] = field(default_factory=list)
    states: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    logits: Tensor | None = None


@dataclass(frozen=True)
class Shape:
    """Layers, heads, K/V heads and head size, and the tokens up to which all that was checked holds."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int


def check(model: PreTrainedModel) -> Shape:
    """Run a model that was loaded under PROBE. NotComputed if it asks for what the engine does not compute."""
    text = model.config.get_text_config()
    if text is not model.config:
        raise NotComputed(f"is more than a decoder of text ({', '.join(model.config.sub_configs)})")
    stated = getattr(text, "max_position_embeddings", None)
    longest = stated if isinstance(stated, int) and stated > 1 else 2
    count = min(17, max(2, longest // 16))
    ids = (text.vocab_size // 2 + torch.arange(count)) % text.vocab_size
    alone = _run(model, ids, None, longest)
    shape = _shape(text, alone)
    if stated != longest:
        raise NotComputed("does not say how many positions it takes (max_position_embeddings)")

    def differs(length: int) -> bool:
        """Whether the last of these tokens is another one beside others, the longest of which is of `length`."""
        positions = torch.full((count,), length - 1)
        positions[0] = count - 1
        beside = _run(model, ids.roll(1), positions, longest)
        return not _same(alone, beside)

    if not differs(longest):
        return shape
    _run(model, ids, None, longest)  # what grew with a long sequence shrinks again with a short one
    if differs(count):
        raise NotComputed("lets a token depend on others, or on its place in the batch, outside attention")
    good, bad = count, longest
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if differs(middle) else (middle, bad)
        _run(model, ids, None, longest)
    return replace(shape, max_model_len=good)


@torch.no_grad()
def _run(model: PreTrainedModel, ids: Tensor, positions: Tensor | None, longest: int) -> Probe:
    """One pass over the tokens of one sequence, or with `positions` as the engine makes it; logits of one token."""
    probe = Probe(longest, with_masks=positions is None)
    inputs = {} if positions is None else {"position_ids": positions[None].to(model.device)}
    keep = torch.tensor([len(ids) - 1 if positions is None else 0], device=model.device)
    try:
        made = model(ids[None].to(model.device), use_cache=False, paged=probe, logits_to_keep=keep, **inputs)
        probe.logits = made.logits[0]
    except (NotComputed, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotComputed(f"cannot run over flattened tokens without a cache ({reason})") from None
    if len(probe.logits) != 1:
        raise NotComputed("cannot be asked for the logits of some tokens only (logits_to_keep)")
    return probe


def _shape(text: PretrainedConfig, probe: Probe) -> Shape:
    """The one shape of all layers' attention."""
    layers = text.num_hidden_layers
    if not probe.layers:
        raise NotComputed(NO_INTERFACE)
    if len(set(probe.layers)) < len(probe.layers):
        raise NotComputed("attends more than once in a layer")
    if sorted(probe.layers) != list(range(layers)):
        raise NotComputed(f"attends in {len(probe.layers)} of its {layers} layers")
    shapes = {(q.shape[0], k.shape[0], q.shape[-1]) for q, k, _ in probe.states}
    if len(shapes) > 1:
        raise NotComputed(f"has layers of {len(shapes)} shapes (heads, K/V heads, head size: {sorted(shapes)})")
    stated, found = getattr(text, "head_dim", None), probe.states[0][0].shape[-1]
    if stated not in (None, found):
        raise NotComputed(f"states heads of {stated} and attends with heads of {found}, as latent attention does")
    return Shape(layers, *shapes.pop(), probe.max_model_len)


def _same(alone: Probe, beside: Probe) -> bool:
    """Whether the last token of a sequence alone is the first one of a batch, in every layer."""
    dtype = alone.logits.dtype
    pairs = [
        (one[:, -1], other[:, 0])
        for ours, theirs in zip(alone.states, beside.states)
        for one, other in zip(ours, theirs)
    ]
    pairs = [*pairs, (alone.logits, beside.logits)] if dtype in _ROUNDING else pairs[: 3 * _CALLS_OF_OTHERS]
    limit = _ROUNDING.get(dtype, _ROUNDING_OF_OTHERS)
    numbers = ((one.float().nan_to_num(), other.float().nan_to_num()) for one, other in pairs)
    return all((one - other).norm() <= limit * one.norm() for one, other in numbers)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **others: object
) -> tuple[Tensor, None]:
    """Attention as far as a probe needs it. query [1, heads, tokens, dim] -> [1, tokens, heads, dim]: own values."""
    probe = others.get("paged")
    if probe is None:
        raise NotComputed("does not hand its attention the block tables (keyword arguments of its forward pass)")
    unknown = sorted(
        name for name, value in others.items() if name not in _HARMLESS and value is not None and value is not False
    )
    if unknown:
        raise NotComputed(f"asks attention for what the kernels do not compute ({', '.join(unknown)})")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        sizes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
        raise NotComputed(f"has queries, keys and values of different shapes ({sizes})")
    if query.shape[1] % key.shape[1] or query.shape[0] != 1:
        raise NotComputed(f"shares {key.shape[1]} key heads among {query.shape[1]} query heads")
    window = others.get("sliding_window")
    if window is not None and window < probe.max_model_len:
        raise NotComputed(f"uses sliding-window attention (window {window})")
    if probe.with_masks:
        _check_mask(attention_mask, probe.max_model_len)
    probe.layers.append(getattr(module, "layer_idx", -1))
    probe.states.append((query[0], key[0], value[0]))
    own = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return own.transpose(1, 2).contiguous(), None


def _check_mask(mask: Tensor | None, longest: int) -> None:
    """NotComputed unless it is the mask that `_mask` made, and asks for all earlier tokens at every length."""
    if mask is None:
        raise NotComputed("attends without a causal mask")
    asked = getattr(mask, "asked", None) or getattr(mask._base, "asked", None)  # of a view, what it is a view of
    if asked is None:
        raise NotComputed("gives attention a mask of its own")
    places = torch.tensor(sorted({0, 1, longest // 2, longest - 1}), device=mask.device)
    nought, queries, keys = torch.zeros_like(places[:1]), places[:, None], places[None]
    found = torch.broadcast_to(torch.as_tensor(asked(nought, nought, queries, keys)), (len(places), len(places)))
    if (found & (keys > queries)).any():
        raise NotComputed("attends to later tokens")
    if (~found & (keys <= queries)).any():
        raise NotComputed(f"does not attend to all of {longest:,} tokens (a sliding window, or chunks)")


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    dtype: torch.dtype = torch.float32,
    **others: object,
) -> Tensor:
    """A mask that masks nothing, and knows what it was asked to be."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=others.get("device"))
    mask.asked = mask_function
    return mask


AttentionInterface.register(PROBE, _attend)
AttentionMaskInterface.register(PROBE, _mask)
