"""Paged attention as transformers sees it: one function, registered under the name `IMPLEMENTATION`.

A model runs on flattened tokens [1, total]: first one token of each decoding sequence, then the chunks of prompts. Each
attention layer calls `paged_attention` with the projected queries, keys and values; it writes K and V into the layer's
pool and attends through the block tables that came in as the keyword `paged`. No mask and no cache object is built. The
work is one operator, so that torch.compile sees a single opaque call, with tensors only (plain numbers that change from
step to step would make it compile again): the sizes travel as a small CPU tensor."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from repro import kernels
from repro.errors import UserError

IMPLEMENTATION = "repro_paged"


class PagedInputs(NamedTuple):
    """What attention has to know about a batch, in the order in which the operator takes it. The first `sizes[0]`
    sequences decode, or are padding where a chunk of prompt has their token; the others run a chunk.

    slots         int64 [tokens]             where each token's K and V go; -1: nowhere (padding)
    block_table   int32 [sequences, blocks]  physical blocks in logical order
    context_lens  int32 [sequences]          tokens to attend to, the newest included
    cu_chunks     int32 [chunks + 1]         first token of each chunk, and the end of the last one
    sizes         int64 [3], on the CPU      decoding sequences; upper bounds of their contexts and of a chunk
    workspace     int32 zeros                scratch of the decode kernel"""

    slots: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_chunks: Tensor
    sizes: Tensor
    workspace: Tensor


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Tensor:
    """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> attended [tokens, heads, dim].

    `others` are the fields of PagedInputs and the scale."""
    slots, block_table, context_lens, cu_chunks, sizes, workspace, scale = others
    kernels.write_kv(k, v, k_cache, v_cache, slots)
    caches = k_cache, v_cache
    decodes, decode_context, chunk = sizes.tolist()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if decodes:
        tables, lens = block_table[:decodes], context_lens[:decodes]
        kernels.paged_decode_attention(
            q[:decodes], *caches, tables, lens, scale, decode_context, out[:decodes], workspace
        )
    if chunk:
        # After decoding, whose padding has left zeros in rows that belong to chunks.
        tables, lens = block_table[decodes:], context_lens[decodes:]
        kernels.paged_prefill_attention(q, *caches, tables, lens, cu_chunks, scale, chunk, out)
    return out


def _shape_of_attended(q: Tensor, *others: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


# Registered by hand: torch.library.custom_op would add some 50 us of the host's time to every layer's call.
_LIBRARY = torch.library.Library("repro", "DEF")
_LIBRARY.define(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor "
    "block_table, Tensor context_lens, Tensor cu_chunks, Tensor sizes, Tensor(c!) workspace, float scale) -> Tensor"
)
_LIBRARY.impl("paged_attention", _paged_attention, "CompositeExplicitAutograd")
torch.library.register_fake("repro::paged_attention", _shape_of_attended, lib=_LIBRARY)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    *,
    paged: PagedInputs | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim] -> [1, tokens, heads, dim].

    `scaling` is taken as given (OPT scales its queries itself and passes 1). The layer's pools are its attributes
    `k_cache` and `v_cache` (see `attach`). What is unused here was found harmless when the model was loaded (see
    `acceptance`)."""
    if paged is None:
        raise UserError("a model loaded for the paged engine needs block tables; run it through TorchExecutor or LLM")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.repro.paged_attention(q, k, v, module.k_cache, module.v_cache, *paged, scale)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def attach(model: nn.Module, caches: list[Tensor]) -> None:
    """Give each attention layer its pools: `caches` alternates K and V, layer by layer."""
    for module in model.get_decoder().modules():
        index = getattr(module, "layer_idx", None)
        if index is not None:
            module.k_cache, module.v_cache = caches[2 * index], caches[2 * index + 1]


def detach(model: nn.Module) -> None:
    """Let go of the pools, so that they can be freed."""
    for module in model.modules():
        if hasattr(module, "k_cache"):
            del module.k_cache, module.v_cache
