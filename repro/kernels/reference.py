"""Plain-torch references of every kernel, with the same signatures.

They define what the Triton kernels must compute, and what the CPU runs (`repro.kernels.cpu`). Each sequence is attended
on its own, so that its result does not depend on what else is in the batch. The layout is that of
`repro.kernels`."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [num_tokens, num_kv_heads, head_dim] into slots slot_mapping int64 [num_tokens]; -1 skips a token."""
    block_size = k_cache.shape[1]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, offsets] = k[used]
    v_cache[blocks, offsets] = v[used]


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
    """One query a sequence: q [batch, num_heads, head_dim] over the sequence's whole context (Section 4.1, Eq. 4)."""
    cu_seqlens_q = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    return paged_prefill_attention(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, 1, out)


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
    """Chunks of queries, q [num_tokens, num_heads, head_dim]: chunk i is rows cu_seqlens_q[i]:cu_seqlens_q[i + 1] and
    holds the last positions of context i; each query attends to all positions up to its own."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    starts = cu_seqlens_q.tolist()
    for i, context_len in enumerate(context_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if context_len == 0:  # padding of a fixed-size batch
            out[begin:end] = 0
        elif begin < end:
            k, v = (_gather(cache, block_table[i], context_len) for cache in (k_cache, v_cache))
            out[begin:end] = _attend(q[begin:end], k, v, scale)
    return out


def _gather(cache: Tensor, table: Tensor, context_len: int) -> Tensor:
    """The context's rows in order, [context_len, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    blocks = table[: -(-context_len // block_size)].to(torch.int64)
    return cache[blocks].flatten(0, 1)[:context_len]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [n, num_heads, head_dim] are the last n positions of k, v [context_len, num_kv_heads, head_dim]."""
    num_queries, context_len = q.shape[0], k.shape[0]
    mask = None
    if 1 < num_queries < context_len:
        mask = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device).tril(context_len - num_queries)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    how = {"is_causal": 1 < num_queries == context_len, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    return scaled_dot_product_attention(q, k, v, mask, **how)[0].transpose(0, 1)


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor, pointers: Tensor | None = None) -> None:
    """In every cache, copy block pairs[i, 0] to block pairs[i, 1] (copy-on-write, Section 4.4); pairs int64 [n, 2].

    The copies of one call happen in no order: no block may be both read and written."""
    for cache in caches:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]


def swap_blocks(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    pairs: Tensor,
    batched: bool = True,
    pointers: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Copy block pairs[i, 0] of every source cache to block pairs[i, 1] of the target cache of the same index (the
    layers' K and V; Section 4.5). pairs is an int64 [n, 2] tensor on the CPU. Not batched is the 2023 way: one copy a
    block and layer, queued on the current stream."""
    if batched:
        for a, b in zip(source, target, strict=True):
            b[pairs[:, 1].to(b.device)] = a[pairs[:, 0].to(a.device)].to(b.device)
        return
    for a, b in zip(source, target, strict=True):
        for from_block, to_block in pairs.tolist():
            b[to_block].copy_(a[from_block], non_blocking=True)
