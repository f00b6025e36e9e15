"""A memory map as a page of its own, without a network. What it shows is made again in the browser, from the changes;
at every keyframe it is compared with the tables that were read from the memory manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from repro.history.pages import filled, packed

if TYPE_CHECKING:
    from repro.history.memory_map import MemoryMap

#: blocks x iterations of a page: the browser takes 4 bytes for each
MOST_CELLS = 24_000_000


def render(memory: MemoryMap, first: int, last: int) -> str:
    """The page of these iterations, or of as many from the first one on as a page takes."""
    last, whole, most = min(last, first + _most(memory.num_blocks) - 1), "the whole run", ""
    said = f"{len(memory):,} iterations"
    if last - first + 1 < len(memory):
        said, whole = f"Iterations {first:,} to {last:,} of {len(memory):,}", "all of these"
        most = 'The others are left out here: save("map.html", first=..., last=...) has them.'
    run = packed({"maps": {"run": content(memory, first, last)}, "parting": None})
    sizes = {"blocks": f"{memory.num_blocks:,}", "size": memory.block_size}
    return filled("map.html", run=run, said=said, whole=whole, left_out=most, **sizes)


def render_pair(before: MemoryMap, after: MemoryMap, parting: int | None, **words: str) -> str:
    """The page of two maps, one above the other; they part at this iteration. If they are too long for a page, it has
    as many iterations as it takes, a quarter of them before that. `words` are `heading`, `said`, `what` and `costs`."""
    longest, at = max(len(before), len(after)), parting or 0
    most = _most(before.num_blocks + after.num_blocks)
    first = max(0, min(at - most // 4, longest - most, len(before) - 1, len(after) - 1))
    last = min(longest, first + most) - 1
    maps = {"before": before, "after": after}
    run = {name: content(memory, first, min(last, len(memory) - 1)) for name, memory in maps.items()}
    shown, whole = f"{len(before):,} iterations before, {len(after):,} after.", "the whole run"
    if last - first + 1 < longest:
        shown, whole = f"{shown} Here are {first:,} to {last:,}.", "all of these"
    packs = packed({"maps": run, "parting": None if parting is None else at - first})
    return filled("pair.html", run=packs, shown=shown, whole=whole, **words)


def _most(num_blocks: int) -> int:
    return max(1, MOST_CELLS // num_blocks)


def content(memory: MemoryMap, first: int, last: int) -> dict[str, Any]:
    """All that the page knows. Frames are counted from `first`; what came before it is in the first keyframe."""
    log, before = memory.tables, memory.at(first)
    frames = slice(first, last + 1)
    keyframes = [(0, log.at(first)), *((at - first, all) for at, all in log.keyframes if first < at <= last)]
    starts = {request: [0, request, tokens, 0] for request, tokens in before.stored.items()}
    for at, request, tokens, grows in memory.lengths:
        if at <= first and request in starts:
            starts[request] = [0, request, tokens + grows * (first - at), grows]
    return {
        "first": first,
        "unit": memory.unit,
        "num_blocks": memory.num_blocks,
        "block_size": memory.block_size,
        "is_paged": memory.is_paged,
        "prefix": memory.prefix,
        "start_s": [round(start_s, 6) for start_s, _ in memory.times_s[frames]],
        "end_s": [round(end_s, 6) for _, end_s in memory.times_s[frames]],
        "counts": memory.counts[frames],
        "stalled": [at - first for at in range(first, last + 1) if memory.happenings.stalled[at]],
        "requests": {
            number: [one.prompt_tokens, one.output_tokens, one.sampling.n] for number, one in memory.requests.items()
        },
        "sequences": log.sequences,
        "keyframes": [(at, sorted(tables.items())) for at, tables in keyframes],
        "deltas": [[at - first, *rest] for at, *rest in log.deltas if first < at <= last],
        "lengths": [*starts.values(), *([at - first, *rest] for at, *rest in memory.lengths if first < at <= last)],
        "cached": [
            *([0, block] for block in sorted(before.cached)),
            *([at - first, block] for at, block in memory.toggles if first < at <= last),
        ],
        "happenings": [[one.frame - first, *one[1:]] for one in memory.happenings if first <= one.frame <= last],
        "rent": memory.rent(),
    }
