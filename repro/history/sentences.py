"""What a scheduler decided, in sentences: the same ones under the explorer's maps and under a memory map."""

from __future__ import annotations

from repro.engine.memory.contiguous import ChunkAllocator
from repro.words import count


def starts(request: int, again: bool, took: str) -> str:
    return f"Request {request} starts{' again' if again else ''}: {took}."


def took_blocks(blocks: int, unit: str, tokens: int) -> str:
    return f"{count(blocks, unit)} for {count(tokens, 'token')}"


def took_chunk(reserved: int, held: int, first: int, unit: str, prompt: int) -> str:
    """A chunk of contiguous memory that begins at `first`; `held` is what was reserved, rounded up."""
    rounded = f", rounded up to {held:,}" if reserved < held else ""
    return f"{count(reserved, unit)} for a prompt of {prompt:,} and its output{rounded}, from {unit} {first:,} on"


def ends(request: int, tokens: int, freed: str) -> str:
    return f"Request {request} is done after {count(tokens, 'token')}: {freed} are freed."


def ends_early(request: int, tokens: int, most: int, freed: str) -> str:
    """By a stop token, or because it was taken back."""
    return f"Request {request} ends after {tokens:,} of at most {count(most, 'token')}: {freed} are freed."


def driven_out(request: int, requester: int, what: str, then: str) -> str:
    """`what` of the requester found no block; `then` says what becomes of the victim's memory."""
    who = "It is itself" if requester == request else f"Request {request} is"
    return f"No block is free for the {what} of request {requester}. {who} driven out: {then}."


def freed(blocks: str, tokens: int) -> str:
    return f"{blocks} are freed, {count(tokens, 'token')} must be computed again"


def moves_out(blocks: str) -> str:
    return f"{blocks} move to CPU memory"


def returns(request: int, took: str) -> str:
    return f"Request {request} returns from CPU memory: {took}."


def copied(request: int, pairs: list[tuple[int, int]], is_paged: bool) -> str:
    """Blocks of a request that are copied, each as (from, to)."""
    why = "its sequences share them, and write on apart" if is_paged else "its sequences share nothing"
    shown = ", ".join(f"{source} to {target}" for source, target in pairs[:3]) + (" ..." if len(pairs) > 3 else "")
    return f"Request {request} has {count(len(pairs), 'block')} copied ({shown}): {why}."


def waits(request: int, why: str) -> str:
    return f"Request {request} waits: {why}."


def needs(needed: int, unit: str, free: int, largest: int | None = None) -> str:
    """`largest` is the largest free piece, where one piece is needed and the free ones would do together."""
    said = f"it needs {count(needed, unit)}, and {free:,} are free"
    return said if largest is None else f"{said}, but at most {largest:,} in one piece"


def must_stay_free(kept: int) -> str:
    return f"; {kept:,} must stay free" if kept else ""


def cannot_return(free: int, kept: int) -> str:
    return f"it is in CPU memory, and of the pool's blocks {free:,} are free{must_stay_free(kept)}"


def is_full(most: int) -> str:
    return f"{most} sequences run, and no more may"


def largest_piece(allocator: ChunkAllocator) -> int:
    """The largest chunk that could be handed out now, in blocks."""
    if hasattr(allocator, "largest_run"):
        return allocator.largest_run
    size = 1 << allocator.num_free.bit_length()
    while size and not allocator.can_allocate(size, 1):
        size //= 2
    return size
