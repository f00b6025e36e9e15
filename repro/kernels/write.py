"""Slot write: put the K and V of new tokens into their slots (the paper's fused reshape and block write, Section 5.1).

    k_cache[s // block_size, s % block_size, h, d] = k[t, h, d],   s = slot_mapping[t] >= 0;   the same for v

One launch writes both caches. The inputs may be strided views, as attention layers hand them over."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token,
    k_head,
    v_token,
    v_head,
    stride_block,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (token, part): SPAN elements of one token's row of K and of V."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    index = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    mask = index < NUM_HEADS * HEAD_DIM
    head, dim = index // HEAD_DIM, index % HEAD_DIM
    target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_token + head * stride_head + dim
    new_k = tl.load(k + token * k_token + head * k_head + dim, mask=mask)
    new_v = tl.load(v + token * v_token + head * v_head + dim, mask=mask)
    tl.store(k_cache + target, new_k, mask=mask)
    tl.store(v_cache + target, new_v, mask=mask)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Triton's version of `reference.write_kv`."""
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    span = min(2048, triton.next_power_of_2(num_heads * head_dim))
    strides = (*k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3])
    sizes = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_SIZE": k_cache.shape[1], "SPAN": span}
    launch = _write_kernel[(num_tokens, triton.cdiv(num_heads * head_dim, span))]
    launch(k, v, k_cache, v_cache, slot_mapping, *strides, **sizes, num_warps=8)
