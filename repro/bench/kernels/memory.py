"""Benchmarks of the operations that only move K and V: slot write, block copy, and swap over the bus."""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from repro import kernels
from repro.bench.kernels.timing import eager_time_us, graph_time_us
from repro.bench.rows import Row

NUM_HEADS, HEAD_DIM, NUM_LAYERS = 40, 128, 40  # OPT-13B
TOKEN_BYTES = NUM_HEADS * HEAD_DIM * 2  # K or V of one token in one layer, fp16
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def write() -> Iterator[Row]:
    """Slot write of prompts, whole blocks in random order; bytes moved are those read plus those written."""
    for num_tokens in (256, 1648, 4096, 16384):
        k, v = (torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.float16) for _ in range(2))
        shape = (max(8192, num_tokens // 4), 16, NUM_HEADS, HEAD_DIM)
        k_cache, v_cache = (torch.zeros(shape, device="cuda", dtype=torch.float16) for _ in range(2))
        first_slots = torch.randperm(shape[0], device="cuda")[:, None] * 16
        slots = (first_slots + torch.arange(16, device="cuda")).flatten()
        parts = [slots[i * num_tokens : (i + 1) * num_tokens] for i in range(4)]
        us = graph_time_us([partial(kernels.write_kv, k, v, k_cache, v_cache, part) for part in parts])
        last = parts[-1]
        assert torch.equal(k_cache[last // 16, last % 16], k) and torch.equal(v_cache[last // 16, last % 16], v)
        moved = 4 * num_tokens * TOKEN_BYTES
        yield {"contender": "ours", "tokens": num_tokens, "block_size": 16, "launch": "graph", "us": us, "bytes": moved}
        yield _plain_copy(moved)


def copy() -> Iterator[Row]:
    """Copy-on-write of random blocks over all layers in one launch; beside torch's copy of as many bytes."""
    num_blocks = 512
    shape = (num_blocks, 16, NUM_HEADS, HEAD_DIM)
    caches = [torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2 * NUM_LAYERS)]
    pointers = kernels.cache_pointers(caches, caches[0].device)
    for count in (1, 3, 8, 32, 128):
        pairs = [torch.randperm(num_blocks, device="cuda")[: 2 * count].view(count, 2) for _ in range(4)]
        us = graph_time_us([partial(kernels.copy_blocks, caches, pair, pointers) for pair in pairs])
        last = pairs[-1]
        assert all(torch.equal(cache[last[:, 0]], cache[last[:, 1]]) for cache in caches[::20])
        moved = 2 * count * len(caches) * 16 * TOKEN_BYTES
        yield {"contender": "ours", "pairs": count, "block_size": 16, "launch": "graph", "us": us, "bytes": moved}
        yield _plain_copy(moved)


def _plain_copy(moved: int) -> Row:
    """torch's copy of as many bytes in one piece: what size alone costs (a graph would take the slower copy engine)."""
    flat = [torch.randn(moved // 4, device="cuda", dtype=torch.float16) for _ in range(4)]
    us = eager_time_us([partial(flat[i].copy_, flat[i - 1]) for i in range(4)])
    return {"contender": "torch copy, one piece", "launch": "eager", "us": us, "bytes": moved}


def swap() -> Iterator[Row]:
    """Fig. 19a's set-up: 256 (and 1024) tokens of a sequence out of and into random blocks, all layers of OPT-13B."""
    pool_tokens = 2048
    shape = (2 * NUM_LAYERS, pool_tokens, NUM_HEADS, HEAD_DIM)
    gpu_pool = torch.empty(shape, device="cuda", dtype=torch.float16).normal_()
    cpu_pool = torch.zeros(shape, dtype=torch.float16, pin_memory=True)
    generator = torch.Generator().manual_seed(0)
    for num_tokens, block_size in product((256, 1024), BLOCK_SIZES):
        blocks = (2 * NUM_LAYERS, -1, block_size, NUM_HEADS, HEAD_DIM)
        gpu, cpu = list(gpu_pool.view(blocks)), list(cpu_pool.view(blocks))
        both = kernels.cache_pointers(gpu, gpu_pool.device), kernels.cache_pointers(cpu, gpu_pool.device)
        orders = [torch.randperm(pool_tokens // block_size, generator=generator) for _ in range(2)]
        pairs = torch.stack(orders, dim=1)[: num_tokens // block_size]
        for batched, direction in product((True, False) if num_tokens == 256 else (True,), ("out", "in")):
            us = _swap_us(gpu, cpu, pairs, both, batched, direction)
            name = "ours, one launch" if batched else "2023 way: a copy a block and layer"
            row = {"contender": name, "tokens": num_tokens, "block_size": block_size, "direction": direction}
            yield row | {"launch": "eager", "us": us, "bytes": 2 * NUM_LAYERS * num_tokens * TOKEN_BYTES}


def _swap_us(
    gpu: list[Tensor], cpu: list[Tensor], pairs: Tensor, pointers: tuple[Tensor, Tensor], batched: bool, direction: str
) -> float:
    source, target = (gpu, cpu) if direction == "out" else (cpu, gpu)
    if direction == "in":
        pairs, pointers = pairs.flip(1).contiguous(), pointers[::-1]
    us = eager_time_us([lambda: kernels.swap_blocks(source, target, pairs, batched, pointers)], replays=5)
    moved = pairs[:, 0].to(source[0].device), pairs[:, 1].to(target[0].device)
    assert all(torch.equal(a[moved[0]].cpu(), b[moved[1]].cpu()) for a, b in list(zip(source, target))[::40])
    return us
