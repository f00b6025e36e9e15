"""Paged attention for decoding: one query a sequence over its paged context (Sections 4.1 and 5.1).

    out[b, h] = sum_j softmax_j(scale * q[b, h] . K_b[j]) V_b[j],   j = 0 .. context_lens[b] - 1

where row j of K_b is k_cache[block_table[b, j // block_size], j % block_size, h // group].

The context is cut into chunks of equal length, one program each, so that small batches fill the GPU and ragged batches
balance (flash-decoding). A chunk leaves its softmax-weighted mean and its log2-sum-exp; the last program to finish a
sequence's head merges them. Chunks beyond a sequence's end return at once, and the grid depends on shapes and on
max_context_len only, so a launch can be captured in a CUDA graph and replayed with other lengths.

Here is the launch, and how it divides the work; the kernels are in `decode_kernels`."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from repro.kernels.decode_kernels import decode_groups, decode_rows
from repro.kernels.ops import LOG2E


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
        heads, kernel = num_kv_heads, decode_groups
        extra = {"ROWS": triton.next_power_of_2(group), "SLICES": plan.num_warps}
    else:
        heads, kernel, extra = num_heads, decode_rows, {}
    tensors = (out, q, k_cache, v_cache, block_table, context_lens, partial_out, partial_lse, workspace)
    strides = (*q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], block_table.stride(0))
    sizes = {"GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_SIZE": k_cache.shape[1]}
    sizes |= {"TILE": plan.tile, "MERGE": plan.merge, "STAGES": plan.stages, "num_warps": plan.num_warps, **extra}
    numbers = (scale * LOG2E, plan.chunk, max_chunks, *strides, block_table.shape[1])
    kernel[(heads, max_chunks, batch)](*tensors, *numbers, **sizes)
    return out
