"""Batched block copy and swap: whole blocks, over all layers' caches, in one launch (Sections 4.4, 4.5 and 5.1).

    target[c][pairs[i, 1]] = source[c][pairs[i, 0]]   for every cache c (a layer's K or V) and pair i

A copy has target = source. A swap has one side in pinned CPU memory, which the GPU reads or writes directly through the
bus: a launch moves any number of blocks of any size at the link's rate, where one copy call a block and layer (the 2023
way, kept selectable) is bound by the calls. The caches' addresses travel in an int64 tensor."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.kernels import reference

WORD = 8  # bytes; a thread moves two words at once


@triton.jit
def _move_kernel(source, target, pairs, num_parts, words, SPAN: tl.constexpr):
    """Program (p, cache): parts p, p + P, ... of all (pair, part of the block) of one cache; a part is SPAN words."""
    cache = tl.program_id(1)
    from_base = tl.load(source + cache).to(tl.pointer_type(tl.int64))
    to_base = tl.load(target + cache).to(tl.pointer_type(tl.int64))
    parts_per_block = tl.cdiv(words, SPAN)
    for part in tl.range(tl.program_id(0), num_parts, tl.num_programs(0)):
        pair = part // parts_per_block
        index = (part % parts_per_block) * SPAN + tl.arange(0, SPAN)
        from_block, to_block = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        from_words = tl.multiple_of(from_base + (from_block * words + index), 16)  # whole blocks: 16-byte accesses
        to_words = tl.multiple_of(to_base + (to_block * words + index), 16)
        tl.store(to_words, tl.load(from_words, mask=index < words), mask=index < words)


def cache_pointers(caches: Sequence[Tensor], device: torch.device) -> Tensor:
    """The caches' addresses, int64 [len(caches)], on `device`; make it once for pools that stay."""
    return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64).to(device)


def _move(source: Tensor, target: Tensor, pairs: Tensor, block_bytes: int, part_words: int, max_programs: int) -> None:
    words = block_bytes // WORD
    span = min(part_words, triton.next_power_of_2(words))
    num_parts = pairs.shape[0] * triton.cdiv(words, span)
    num_caches = source.shape[0]
    programs = max(1, min(num_parts, max_programs // num_caches))
    _move_kernel[(programs, num_caches)](source, target, pairs, num_parts, words, SPAN=span, num_warps=4)


def _block_bytes(cache: Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor, pointers: Tensor | None = None) -> None:
    """Triton's version of `reference.copy_blocks`; `pointers` is cache_pointers(caches)."""
    if pairs.shape[0] == 0 or not caches:
        return
    if _block_bytes(caches[0]) % (2 * WORD):  # heads of odd sizes
        reference.copy_blocks(caches, pairs)
        return
    if pointers is None:
        pointers = cache_pointers(caches, pairs.device)
    _move(pointers, pointers, pairs, _block_bytes(caches[0]), part_words=512, max_programs=1 << 20)


def swap_blocks(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    pairs: Tensor,
    batched: bool = True,
    pointers: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Triton's version of `reference.swap_blocks`, queued on the current stream; the CPU caches are pinned.

    `pointers` are cache_pointers of source and target. `pairs` may be on the CPU or already on the GPU."""
    if pairs.shape[0] == 0 or not source:
        return
    if not batched or _block_bytes(source[0]) % (2 * WORD):
        reference.swap_blocks(source, target, pairs, batched)
        return
    device = source[0].device if source[0].is_cuda else target[0].device
    if pointers is None:
        pointers = cache_pointers(source, device), cache_pointers(target, device)
    # About one program a multiprocessor keeps the bus busy and leaves room for kernels that run meanwhile.
    _move(*pointers, pairs.to(device), _block_bytes(source[0]), part_words=1024, max_programs=160)
