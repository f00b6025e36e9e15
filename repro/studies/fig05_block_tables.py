"""Fig. 5 to 10 walked through with the real block manager: block tables, copy-on-write, beams, a shared prefix.

Every state is read off `PagedKVCacheManager` with blocks of four slots, as in the figures. Physical block numbers are
the allocator's business: a state agrees with the figure's if it is the same up to the names of the blocks, with the
same filled slots and reference counts. No token values and no times occur."""

from collections.abc import Iterable
from itertools import starmap
from typing import Any, ClassVar

from repro.engine.memory.interface import CacheOp
from repro.engine.memory.paged import PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.studies.base import DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import BlockSize, about

TABLES = {"states": ("walk", "step", "sequence", "logical")}
NUM_BLOCKS = 32
CELL = ["physical", "filled", "ref_count"]  # of a logical block: what the figures show
_EXAMPLES, _SHARED = "0:4x3 1:4x3 2:4x3 3:4x3 4:4x3", "0:4x4 1:4x4 3:4x4"
#: walk -> step -> the tables drawn, blocks in use, and blocks copied. A table is a sequence's logical blocks in order,
#: each the paper's number of its block, its filled slots and, if several sequences hold it, its reference count.
DRAWN: dict[str, dict[str, tuple[list[str], int, int]]] = {
    "one request": {
        "prompt": (["7:4 1:3"], 2, 0),
        "first word": (["7:4 1:4"], 2, 0),
        "second word": (["7:4 1:4 3:1"], 3, 0),
        "third word": (["7:4 1:4 3:2"], 3, 0),
    },
    "two requests": {"both running": (["7:4 1:4 3:1", "5:4 2:2"], 5, 0)},
    "two samples": {
        "prompt": (["7:4x2 1:3x2", "7:4x2 1:3x2"], 2, 0),
        "first write": (["7:4x2 3:4", "7:4x2 1:4"], 3, 1),
    },
    "four beams": {
        "before": ([*(f"0:4x4 1:4x3 3:4x3 {last}:4" for last in "567"), "0:4x4 2:4 4:4 8:4"], 9, 0),
        "candidates dropped": ([f"{_SHARED} {last}:4x2" for last in "6677"], 5, 0),
        "new words": ([f"{_SHARED} {last}:4x2 {new}:1" for last, new in zip("6677", (9, 10, 11, 12))], 9, 0),
    },
    "shared prefix": {
        "prefix stored": (["0:4 1:4 2:4 3:4 4:4"], 5, 0),
        "two prompts": ([_EXAMPLES, f"{_EXAMPLES} 5:2", f"{_EXAMPLES} 6:4"], 7, 0),
        "first words": ([_EXAMPLES, f"{_EXAMPLES} 5:3", f"{_EXAMPLES} 6:4 7:1"], 8, 0),
        "first has ended": ([table.replace("x3", "x2") for table in (_EXAMPLES, f"{_EXAMPLES} 6:4 7:2")], 7, 0),
    },
}
#: walk -> the figure that it follows; Fig. 5 is the third word of Fig. 6's request.
FIGURE = {walk: f"Fig. {number}" for walk, number in zip(DRAWN, (6, 7, 8, 9, 10))}
_LINES = (("one request",), ("two requests", "two samples"), ("four beams",), ("shared prefix",))  # of the figure
_STEP = {"third word": "third word (Fig. 5)"}
#: Fig. 10's words, in blocks of 4: an instruction and three examples, 4 + 6 + 4 + 6; then "cheese =>" and "I love you
#: =>".
PREFIX_WORDS, INPUT_WORDS = 20, (2, 4)
_CLAIM = dict.fromkeys(("one request", "two requests"), "fig5-7-block-tables")
_CLAIM |= {"two samples": "fig8-parallel-cow", "four beams": "fig9-beam-sharing"}


class Params(Parameters):
    block_size: BlockSize
    free: ClassVar = ()


def points(params: Params) -> list[Point]:
    walks = (requests, two_samples, four_beams, shared_prefix)
    return [Point(walk, {"block_size": params.block_size}, "states") for walk in walks]


def _group(request_id: int, prompt_tokens: int, prefix: str | None = None, **sampling: Any) -> SequenceGroup:
    return SequenceGroup(Request(request_id, 0.0, prompt_tokens, 64, SamplingParams(max_tokens=64, **sampling), prefix))


class _Walk:
    """A block manager, and its states so far: one row for each logical block of each sequence.

    A stored prefix comes first, as a sequence of its own."""

    def __init__(self, block_size: int, prefix_words: int = 0) -> None:
        self.manager = PagedKVCacheManager(NUM_BLOCKS, block_size, watermark=0.0)
        self.rows: list[dict[str, Any]] = []
        self._has_prefix = prefix_words > 0
        if self._has_prefix:
            self.manager.store_prefix("prefix", prefix_words)

    def see(self, walk: str, step: str, lengths: dict[SequenceGroup, int], ops: Iterable[CacheOp] = ()) -> None:
        """Note the state, given the tokens that each group has stored and the copies that led here."""
        manager, size = self.manager, self.manager.block_size
        kind = {"two samples": "sample", "four beams": "beam"}.get(walk, "request")
        tables = {}
        if self._has_prefix:
            stored = manager.prefix_blocks("prefix")
            tables["prefix"] = stored, size * len(stored)
        for group, num_tokens in lengths.items():
            for index, seq in enumerate(group.seqs):
                name = f"{kind} {group.request.request_id if kind == 'request' else index}"
                tables[name] = manager.block_table(seq), num_tokens
        totals = {"blocks_in_use": NUM_BLOCKS - manager.num_free_blocks, "blocks_copied": len(list(ops))}
        for name, (blocks, num_tokens) in tables.items():
            state = {"walk": walk, "step": step, "sequence": name}
            for logical, block in enumerate(blocks):
                filled, count = min(size, num_tokens - logical * size), manager.gpu.ref_counts[block]
                cell = {"logical": logical, "physical": block, "filled": filled, "ref_count": count}
                self.rows.append(state | cell | totals | about("exact"))


def requests(block_size: int) -> list[dict[str, Any]]:
    """Fig. 5 and 6: a prompt of seven words and three more. Fig. 7: beside its first nine a second request of six."""
    walk = _Walk(block_size)
    first, second = _group(0, 7), _group(1, 5)
    walk.manager.allocate(first, 7)
    walk.see("one request", "prompt", {first: 7})
    for step, length in (("first word", 8), ("second word", 9)):
        walk.see("one request", step, {first: length}, walk.manager.append_slots(first, length))
    walk.manager.allocate(second, 5)
    walk.see("two requests", "both running", {first: 9, second: 6}, walk.manager.append_slots(second, 6))
    walk.manager.free(second)
    walk.see("one request", "third word", {first: 10}, walk.manager.append_slots(first, 10))
    return walk.rows


def two_samples(block_size: int) -> list[dict[str, Any]]:
    """Fig. 8: two samples share a prompt of seven words; the first to write copies the last block."""
    walk, group = _Walk(block_size), _group(0, 7, n=2)
    walk.manager.allocate(group, 7)
    walk.see("two samples", "prompt", {group: 7})
    walk.see("two samples", "first write", {group: 8}, walk.manager.append_slots(group, 8))
    return walk.rows


def four_beams(block_size: int) -> list[dict[str, Any]]:
    """Fig. 9: beams 0 to 2 part after three blocks, beam 3 after one; then all go on from beams 1 and 2."""
    walk, group = _Walk(block_size), _group(0, block_size, n=4, use_beam_search=True)
    manager, length = walk.manager, 4 * block_size
    manager.allocate(group, block_size)
    for stored in range(block_size, length):
        if stored in (2 * block_size, 3 * block_size):
            manager.fork(group, [0, 0, 0, 3], stored)
        manager.append_slots(group, stored + 1)
    walk.see("four beams", "before", {group: length})
    walk.see("four beams", "candidates dropped", {group: length}, manager.fork(group, [1, 1, 2, 2], length))
    walk.see("four beams", "new words", {group: length + 1}, manager.append_slots(group, length + 1))
    return walk.rows


def shared_prefix(block_size: int) -> list[dict[str, Any]]:
    """Fig. 10: two translations whose prompts begin with the same examples, which are stored once and for all."""
    walk = _Walk(block_size, PREFIX_WORDS)
    walk.see("shared prefix", "prefix stored", {})
    one, other = (PREFIX_WORDS + words for words in INPUT_WORDS)
    first, second = _group(0, one, "prefix"), _group(1, other, "prefix")
    walk.manager.allocate(first, one)
    walk.manager.allocate(second, other)
    walk.see("shared prefix", "two prompts", {first: one, second: other})
    ops = walk.manager.append_slots(first, one + 1) + walk.manager.append_slots(second, other + 1)
    walk.see("shared prefix", "first words", {first: one + 1, second: other + 1}, ops)
    walk.manager.free(first)
    walk.see("shared prefix", "first has ended", {second: other + 2}, walk.manager.append_slots(second, other + 2))
    return walk.rows


def same_state(rows: DataFrame, drawn: tuple[list[str], int, int]) -> bool:
    """Whether a state of ours is the one drawn, up to the names of the physical blocks."""
    tables, *totals = drawn
    ours = [table[CELL].to_numpy().tolist() for _, table in rows.groupby("sequence", sort=False)]
    counted = rows[["blocks_in_use", "blocks_copied"]].drop_duplicates().to_numpy().tolist()
    return _renamed(ours) == _renamed(map(_parsed, tables)) and counted == [totals]


def _parsed(table: str) -> list[tuple[str, int, int]]:
    """(block, filled slots, reference count) of each block of a drawn table."""
    cells = [cell.replace(":", "x").split("x") for cell in table.split()]
    return [(block, int(filled), int(*count or [1])) for block, filled, *count in cells]


def _renamed(tables: Iterable[list[tuple[Any, int, int]]]) -> list[list[tuple[int, int, int]]]:
    """The tables with blocks numbered in order of appearance."""
    names: dict[Any, int] = {}
    return [
        [(names.setdefault(block, len(names)), int(filled), int(count)) for block, filled, count in table]
        for table in tables
    ]


def judge(rows: Rows, params: Params) -> list[Judgement]:
    states = rows["states"]
    other = dict.fromkeys(_CLAIM.values(), 0)
    for walk, claim_id in _CLAIM.items():
        for step, drawn in DRAWN[walk].items():
            other[claim_id] += not same_state(where(states, walk=walk, step=step), drawn)
    return [Judgement(claim_id, count, "exact") for claim_id, count in other.items()]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    from repro.report import diagrams

    states = {tuple(key): state for key, state in rows["states"].groupby(["walk", "step"], sort=False)}
    lines = [[key for key in states if key[0] in walks] for walks in _LINES]
    columns = max(map(len, lines))
    places = [key for line in lines for key in [*line, *[None] * (columns - len(line))]]
    heights = [max(states[key]["sequence"].nunique() for key in line) for line in lines]
    titles = [f"{FIGURE[key[0]]}: {_STEP.get(key[1], key[1])}" if key else "" for key in places]
    ratios = [0.6 + height for height in heights]
    figure, axes = plotting.panels(titles, columns=columns, width=3.3, height=1.85, height_ratios=ratios)
    for number, (axis, key) in enumerate(zip(axes, places)):
        if key is None:
            axis.remove()
            continue
        line = number // columns
        width = max(states[other]["logical"].max() + 1 for other in lines[line])
        sequences = states[key].groupby("sequence", sort=False)
        tables = {name: list(starmap(diagrams.Cell, table[CELL].to_numpy())) for name, table in sequences}
        diagrams.draw_tables(axis, tables, params.block_size, max(5, width), heights[line])
        in_use, copied = states[key][["blocks_in_use", "blocks_copied"]].iloc[0]
        axis.set_xlabel(f"blocks in use: {in_use}" + (f", copied: {copied}" if copied else ""))
    diagrams.legend(figure)
    note = "Read off the block manager. The prefix of Fig. 10 is itself one of its blocks' holders"
    plotting.footer(figure, rows["states"], note=note)
    return {"fig05_block_tables": figure}
