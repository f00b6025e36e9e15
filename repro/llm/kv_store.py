"""The K/V pools themselves: per layer one K and one V tensor of blocks, and their twins in CPU memory for swapping.

Which block belongs to whom is the memory manager's business; this module only holds the data and moves whole blocks as
CacheOps say, in the order in which they were issued."""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from repro import kernels
from repro.engine.config import ModelConfig
from repro.engine.memory.interface import CacheOp, OpKind
from repro.errors import UserError
from repro.llm.transfer import upload


def batches(ops: Iterable[CacheOp]) -> Iterator[list[CacheOp]]:
    """Cut an ordered list of operations into runs that may happen in any order within themselves (one launch each).

    A run is of one kind, writes no block twice, and no copy in it reads what another one writes or writes what another
    one reads."""
    run: list[CacheOp] = []
    reads: set[int] = set()
    writes: set[int] = set()
    for op in ops:
        conflict = op.dst in writes or (op.kind is OpKind.COPY and (op.src in writes or op.dst in reads))
        if run and (op.kind is not run[0].kind or conflict):
            yield run
            run, reads, writes = [], set(), set()
        run.append(op)
        reads.add(op.src)
        writes.add(op.dst)
    if run:
        yield run


class KVStore:
    """`caches` holds K of layer 0, V of layer 0, K of layer 1, ...: [num_blocks, block_size, kv_heads, head_dim] each.

    `cpu_caches` is the same with `num_cpu_blocks` blocks, in page-locked memory if the pool is on a GPU. The pools
    start uninitialised: no slot is read before it was written."""

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        num_cpu_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (block_size, model.num_kv_heads, model.head_dim)
        on_gpu = device.type == "cuda"
        try:
            layers, pinned = range(2 * model.num_layers), on_gpu and num_cpu_blocks > 0
            self.caches = [torch.empty((num_blocks, *shape), dtype=dtype, device=device) for _ in layers]
            self.cpu_caches = [torch.empty((num_cpu_blocks, *shape), dtype=dtype, pin_memory=pinned) for _ in layers]
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise UserError(
                f"a K/V pool of {num_blocks} blocks of {block_size} tokens and {num_cpu_blocks} swap blocks does not "
                f"fit into memory beside {model.name}; ask for fewer ({str(error).splitlines()[0]})"
            ) from None
        self.device = device
        self._gpu = self._cpu = None  # the pools' addresses, which the kernels take
        if on_gpu:
            self._gpu = kernels.cache_pointers(self.caches, device)
            self._cpu = kernels.cache_pointers(self.cpu_caches, device)
        self.blocks_moved: Counter[OpKind] = Counter()

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def apply(self, ops: list[CacheOp]) -> None:
        """Move blocks, each operation seeing what those before it did."""
        for run in batches(ops):
            kind = run[0].kind
            pairs = np.array([(op.src, op.dst) for op in run], np.int64)
            if kind is OpKind.COPY:
                kernels.copy_blocks(self.caches, upload(pairs, self.device), self._gpu)
            else:
                sides = (self.caches, self._gpu), (self.cpu_caches, self._cpu)
                (source, start), (target, end) = sides if kind is OpKind.SWAP_OUT else reversed(sides)
                kernels.swap_blocks(source, target, torch.from_numpy(pairs), pointers=(start, end))
            self.blocks_moved[kind] += len(run)
