"""`repro diff A B`: which numbers moved between two runs, by how much, against what the seeds differ by anyway.

A run is a table's file, a folder of results or of figures, or a commit whose figures are kept with it. Rows of two runs
belong together when their keys are equal (see `tables`). Numbers are compared as means over seeds; the yardstick is the
range over the seeds. This module knows no experiment: tables, keys and columns are all it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import pandas as pd

from repro.harness.runs import kept_runs
from repro.harness.tables import Rows

#: Two runs of the same code on two types of processor agree to this, relatively.
SAME = 1e-9


@dataclass(frozen=True)
class Moved:
    """One number, as means over seeds; `spread` is the range over the seeds in the run where it is wider, None without
    seeds."""

    column: str
    where: str
    before: float
    after: float
    spread: float | None

    @property
    def beyond(self) -> bool:
        """Whether the seeds do not explain it."""
        return self.spread is None or abs(self.after - self.before) > self.spread

    def __str__(self) -> str:
        change = f"{self.after - self.before:+.4g}"
        if self.before:
            change += f", {100 * (self.after / self.before - 1):+.3g} %"
        seeds = "one seed" if self.spread is None else f"seeds differ by {self.spread:.3g}"
        return f"{self.column}: {self.before:.6g} -> {self.after:.6g} ({change}; {seeds})  {self.where}"


@dataclass(frozen=True)
class Difference:
    """How two tables differ. `unmatched` are lines about rows, columns and texts that have no counterpart."""

    matched: int
    unmatched: list[str]
    moved: list[Moved]

    def __bool__(self) -> bool:
        return bool(self.unmatched or self.moved)


def first_difference(a: pd.DataFrame, b: pd.DataFrame) -> str:
    """The first place where two tables differ by more than a rounding (SAME), in words; "" if there is none."""
    if list(a.columns) != list(b.columns):
        return f"the columns are {', '.join(map(str, a.columns))} and {', '.join(map(str, b.columns))}"
    pairs = zip(a.itertuples(index=False), b.itertuples(index=False), strict=False)
    for number, (row, other) in enumerate(pairs, start=1):
        for column, theirs, ours in zip(a.columns, row, other, strict=True):
            if not _same(theirs, ours):
                return f"{column} of row {number} is {theirs!r} kept and {ours!r} now"
    return f"there are {len(a)} rows kept and {len(b)} now" if len(a) != len(b) else ""


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, Real) and isinstance(other, Real)
    return one == other or (pd.isna(one) and pd.isna(other)) or (numbers and math.isclose(one, other, rel_tol=SAME))


def compare(a: pd.DataFrame, b: pd.DataFrame, keys: Sequence[str]) -> Difference:
    """What moved from table `a` to table `b`, whose rows are told apart by `keys`."""
    unmatched = [
        f"column {name} is only in {side}"
        for side, one, other in (("A", a, b), ("B", b, a))
        for name in one.columns
        if name not in other.columns
    ]
    shared = [name for name in a.columns if name in b.columns]
    keys = [name for name in keys if name in shared]
    for side, table in (("A", a), ("B", b)):
        if table.duplicated(keys).any():
            return Difference(0, [*unmatched, f"rows of {side} are not told apart by {', '.join(keys)}"], [])
    numbers = a.select_dtypes("number").columns.intersection(b.select_dtypes("number").columns)
    values = [column for column in shared if column not in keys and column in numbers]
    both = a[shared].merge(b[shared], on=keys, how="outer", suffixes=("", " of b"), indicator=True)
    for side, name in (("left_only", "A"), ("right_only", "B")):
        only = both[both["_merge"] == side]
        if len(only):
            unmatched.append(f"{len(only)} rows only in {name}, the first with {_where(only.iloc[0], keys)}")
    both = both[both["_merge"] == "both"]
    for column in [name for name in shared if name not in keys and name not in values]:
        one, other = both[column], both[f"{column} of b"]
        changed = both[(one != other) & ~(one.isna() & other.isna())]
        if len(changed):
            first = changed.iloc[0]
            before, after = str(first[column])[:24], str(first[f"{column} of b"])[:24]
            moved = f"differs in {len(changed)} rows, the first {before!r} -> {after!r}"
            unmatched.append(f"{column} {moved} with {_where(first, keys)}")
    return Difference(len(both), unmatched, sorted(_moved(both, keys, values), key=_importance))


def _moved(both: pd.DataFrame, keys: Sequence[str], values: list[str]) -> Iterator[Moved]:
    fixed = [key for key in keys if key != "seed"]
    groups = both.groupby(fixed, dropna=False, sort=False) if fixed else [((), both)]
    for _, group in groups:
        seeds = len(group) if "seed" in keys else 1
        for column in values:
            pair = pd.DataFrame({"a": pd.to_numeric(group[column]), "b": pd.to_numeric(group[f"{column} of b"])})
            lost = (pair["a"].isna() != pair["b"].isna()).any()
            if lost or ((pair["a"] - pair["b"]).abs() > SAME * pair.abs().max(axis=1)).any():
                spread = float((pair.max() - pair.min()).max()) if seeds > 1 and not lost else None
                yield Moved(column, _where(group.iloc[0], fixed), pair["a"].mean(), pair["b"].mean(), spread)


def _importance(moved: Moved) -> tuple[bool, float]:
    size = abs(moved.after - moved.before) / (abs(moved.before) or 1.0)
    return not moved.beyond, -size if not math.isnan(size) else float("-inf")


def _where(row: pd.Series, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in keys if not pd.isna(row[key]))


def main(a: str, b: str, lines: int) -> int:
    """Print what moved, at most `lines` numbers a table (0: all). Returns 0 if nothing did, else 1."""
    before, after = kept_runs(a), kept_runs(b)
    if len(before) == len(after) == 1:  # two files are compared whatever they are called
        after = dict(zip(before, after.values(), strict=True))
    names, same = sorted({*before, *after}), 0
    for name in names:
        if name not in before or name not in after:
            print(f"{name}: only in {a if name in before else b}")
            continue
        found = compare_tables(before[name].rows, after[name].rows)
        same += not found
        reasons = _reasons(before[name].about, after[name].about)
        for table, difference in found.items():
            _show(f"{name}, {table}", difference, before[name].rows.keys_of.get(table, ()), reasons, lines)
    print(f"{same} of {len(names)} experiments are the same to {SAME:g}")
    return 0 if same == len(names) else 1


def compare_tables(before: Rows, after: Rows) -> dict[str, Difference]:
    """Table -> how it differs, of those that do."""
    found = {}
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            found[name] = Difference(0, [f"the table is only in {'A' if name in before else 'B'}"], [])
        elif difference := compare(before[name], after[name], before.keys_of[name]):
            found[name] = difference
    return found


def _reasons(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else differs between the runs and may be why."""
    one, other = (about.get("parameters", {}) for about in (before, after))
    changed = [
        f"parameter {name}: {str(one.get(name))[:60]} -> {str(other.get(name))[:60]}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]
    return changed + ["computed by other code"] * (before.get("code_hash") != after.get("code_hash"))


def _show(name: str, found: Difference, keys: Sequence[str], reasons: list[str], lines: int) -> None:
    beyond = sum(moved.beyond for moved in found.moved)
    moved = f"{len(found.moved)} numbers moved, {beyond} of them by more than the seeds differ"
    print(f"{name}: {found.matched} rows matched by {', '.join(keys)}; {moved}")
    for line in [*reasons, *found.unmatched]:
        print(f"  {line}")
    for one in found.moved[: lines or None]:
        print(f"  {'*' if one.beyond else ' '} {one}")
    if 0 < lines < len(found.moved):
        print(f"    and {len(found.moved) - lines} more (--lines 0 shows all)")
