"""An experiment's rows: named tables, each with the columns that tell its rows apart, one CSV file each.

A study declares its tables (`TABLES`: name -> key columns). Everything that reads rows asks for a table by name, and
everything that compares rows does it by keys."""

from __future__ import annotations

import hashlib
import io
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import display
from repro.checks import shown
from repro.errors import UserError
from repro.hashing import sha256_json, write_atomically
from repro.history.memory_map import MemoryMap, Moment

if TYPE_CHECKING:
    import pandas as pd

#: What every row says of itself, whatever its table.
ABOUT = ("evidence", "device", "seed", "trace_hash")
#: Significant digits of a float in a row. The order of a sum follows the processor's vector unit, and so do the last
#: few of a float's 17 digits; these hold on every machine.
DIGITS = 12
Keys = Mapping[str, tuple[str, ...]]


#: rows of a table that a notebook shows
SHOWN = 200


def show_whole_tables() -> None:
    """In a notebook, show tables of up to SHOWN rows whole, and of longer ones as many, with how many there are.

    Pandas cuts at 60 rows to ten. What a user has set stays as it is."""
    import pandas as pd

    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() and pd.get_option("display.max_rows") == 60:
        pd.set_option("display.max_rows", SHOWN, "display.min_rows", SHOWN, "display.max_colwidth", 100)


def to_frame(things: Any) -> pd.DataFrame:
    """Whatever has rows, for pandas: what has a `to_frame` of its own, the bills of a memory map, the block tables of
    one of its moments, or several things that are a row each, such as receipts, events, outcomes and requests.
    UserError for anything else."""
    import pandas as pd

    if hasattr(things, "to_frame"):
        return things.to_frame()
    if isinstance(things, MemoryMap):
        return pd.DataFrame(things.rent())
    if isinstance(things, Moment):
        return pd.DataFrame(things.rows())
    is_one, is_several = hasattr(things, "row"), isinstance(things, Iterable) and not isinstance(things, str | Mapping)
    found = [things] if is_one else list(things) if is_several else []
    if not (is_one or is_several) or not all(hasattr(one, "row") for one in found):
        raise UserError(
            f"{shown(things)} has no rows; give a trace, a served run, receipts, a generation, a memory map, or a list "
            "of events, outcomes or requests"
        )
    return pd.DataFrame([one.row() for one in found])


class Rows(dict[str, "pd.DataFrame"]):
    """Table -> its rows, and the columns that tell the rows of each apart; a table may be empty."""

    def __init__(self, tables: Mapping[str, pd.DataFrame], keys: Keys) -> None:
        super().__init__(tables)
        self.keys_of = dict(keys)

    @classmethod
    def collect(cls, contents: Iterable[Mapping[str, list[dict[str, Any]]]], keys: Keys) -> Rows:
        """The tables of all points in their order. ValueError if two rows of a table have equal keys, or if there is a
        table that the study does not declare: both are mistakes of the study."""
        import pandas as pd

        found: dict[str, list[dict[str, Any]]] = {name: [] for name in keys}
        for content in contents:
            for name, rows in content.items():
                if name not in found:
                    raise ValueError(f"a point gave rows of a table {name!r}; the study declares {', '.join(keys)}")
                found[name] += [{key: _settled(value) for key, value in row.items()} for row in rows]
        tables = {name: pd.DataFrame(rows) if rows else _empty(keys[name]) for name, rows in found.items()}
        for name, table in tables.items():
            twice = table[table.duplicated(list(keys[name]))]
            if len(twice):
                first = twice.iloc[0][list(keys[name])].to_dict()
                raise ValueError(f"two rows of the table {name!r} have the keys {first}")
        return cls(tables, keys)

    @classmethod
    def read(cls, files: Mapping[str, Path | bytes], keys: Keys) -> Rows:
        """Tables from their files or contents; those without a file are empty."""
        return cls({name: read_table(files[name]) if name in files else _empty(keys[name]) for name in keys}, keys)

    def _repr_html_(self) -> str:
        """Each table by its name; the tables themselves show all of their rows."""
        return "".join(
            display.indexed(
                f"{name}: {len(table):,} rows", len(table), lambda at, table=table: table.iloc[at].to_dict()
            )
            for name, table in self.items()
        )

    def written(self) -> dict[str, bytes]:
        """Table -> its CSV text, of the tables that have rows."""
        return {name: csv_of(table) for name, table in self.items() if len(table)}

    def write(self, folder: Path, prefix: str = "") -> dict[str, str]:
        """Write <prefix><table>.csv for each table that has rows, and remove those of others; table -> file name."""
        names = {}
        for name, content in self.written().items():
            names[name] = f"{prefix}{name}.csv"
            write_atomically(folder / names[name], content)
        for stale in folder.glob(f"{prefix}*.csv"):
            if stale.name not in names.values():
                stale.unlink()
        return names

    def described(self) -> dict[str, dict[str, Any]]:
        """Table -> how many rows it has, its key columns, and the hash of its CSV text."""
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in self.written().items()}
        return {
            name: {"rows": len(self[name]), "keys": list(self.keys_of[name]), "sha256": sha256}
            for name, sha256 in hashes.items()
        }

    def hash(self) -> str:
        """One hash of all tables."""
        return tables_hash({name: about["sha256"] for name, about in self.described().items()})

    def distinct(self, column: str) -> list[str]:
        """The values of a column in all tables, as text, in order."""
        return sorted({str(value) for table in self.values() if column in table for value in table[column].dropna()})


def tables_hash(hashes: Mapping[str, str]) -> str:
    """The hash of a set of tables from the hashes of their CSV texts."""
    return sha256_json(dict(hashes))


def csv_of(table: pd.DataFrame) -> bytes:
    """A table as CSV text: columns and rows in their order, floats in their shortest exact form (DIGITS at most)."""
    return table.to_csv(index=False, lineterminator="\n").encode()


def read_table(source: Path | bytes) -> pd.DataFrame:
    """Rows as they were written: an empty cell is a missing value, and no text is taken for one. UserError if the file
    is absent or damaged."""
    import pandas as pd

    name = source if isinstance(source, Path) else "the rows"
    try:
        data = source.read_bytes() if isinstance(source, Path) else source
        return pd.read_csv(io.BytesIO(data), keep_default_na=False, na_values=[""], low_memory=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read as rows: {str(error).splitlines()[0]}") from None


def _settled(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _empty(keys: Iterable[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns=list(dict.fromkeys((*keys, *ABOUT))))
