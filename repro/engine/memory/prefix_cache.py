"""Automatic prefix caching, as vLLM V1 has it: full blocks are found again by what they hold.

A block's hash is chained with that of the block before it, so equal hashes mean equal prefixes. A block keeps its hash
when its last holder lets it go, and is found until it is handed out for something else; the block free for longest goes
first. The manager still knows no tokens: `hashes` says what a request's full blocks hold, of its prompt and, where it
has one sequence, of as much of its output as is known."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.memory.interface import CacheOp
from repro.engine.memory.paged import PagedKVCacheManager
from repro.engine.sequence import Request, SequenceGroup
from repro.errors import UserError

#: the hashes of a request's full blocks, in order
Hashes = Callable[[Request], Items[bytes]]


def block_hashes(token_ids: Items[int], block_size: int, salt: bytes = b"", before: bytes | None = None) -> list[bytes]:
    """One hash for each full block of tokens, the same in every process. What has other salts shares nothing. `before`
    is the hash of the block before them, if there is one."""
    found, before = [], before or hashlib.sha256(salt).digest()
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = array("q", token_ids[start : start + block_size])
        before = hashlib.sha256(before + block.tobytes()).digest()
        found.append(before)
    return found


class Start(NamedTuple):
    """What a request found when it started, the last time: its first `found` tokens; `evicted`, of each block that
    followed and had been there, the request that took it over (None: one of an earlier run)."""

    found: int
    evicted: tuple[int | None, ...]


class CachingBlockAllocator(BlockAllocator):
    """Blocks that can be found by their hash, also while they are free; the one free for longest is used first.

    `evicted` remembers of the latest evictions, as many as there are blocks, which request took the block: `taker`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free: dict[int, None] = dict.fromkeys(range(num_blocks))  # in the order of use
        self.found: dict[bytes, int] = {}
        self.num_changes = 0  # of what is found
        self._holds: dict[int, bytes] = {}
        self.taker: int | None = None
        self.evicted: dict[bytes, int | None] = {}

    def keep(self, block: int, content: bytes) -> None:
        """`block` holds this from now on, and is found by it unless another block is."""
        if self.found.setdefault(content, block) == block:
            self._holds[block] = content
            self.evicted.pop(content, None)
            self.num_changes += 1

    def allocate(self) -> int:
        block = next(iter(self._free), None)
        if block is None:
            raise IndexError("a block asked for, none free")
        del self._free[block]
        if (content := self._holds.pop(block, None)) is not None:
            del self.found[content]
            self.num_changes += 1
            self.evicted[content] = self.taker
            if len(self.evicted) > self.num_blocks:
                del self.evicted[next(iter(self.evicted))]
        self.ref_counts[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        if count > len(self._free):
            raise IndexError(f"{count} blocks asked for, {len(self._free)} free")
        return [self.allocate() for _ in range(count)]

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each of `blocks`, the last one first: a prompt's end serves the fewest."""
        for block in reversed(list(blocks)):
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed twice")
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free[block] = None

    def share(self, blocks: Iterable[int], holders: int = 1) -> None:
        """Add `holders` references to each of `blocks`, which are in use or found by their hash."""
        for block in blocks:
            if not self.ref_counts[block]:
                if block not in self._holds:
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._free[block]
            self.ref_counts[block] += holders


class PrefixCachingKVCacheManager(PagedKVCacheManager):
    """Paged memory in which a request that starts takes over the blocks that hold the beginning of its tokens.

    At least the last token is computed, since its output is needed; blocks partly filled are never shared. Hits are
    decided when a group starts and stay its own until it ends, is recomputed or swapped: swapping moves everything.
    `num_asked` and `num_hit` count tokens of groups that start, and those that were found; `starts` has each
    request's."""

    def __init__(
        self, num_blocks: int, block_size: int = 16, watermark: float = 0.01, num_cpu_blocks: int = 0, *, hashes: Hashes
    ) -> None:
        super().__init__(num_blocks, block_size, watermark, num_cpu_blocks)
        self.gpu: CachingBlockAllocator = CachingBlockAllocator(self.num_blocks)
        self.num_asked = self.num_hit = 0
        self.starts: dict[int, Start] = {}
        self.hashes = hashes
        self._hits: dict[SequenceGroup, int] = {}  # blocks, of groups that have memory
        # The last answer of `match`, to whom, and how many changes there had been: who is first in the queue is asked
        # for in every iteration, and three times when it starts.
        self._last: tuple[SequenceGroup | None, int, list[int]] = (None, 0, [])

    def begin_run(self) -> None:
        """Requests are numbered anew from now on."""
        self.starts, self.gpu.evicted = {}, dict.fromkeys(self.gpu.evicted)

    def store_prefix(self, prefix_id: str, num_tokens: int) -> int:
        raise UserError("a prefix cache finds shared prefixes by itself; use the system without it to declare one")

    def contents(self, group: SequenceGroup, num_tokens: int) -> Items[bytes]:
        """What the full blocks of the first `num_tokens` hold. Several sequences have their prompt in common alone."""
        known = num_tokens if group.request.sampling.n == 1 else min(num_tokens, group.request.prompt_tokens)
        return self.hashes(group.request)[: known // self.block_size]

    def match(self, group: SequenceGroup) -> list[int]:
        """The blocks that hold the beginning of the tokens of a group that waits, but for the last one."""
        asked, changes, found = self._last
        if asked is group and changes == self.gpu.num_changes:
            return found
        found = []
        several = group.request.sampling.n > 1
        most = (group.request.prompt_tokens if several else group.num_stored(0)) - 1
        for content in self.contents(group, most):
            if (block := self.gpu.found.get(content)) is None:
                break
            found.append(block)
        self._last = group, self.gpu.num_changes, found
        return found

    def prefix_tokens(self, group: SequenceGroup) -> int:
        held = self._hits.get(group)
        return self.block_size * (len(self.match(group)) if held is None else held)

    def blocks_at_most(self, group: SequenceGroup) -> int:
        """As if nothing were found."""
        request = group.request
        full = request.prompt_tokens // self.block_size
        return full + (self.cdiv(request.prompt_tokens + request.output_tokens - 1) - full) * request.sampling.n

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        revived = sum(not self.gpu.ref_counts[block] for block in self.match(group))
        return self.blocks_needed(group, num_tokens) + revived + self.watermark_blocks <= self.gpu.num_free

    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        common, (_, num_shared, num_own) = self.match(group), self.layout(group, num_tokens)
        self._hits[group] = len(common)
        self.num_asked += group.num_stored(0)
        self.num_hit += len(common) * self.block_size
        missed = self.contents(group, group.num_stored(0))[len(common) :]
        evicted = tuple(self.gpu.evicted[content] for content in missed if content in self.gpu.evicted)
        self.starts[group.request.request_id] = Start(len(common) * self.block_size, evicted)
        self.gpu.taker = group.request.request_id
        self.gpu.share(common, len(group.seqs))
        shared = self.gpu.allocate_many(num_shared)
        self.gpu.share(shared, len(group.seqs) - 1)
        for seq in group.seqs:
            self._tables[seq] = common + shared + self.gpu.allocate_many(num_own)
        self._keep(group, len(common), num_tokens)

    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        self.gpu.taker = group.request.request_id
        ops = super().append_slots(group, num_tokens)
        if (num_tokens - 1) % self.block_size == 0:  # the block before is full
            self._keep(group, (num_tokens - 1) // self.block_size - 1, num_tokens - 1)
        return ops

    def _keep(self, group: SequenceGroup, first: int, num_tokens: int) -> None:
        """From block `first` on, full blocks of the first `num_tokens` are found from now on: what is computed in an
        iteration is written before anything in it is read."""
        table = self._tables[group.seqs[0]]
        for block, content in zip(table[first:], self.contents(group, num_tokens)[first:]):
            self.gpu.keep(block, content)

    def free(self, group: SequenceGroup) -> None:
        super().free(group)
        self._hits.pop(group, None)
        self._last = None, 0, []  # when it comes back, it may have grown

    def free_swapped(self, group: SequenceGroup) -> None:
        super().free_swapped(group)
        self._hits.pop(group, None)

    def _movable_blocks(self, group: SequenceGroup) -> Counter[int]:
        return Counter(block for seq in group.seqs for block in self._tables[seq])

    def swap_out(self, group: SequenceGroup) -> list[CacheOp]:
        self._hits[group] = 0
        return super().swap_out(group)
