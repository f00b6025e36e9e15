"""`repro diff A B`: which numbers moved between two runs, by how much, against what the seeds differ by anyway.

A run is a file of rows, a folder of results or of figures, or a commit whose figures are kept with it. Rows of two runs
belong together when everything is equal in them that describes rather than measures: columns are taken as describing
while their values recur in the other run. Numbers are compared as means over seeds; the yardstick is the range over the
seeds. This module knows no experiment: rows and columns are all it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from repro.harness.runs import kept_runs

if TYPE_CHECKING:
    import pandas as pd

#: Never describe a row: what they say may change without the row being another one.
_ABOUT = ("evidence", "device", "trace_hash")
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
    """How two runs of one experiment differ. `told` are lines about rows and texts that have no counterpart."""

    keys: list[str]
    matched: int
    told: list[str]
    moved: list[Moved]

    @property
    def none(self) -> bool:
        return not self.told and not self.moved


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


def compare(a: pd.DataFrame, b: pd.DataFrame) -> Difference:
    """What moved from `a` to `b`."""
    told = [
        f"column {name} is only in {side}"
        for side, one, other in (("A", a, b), ("B", b, a))
        for name in one.columns
        if name not in other.columns
    ]
    shared = [name for name in a.columns if name in b.columns]
    keys = _keys(a[shared], b[shared])
    a, b = _numbered(a[shared], keys), _numbered(b[shared], keys)
    values = [column for column in shared if column not in keys and _is_number(a[column], b[column])]
    index = [*keys, "#"]
    both = a.merge(b, on=index, how="outer", suffixes=("", " of b"), indicator=True)
    for side, name in (("left_only", "A"), ("right_only", "B")):
        only = both[both["_merge"] == side]
        if len(only):
            told.append(f"{len(only)} rows only in {name}, the first with {_where(only.iloc[0], keys)}")
    both = both[both["_merge"] == "both"]
    for column in shared:
        if column not in keys and column not in values:
            told += _changed_texts(both, column, keys)
    return Difference(keys, len(both), told, sorted(_moved(both, keys, values), key=_importance))


def _changed_texts(both: pd.DataFrame, column: str, keys: list[str]) -> list[str]:
    one, other = both[column], both[f"{column} of b"]
    changed = both[(one != other) & ~(one.isna() & other.isna())]
    if not len(changed):
        return []
    first = changed.iloc[0]
    before, after = (str(first[name])[:24] for name in (column, f"{column} of b"))
    return [f"{column} differs in {len(changed)} rows, the first {before!r} -> {after!r} with {_where(first, keys)}"]


def _moved(both: pd.DataFrame, keys: list[str], values: list[str]) -> Iterator[Moved]:
    import pandas as pd

    fixed = [key for key in keys if key != "seed"]
    groups = both.groupby([*fixed, "#"], dropna=False, sort=False) if fixed else [((), both)]
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


def _keys(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """The columns that say which row is which: the seed, and from the left (what is given stands before what is
    measured) as many others as it takes."""
    candidates = [name for name in a.columns if name not in _ABOUT and _recurs(a[name], b[name])]
    keys = ["seed"] if "seed" in candidates else []

    def ambiguous(names: list[str]) -> int:
        return int(a.duplicated(names).sum()) if names else len(a) - 1

    for name in candidates:
        if name not in keys and ambiguous([*keys, name]) < ambiguous(keys):
            keys.append(name)
    for name in keys[::-1]:
        rest = [key for key in keys if key != name]
        if name != "seed" and ambiguous(rest) == ambiguous(keys):
            keys = rest
    return [name for name in candidates if name in keys]


def _recurs(a: pd.Series, b: pd.Series) -> bool:
    one, other = set(a.dropna()), set(b.dropna())
    return 2 * len(one & other) >= min(len(one), len(other)) and (bool(one) == bool(other))


def _numbered(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """With a column "#" that tells rows apart which all keys leave equal."""
    number = rows.groupby(keys, dropna=False).cumcount() if keys else range(len(rows))
    return rows.assign(**{"#": number})


def _is_number(a: pd.Series, b: pd.Series) -> bool:
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return all(is_numeric_dtype(column) and not is_bool_dtype(column) for column in (a, b))


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _where(row: pd.Series, keys: list[str]) -> str:
    return ", ".join(f"{key}={row[key]}" for key in keys if not _is_missing(row[key]))


def main(a: str, b: str, lines: int) -> int:
    """Print what moved, at most `lines` numbers an experiment (0: all). Returns 0 if nothing did, else 1."""
    before, after = kept_runs(a), kept_runs(b)
    if len(before) == len(after) == 1:  # two files are compared whatever they are called
        after = dict(zip(before, after.values(), strict=True))
    same = 0
    for name in sorted({*before, *after}):
        if name not in before or name not in after:
            print(f"{name}: only in {a if name in before else b}")
            continue
        found = compare(before[name].rows, after[name].rows)
        same += found.none
        if not found.none:
            _tell(name, found, _reasons(before[name].about, after[name].about), lines)
    print(f"{same} of {len({*before, *after})} experiments are the same to {SAME:g}")
    return 0 if same == len({*before, *after}) else 1


def _reasons(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else differs between the runs and may be why."""
    if not before or not after:
        return []
    told = [
        f"parameter {name}: {str(one)[:60]} -> {str(other)[:60]}"
        for name in sorted({*before.get("parameters", {}), *after.get("parameters", {})})
        if (one := before.get("parameters", {}).get(name)) != (other := after.get("parameters", {}).get(name))
    ]
    return told + ["computed by other code"] * (before.get("code_hash") != after.get("code_hash"))


def _tell(name: str, found: Difference, reasons: list[str], lines: int) -> None:
    beyond = sum(moved.beyond for moved in found.moved)
    print(
        f"{name}: {found.matched} rows matched by {', '.join(found.keys) or 'their order'}; {len(found.moved)} numbers "
        f"moved, {beyond} of them by more than the seeds differ"
    )
    for line in [*reasons, *found.told]:
        print(f"  {line}")
    shown = found.moved[: lines or None]
    for moved in shown:
        print(f"  {'*' if moved.beyond else ' '} {moved}")
    if len(shown) < len(found.moved):
        print(f"    and {len(found.moved) - len(shown)} more (--lines 0 shows all)")
