"""The kernels of decoding, and the merge of a context's chunks; `repro.kernels.decode` launches them.

Both have one shape: the loop holds no exchange between warps, and partial softmaxes merge after it. In fp16 and bf16
each warp runs its own flash-decoding over its slice of a tile on the tensor cores (a batched dot, one batch entry a
warp), with all queries of a KV head's group as rows; even a single query is cheaper there than in plain registers. In
fp32 each row of K is multiplied with q in registers and every row slot of the tile keeps its own running softmax."""

import triton
import triton.language as tl

from repro.kernels.ops import LOWEST, dot


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
def decode_rows(
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
def decode_groups(
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
