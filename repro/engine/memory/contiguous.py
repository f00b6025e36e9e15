"""The Orca-style baseline: one contiguous chunk per sequence, reserved at admission and held to the end (§6.1).

What differs between the three Orca variants is only how much they reserve: a function of the request. A new policy is
one more function. The reservation is rounded up to a chunk (`chunk_blocks`) by the allocator: a power of two for the
buddy allocator that Orca has, which is what loses slots to rounding in Fig. 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Protocol

from repro.checks import ask, unfit, whole
from repro.engine.memory.buddy import BuddyAllocator
from repro.engine.memory.interface import CacheOp, KVCacheManager, MemoryUsage, check_parents
from repro.engine.sequence import Request, SamplingParams, Sequence, SequenceGroup
from repro.errors import UserError

#: output tokens for which a request gets room, given the request and the model's maximum length
Reservation = Callable[[Request, int], int]


_TASK = "it gets (request, max_model_len) and must return for how many output tokens to reserve room, a whole number"


def check_reservation(policy: Reservation) -> None:
    """Try a policy on three requests. UserError, with the policy's own line, if it raises or returns no whole number.

    Whether it reserves enough depends on the request: see `ContiguousKVCacheManager.reserved_tokens`."""
    for prompt, output in ((1, 1), (100, 50), (1000, 333)):
        request = Request(0, 0.0, prompt, output, SamplingParams())
        _whole(policy, ask("reservation policy", policy, _TASK, request, 2048))


def _whole(policy: Reservation, output: object) -> int:
    """What a policy returned, if it is a whole number of at least 0."""
    if type(output) is int and output >= 0:  # first, as it is asked for every request whenever the pool is sampled
        return output
    if isinstance(output, bool) or not isinstance(output, Integral) or output < 0:
        raise unfit("reservation policy", policy, f"returned {output!r} ({type(output).__name__})", _TASK)
    return int(output)


def reserve_max(request: Request, max_model_len: int) -> int:
    """Orca (Max): the longest output that the model allows."""
    return max_model_len


def reserve_pow2(request: Request, max_model_len: int) -> int:
    """Orca (Pow2): the true output length rounded up to a power of two (at most twice too much)."""
    return 1 << (request.output_tokens - 1).bit_length()


def reserve_oracle(request: Request, max_model_len: int) -> int:
    """Orca (Oracle): the true output length, which no real system knows."""
    return request.output_tokens


class ChunkAllocator(Protocol):
    """Hands out chunks of consecutive blocks, named by their first block, of the sizes that `rounded` gives.

    `capacity` is how many of a size an empty pool holds; `can_allocate` whether so many are free at the same time."""

    num_free: int

    def rounded(self, count: int) -> int: ...
    def capacity(self, size: int) -> int: ...
    def can_allocate(self, size: int, count: int) -> bool: ...
    def allocate(self, size: int) -> int: ...
    def release(self, start: int) -> None: ...


class ContiguousKVCacheManager(KVCacheManager):
    """Reserves min(prompt + reservation(request), max_model_len) slots per sequence, in one run of consecutive blocks.

    Parallel samples and beams share nothing: every sequence has a chunk of its own, and a beam that continues another
    one copies that one's blocks. Nothing is ever preempted, since nothing grows beyond its reservation. Chunks come
    from a BuddyAllocator unless another `allocator` is given."""

    grows = False
    shares = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        reservation: Reservation,
        max_model_len: int = 2048,
        allocator: ChunkAllocator | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.reservation = reservation
        self.max_model_len = whole("max_model_len", max_model_len, 1)
        self.allocator = allocator or BuddyAllocator(num_blocks, BuddyAllocator.rounded(self.cdiv(max_model_len)))
        self._tables: dict[Sequence, list[int]] = {}

    def reserved_tokens(self, group: SequenceGroup) -> int:
        """Slots that each sequence of the group is given, before the allocator rounds them up."""
        request = group.request
        output = _whole(self.reservation, self.reservation(request, self.max_model_len))
        reserved = min(request.prompt_tokens + output, self.max_model_len)
        if reserved < request.prompt_tokens + request.output_tokens - 1:
            raise UserError(
                f"{request}: its reservation of {reserved} slots is too short; a reservation must cover the output "
                f"(max_model_len is {self.max_model_len})"
            )
        return reserved

    def chunk_blocks(self, group: SequenceGroup) -> int:
        """Blocks of each sequence's chunk: its reservation, rounded up by the allocator."""
        return self.allocator.rounded(self.cdiv(self.reserved_tokens(group)))

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free

    def fits(self, group: SequenceGroup) -> bool:
        return self.allocator.capacity(self.chunk_blocks(group)) >= len(group.seqs)

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        return self.allocator.can_allocate(self.chunk_blocks(group), len(group.seqs))

    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        size = self.chunk_blocks(group)
        for seq in group.seqs:
            start = self.allocator.allocate(size)
            self._tables[seq] = list(range(start, start + size))

    def can_append_slots(self, group: SequenceGroup, num_tokens: int) -> bool:
        return True  # reserved at admission

    def append_slots(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        return []

    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        check_parents(group, parents)
        return self.copies(group, parents, num_tokens)

    def free_sequence(self, seq: Sequence) -> None:
        self.allocator.release(self._tables.pop(seq)[0])

    def block_table(self, seq: Sequence) -> list[int]:
        return self._tables[seq]

    def usage(self, groups: Iterable[tuple[SequenceGroup, int]]) -> MemoryUsage:
        tokens = reserved = internal = rounding = blocks = 0
        for group, num_tokens in groups:
            width = len(group.seqs)
            final = group.request.prompt_tokens + group.request.output_tokens
            planned = self.reserved_tokens(group)
            held = len(self._tables[group.seqs[0]])
            tokens += width * num_tokens
            reserved += width * (min(final, planned) - num_tokens)
            internal += width * (planned - min(final, planned))
            rounding += width * (held * self.block_size - planned)
            blocks += width * held
        return MemoryUsage(
            total=self.num_blocks * self.block_size,
            token_states=tokens,
            reserved=reserved,
            internal=internal,
            rounding=rounding,
            free=self.allocator.num_free * self.block_size,
            logical_blocks=blocks,
            physical_blocks=blocks,
        )
