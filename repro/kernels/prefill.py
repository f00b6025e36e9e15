"""Paged attention for prefill: chunks of queries over their paged contexts, causal (Section 4.3; shared prefixes, 4.4).

    out[t, h] = sum_j softmax_j(scale * q[t, h] . K_b[j]) V_b[j],   j = 0 .. position(t)

for every row t of chunk b; position(t) counts from context_lens[b] - length of the chunk, so that a chunk may follow a
prefix that is already in the cache (chunked prefill, a shared prompt). Flash attention over a gathered K and V: one
program holds a tile of queries of one head, walks the context tile by tile, and masks only the tiles on the
diagonal."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.kernels.ops import LOG2E, LOWEST, dot

#: sequences that a program looks through at least: fewer would only be more kernels to compile
_LEAST_SEQS = 64


@triton.jit
def _walk(
    queries,
    highest,
    total,
    acc,
    k_head,
    v_head,
    table,
    q_positions,
    context_len,
    scale_log2,
    stride_block,
    stride_token,
    begin,
    end,
    in_head,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The running softmax over positions begin..end; only MASKED tiles reach past a query's own position."""
    within = tl.arange(0, TILE)
    block = tl.load(table + (begin + within) // BLOCK_SIZE, mask=begin + within < context_len, other=0)
    for first in tl.range(begin, end, TILE):
        positions = first + within
        this_block, ahead = (block.to(tl.int64), positions + TILE)  # the table is read one tile ahead of K and V
        block = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < context_len, other=0)
        mask = in_head[None, :]
        if MASKED:
            mask = (positions < context_len)[:, None] & mask
        offset = (this_block * stride_block + (positions % BLOCK_SIZE) * stride_token)[:, None]
        k = tl.load(k_head[None, :] + offset, mask=mask, other=0.0)
        scores = dot(queries, tl.trans(k)) * scale_log2
        if MASKED:
            scores = tl.where(positions[None, :] <= q_positions[:, None], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new_highest[:, None])
        kept = tl.exp2(highest - new_highest)
        total = total * kept + tl.sum(weight, axis=1)
        v = tl.load(v_head[None, :] + offset, mask=mask, other=0.0)
        acc = acc * kept[:, None] + dot(weight.to(v.dtype), v)
        highest = new_highest
    return highest, total, acc


@triton.jit
def _place(cu_seqlens_q, num_seqs, tile, SEQS: tl.constexpr, QUERIES: tl.constexpr):
    """Sequence and first query of a tile, counted over all sequences; of each the last queries come first, since they
    see the most. Beyond the last tile the sequence is SEQS."""
    index = tl.arange(0, SEQS)
    begins = tl.load(cu_seqlens_q + index, mask=index < num_seqs, other=0)
    ends = tl.load(cu_seqlens_q + index + 1, mask=index < num_seqs, other=0)
    upto = tl.cumsum((ends - begins + QUERIES - 1) // QUERIES, 0)
    seq = tl.sum((upto <= tile).to(tl.int32), 0)
    return seq, (tl.sum(tl.where(index == seq, upto, 0), 0) - 1 - tile) * QUERIES


@triton.jit(do_not_specialize=["stride_table", "num_seqs"])
def _prefill_kernel(
    out,
    q,
    k_cache,
    v_cache,
    block_table,
    context_lens,
    cu_seqlens_q,
    scale_log2,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    num_seqs,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (head, query tile): the tiles that see the most start first, those of all heads together."""
    head = tl.program_id(0)
    seq, first_query = _place(cu_seqlens_q, num_seqs, tl.program_id(1), SEQS, QUERIES)
    if seq >= num_seqs:
        return
    q_begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - q_begin
    context_len = tl.load(context_lens + seq)
    rows, dims = first_query + tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    mask = (rows < q_len)[:, None] & in_head[None, :]
    token = (q_begin + rows).to(tl.int64)[:, None]
    queries = tl.load(q + token * stride_qt + head * stride_qh + dims[None, :], mask=mask, other=0.0)
    first_position = context_len - q_len + first_query
    q_positions = context_len - q_len + rows
    head_offset = (head // GROUP) * stride_head + dims
    k_head, v_head = k_cache + head_offset, v_cache + head_offset
    table = block_table + seq.to(tl.int64) * stride_table

    highest = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    diagonal = (first_position + 1) // TILE * TILE  # tiles before it are seen whole by every query
    end = tl.minimum(first_position + QUERIES, context_len)
    highest, total, acc = _walk(
        queries,
        highest,
        total,
        acc,
        k_head,
        v_head,
        table,
        q_positions,
        context_len,
        scale_log2,
        stride_block,
        stride_token,
        0,
        diagonal,
        in_head,
        False,
        BLOCK_SIZE,
        TILE,
    )
    highest, total, acc = _walk(
        queries,
        highest,
        total,
        acc,
        k_head,
        v_head,
        table,
        q_positions,
        context_len,
        scale_log2,
        stride_block,
        stride_token,
        diagonal,
        end,
        in_head,
        True,
        BLOCK_SIZE,
        TILE,
    )
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + token * stride_ot + head * stride_oh + dims[None, :], result, mask=mask)


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
    tiles: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Triton's version of `reference.paged_prefill_attention`; `max_query_len` is an upper bound known on the host."""
    _, num_heads, head_dim = q.shape
    block_d = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    queries, tile, num_warps, num_stages = tiles or _tiles(q, block_d, max_query_len)
    batch = cu_seqlens_q.shape[0] - 1
    tensors = (out, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q)
    strides = (*q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], block_table.stride(0))
    sizes = {"GROUP": num_heads // k_cache.shape[2], "HEAD_DIM": head_dim, "BLOCK_D": block_d}
    sizes |= {"BLOCK_SIZE": k_cache.shape[1], "QUERIES": queries, "TILE": tile}
    sizes["SEQS"] = max(_LEAST_SEQS, triton.next_power_of_2(batch))
    # Tiles at most: whole ones of all queries, and one of what remains of each sequence.
    num_tiles = min(batch * triton.cdiv(max_query_len, queries), q.shape[0] // queries + batch)
    launch = _prefill_kernel[(num_heads, num_tiles)]
    launch(*tensors, scale * LOG2E, *strides, batch, **sizes, num_warps=num_warps, num_stages=num_stages)
    return out


def _tiles(q: Tensor, block_d: int, max_query_len: int) -> tuple[int, int, int, int]:
    """(queries a program, positions a tile, warps, pipeline stages), as measured (docs/performance.md).

    Wide tiles leave room for two programs a multiprocessor, narrow ones for three: they pay where two are enough."""
    if q.dtype == torch.float32:
        return 16, 32, 4, 1
    if max_query_len <= 16:
        return 16, 64 if block_d <= 128 else 32, 4, 3
    if block_d > 128:
        return 64, 32, 4, 3
    if max_query_len > 1024 or (max_query_len >= 512 and q.shape[0] >= 4096):
        return 128, 64, 8, 3
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
    wide = triton.cdiv(max_query_len, 64) * q.shape[1] <= 2 * sms
    return 64, 64 if wide else 32, 4, 3
