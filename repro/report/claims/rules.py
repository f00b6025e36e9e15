"""How a reproduced value earns its verdict: a small closed set of rules, each a pure function.

A claim names a rule, or several for parts of its value, in its `judge` field. Most rules judge a single number or word;
`quorum` and `order` judge a whole table of numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

Leaf = int | float | str | bool | None
Tree = Any  # Leaf | list[Tree] | dict[str, Tree]
KeyPath = tuple[str, ...]


class Verdict(StrEnum):
    """From best to worst: a claim takes the worst verdict of its keys.

    A key that differs outweighs one that is missing: a known miss must not hide behind work that is not done yet."""

    INPUT = "input"  # given by the source, the claim's arithmetic starts from it; never the verdict of a claim
    CALIBRATION = "calibration"  # the value went into a model, so it cannot test it: the claim's other keys decide
    REPRODUCED = "reproduced"
    REPORTED = "reported"  # a rule without a tolerance: never counts as reproduced
    NOT_COMPARABLE = "not comparable"  # the rule cannot hold on another machine; of measured rows only, like the next
    NOT_MEASURED = "not measured"
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


def in_words(tree: Tree, path: KeyPath) -> str:
    """The path of a key; items of a list count from one."""
    steps = []
    for step in path:
        steps.append(f"({int(step) + 1})" if isinstance(tree, list) else step)
        tree = at(tree, (step,))
    return " · ".join(steps)


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


def _tolerance(paper: Leaf, percent: float | None = None, absolute: float | None = None) -> float:
    return absolute if absolute is not None else abs(paper) * percent / 100.0


def _within(paper: Leaf, ours: Leaf, **tolerance: float) -> bool:
    return is_number(ours) and abs(ours - paper) <= _tolerance(paper, **tolerance) * (1 + 1e-9)


def _bounded(holds: Callable[[float, float], bool]) -> Callable[..., bool]:
    """A rule that compares ours with the paper's value, or with a limit of its own."""
    return lambda paper, ours, limit=None: is_number(ours) and holds(ours, paper if limit is None else limit)


def _inside(paper: Leaf, ours: Leaf, low: float, high: float) -> bool:
    return is_number(ours) and low <= ours <= high


_DECIDED: dict[str, Callable[..., bool]] = {
    "equal": _equal,
    "printed-digits": _printed_digits,  # rounds to what is printed
    "within": _within,  # percent of the paper's value, or an absolute distance in its unit
    "below": _bounded(operator.lt),
    "at-most": _bounded(operator.le),
    "above": _bounded(operator.gt),
    "inside": _inside,
}
_UNDECIDED: dict[str, Verdict] = {
    "report": Verdict.REPORTED,
    "contradictory": Verdict.CONTRADICTORY,
    "calibration": Verdict.CALIBRATION,
    "input": Verdict.INPUT,
}
#: These judge all the keys that they cover together.
_GROUPED = ("quorum", "order")
_OPTIONS: dict[str, list[set[str]]] = {
    "within": [{"percent"}, {"absolute"}],
    **dict.fromkeys(("below", "at-most", "above"), [set(), {"limit"}]),
    "inside": [{"low", "high"}],
    "quorum": [{"percent", "at_least", "none_beyond_percent"}],
    "order": [{"chains"}],  # keys of ours from the least to the greatest: "16 < 32 < 64"
}


@dataclass(frozen=True)
class Rule:
    """One rule with its options; ValueError if the type or the options are not among the known ones."""

    type: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: Mapping[str, Any]) -> Rule:
        return cls(text["type"], {key: value for key, value in text.items() if key != "type"})

    def __post_init__(self) -> None:
        if self.type not in (*_DECIDED, *_UNDECIDED, *_GROUPED):
            raise ValueError(f"unknown rule type {self.type!r}")
        if set(self.options) not in _OPTIONS.get(self.type, [set()]):
            raise ValueError(f"rule {self.type!r} does not take {sorted(self.options)}")

    def leaf(self, paper: Leaf, ours: Leaf) -> Verdict:
        """The verdict of one key; for a quorum whether this member lies within its `percent`, for an order only whether
        it is there."""
        if ours is None:
            return Verdict.NOT_RUN
        if self.type in _UNDECIDED:
            return _UNDECIDED[self.type]
        if self.type == "order":
            return Verdict.REPRODUCED
        if self.type == "quorum":
            held = _within(paper, ours, percent=self.options["percent"])
        else:
            held = _DECIDED[self.type](paper, ours, **self.options)
        return Verdict.REPRODUCED if held else Verdict.DIFFERS

    def used(self, paper: Leaf, ours: Leaf) -> tuple[float, float] | None:
        """How far ours lies from the paper's value, and how far it may; None where no distance decides."""
        if self.type != "within" or not is_number(ours):
            return None
        return ours - paper, _tolerance(paper, **self.options)

    def pairs(self) -> list[tuple[str, str]]:
        """The keys of which an order says that the first has less than the second."""
        return [pair for chain in self.options.get("chains", ()) for pair in pairwise(chain.split(" < "))]

    def verdicts(self, members: Mapping[KeyPath, tuple[Leaf, Leaf]]) -> dict[KeyPath, Verdict]:
        """The verdict of each key that the rule covers, from (paper, ours) by path.

        Keys that are judged together share a verdict, but for those that are missing, and for the members of a failed
        quorum that do lie within its `percent`."""
        found = {path: self.leaf(*pair) for path, pair in members.items()}
        if self.type in _GROUPED:
            holds = self._holds(members, found)
            if holds or self.type == "order":
                shared = Verdict.REPRODUCED if holds else Verdict.DIFFERS
                found = {path: one if one is Verdict.NOT_RUN else shared for path, one in found.items()}
        return found

    def _holds(self, members: Mapping[KeyPath, tuple[Leaf, Leaf]], found: Mapping[KeyPath, Verdict]) -> bool:
        there = {path: pair for path, pair in members.items() if pair[1] is not None}
        if self.type == "order":
            ours = {path[-1]: pair[1] for path, pair in there.items()}
            pairs = [(ours[low], ours[high]) for low, high in self.pairs() if low in ours and high in ours]
            return all(is_number(low) and is_number(high) and low < high for low, high in pairs)
        far, misses = self.options["none_beyond_percent"], list(found.values()).count(Verdict.DIFFERS)
        return misses <= len(found) - self.options["at_least"] and all(
            _within(*pair, percent=far) for pair in there.values()
        )
