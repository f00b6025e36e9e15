"""`repro diff A B`: which numbers moved between two runs, by how much, against what the seeds differ by anyway.

A run is a table's file, a folder of results or of figures, or a commit whose figures are kept with it. Rows of two runs
belong together when their keys are equal (see `tables`). Numbers are compared as means over seeds; the yardstick is the
range over the seeds. This module knows no experiment: tables, keys and columns are all it sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro.harness.runs import kept_runs

if TYPE_CHECKING:
    import pandas as pd

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
    """The first place where two tables differ, in words."""
    if list(a.columns) != list(b.columns):
        return f"the columns are {', '.join(map(str, a.columns))} and {', '.join(map(str, b.columns))}"
    for number, (row, other) in enumerate(
        zip(a.itertuples(index=False), b.itertuples(index=False), strict=False), start=1
    ):
        for column, theirs, ours in zip(a.columns, row, other, strict=True):
            if theirs != ours and not (_is_missing(theirs) and _is_missing(ours)):
                return f"{column} of row {number} is {theirs!r} kept and {ours!r} now"
    return f"there are {len(a)} rows kept and {len(b)} now" if len(a) != len(b) else "only in how values are written"


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
    values = [column for column in shared if column not in keys and _is_number(a[column], b[column])]
    both = a[shared].merge(b[shared], on=keys, how="outer", suffixes=("", " of b"), indicator=True)
    for side, name in (("left_only", "A"), ("right_only", "B")):
        only = both[both["_merge"] == side]
        if len(only):
            unmatched.append(f"{len(only)} rows only in {name}, the first with {_where(only.iloc[0], keys)}")
    both = both[both["_merge"] == "both"]
    for column in shared:
        if column not in keys and column not in values:
            unmatched += _changed_texts(both, column, keys)
    return Difference(len(both), unmatched, sorted(_moved(both, keys, values), key=_importance))


def _changed_texts(both: pd.DataFrame, column: str, keys: Sequence[str]) -> list[str]:
    one, other = both[column], both[f"{column} of b"]
    changed = both[(one != other) & ~(one.isna() & other.isna())]
    if not len(changed):
        return []
    first = changed.iloc[0]
    before, after = (str(first[name])[:24] for name in (column, f"{column} of b"))
    return [f"{column} differs in {len(changed)} rows, the first {before!r} -> {after!r} with {_where(first, keys)}"]


def _moved(both: pd.DataFrame, keys: Sequence[str], values: list[str]) -> Iterator[Moved]:
    import pandas as pd

    fixed = [key for key in keys if key != "seed"]
    groups = both.groupby(fixed, dropna=False, sort=False) if fixed else [((), both)]
    for _, group in groups:
        seeds = len(group) if "seed" in keys else 1
        for column in values:
            pair = pd.DataFrame({"a": pd.to_numeric(group[column]), "b": pd.to_numeric(group[f"{column} of b"])})
            if (pair["a"].isna() != pair["b"].isna()).any():
                yield Moved(column, _where(group.iloc[0], fixed), pair["a"].mean(), pair["b"].mean(), None)
                continue
            scale = pair.abs().max(axis=1)
            if ((pair["a"] - pair["b"]).abs() > SAME * scale).any():
                ranges = pair.max() - pair.min()
                spread = float(ranges.max()) if seeds > 1 else None
                yield Moved(column, _where(group.iloc[0], fixed), pair["a"].mean(), pair["b"].mean(), spread)


def _importance(moved: Moved) -> tuple[bool, float]:
    size = abs(moved.after - moved.before) / (abs(moved.before) or 1.0)
    return not moved.beyond, -size if not math.isnan(size) else float("-inf")


def _is_number(a: pd.Series, b: pd.Series) -> bool:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return all(is_numeric_dtype(column) and not is_bool_dtype(column) for column in (a, b))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _where(row: pd.Series, keys: Sequence[str]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in keys if not _is_missing(row[key]))


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
    print(
        f"{name}: {found.matched} rows matched by {', '.join(keys)}; {len(found.moved)} numbers moved, {beyond} of "
        "them by more than the seeds differ"
    )
    for line in [*reasons, *found.unmatched]:
        print(f"  {line}")
    shown = found.moved[: lines or None]
    for moved in shown:
        print(f"  {'*' if moved.beyond else ' '} {moved}")
    if len(shown) < len(found.moved):
        print(f"    and {len(found.moved) - len(shown)} more (--lines 0 shows all)")
