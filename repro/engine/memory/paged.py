"""PagedAttention's memory manager: block tables, sharing, copy-on-write, all-or-nothing swap (§4.2-4.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from repro.checks import number, whole
from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.memory.interface import CacheOp, KVCacheManager, MemoryUsage, OpKind, check_parents
from repro.engine.sequence import Sequence, SequenceGroup
from repro.errors import UserError


def check_watermark(watermark: float) -> float:
    """The share of the blocks that admission leaves free. UserError unless it is from 0 to below 1."""
    if number("watermark", watermark, 0) >= 1:
        raise UserError(f"watermark = {watermark}: the share of blocks kept free at admission must be below 1")
    return watermark


class PagedKVCacheManager(KVCacheManager):
    """Maps each sequence's logical blocks to physical blocks, on demand, one block at a time.

    `watermark` is the share of the pool that admission leaves free, so that a request just admitted is not the cause of
    the next preemption. `num_cpu_blocks` is the swap space. A block is shared by reference count and copied when one of
    its holders has to write into it."""

    grows = True
    shares = True

    def __init__(self, num_blocks: int, block_size: int = 16, watermark: float = 0.01, num_cpu_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size)
        self.watermark_blocks = int(check_watermark(watermark) * num_blocks)
        self.gpu = BlockAllocator(self.num_blocks)
        self.cpu = BlockAllocator(whole("num_cpu_blocks", num_cpu_blocks, 0, 2**32))
        self._tables: dict[Sequence, list[int]] = {}
        self._prefixes: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.gpu.num_free

    # Shared prefixes (§4.4)

    def store_prefix(self, prefix_id: str, num_tokens: int) -> int:
        """As the interface says; whole blocks are shared."""
        if prefix_id in self._prefixes:
            raise UserError(f"prefix {prefix_id!r} is stored already")
        count = num_tokens // self.block_size
        if count >= self.num_blocks or count > self.gpu.num_free:
            raise UserError(
                f"prefix {prefix_id!r} takes {count} blocks; {self.gpu.num_free} of the pool's {self.num_blocks} are "
                "free, and some must be left for requests"
            )
        self._prefixes[prefix_id] = self.gpu.allocate_many(count)
        return count * self.block_size

    def prefix_blocks(self, prefix_id: str) -> list[int]:
        """Physical blocks of a stored prefix, in logical order. Read only."""
        return self._prefixes[prefix_id]

    def prefix_tokens(self, group: SequenceGroup) -> int:
        """Prompt tokens of the group whose K/V is stored already: whole blocks, and never the entire prompt."""
        if group.request.prefix_id is None:
            return 0
        blocks = self._prefixes.get(group.request.prefix_id, ())
        return min(len(blocks), (group.request.prompt_tokens - 1) // self.block_size) * self.block_size

    # Admission and growth

    def layout(self, group: SequenceGroup, num_tokens: int) -> tuple[int, int, int]:
        """(blocks of the stored prefix, blocks shared by the group's sequences, blocks of each sequence's own).

        Fresh sequences share their whole prompt, the partly filled last block too. Sequences that have generated tokens
        have diverged: after recomputation only the prompt's full blocks can be shared."""
        total = -(-num_tokens // self.block_size)
        prefix = self.prefix_tokens(group) // self.block_size
        if len(group.seqs) == 1 or num_tokens == group.request.prompt_tokens:
            return prefix, total - prefix, 0
        shared = group.request.prompt_tokens // self.block_size
        return prefix, shared - prefix, total - shared

    def blocks_needed(self, group: SequenceGroup, num_tokens: int) -> int:
        """Physical blocks that the group takes beyond the stored prefix when all its sequences have this length."""
        _, shared, own = self.layout(group, num_tokens)
        return shared + own * len(group.seqs)

    def tokens_to_compute(self, group: SequenceGroup, num_tokens: int) -> int:
        prefix, shared, _ = self.layout(group, num_tokens)
        common = min((prefix + shared) * self.block_size, num_tokens)
        return common - prefix * self.block_size + (num_tokens - common) * len(group.seqs)

    def blocks_at_most(self, group: SequenceGroup) -> int:
        """Blocks the group takes in the worst case: at its end, nothing shared but the prompt's full blocks."""
        request = group.request
        full = request.prompt_tokens // self.block_size - self.prefix_tokens(group) // self.block_size
        own = self.cdiv(request.prompt_tokens + request.output_tokens - 1) - request.prompt_tokens // self.block_size
        return full + own * request.sampling.n

    def fits(self, group: SequenceGroup) -> bool:
        stored = sum(map(len, self._prefixes.values()))
        return self.blocks_at_most(group) + self.watermark_blocks + stored <= self.num_blocks

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        return self.blocks_needed(group, num_tokens) + self.watermark_blocks <= self.gpu.num_free

    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        num_prefix, num_shared, num_own = self.layout(group, num_tokens)
        common = self._prefixes[group.request.prefix_id][:num_prefix] if num_prefix else []
        self.gpu.share(common, len(group.seqs))
        shared = self.gpu.allocate_many(num_shared)
        if len(group.seqs) > 1:
            self.gpu.share(shared, len(group.seqs) - 1)
        for seq in group.seqs:
            self._tables[seq] = common + shared + self.gpu.allocate_many(num_own)

    def _blocks_to_append(self, group: SequenceGroup, num_tokens: int) -> int:
        """Free blocks that one more token takes: one per sequence at a block boundary, else one per copy-on-write.

        Of r holders of a shared block that all write, r - 1 copy it and the last one keeps it."""
        if (num_tokens - 1) % self.block_size == 0:
            return len(group.seqs)
        if len(group.seqs) == 1:
            return 0
        lasts = [self._tables[seq][-1] for seq in group.seqs]
        return len(lasts) - len(set(lasts))

    def can_append_slots(self, group: SequenceGroup, num_tokens: int) -> bool:
        return self._blocks_to_append(group, num_tokens) <= self.gpu.num_free

    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        ops: list[CacheOp] = []
        if (num_tokens - 1) % self.block_size == 0:
            for seq in group.seqs:
                self._tables[seq].append(self.gpu.allocate())
            return ops
        for seq in group.seqs:
            table = self._tables[seq]
            if self.gpu.ref_counts[table[-1]] > 1:  # copy-on-write (Fig. 8)
                copy = self.gpu.allocate()
                ops.append(CacheOp(OpKind.COPY, table[-1], copy))
                self.gpu.release([table[-1]])
                table[-1] = copy
        return ops

    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        check_parents(group, parents)
        moves = [(group.seqs[child], group.seqs[parent]) for child, parent in enumerate(parents) if child != parent]
        for loser, _ in moves:
            self.free_sequence(loser)
        for loser, survivor in moves:
            self.fork_sequence(survivor, loser)
        return []  # sharing moves nothing; writes copy later (Fig. 9)

    def fork_sequence(self, parent: Sequence, child: Sequence) -> None:
        """Let a child that holds nothing share all that its parent holds (§5.2); this takes no free block.

        The child may be of another group. `can_append_slots` and `usage` look at sharing within a group, so whoever
        forks across groups asks for a free block, and counts blocks, in another way."""
        table = self._tables[child] = list(self._tables[parent])
        self.gpu.share(table)

    def free_sequence(self, seq: Sequence) -> None:
        self.gpu.release(self._tables.pop(seq))

    # Swapping (§4.5): a group moves as a whole, a shared block once, a stored prefix not at all

    def _movable_blocks(self, group: SequenceGroup) -> Counter[int]:
        """Each block of the group beyond the stored prefix -> how many of its sequences refer to it."""
        prefix = self.prefix_tokens(group) // self.block_size
        return Counter(block for seq in group.seqs for block in self._tables[seq][prefix:])

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return len(self._movable_blocks(group)) <= self.cpu.num_free

    def can_swap_in(self, group: SequenceGroup, num_tokens: int) -> bool:
        """Room for the group's blocks and for its next token, above the watermark."""
        needed = len(self._movable_blocks(group)) + self._blocks_to_append(group, num_tokens)
        return needed + self.watermark_blocks <= self.gpu.num_free

    def swap_out(self, group: SequenceGroup) -> list[CacheOp]:
        return self._move(group, self.gpu, self.cpu, OpKind.SWAP_OUT)

    def swap_in(self, group: SequenceGroup) -> list[CacheOp]:
        return self._move(group, self.cpu, self.gpu, OpKind.SWAP_IN)

    def free_swapped(self, group: SequenceGroup) -> None:
        prefix = self.prefix_tokens(group) // self.block_size
        for seq in group.seqs:
            table = self._tables.pop(seq)
            self.gpu.release(table[:prefix])
            self.cpu.release(table[prefix:])

    def _move(
        self, group: SequenceGroup, source: BlockAllocator, target: BlockAllocator, kind: OpKind
    ) -> list[CacheOp]:
        # Moving a stored prefix would free nothing, and the pool may not hold a second copy when the group returns.
        counts = self._movable_blocks(group)
        moved = dict(zip(counts, target.allocate_many(len(counts))))
        for block, holders in counts.items():
            target.share([moved[block]], holders - 1)
            source.release([block] * holders)
        prefix = self.prefix_tokens(group) // self.block_size
        for seq in group.seqs:
            table = self._tables[seq]
            self._tables[seq] = table[:prefix] + [moved[block] for block in table[prefix:]]
        return [CacheOp(kind, block, moved[block]) for block in counts]

    def block_table(self, seq: Sequence) -> list[int]:
        return self._tables[seq]

    def usage(self, groups: Iterable[tuple[SequenceGroup, int]]) -> MemoryUsage:
        size, logical, held = self.block_size, 0, set().union(*self._prefixes.values())
        ends: dict[int, tuple[int, int]] = {}  # blocks with room -> slots in use, slots that will be
        for group, num_tokens in groups:
            tables = [self._tables[seq] for seq in group.seqs]
            logical += sum(map(len, tables))
            held.update(*tables)
            # All sequences of a group are equally long, so a block is the last one of all its holders or of none.
            used = (num_tokens - 1) % size + 1
            final = group.request.prompt_tokens + group.request.output_tokens - 1
            later = min(size - used, max(final - num_tokens, 0))
            for table in tables:
                ends[table[-1]] = used, later
        used, later = (sum(part) for part in zip(*ends.values())) if ends else (0, 0)
        return MemoryUsage(
            total=self.num_blocks * size,
            token_states=(len(held) - len(ends)) * size + used,
            reserved=later,
            internal=len(ends) * size - used - later,
            rounding=0,
            free=self.gpu.num_free * size,
            logical_blocks=logical,
            physical_blocks=self.num_blocks - self.gpu.num_free,
        )
