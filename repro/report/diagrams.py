"""Block tables of a run, as they were: recorded while it happens, and drawn like Fig. 6-9.

    watch = BlockTables()
    llm.generate(prompts, params, observers=[watch])
    draw(watch.states, [0, 4, 8])

One row per sequence, one cell per logical block; a cell shows its physical block, how far it is filled, and its
reference count (a stored prefix counts as a holder). `draw_tables` is one panel of such a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import SchedulerOutput
from repro.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HOLDERS = ("#D6CFE8", "#B3A5D6", "#8571BD", "#4F3A8F")  # 1, 2, 3, 4 or more sequences
_SLOT = "#4D4D4D"
_CELL = 0.92  # width of a cell; the rest sets it apart from the next


class Cell(NamedTuple):
    """A logical block: its physical block, slots filled, reference count."""

    physical: int
    filled: int
    holders: int


@dataclass(frozen=True)
class State:
    """All block tables during one iteration, by sequence; a reservation's empty blocks have no slot filled."""

    iteration: int
    block_size: int
    tables: dict[str, list[Cell]]

    @property
    def physical_blocks(self) -> int:
        return len({cell.physical for cells in self.tables.values() for cell in cells})


class BlockTables(Observer):
    """Remembers the block tables of the iterations from `first` to `last` (numbers as in Event)."""

    def __init__(self, first: int = 0, last: int = 999) -> None:
        self.first, self.last = first, last
        self.states: list[State] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        if not self.first <= output.iteration <= self.last:
            return
        manager, size = engine.scheduler.manager, engine.scheduler.manager.block_size
        holders = manager.gpu.ref_counts if isinstance(manager, PagedKVCacheManager) else None
        tables = {}
        for group, stored in engine.scheduler.stored_lengths(output.iteration):
            for seq in group.seqs:
                tables[seq.seq_id] = [
                    Cell(block, min(max(stored - index * size, 0), size), 1 if holders is None else holders[block])
                    for index, block in enumerate(manager.block_table(seq))
                ]
        self.states.append(State(output.iteration, size, tables))


def draw(states: Iterable[State], iterations: Iterable[int] | None = None, max_blocks: int = 12) -> Figure:
    """One panel per iteration (all recorded ones unless named); tables are cut after `max_blocks` blocks.

    UserError if none of the iterations was recorded."""
    from repro.report import plotting

    states = list(states)
    wanted = {state.iteration for state in states} if iterations is None else set(iterations)
    chosen = [state for state in states if state.iteration in wanted]
    if not any(state.tables for state in chosen):
        recorded = [state.iteration for state in states if state.tables] or "none"
        raise UserError(f"no block tables of iterations {sorted(wanted)} to draw; recorded: {recorded}")
    width = min(max_blocks, max(len(cells) for state in chosen for cells in state.tables.values()))
    tallest = max(len(state.tables) for state in chosen)
    with plotting.house():
        figure, axes = plotting.panels(
            [f"Iteration {state.iteration}: {state.physical_blocks} physical blocks" for state in chosen],
            columns=2,
            width=max(4.0, 0.55 * width + 1.2),
            height=0.42 * tallest + 0.5,
        )
        for axis, state in zip(axes, chosen):
            draw_tables(axis, state.tables, state.block_size, width, tallest)
        legend(figure)
    return figure


def legend(figure: Figure) -> None:
    """What the cells of `draw_tables` mean, above the panels."""
    from repro.report import plotting

    labels = ("one", "two", "three", "four or more")
    handles = [plotting.swatch(label, color) for color, label in zip(_HOLDERS, labels)]
    handles.append(plotting.swatch("a slot in use", _SLOT))
    title = "A cell is a logical block. Number: its physical block; \u00d7 and colour: how many sequences hold it"
    plotting.place_legend(figure, handles, title=title)


def draw_tables(axis: Axes, tables: Mapping[str, list[Cell]], block_size: int, width: int, height: int) -> None:
    """Block tables as rows of cells, on a panel with room for `width` blocks and `height` sequences."""
    from repro.report.plotting import ink

    for row, cells in enumerate(tables.values()):
        for column, cell in enumerate(cells[:width]):
            color = _HOLDERS[min(cell.holders, len(_HOLDERS)) - 1]
            axis.barh(row, _CELL, 0.78, left=column, color=color)
            # The slots have a strip of their own, so that no number straddles the end of those in use.
            axis.barh(row + 0.27, _CELL, 0.24, left=column, color="white", edgecolor=_SLOT, linewidth=0.8)
            axis.barh(row + 0.27, _CELL * cell.filled / block_size, 0.24, left=column, color=_SLOT)
            if block_size <= 8:  # few enough to be counted
                slots = [column + _CELL * slot / block_size for slot in range(1, block_size)]
                axis.vlines(slots, row + 0.15, row + 0.39, color="#BBBBBB", linewidth=0.8)
            text = f"{cell.physical}" + (f"\u00d7{cell.holders}" if cell.holders > 1 else "")
            axis.text(column + _CELL / 2, row - 0.11, text, ha="center", va="center", color=ink(color))
    axis.set(
        xlim=(-0.05, width), ylim=(height - 0.4, -0.6), xticks=[], yticks=range(len(tables)), yticklabels=list(tables)
    )
    axis.tick_params(left=False)
    axis.grid(visible=False)
    for spine in axis.spines.values():
        spine.set_visible(False)
