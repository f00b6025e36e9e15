"""Paged attention for decoding: one query a sequence over its paged context (the paper's Sections 4.1 and
5.1).

    out[b, h] = sum_j softmax_j(scale * q[b, h] . K_b[j]) V_b[j],   j = 0 .. context_lens[b] - 1

where row j of K_b is k_cache[block_table[b, j // block_size], j % block_size, h // group].

The context is cut into chunks of equal length, one program each, so that small batches fill the GPU and ragged batches
balance (flash-decoding). A chunk leaves its softmax-weighted mean and its log2-sum-exp; the last program to finish a
sequence's head merges them. Chunks beyond a sequence's end return at once, and the grid depends on shapes and on
max_context_len only, so a launch can be captured in a CUDA graph and replayed with other lengths.

Two kernels of one shape: the loop holds no exchange between warps, and partial softmaxes merge after it. In fp16 and
bf16 each warp runs its own flash-decoding over its slice of a tile on the tensor cores (a batched dot, one batch entry
a warp), with all queries of a KV head's group as rows; even a single query is cheaper there than in plain registers. In
fp32 each row of K is multiplied with q in registers and every row slot of the tile keeps its own running softmax."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.kernels.ops import LOG2E, LOWEST, dot


@triton.jit
def _split_positions(within, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where to look blocks up, and what is left to add: SIZE aligned positions may lie in one block."""
    if BLOCK_SIZE >= SIZE:
        return 0, within
    else:
        return within, within * 0


@triton.jit
def _first_block(table, positions, table_width, BLOCK_SIZE: tl.constexpr):
    """The first look-up does not wait for the context's length: entries beyond it may be anything and go unused."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions // BLOCK_SIZE < table_width, other=0)


@triton.jit
def _next_block(table, positions, end, BLOCK_SIZE: tl.constexpr):
    """Looked up one tile ahead, so that the addresses of K and V are there when their loads are issued."""
    return tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def _finish(
    mean,
    lse,
    out,
    partial_out,
    partial_lse,
    arrivals,
    context_len,
    chunk_len,
    max_chunks,
    stride_ob,
    stride_oh,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Store a chunk's mean [ROWS, BLOCK_D], or leave it with its lse [ROWS] and merge all if this program is the last.

    Only the first GROUP rows are query heads; the others are padding."""
    pid, chunk, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_used = tl.cdiv(context_len, chunk_len)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    out += seq.to(tl.int64) * stride_ob + pid * GROUP * stride_oh
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    if num_used <= 1:
        tl.store(out + rows[:, None] * stride_oh + dims[None, :], mean.to(out.dtype.element_ty), mask=mask)
    else:
        first_row = (seq * tl.num_programs(0) + pid).to(tl.int64) * GROUP
        partial_out += first_row * max_chunks * BLOCK_D
        partial_lse += first_row * max_chunks
        target = partial_out + (rows * max_chunks + chunk)[:, None] * BLOCK_D + dims[None, :]
        tl.store(target, mean, mask=(rows < GROUP)[:, None])
        tl.store(partial_lse + rows * max_chunks + chunk, lse, mask=rows < GROUP)
        tl.debug_barrier()  # every thread's stores come before the arrival that publishes them
        arrival = arrivals + seq * tl.num_programs(0) + pid
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_used - 1:
            tl.store(arrival, 0)  # ready for the next launch
            _merge(out, partial_out, partial_lse, num_used, max_chunks, stride_oh, GROUP, HEAD_DIM, BLOCK_D, MERGE)


@triton.jit
def _merge(
    out,
    partial_out,
    partial_lse,
    num_used,
    max_chunks,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
):
    """Weight the chunks' means by 2 ** lse. Read past L1: other programs wrote them."""
    rows, dims = tl.arange(0, triton.next_power_of_2(GROUP)), tl.arange(0, BLOCK_D)
    highest = tl.full([MERGE, triton.next_power_of_2(GROUP)], LOWEST, tl.float32)
    total = tl.zeros_like(highest)
    acc = tl.zeros([MERGE, triton.next_power_of_2(GROUP), BLOCK_D], tl.float32)
    for first in range(0, num_used, MERGE):
        chunks = first + tl.arange(0, MERGE)
        index = rows[None, :] * max_chunks + chunks[:, None]
        valid = (chunks < num_used)[:, None] & (rows < GROUP)[None, :]
        lse = tl.load(partial_lse + index, mask=valid, other=float("-inf"), cache_modifier=".cg")
        mean = tl.load(
            partial_out + index[:, :, None] * BLOCK_D + dims[None, None, :],
            mask=valid[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, lse)
        kept, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
        acc = acc * kept[:, :, None] + mean * weight[:, :, None]
        total = total * kept + weight
        highest = new_highest
    weight = tl.exp2(highest - tl.max(highest, axis=0)[None, :])
    merged = tl.sum(acc * weight[:, :, None], axis=0) / tl.sum(total * weight, axis=0)[:, None]
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + rows[:, None] * stride_oh + dims[None, :], merged.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["chunk_len", "max_chunks", "stride_table", "table_width"])
def _decode_rows(
    out,
    q,
    k_cache,
    v_cache,
    block_table,
    context_lens,
    partial_out,
    partial_lse,
    arrivals,
    scale_log2,
    chunk_len,
    max_chunks,
    stride_qb,
    stride_qh,
    stride_ob,
    stride_oh,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    table_width,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (head, chunk, sequence): one query head over one chunk, without tensor cores."""
    head, seq = tl.program_id(0), tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    begin = tl.program_id(1) * chunk_len
    within, dims = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    table = block_table + seq.to(tl.int64) * stride_table
    # A tile inside one block needs one look-up, and its rows' offsets do not change.
    lookup, rest = _split_positions(within, TILE, BLOCK_SIZE)
    block = _first_block(table, begin + lookup, table_width, BLOCK_SIZE)
    in_head = dims < HEAD_DIM
    q_row = tl.load(q + seq.to(tl.int64) * stride_qb + head * stride_qh + dims, mask=in_head, other=0.0)
    if begin > 0 and begin >= context_len:
        return
    end = tl.minimum(begin + chunk_len, context_len)
    q_row = q_row.to(tl.float32) * scale_log2
    offset_in_tile = (rest * stride_token)[:, None] + ((head // GROUP) * stride_head + dims)[None, :]

    highest = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        valid = first + within < end
        row = block.to(tl.int64) * stride_block + ((first + lookup) % BLOCK_SIZE) * stride_token
        block = _next_block(table, first + TILE + lookup, end, BLOCK_SIZE)
        mask = valid[:, None] & in_head[None, :]
        k_rows, v_rows = k_cache + row, v_cache + row
        if BLOCK_SIZE < TILE:
            k_rows, v_rows = k_rows[:, None], v_rows[:, None]
        k = tl.load(k_rows + offset_in_tile, mask=mask, other=0.0)
        v = tl.load(v_rows + offset_in_tile, mask=mask, other=0.0)
        scores = tl.where(valid, tl.sum(k.to(tl.float32) * q_row[None, :], axis=1), float("-inf"))
        new_highest = tl.maximum(highest, scores)
        kept, weight = tl.exp2(highest - new_highest), tl.exp2(scores - new_highest)
        acc = acc * kept[:, None] + v.to(tl.float32) * weight[:, None]
        total = total * kept + weight
        highest = new_highest

    top = tl.max(highest, axis=0)
    weight = tl.exp2(highest - top)
    total_all = tl.sum(total * weight, axis=0)
    total_all = tl.where(total_all == 0, 1.0, total_all)  # an empty context gives zeros
    mean = tl.sum(acc * weight[:, None], axis=0) / total_all
    lse = tl.full([1], 0.0, tl.float32) + (top + tl.log2(total_all))
    _finish(
        mean[None, :],
        lse,
        out,
        partial_out,
        partial_lse,
        arrivals,
        context_len,
        chunk_len,
        max_chunks,
        stride_ob,
        stride_oh,
        1,
        1,
        HEAD_DIM,
        BLOCK_D,
        MERGE,
    )


@triton.jit(do_not_specialize=["chunk_len", "max_chunks", "stride_table", "table_width"])
def _decode_groups(
    out,
    q,
    k_cache,
    v_cache,
    block_table,
    context_lens,
    partial_out,
    partial_lse,
    arrivals,
    scale_log2,
    chunk_len,
    max_chunks,
    stride_qb,
    stride_qh,
    stride_ob,
    stride_oh,
    stride_block,
    stride_token,
    stride_head,
    stride_table,
    table_width,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Program (KV head, chunk, sequence): the head's group of queries over one chunk, on the tensor cores."""
    head, seq = tl.program_id(0), tl.program_id(2)
    context_len = tl.load(context_lens + seq)
    begin = tl.program_id(1) * chunk_len
    SLICE: tl.constexpr = TILE // SLICES
    within, slices = tl.arange(0, SLICE)[None, :], tl.arange(0, SLICES)[:, None] * SLICE
    dims, rows = tl.arange(0, BLOCK_D), tl.arange(0, ROWS)
    table = block_table + seq.to(tl.int64) * stride_table
    lookup, rest = _split_positions(within, SLICE, BLOCK_SIZE)
    lookup = slices + lookup
    block = _first_block(table, begin + lookup, table_width, BLOCK_SIZE)
    in_head = dims < HEAD_DIM
    q += seq.to(tl.int64) * stride_qb + head * GROUP * stride_qh
    queries = tl.load(
        q + rows[:, None] * stride_qh + dims[None, :], mask=(rows < GROUP)[:, None] & in_head[None, :], other=0.0
    )
    if begin > 0 and begin >= context_len:
        return
    end = tl.minimum(begin + chunk_len, context_len)
    queries = tl.broadcast_to(queries[None, :, :], [SLICES, ROWS, BLOCK_D])
    offset_in_slice = (rest * stride_token)[:, :, None] + (head * stride_head + dims)[None, None, :]

    highest = tl.full([SLICES, ROWS], LOWEST, tl.float32)
    total = tl.zeros([SLICES, ROWS], tl.float32)
    acc = tl.zeros([SLICES, ROWS, BLOCK_D], tl.float32)
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        valid = first + slices + within < end
        row = block.to(tl.int64) * stride_block + ((first + lookup) % BLOCK_SIZE) * stride_token
        block = _next_block(table, first + TILE + lookup, end, BLOCK_SIZE)
        mask = valid[:, :, None] & in_head[None, None, :]
        k = tl.load((k_cache + row)[:, :, None] + offset_in_slice, mask=mask, other=0.0)
        v = tl.load((v_cache + row)[:, :, None] + offset_in_slice, mask=mask, other=0.0)
        scores = dot(queries, tl.permute(k, (0, 2, 1))) * scale_log2
        scores = tl.where(valid[:, None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=2))
        kept, weight = tl.exp2(highest - new_highest), tl.exp2(scores - new_highest[:, :, None])
        acc = acc * kept[:, :, None] + dot(weight.to(v.dtype), v)
        total = total * kept + tl.sum(weight, axis=2)
        highest = new_highest

    top = tl.max(highest, axis=0)
    share = tl.exp2(highest - top[None, :])
    total_all = tl.sum(total * share, axis=0)
    total_all = tl.where(total_all == 0, 1.0, total_all)  # padding rows, and an empty context
    mean = tl.sum(acc * share[:, :, None], axis=0) / total_all[:, None]
    _finish(
        mean,
        top + tl.log2(total_all),
        out,
        partial_out,
        partial_lse,
        arrivals,
        context_len,
        chunk_len,
        max_chunks,
        stride_ob,
        stride_oh,
        GROUP,
        ROWS,
        HEAD_DIM,
        BLOCK_D,
        MERGE,
    )


@dataclass(frozen=True)
class DecodePlan:
    """How one launch divides the work: positions a tile and a chunk, warps, pipeline stages, chunks merged at a time.

    Tiles, and with tensor cores tile // num_warps, are powers of two; a chunk is a multiple of the tile."""

    tensor_cores: bool
    tile: int
    chunk: int
    num_warps: int
    stages: int = 3
    merge: int = 16


def plan_decode(num_rows: int, dtype: torch.dtype, max_context_len: int, num_multiprocessors: int) -> DecodePlan:
    """A plan for num_rows (sequence, KV head) pairs; the constants are measured (docs/performance.md).

    Up to 2.5 programs a multiprocessor, chunks shrink to fill the GPU, but not below 256 positions, where merging costs
    more than it gains. Beyond, whole contexts would do, but for the balance of ragged batches. Few programs need many
    warps each to keep enough loads in flight; many programs keep that up alone, and fewer warps cost less to merge,
    unless a long chunk pays for it."""
    full = 5 * num_multiprocessors // 2
    chunk = 1024
    if num_rows <= full:
        chunk = max(256, triton.next_power_of_2(triton.cdiv(max_context_len * num_rows, full)))
    num_programs = num_rows * triton.cdiv(max_context_len, chunk)
    longest = min(chunk, max_context_len)
    if num_programs <= num_multiprocessors:
        num_warps = 4
    elif num_programs <= full:
        num_warps = 2 if longest > 64 else 1
    else:
        num_warps = 1 if longest <= 256 else 2 if longest <= 512 else 4
    if dtype == torch.float32:
        return DecodePlan(tensor_cores=False, tile=16, chunk=chunk, num_warps=4)
    return DecodePlan(tensor_cores=True, tile=16 * num_warps, chunk=chunk, num_warps=num_warps, merge=4 * num_warps)


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
    plan: DecodePlan | None = None,
) -> Tensor:
    """Triton's version of `reference.paged_decode_attention`.

    `max_context_len` is an upper bound of context_lens that the host knows. `workspace` is int32 zeros, at least batch
    * num_heads of them, one per stream; every launch leaves it as zeros. Without it each call makes its own."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if plan is None:
        sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        plan = plan_decode(batch * num_kv_heads, q.dtype, max_context_len, sms)
    group = num_heads // num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    max_chunks = max(1, triton.cdiv(max_context_len, plan.chunk))
    partial_rows = batch * num_heads * max_chunks if max_chunks > 1 else 0
    partial_out = torch.empty(partial_rows * (block_d + 1), dtype=torch.float32, device=q.device)
    partial_lse = partial_out[partial_rows * block_d :]
    if workspace is None:
        workspace = torch.zeros(batch * num_heads, dtype=torch.int32, device=q.device)
    if plan.tensor_cores:
        heads, kernel = num_kv_heads, _decode_groups
        extra = {"ROWS": triton.next_power_of_2(group), "SLICES": plan.num_warps}
    else:
        heads, kernel, extra = num_heads, _decode_rows, {}
    kernel[(heads, max_chunks, batch)](
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        partial_out,
        partial_lse,
        workspace,
        scale * LOG2E,
        plan.chunk,
        max_chunks,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        block_table.shape[1],
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_SIZE=k_cache.shape[1],
        TILE=plan.tile,
        MERGE=plan.merge,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
        **extra,
    )
    return out
