"""The paged KV cache's operations, on whatever device the cache is on: Triton on a GPU, plain torch on a CPU.

What: the public face of the kernels. It checks what the kernels take for granted and passes the call on. Each operation
is one file with its formula (write, decode, prefill, blocks); `reference` holds the same functions in plain torch. This
module deliberately knows no model, no scheduler and no layer.

Layout: k_cache, v_cache [num_blocks, block_size, num_kv_heads, head_dim], one pair a layer, of equal strides;
block_table int32 [batch, max_blocks], where entries beyond a context may be anything; context_lens int32 [batch] in
tokens, the newest included."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from repro.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256
DTYPES = ("float16", "bfloat16", "float32")


def check_cache(dtype: torch.dtype, block_size: int, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise UserError for a cache that the kernels cannot serve; cheap enough for every call, and useful before one."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise UserError(f"dtype {name} is not supported by the paged kernels; use one of {', '.join(DTYPES)}")
    if not 1 <= block_size <= MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise UserError(f"block size {block_size} is not supported; use a power of two from 1 to {MAX_BLOCK_SIZE}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise UserError(
            f"head size {head_dim} is not supported; the kernels take 1 to {MAX_HEAD_DIM}: choose a model with smaller "
            "heads"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise UserError(
            f"{num_heads} query heads cannot share {num_kv_heads} KV heads; the number of query heads must be a "
            "multiple of the number of KV heads"
        )


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the K and V of new tokens, [num_tokens, num_kv_heads, head_dim], into their slots (Section 5.1).

    slot_mapping: int64 [num_tokens], block * block_size + offset; -1 skips a token. The inputs may be strided views."""
    _check(k_cache, v_cache, k.shape[1])
    _implementation(k_cache, "write").write_kv(_rows(k), _rows(v), k_cache, v_cache, slot_mapping)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    scale: float,
    max_context_len: int,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence over its paged context (Section 4.1): [batch, num_heads, head_dim].

    q: [batch, num_heads, head_dim]; max_context_len: an upper bound of context_lens known on the host (it fixes the
    launch, so a captured CUDA graph may be replayed with any lengths up to it); a context of 0 gives zeros. workspace:
    on a GPU, int32 zeros, batch * num_heads or more, one per stream, left as zeros; default: made per call."""
    _check(k_cache, v_cache, q.shape[1])
    return _implementation(k_cache, "decode").paged_decode_attention(
        _rows(q), k_cache, v_cache, block_table, context_lens, scale, max_context_len, out, workspace
    )


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    scale: float,
    max_query_len: int,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of queries over their paged contexts (Sections 4.3 and 4.4); of the shape of q.

    q: [num_tokens, num_heads, head_dim], chunk i being rows cu_seqlens_q[i]:cu_seqlens_q[i + 1] (int32 [batch + 1]) and
    the last positions of context i, whose K and V are in the cache already; rows of no chunk are left as they are.
    max_query_len: an upper bound of the chunks' lengths known on the host."""
    _check(k_cache, v_cache, q.shape[1])
    return _implementation(k_cache, "prefill").paged_prefill_attention(
        _rows(q), k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, max_query_len, out
    )


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor, pointers: Tensor | None = None) -> None:
    """In every cache (all layers' K and V), copy block pairs[i, 0] to pairs[i, 1]: copy-on-write (Section 4.4).

    pairs: int64 [n, 2] on the caches' device. The copies of one call happen in no order, so no block may be written
    twice, or both read and written. pointers: on a GPU, `cache_pointers(caches)`, made once; default: made per call."""
    if caches:
        _implementation(caches[0], "blocks").copy_blocks(caches, pairs, pointers)


def swap_blocks(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    pairs: Tensor,
    batched: bool = True,
    pointers: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Copy block pairs[i, 0] of each source cache to pairs[i, 1] of its target cache: swapping (Sections 4.5, 5.1).

    One side is on the GPU, the other in pinned CPU memory (or both on the CPU); pairs: int64 [n, 2], on the CPU. The
    work is queued on the current stream. batched: one launch for all blocks and layers; otherwise one copy a block and
    layer, the 2023 way. pointers: the two sides' `cache_pointers`, made once; default: made per call."""
    if source:
        gpu_side = source[0] if source[0].is_cuda else target[0]
        _implementation(gpu_side, "blocks").swap_blocks(source, target, pairs, batched, pointers)


def cache_pointers(caches: Sequence[Tensor], device: torch.device) -> Tensor:
    """The addresses of caches that stay, int64 on the GPU, for copy_blocks and swap_blocks."""
    from repro.kernels import blocks

    return blocks.cache_pointers(caches, device)


def _implementation(cache: Tensor, module: str) -> ModuleType:
    if not cache.is_cuda:
        from repro.kernels import cpu

        return cpu
    return import_module(f"repro.kernels.{module}")


def _check(k_cache: Tensor, v_cache: Tensor, num_heads: int) -> None:
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    check_cache(k_cache.dtype, block_size, head_dim, num_heads, num_kv_heads)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise UserError(
            f"K and V caches have strides {k_cache.stride()} and {v_cache.stride()}; they must be equal and end in 1: "
            "allocate both with the same shape"
        )


def _rows(x: Tensor) -> Tensor:
    """The kernels read a head's elements in a row; any other stride is taken as it is."""
    return x if x.stride(-1) == 1 else x.contiguous()
