"""What the CPU runs: the references, but for what every layer does in every step.

Decoding attends to many sequences at a time. Contexts are gathered with those of about the same length, since torch
attends to equally long ones only. What a context is rounded up to follows from its own length, so a sequence's result
does not depend on what else is in the batch."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from repro.kernels.reference import copy_blocks, paged_prefill_attention, swap_blocks

__all__ = ["copy_blocks", "paged_decode_attention", "paged_prefill_attention", "swap_blocks", "write_kv"]

SHORTEST = 64  # positions


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference."""
    if (used := slot_mapping >= 0).all():
        slots = slot_mapping
    else:
        k, v, slots = k[used], v[used], slot_mapping[used]
    _slots(k_cache).index_copy_(0, slots, k)
    _slots(v_cache).index_copy_(0, slots, v)


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
    """As the reference, within rounding: q [batch, num_heads, head_dim] over each sequence's whole context."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    alike: dict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(context_lens.tolist()):
        alike[_rounded_up(length)].append(row)
    if (padding := alike.pop(0, None)) is not None:
        out[padding] = 0
    for length, rows in alike.items():
        index = torch.tensor(rows)
        ends = context_lens[index].long()[:, None]
        positions = torch.arange(length)
        # Beyond its end a row has its last position again: a slot that was never written may hold anything.
        held = torch.minimum(positions, ends - 1)
        blocks = block_table[index].gather(1, held // k_cache.shape[1]).long()
        slots = (blocks * k_cache.shape[1] + held % k_cache.shape[1]).flatten()
        gathered = (_slots(cache).index_select(0, slots) for cache in (k_cache, v_cache))
        k, v = (one.unflatten(0, held.shape).transpose(1, 2) for one in gathered)
        # The heads that share K and V are as good as several queries of one head.
        grouped = q[index].unflatten(1, (k.shape[1], -1))
        mask = (positions < ends)[:, None, None]
        out[index] = scaled_dot_product_attention(grouped, k, v, mask, scale=scale).flatten(1, 2)
    return out


def _slots(cache: Tensor) -> Tensor:
    """[num_blocks * block_size, num_kv_heads, head_dim], the same memory. Indexing by slot takes a fifth of the time of
    indexing by block and offset."""
    return cache.view(-1, *cache.shape[2:])


def _rounded_up(length: int) -> int:
    """To a multiple of SHORTEST, or of a quarter of the power of two below: at most a quarter is gathered in vain."""
    step = max(SHORTEST, 1 << max(0, length.bit_length() - 3))
    return -(-length // step) * step
