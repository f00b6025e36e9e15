"""How kernels are timed: CUDA-graph replay, medians, over data larger than the L2 cache; and the machine's ceilings."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

COLD_BYTES = 320 << 20  # the calls of one replay touch at least this much: several times any GPU's L2
MAX_CALLS = 256


def settle() -> None:
    """Give cached memory back to the driver and wait until it has cleaned it.

    For a while after gigabytes were freed, kernels here run up to 12 % slower, whatever they compute; and a graph's
    capture frees all that is cached."""
    cached = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    time.sleep((cached - torch.cuda.memory_reserved()) / 50e9)  # several times what it was seen to take


def graph_time_us(calls: Sequence[Callable[[], object]], replays: int = 11) -> float:
    """Microseconds a call: all calls captured in one CUDA graph, the median over replays divided by their number."""
    settle()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compile and warm up before the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _median_us(graph.replay, replays) / len(calls)


def eager_time_us(calls: Sequence[Callable[[], object]], replays: int = 11) -> float:
    """Microseconds a call when Python launches each of them."""
    settle()
    for call in calls[:2]:
        call()

    def all_calls() -> None:
        for call in calls:
            call()

    return _median_us(all_calls, replays) / len(calls)


def _median_us(action: Callable[[], object], replays: int) -> float:
    action()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    return statistics.median(times)


def copy_gb_s() -> float:
    """Device-to-device copy of 4 GiB, GB/s, bytes read plus bytes written."""
    num_bytes = 4 << 30
    source = torch.empty(num_bytes // 2, dtype=torch.float16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * num_bytes / eager_time_us([lambda: target.copy_(source)]) / 1e3  # in a graph the slower copy engine runs


def link_gb_s(to_device: bool) -> float:
    """One copy of 1 GiB between pinned CPU memory and the GPU, GB/s, bytes counted once."""
    num_bytes = 1 << 30
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if to_device else (host, device)
    return num_bytes / eager_time_us([lambda: target.copy_(source, non_blocking=True)], replays=5) / 1e3


@dataclass(frozen=True)
class PagedInputs:
    """The arguments of one decode call over one sub-pool; `num_bytes` counts the context's K and V once."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    context_lens: Tensor
    scale: float
    max_context_len: int
    num_bytes: int

    def arguments(self) -> tuple[Any, ...]:
        """As a paged decode kernel takes them."""
        caches = self.k_cache, self.v_cache
        return self.q, *caches, self.block_table, self.context_lens, self.scale, self.max_context_len

    def contiguous(self) -> tuple[Tensor, Tensor]:
        """K and V of equal-length contexts as [batch, kv_heads, context, head_dim], for kernels that know no blocks."""
        table = self.block_table.long()
        k, v = (cache[table].flatten(1, 2)[:, : self.max_context_len] for cache in (self.k_cache, self.v_cache))
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def paged_inputs(
    lens: Sequence[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> list[PagedInputs]:
    """As many disjoint sub-pools of one pool as make COLD_BYTES together, their blocks in random order."""
    settle()
    generator = torch.Generator("cuda").manual_seed(0)
    num_blocks = sum(-(-n // block_size) for n in lens)
    num_bytes = 2 * sum(lens) * num_kv_heads * head_dim * dtype.itemsize
    num_pools = min(MAX_CALLS, -(-COLD_BYTES // num_bytes))
    shape = (num_pools * num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = (torch.empty(shape, dtype=dtype, device="cuda").normal_(generator=generator) for _ in range(2))
    order = torch.randperm(shape[0], device="cuda", generator=generator)
    context_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    inputs = []
    for table in _tables(order, lens, block_size):
        q = torch.empty(len(lens), num_heads, head_dim, dtype=dtype, device="cuda")
        q.normal_(generator=generator)
        inputs.append(PagedInputs(q, k_cache, v_cache, table, context_lens, head_dim**-0.5, max(lens), num_bytes))
    return inputs


def in_order(inputs: Sequence[PagedInputs]) -> list[PagedInputs]:
    """The same pool with every context's blocks one after the other: contiguous K and V, read by the same kernel."""
    num_blocks, block_size = inputs[0].k_cache.shape[:2]
    order = torch.arange(num_blocks, device="cuda")
    tables = _tables(order, inputs[0].context_lens.tolist(), block_size)
    return [replace(x, block_table=table) for x, table in zip(inputs, tables, strict=True)]


def _tables(order: Tensor, lens: Sequence[int], block_size: int) -> Tensor:
    """Deal the blocks `order` out to sub-pools and contexts: int32 [sub-pools, batch, max_blocks]."""
    blocks = torch.tensor([-(-n // block_size) for n in lens])
    held = torch.arange(int(blocks.max()))[None, :] < blocks[:, None]
    tables = torch.zeros(len(order) // int(blocks.sum()), *held.shape, dtype=torch.int32)
    tables[held.expand_as(tables)] = order.to("cpu", torch.int32)
    return tables.cuda()
