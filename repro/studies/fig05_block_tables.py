"""Fig. 5 to 9 walked through with the real block manager: block tables, sharing, copy-on-write, beams.

Every state is read off `PagedKVCacheManager` with blocks of four slots, as in the figures. Physical block numbers are
the allocator's business: a state agrees with the figure's if it is the same up to the names of the blocks, with the
same filled slots and reference counts. No token values and no times occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro.claims import Judgement
from repro.config import check_block_size
from repro.experiment import Point
from repro.memory.interface import CacheOp
from repro.memory.paged import PagedKVCacheManager
from repro.sequence import Request, SamplingParams, SequenceGroup

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CAPTION = {
    "fig05_block_tables": "Fig. 6 to 9: the block tables of one request, two requests, two samples of one prompt and "
                          "four beams, state by state, read off the block manager. A cell is a logical block: the "
                          "number of its physical block, its filled slots and, where shared, its reference count.",
}
NUM_BLOCKS = 32
#: A sequence's table as the figures draw it: (block, filled slots, reference count) for each logical block.
Table = list[tuple[str, int, int]]
#: walk -> step -> the tables drawn (blocks keep the paper's numbers), blocks in use, and blocks copied.
DRAWN: dict[str, dict[str, tuple[list[Table], int, int]]] = {
    "one request": {
        "prompt": ([[("7", 4, 1), ("1", 3, 1)]], 2, 0),
        "first word": ([[("7", 4, 1), ("1", 4, 1)]], 2, 0),
        "second word": ([[("7", 4, 1), ("1", 4, 1), ("3", 1, 1)]], 3, 0),
    },
    "two requests": {
        "both running": ([[("7", 4, 1), ("1", 4, 1), ("3", 1, 1)], [("5", 4, 1), ("2", 2, 1)]], 5, 0),
    },
    "two samples": {
        "prompt": ([[("7", 4, 2), ("1", 3, 2)], [("7", 4, 2), ("1", 3, 2)]], 2, 0),
        "first write": ([[("7", 4, 2), ("3", 4, 1)], [("7", 4, 2), ("1", 4, 1)]], 3, 1),
    },
    "four beams": {
        "before": ([*([("0", 4, 4), ("1", 4, 3), ("3", 4, 3), (last, 4, 1)] for last in "567"),
                    [("0", 4, 4), ("2", 4, 1), ("4", 4, 1), ("8", 4, 1)]], 9, 0),
        "candidates dropped": ([[("0", 4, 4), ("1", 4, 4), ("3", 4, 4), (last, 4, 2)] for last in "6677"], 5, 0),
        "new words": ([[("0", 4, 4), ("1", 4, 4), ("3", 4, 4), (last, 4, 2), (new, 1, 1)]
                       for last, new in zip("6677", ("9", "10", "11", "12"))], 9, 0),
    },
}
_CLAIM = {"one request": "fig5-7-block-tables", "two requests": "fig5-7-block-tables",
          "two samples": "fig8-parallel-cow", "four beams": "fig9-beam-sharing"}


@dataclass(frozen=True)
class Params:
    """`block_size`: slots in a block; the figures have 4, and only that is judged."""

    block_size: int = 4

    def __post_init__(self) -> None:
        check_block_size(self.block_size)


def points(params: Params) -> list[Point]:
    return [Point(walk, {"block_size": params.block_size}) for walk in (requests, two_samples, four_beams)]


def _group(request_id: int, prompt_tokens: int, n: int = 1, beams: bool = False) -> SequenceGroup:
    sampling = SamplingParams(n=n, use_beam_search=beams, max_tokens=64)
    return SequenceGroup(Request(request_id, 0.0, prompt_tokens, 64, sampling))


def _state(walk: str, step: str, manager: PagedKVCacheManager, groups: list[tuple[SequenceGroup, int]],
           ops: list[CacheOp]) -> list[dict[str, Any]]:
    """One row for each logical block of each sequence, given the groups and the tokens that they have stored."""
    size = manager.block_size
    kind = {"two samples": "sample", "four beams": "beam"}.get(walk, "request")
    sequences = [(seq, num_tokens) for group, num_tokens in groups for seq in group.seqs]
    return [
        {"walk": walk, "step": step, "sequence": f"{kind} {index}", "logical": logical, "physical": block,
         "filled": min(size, num_tokens - logical * size), "ref_count": manager.gpu.ref_counts[block],
         "blocks_in_use": NUM_BLOCKS - manager.num_free_blocks, "blocks_copied": len(ops),
         "evidence": "exact", "device": None, "seed": None, "trace_hash": None}
        for index, (seq, num_tokens) in enumerate(sequences)
        for logical, block in enumerate(manager.block_table(seq))
    ]


def requests(block_size: int) -> list[dict[str, Any]]:
    """Fig. 5 and 6: a prompt of seven words and two more. Fig. 7: beside it a second request of six."""
    manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
    first, second = _group(0, 7), _group(1, 5)
    manager.allocate(first, 7)
    rows = _state("one request", "prompt", manager, [(first, 7)], [])
    for step, length in (("first word", 8), ("second word", 9)):
        ops = manager.append_slots(first, length)
        rows += _state("one request", step, manager, [(first, length)], ops)
    manager.allocate(second, 5)
    ops = manager.append_slots(second, 6)
    return rows + _state("two requests", "both running", manager, [(first, 9), (second, 6)], ops)


def two_samples(block_size: int) -> list[dict[str, Any]]:
    """Fig. 8: two samples share a prompt of seven words; the first to write copies the last block."""
    manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
    group = _group(0, 7, n=2)
    manager.allocate(group, 7)
    rows = _state("two samples", "prompt", manager, [(group, 7)], [])
    ops = manager.append_slots(group, 8)
    return rows + _state("two samples", "first write", manager, [(group, 8)], ops)


def four_beams(block_size: int) -> list[dict[str, Any]]:
    """Fig. 9: beams 0 to 2 part after three blocks, beam 3 after one; then all go on from beams 1 and 2."""
    manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
    group = _group(0, block_size, n=4, beams=True)
    manager.allocate(group, block_size)
    for blocks in (2, 3, 4):
        for length in range((blocks - 1) * block_size + 1, blocks * block_size + 1):
            manager.append_slots(group, length)
        if blocks < 4:
            manager.fork(group, [0, 0, 0, 3], blocks * block_size)
    length = 4 * block_size
    rows = _state("four beams", "before", manager, [(group, length)], [])
    ops = manager.fork(group, [1, 1, 2, 2], length)
    rows += _state("four beams", "candidates dropped", manager, [(group, length)], ops)
    ops = manager.append_slots(group, length + 1)
    return rows + _state("four beams", "new words", manager, [(group, length + 1)], ops)


def same_state(rows: pd.DataFrame, drawn: tuple[list[Table], int, int]) -> bool:
    """Whether a state of ours is the one drawn, up to the names of the physical blocks."""
    tables, in_use, copied = drawn
    ours = [list(zip(table["physical"], table["filled"], table["ref_count"]))
            for _, table in rows.groupby("sequence", sort=False)]
    totals = rows[["blocks_in_use", "blocks_copied"]].drop_duplicates().to_numpy().tolist()
    return _renamed(ours) == _renamed(tables) and totals == [[in_use, copied]]


def _renamed(tables: list[list[tuple[Any, int, int]]]) -> list[Table]:
    """The tables with blocks named in order of appearance."""
    names: dict[Any, str] = {}
    return [[(names.setdefault(block, str(len(names))), int(filled), int(count)) for block, filled, count in table]
            for table in tables]


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params.block_size != Params.block_size:
        return []
    held = {claim_id: True for claim_id in _CLAIM.values()}
    for walk, steps in DRAWN.items():
        for step, drawn in steps.items():
            held[_CLAIM[walk]] &= same_state(rows[(rows["walk"] == walk) & (rows["step"] == step)], drawn)
    return [Judgement(claim_id, same, "exact", note="Read off the block manager, up to the names of the blocks.")
            for claim_id, same in held.items()]


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro import plotting

    states = list(rows.groupby(["walk", "step"], sort=False))
    with plotting.house():
        figure, axes = plotting.panels([f"{walk}: {step}" for (walk, step), _ in states], width=3.2, height=1.35,
                                        height_ratios=[1, 2, 4])
        for axis, (_, state) in zip(axes, states):
            _draw_state(axis, state, params.block_size)
        handles = [plotting.Patch(facecolor=_color(count), label=text)
                   for count, text in ((1, "one holder"), (2, "two"), (3, "three"), (4, "four"))]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=9)
        plotting.footer(figure, rows, note="Read off the block manager; numbers are its physical blocks, the filled "
                                           "part of a cell its filled slots")
    return {"fig05_block_tables": figure}


def _color(ref_count: int) -> str:
    return {1: "#9CC7E8", 2: "#5A9BD0", 3: "#2F6FA8", 4: "#17436F"}[ref_count]


def _draw_state(axis: Axes, state: pd.DataFrame, block_size: int) -> None:
    sequences = list(dict.fromkeys(state["sequence"]))
    for row in state.itertuples():
        x, y = row.logical, sequences.index(row.sequence)
        axis.barh(y, 0.92 * row.filled / block_size, 0.72, left=x, color=_color(row.ref_count))
        axis.barh(y, 0.92, 0.72, left=x, facecolor="none", edgecolor="#888888", linewidth=0.8)
        axis.text(x + 0.46, y, f"{row.physical}" + (f" \u00d7{row.ref_count}" if row.ref_count > 1 else ""), fontsize=8,
                  ha="center", va="center", color="white" if row.ref_count > 2 else "#222222")
    axis.set(xlim=(-0.05, max(5, state["logical"].max() + 1)), ylim=(len(sequences) - 0.45, -0.55), xticks=[],
             yticks=range(len(sequences)), yticklabels=sequences)
    axis.tick_params(left=False)
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
