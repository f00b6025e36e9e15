"""Two sides are the same if they decide the same and their memory is equal, but for the names of blocks.

Which free block is handed out is nobody's promise. So blocks are renamed: a block of ours stands for one of theirs, in
every table at once and for as long as it is held. Under that renaming tables, reference counts, free counts, copies
and swaps have to be equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[int, int]  # a request and one of its sequences


class Difference(Exception):
    """The two sides differ; one message that says in what."""


class Ends(Exception):
    """A side cannot go on, for a reason that it names."""


class Move(NamedTuple):
    """Contents of a block that go elsewhere: "copy", "swap out" or "swap in"."""

    kind: str
    source: int
    target: int


#: where the blocks of a move lie
PLACES = {"copy": ("gpu", "gpu"), "swap out": ("gpu", "cpu"), "swap in": ("cpu", "gpu")}


@dataclass
class Memory:
    """What is held: each sequence's place ("gpu" or "cpu") and blocks, references by place, and what is free."""

    tables: dict[Key, tuple[str, list[int]]] = field(default_factory=dict)
    references: dict[str, dict[int, int]] = field(default_factory=lambda: {"gpu": {}, "cpu": {}})
    free: dict[str, int] = field(default_factory=dict)


def equal(what: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise Difference(f"{what}: ours {ours}, theirs {theirs}")


class Renaming:
    """Ours to theirs: which block stands for which, since when both are held."""

    def __init__(self) -> None:
        self._names: dict[str, dict[int, int]] = {"gpu": {}, "cpu": {}}
        self._tables: Mapping[Key, tuple[str, list[int], list[int]]] = {}

    def check(self, ours: Memory, theirs: Memory, ours_moved: Sequence[Move], theirs_moved: Sequence[Move]) -> None:
        """What is held now, and what was moved since the last call."""
        before = self._names
        self._names = _names(ours, theirs)
        for place in ("gpu", "cpu"):
            names = self._names[place]
            counts = {names[block]: count for block, count in ours.references[place].items() if block in names}
            equal(f"references of {place} blocks, by their numbers", counts, theirs.references[place])
            equal(f"{place} blocks with references", len(ours.references[place]), len(counts))
        equal("free blocks", ours.free, theirs.free)
        self._check_kept(ours, theirs)
        mine, others = Counter(self._renamed(move, before) for move in ours_moved), Counter(theirs_moved)
        equal("blocks moved, by their numbers", _listed(mine - others), _listed(others - mine))

    def _renamed(self, move: Move, before: Mapping[str, Mapping[int, int]]) -> Move:
        """A move in their numbers: what was swapped lay where it lay before; all else is where it is now."""
        source, target = PLACES[move.kind]
        old = self._names if move.kind == "copy" else before
        if move.source not in old[source] or move.target not in self._names[target]:
            raise Difference(f"our {move.kind} from block {move.source} to {move.target}: nobody holds that")
        return Move(move.kind, old[source][move.source], self._names[target][move.target])

    def _check_kept(self, ours: Memory, theirs: Memory) -> None:
        """A block that stays where it is in a table of ours stays in theirs."""
        previous, self._tables = (
            self._tables,
            {key: (place, list(blocks), list(theirs.tables[key][1])) for key, (place, blocks) in ours.tables.items()},
        )
        for key, (place, mine, others) in self._tables.items():
            if key in previous and previous[key][0] == place:
                _, mine_before, others_before = previous[key]
                kept = [old == new for old, new in zip(mine_before, mine)]
                kept_by_them = [old == new for old, new in zip(others_before, others)]
                equal(f"blocks that sequence {_name(key)} keeps", kept, kept_by_them)


def _names(ours: Memory, theirs: Memory) -> dict[str, dict[int, int]]:
    """The renaming that the tables ask for, if there is one."""
    names: dict[str, dict[int, int]] = {"gpu": {}, "cpu": {}}
    used: dict[str, dict[int, int]] = {"gpu": {}, "cpu": {}}
    equal("sequences that hold blocks", sorted(map(_name, ours.tables)), sorted(map(_name, theirs.tables)))
    for key, (place, blocks) in sorted(ours.tables.items()):
        other_place, others = theirs.tables[key]
        where = f"sequence {_name(key)}"
        equal(f"place of {where}", place, other_place)
        equal(f"number of blocks of {where}", len(blocks), len(others))
        for index, (mine, other) in enumerate(zip(blocks, others)):
            known, known_by_them = names[place].setdefault(mine, other), used[place].setdefault(other, mine)
            if known != other:
                raise Difference(f"{where}, block {index}: ours {mine}, theirs {other}, but ours is {known} elsewhere")
            if known_by_them != mine:
                raise Difference(
                    f"{where}, block {index}: ours {mine}, theirs {other}, but theirs is our {known_by_them} elsewhere"
                )
    return names


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


def _listed(moves: Counter[Move]) -> str:
    return ", ".join(f"{move.kind} {move.source} to {move.target}" for move in sorted(moves.elements())) or "none"
