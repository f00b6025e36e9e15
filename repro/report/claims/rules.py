"""How a reproduced value earns its verdict: a small closed set of rules, each a pure function.

A claim names a rule (or one for each top-level key of its value) in its `judge` field. Every rule but `quorum` judges a
single number, word or flag; `quorum` judges a whole table of numbers and gives it one verdict."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Leaf = int | float | str | bool | None
Tree = Any  # Leaf | list[Tree] | dict[str, Tree]
KeyPath = tuple[str, ...]


class Verdict(StrEnum):
    """From best to worst: a claim takes the worst verdict of its keys.

    A key that differs outweighs one that is missing: a known miss must not hide behind work that is not done yet."""

    INPUT = "input"  # given by the source, the claim's arithmetic starts from it; never the verdict of a claim
    REPRODUCED = "reproduced"
    CALIBRATION = "calibration"  # the value went into a model, so it cannot test it
    REPORTED = "reported"  # a rule without a tolerance: never counts as reproduced
    CONTRADICTORY = "contradictory in the source"
    NOT_RUN = "not run"
    DIFFERS = "differs"

    @property
    def severity(self) -> int:
        return list(Verdict).index(self)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The worst of at least one verdict."""
    return max(verdicts, key=lambda verdict: verdict.severity)


def leaves(tree: Tree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Leaf]]:
    """Every leaf with its path; list items count as keys "0", "1", ..."""
    if not isinstance(tree, (Mapping, list)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        yield from leaves(value, (*path, str(key)))


def mapped(tree: Tree, value: Callable[[KeyPath, Leaf], Tree], path: KeyPath = ()) -> Tree:
    """The tree with `value(path, leaf)` in place of every leaf."""
    if isinstance(tree, Mapping):
        return {key: mapped(item, value, (*path, str(key))) for key, item in tree.items()}
    if isinstance(tree, list):
        return [mapped(item, value, (*path, str(index))) for index, item in enumerate(tree)]
    return value(path, tree)


def at(tree: Tree, path: KeyPath) -> Tree:
    """The subtree at `path`, or None where the tree does not have it."""
    for key in path:
        if isinstance(tree, list):
            tree = tree[int(key)] if key.isdecimal() and int(key) < len(tree) else None
        else:
            tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def deviation(paper: Leaf, ours: Leaf) -> float | None:
    """(ours - paper) / |paper| in percent; None unless both are numbers and the paper's is not zero."""
    if is_number(paper) and is_number(ours) and paper != 0:
        return 100.0 * (ours - paper) / abs(paper)
    return None


def _equal(paper: Leaf, ours: Leaf) -> bool:
    if is_number(paper) and is_number(ours):
        return abs(ours - paper) <= 1e-12 * abs(paper)
    return type(paper) is type(ours) and paper == ours


def _printed_digits(paper: Leaf, ours: Leaf) -> bool:
    decimals = len(repr(paper).partition(".")[2]) if isinstance(paper, float) else 0
    return is_number(ours) and abs(ours - paper) <= 0.5 * 10.0**-decimals * (1 + 1e-9)


def _within(
    paper: Leaf, ours: Leaf, percent: float | None = None, absolute: float | None = None, factor: float | None = None
) -> bool:
    if not is_number(ours):
        return False
    if factor is not None:
        return paper / factor <= ours <= paper * factor
    tolerance = absolute if absolute is not None else abs(paper) * percent / 100.0
    return abs(ours - paper) <= tolerance * (1 + 1e-9)


def _bounded(holds: Callable[[float, float], bool]) -> Callable[..., bool]:
    """A rule that compares ours with the paper's value, or with a limit of its own."""
    return lambda paper, ours, limit=None: is_number(ours) and holds(ours, paper if limit is None else limit)


def _inside(paper: Leaf, ours: Leaf, low: float, high: float) -> bool:
    return is_number(ours) and low <= ours <= high


def _predicate(paper: Leaf, ours: Leaf) -> bool:
    if not isinstance(ours, bool):
        raise ValueError(f"a predicate is True or False, not {ours!r}")
    return ours


_DECIDED: dict[str, Callable[..., bool]] = {
    "equal": _equal,
    "printed-digits": _printed_digits,  # rounds to what is printed
    "within": _within,  # percent of the paper's value, an absolute distance in its unit, or a factor either way
    "below": _bounded(operator.lt),
    "at-most": _bounded(operator.le),
    "above": _bounded(operator.gt),
    "inside": _inside,
    "predicate": _predicate,
}
_UNDECIDED: dict[str, Verdict] = {
    "report": Verdict.REPORTED,
    "contradictory": Verdict.CONTRADICTORY,
    "calibration": Verdict.CALIBRATION,
    "input": Verdict.INPUT,
}
_OPTIONS: dict[str, list[set[str]]] = {
    "within": [{"percent"}, {"absolute"}, {"factor"}],
    **dict.fromkeys(("below", "at-most", "above"), [set(), {"limit"}]),
    "inside": [{"low", "high"}],
    "quorum": [{"percent", "at_least", "none_beyond_percent"}],
}


@dataclass(frozen=True)
class Rule:
    """One rule with its options; ValueError if the type or the options are not among the known ones."""

    type: str
    options: Mapping[str, float]

    @classmethod
    def parse(cls, text: Mapping[str, Any]) -> Rule:
        return cls(text["type"], {key: value for key, value in text.items() if key != "type"})

    def __post_init__(self) -> None:
        if self.type not in _DECIDED and self.type not in _UNDECIDED and self.type != "quorum":
            raise ValueError(f"unknown rule type {self.type!r}")
        if set(self.options) not in _OPTIONS.get(self.type, [set()]):
            raise ValueError(f"rule {self.type!r} does not take {sorted(self.options)}")

    def leaf(self, paper: Leaf, ours: Leaf) -> Verdict:
        """The verdict of one key; for a quorum, whether this member lies within its `percent`."""
        if ours is None:
            return Verdict.NOT_RUN
        if self.type in _UNDECIDED:
            return _UNDECIDED[self.type]
        if self.type == "quorum":
            held = _within(paper, ours, percent=self.options["percent"])
        else:
            held = _DECIDED[self.type](paper, ours, **self.options)
        return Verdict.REPRODUCED if held else Verdict.DIFFERS

    def tree(self, paper: Tree, ours: Tree) -> Tree:
        """Verdicts in the shape of `paper`; a quorum gives a single one for all of it."""
        if self.type == "quorum":
            return self._quorum([(value, at(ours, path)) for path, value in leaves(paper)])
        return mapped(paper, lambda path, value: self.leaf(value, at(ours, path)))

    def _quorum(self, pairs: list[tuple[Leaf, Leaf]]) -> Verdict:
        members, far = [self.leaf(*pair) for pair in pairs], self.options["none_beyond_percent"]
        beyond = any(ours is not None and not _within(paper, ours, percent=far) for paper, ours in pairs)
        if beyond or members.count(Verdict.DIFFERS) > len(members) - self.options["at_least"]:
            return Verdict.DIFFERS
        return Verdict.NOT_RUN if Verdict.NOT_RUN in members else Verdict.REPRODUCED
