"""What a scheduler asks of a K/V memory, whichever way the memory is laid out.

A manager hands out blocks of `block_size` slots (a slot holds one token's K and V in all layers). A contiguous manager
hands out runs of consecutive block numbers, so executors and kernels see one layout. Managers know lengths, never token
values, devices or time. Data that has to move is returned as CacheOps, to be applied in the order issued."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from repro import display
from repro.checks import whole
from repro.engine.config import check_block_size
from repro.engine.sequence import Sequence, SequenceGroup
from repro.errors import UserError


class OpKind(enum.Enum):
    COPY = "copy"  # GPU block to GPU block
    SWAP_OUT = "swap_out"  # GPU block to CPU block
    SWAP_IN = "swap_in"  # CPU block to GPU block


class CacheOp(NamedTuple):
    """Move one block's contents. Lists of these are ORDERED: a copy may start from a block swapped in just before."""

    kind: OpKind
    src: int
    dst: int


@dataclass(frozen=True)
class MemoryUsage:
    """Where the slots of the pool are at one moment, in slots; the five parts add up to `total` (Fig. 2).

    token_states   hold a live token's K/V (a shared token counts once)
    reserved       will hold a token that this request still generates
    internal       reserved but never to be used: beyond the true final length, or the rest of a last block
    rounding       added by the allocator's power-of-two chunk sizes (the paper books it under "external & others")
    free           not allocated; in a contiguous pool this is what external fragmentation leaves unusable

    `logical_blocks` counts blocks with multiplicity (one per sequence that refers to it), `physical_blocks` once; their
    ratio is the saving of sharing (Fig. 15: 1 - physical / logical)."""

    total: int
    token_states: int
    reserved: int
    internal: int
    rounding: int
    free: int
    logical_blocks: int
    physical_blocks: int

    def __post_init__(self) -> None:
        parts = (self.token_states, self.reserved, self.internal, self.rounding, self.free)
        if min(parts) < 0 or sum(parts) != self.total:
            raise AssertionError(f"memory usage does not add up: {self}")


class KVCacheManager(ABC):
    """Between scheduler and memory. `num_tokens` is always the stored length of each sequence of the group."""

    grows: bool  # sequences ask for slots as they grow (paged); if not, they hold all they will ever get (contiguous)
    shares: bool  # several sequences of a group can refer to one block
    #: prompt tokens of groups that started, and those of them found in a prefix cache
    num_asked = num_hit = 0
    _tables: dict[Sequence, list[int]]  # of the sequences that hold blocks

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = check_block_size(block_size)
        self.num_blocks = whole("num_blocks", num_blocks, 1, 2**32)

    @abstractmethod
    def fits(self, group: SequenceGroup) -> bool:
        """Whether an empty pool could take the group to its very end. Asked once, when a request is submitted: one that
        can never run must not enter a first-come queue, which it would block for good."""

    @abstractmethod
    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Whether a waiting group of this length can start now."""

    @abstractmethod
    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        """Give every sequence of a waiting group room for its first `num_tokens` tokens."""

    def spread_prompt(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        """Copies that bring a prompt just computed, once, to all sequences; they belong to the next iteration."""
        return [] if self.shares else self.copies(group, [0] * len(group.seqs), num_tokens)

    def store_prefix(self, prefix_id: str, num_tokens: int) -> int:
        """Keep a prefix for all requests that name it; how many of its tokens are shared. UserError if that cannot
        be."""
        raise UserError("a shared prefix needs paged memory; use the system 'vllm'")

    def prefix_tokens(self, group: SequenceGroup) -> int:
        """Prompt tokens whose K/V is stored already (§4.4, shared prefix)."""
        return 0

    def tokens_to_compute(self, group: SequenceGroup, num_tokens: int) -> int:
        """Tokens of forward pass that starting (or restarting) the group at this length takes."""
        return num_tokens

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""

    @abstractmethod
    def can_append_slots(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Whether every sequence can get the slot of its token number `num_tokens`."""

    @abstractmethod
    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        """Give every sequence the slot of its token number `num_tokens`; the copies that this takes (§4.4)."""

    @abstractmethod
    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        """After a beam step, let sequence i continue what sequence `parents[i]` held. A parent that survives keeps its
        place: parents[p] == p for every p in parents. The copies returned belong to the next iteration."""

    def copies(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        """Copies of the blocks that hold `num_tokens` tokens, from sequence `parents[i]` to each sequence i."""
        tables = [self.block_table(seq)[: self.cdiv(num_tokens)] for seq in group.seqs]
        moves = [(tables[parent], tables[child]) for child, parent in enumerate(parents) if child != parent]
        return [CacheOp(OpKind.COPY, src, dst) for source, target in moves for src, dst in zip(source, target)]

    def free(self, group: SequenceGroup) -> None:
        """Take back everything that the group's sequences hold on the GPU."""
        for seq in group.seqs:
            self.free_sequence(seq)

    @abstractmethod
    def free_sequence(self, seq: Sequence) -> None:
        """Take back what one sequence holds."""

    def _repr_html_(self) -> str:
        """The block tables that it has now."""
        said = f"{self.num_blocks:,} blocks of {self.block_size} slots, {self.num_free_blocks:,} free"
        held = list(self._tables.items())

        def row(number: int) -> dict[str, object]:
            seq, table = held[number]
            return {"sequence": seq.seq_id, "blocks": len(table), "block_table": display.ranges(table)}

        return display.indexed(f"{type(self).__name__}: {said}; {len(held):,} block tables", len(held), row)

    @abstractmethod
    def block_table(self, seq: Sequence) -> list[int]:
        """Physical block numbers of the sequence, in logical order. Read only."""

    @abstractmethod
    def usage(self, groups: Iterable[tuple[SequenceGroup, int]]) -> MemoryUsage:
        """The pool, given the running groups and their stored lengths. Uses the true final lengths of the requests."""

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return False

    def swap_out(self, group: SequenceGroup) -> list[CacheOp]:
        raise NotImplementedError(f"{type(self).__name__} does not swap")

    def can_swap_in(self, group: SequenceGroup, num_tokens: int) -> bool:
        return False

    def swap_in(self, group: SequenceGroup) -> list[CacheOp]:
        raise NotImplementedError(f"{type(self).__name__} does not swap")

    def free_swapped(self, group: SequenceGroup) -> None:
        """Take back everything that a swapped group holds, wherever it is."""
        raise NotImplementedError(f"{type(self).__name__} does not swap")

    def cdiv(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def check_parents(group: SequenceGroup, parents: list[int]) -> None:
    """Refuse a beam step in which a surviving parent loses its place (the result would depend on the order)."""
    if len(parents) != len(group.seqs) or any(parents[parent] != parent for parent in parents):
        raise ValueError(f"parents {parents} of {group}: need one per sequence, and parents[p] == p for each parent p")
