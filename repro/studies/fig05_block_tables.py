"""Fig. 5 to 10 walked through with the real block manager: block tables, copy-on-write, beams, a shared prefix.

Every state is read off `PagedKVCacheManager` with blocks of four slots, as in the figures. Physical block numbers are
the allocator's business: a state agrees with the figure's if it is the same up to the names of the blocks, with the
same filled slots and reference counts. No token values and no times occur.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.config import check_block_size
from repro.engine.memory.interface import CacheOp
from repro.engine.memory.paged import PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

NUM_BLOCKS = 32
#: A sequence's table as the figures draw it: (block, filled slots, reference count) for each logical block.
Table = list[tuple[str, int, int]]
#: walk -> step -> the tables drawn (blocks keep the paper's numbers), blocks in use, and blocks copied.
DRAWN: dict[str, dict[str, tuple[list[Table], int, int]]] = {
    "one request": {
        "prompt": ([[("7", 4, 1), ("1", 3, 1)]], 2, 0),
        "first word": ([[("7", 4, 1), ("1", 4, 1)]], 2, 0),
        "second word": ([[("7", 4, 1), ("1", 4, 1), ("3", 1, 1)]], 3, 0),
        "third word": ([[("7", 4, 1), ("1", 4, 1), ("3", 2, 1)]], 3, 0),
    },
    "two requests": {"both running": ([[("7", 4, 1), ("1", 4, 1), ("3", 1, 1)], [("5", 4, 1), ("2", 2, 1)]], 5, 0)},
    "two samples": {
        "prompt": ([[("7", 4, 2), ("1", 3, 2)], [("7", 4, 2), ("1", 3, 2)]], 2, 0),
        "first write": ([[("7", 4, 2), ("3", 4, 1)], [("7", 4, 2), ("1", 4, 1)]], 3, 1),
    },
    "four beams": {
        "before": (
            [
                *([("0", 4, 4), ("1", 4, 3), ("3", 4, 3), (last, 4, 1)] for last in "567"),
                [("0", 4, 4), ("2", 4, 1), ("4", 4, 1), ("8", 4, 1)],
            ],
            9,
            0,
        ),
        "candidates dropped": ([[("0", 4, 4), ("1", 4, 4), ("3", 4, 4), (last, 4, 2)] for last in "6677"], 5, 0),
        "new words": (
            [
                [("0", 4, 4), ("1", 4, 4), ("3", 4, 4), (last, 4, 2), (new, 1, 1)]
                for last, new in zip("6677", ("9", "10", "11", "12"))
            ],
            9,
            0,
        ),
    },
    "shared prefix": {
        "prefix stored": ([[(block, 4, 1) for block in "01234"]], 5, 0),
        "two prompts": (
            [
                [(block, 4, 3) for block in "01234"],
                [*((block, 4, 3) for block in "01234"), ("5", 2, 1)],
                [*((block, 4, 3) for block in "01234"), ("6", 4, 1)],
            ],
            7,
            0,
        ),
        "first words": (
            [
                [(block, 4, 3) for block in "01234"],
                [*((block, 4, 3) for block in "01234"), ("5", 3, 1)],
                [*((block, 4, 3) for block in "01234"), ("6", 4, 1), ("7", 1, 1)],
            ],
            8,
            0,
        ),
        "first has ended": (
            [[(block, 4, 2) for block in "01234"], [*((block, 4, 2) for block in "01234"), ("6", 4, 1), ("7", 2, 1)]],
            7,
            0,
        ),
    },
}
#: walk -> the figure that it follows; Fig. 5 is the third word of Fig. 6's request.
FIGURE = {
    "one request": "Fig. 6",
    "two requests": "Fig. 7",
    "two samples": "Fig. 8",
    "four beams": "Fig. 9",
    "shared prefix": "Fig. 10",
}
_LINES = (("one request",), ("two requests", "two samples"), ("four beams",), ("shared prefix",))  # of the figure
_STEP = {"third word": "third word (Fig. 5)"}
#: Fig. 10's words, in blocks of 4: an instruction and three examples, 4 + 6 + 4 + 6; then "cheese =>" and "I love you
#: =>".
PREFIX_WORDS, INPUT_WORDS = 20, (2, 4)
_CLAIM = {
    "one request": "fig5-7-block-tables",
    "two requests": "fig5-7-block-tables",
    "two samples": "fig8-parallel-cow",
    "four beams": "fig9-beam-sharing",
}


class Params(Parameters):
    """`block_size`: slots in a block; the figures have 4, and only that is judged."""

    block_size: int

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_block_size(self.block_size)
        return self


def points(params: Params) -> list[Point]:
    return [
        Point(walk, {"block_size": params.block_size}) for walk in (requests, two_samples, four_beams, shared_prefix)
    ]


def _group(
    request_id: int, prompt_tokens: int, n: int = 1, beams: bool = False, prefix: str | None = None
) -> SequenceGroup:
    sampling = SamplingParams(n=n, use_beam_search=beams, max_tokens=64)
    return SequenceGroup(Request(request_id, 0.0, prompt_tokens, 64, sampling, prefix))


def _state(
    walk: str,
    step: str,
    manager: PagedKVCacheManager,
    groups: list[tuple[SequenceGroup, int]],
    ops: list[CacheOp],
    prefix: str | None = None,
) -> list[dict[str, Any]]:
    """One row for each logical block of each sequence, given the groups and the tokens that they have stored.

    A stored prefix comes first, as a sequence of its own.
    """
    size = manager.block_size
    kind = {"two samples": "sample", "four beams": "beam"}.get(walk, "request")
    tables = (
        {} if prefix is None else {prefix: (manager.prefix_blocks(prefix), size * len(manager.prefix_blocks(prefix)))}
    )
    for group, num_tokens in groups:
        for index, seq in enumerate(group.seqs):
            name = f"{kind} {group.request.request_id if kind == 'request' else index}"
            tables[name] = manager.block_table(seq), num_tokens
    return [
        {
            "walk": walk,
            "step": step,
            "sequence": name,
            "logical": logical,
            "physical": block,
            "filled": min(size, num_tokens - logical * size),
            "ref_count": manager.gpu.ref_counts[block],
            "blocks_in_use": NUM_BLOCKS - manager.num_free_blocks,
            "blocks_copied": len(ops),
            "evidence": "exact",
            "device": None,
            "seed": None,
            "trace_hash": None,
        }
        for name, (blocks, num_tokens) in tables.items()
        for logical, block in enumerate(blocks)
    ]


def requests(block_size: int) -> list[dict[str, Any]]:
    """Fig. 5 and 6: a prompt of seven words and three more. Fig. 7: beside its first nine a second request of six."""
    manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
    first, second = _group(0, 7), _group(1, 5)
    manager.allocate(first, 7)
    rows = _state("one request", "prompt", manager, [(first, 7)], [])
    for step, length in (("first word", 8), ("second word", 9)):
        ops = manager.append_slots(first, length)
        rows += _state("one request", step, manager, [(first, length)], ops)
    manager.allocate(second, 5)
    ops = manager.append_slots(second, 6)
    together = _state("two requests", "both running", manager, [(first, 9), (second, 6)], ops)
    manager.free(second)
    ops = manager.append_slots(first, 10)
    return rows + _state("one request", "third word", manager, [(first, 10)], ops) + together


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


def shared_prefix(block_size: int) -> list[dict[str, Any]]:
    """Fig. 10: two translations whose prompts begin with the same examples, which are stored once and for all."""
    manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
    manager.store_prefix("prefix", PREFIX_WORDS)
    walk = partial(_state, "shared prefix", manager=manager, prefix="prefix")
    rows = walk("prefix stored", groups=[], ops=[])
    lengths = [PREFIX_WORDS + words for words in INPUT_WORDS]
    first, second = (_group(index, length, prefix="prefix") for index, length in enumerate(lengths))
    for group, length in zip((first, second), lengths):
        manager.allocate(group, length)
    rows += walk("two prompts", groups=[(first, lengths[0]), (second, lengths[1])], ops=[])
    ops = manager.append_slots(first, lengths[0] + 1) + manager.append_slots(second, lengths[1] + 1)
    rows += walk("first words", groups=[(first, lengths[0] + 1), (second, lengths[1] + 1)], ops=ops)
    manager.free(first)
    ops = manager.append_slots(second, lengths[1] + 2)
    return rows + walk("first has ended", groups=[(second, lengths[1] + 2)], ops=ops)


def same_state(rows: pd.DataFrame, drawn: tuple[list[Table], int, int]) -> bool:
    """Whether a state of ours is the one drawn, up to the names of the physical blocks."""
    tables, in_use, copied = drawn
    ours = [
        list(zip(table["physical"], table["filled"], table["ref_count"]))
        for _, table in rows.groupby("sequence", sort=False)
    ]
    totals = rows[["blocks_in_use", "blocks_copied"]].drop_duplicates().to_numpy().tolist()
    return _renamed(ours) == _renamed(tables) and totals == [[in_use, copied]]


def _renamed(tables: list[list[tuple[Any, int, int]]]) -> list[Table]:
    """The tables with blocks named in order of appearance."""
    names: dict[Any, str] = {}
    return [
        [(names.setdefault(block, str(len(names))), int(filled), int(count)) for block, filled, count in table]
        for table in tables
    ]


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params.block_size != Params.block_size:
        return []
    held = dict.fromkeys(_CLAIM.values(), True)
    for walk, claim_id in _CLAIM.items():
        for step, drawn in DRAWN[walk].items():
            held[claim_id] &= same_state(rows[(rows["walk"] == walk) & (rows["step"] == step)], drawn)
    return [
        Judgement(claim_id, same, "exact", note="Read off the block manager, up to the names of the blocks.")
        for claim_id, same in held.items()
    ]


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import diagrams, plotting

    states = {tuple(key): state for key, state in rows.groupby(["walk", "step"], sort=False)}
    lines = [[key for key in states if key[0] in walks] for walks in _LINES]
    with plotting.house():
        columns = max(map(len, lines))
        places = [key for line in lines for key in [*line, *[None] * (columns - len(line))]]
        heights = [max(states[key]["sequence"].nunique() for key in line) for line in lines]
        figure, axes = plotting.panels(
            [f"{FIGURE[key[0]]}: {_STEP.get(key[1], key[1])}" if key else "" for key in places],
            columns=columns,
            width=3.1,
            height=1.75,
            height_ratios=[0.6 + height for height in heights],
        )
        for number, (axis, key) in enumerate(zip(axes, places)):
            if key is None:
                axis.remove()
                continue
            line = number // columns
            width = max(states[other]["logical"].max() + 1 for other in lines[line])
            tables = {
                name: list(map(diagrams.Cell, table["physical"], table["filled"], table["ref_count"]))
                for name, table in states[key].groupby("sequence", sort=False)
            }
            diagrams.draw_tables(axis, tables, params.block_size, max(5, width), heights[line])
            in_use, copied = states[key][["blocks_in_use", "blocks_copied"]].iloc[0]
            axis.set_xlabel(f"blocks in use: {in_use}" + (f", copied: {copied}" if copied else ""), fontsize=8.5)
        diagrams.legend(figure)
        plotting.footer(
            figure, rows, note="Read off the block manager. The prefix of Fig. 10 is itself one of its blocks' holders"
        )
    return {"fig05_block_tables": figure}
