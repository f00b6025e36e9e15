"""The store of finished points, and locks for what two runs must not do at once.

A finished point is one small JSON file named by its key, at every moment whole or absent: two runs in one checkout do
no harm. A checksum inside tells a truncated or hand-edited file, which then counts as missing: it is never used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from repro.errors import UserError
from repro.hashing import WriteError, pretty_json, sha256_json, write_atomically

Row = dict[str, "str | int | float | bool | None"]


@contextmanager
def locked(path: Path, wait: bool, about: str = "") -> Iterator[None]:
    """Hold the lock file `path`, which goes with the process however it ends; `about` says in it who holds it.

    Waits for another holder, or raises UserError that names it. Where the file system has no locks it holds nothing:
    points are safe without, only summaries of two runs at once may then mix."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise WriteError(
                f"cannot write to the folder {path.parent}: {error.strerror or error}; make it writable, or name "
                "another one with REPRO_RESULTS_DIR"
            ) from error
        try:
            held.enter_context(FileLock(path, timeout=-1 if wait else 0))
        except Timeout:
            holder = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:400] or "not known"
            raise UserError(
                f"another run holds {path}: {holder}; wait until it is done, end it (finished points are kept), or "
                "name other folders with REPRO_RESULTS_DIR and REPRO_FIGURES_DIR"
            ) from None
        except OSError:
            pass
        if about:
            with suppress(OSError):  # a full disk; whoever needs the space will say so
                path.write_text(about, encoding="utf-8")
        yield


def check_tables(returned: Any, table: str | None) -> dict[str, list[Row]]:
    """What a point returned, as table -> rows with plain values: one row or a list of rows of `table`, or, if that is
    None, a mapping from tables to these. NumPy scalars become Python numbers; TypeError or ValueError names an entry
    that is not text, a finite number, a truth value or None."""
    if table is not None:
        returned = {table: returned}
    if not isinstance(returned, Mapping):
        raise TypeError(f"a point without a table must return a mapping, table -> rows, not {type(returned).__name__}")
    tables = {}
    for name, rows in returned.items():
        listed = [rows] if isinstance(rows, Mapping) else rows
        if not isinstance(listed, list) or not all(isinstance(row, Mapping) for row in listed):
            raise TypeError(f"a point must return one row (a dict) or a list of rows, not {type(rows).__name__}")
        tables[_name(name)] = [{_name(key): _plain(key, value) for key, value in row.items()} for row in listed]
    return tables


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the names of tables and in rows must be text, not {name!r}")
    return name


def _plain(name: str, value: Any) -> str | int | float | bool | None:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a NumPy or torch scalar
        value = value.item()
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if not isinstance(value, float):
        kind = type(value).__name__
        raise TypeError(f"row entry {name!r} is a {kind}; only text, numbers, truth values and None go in")
    if not math.isfinite(value):
        raise ValueError(f"row entry {name!r} is {value}; use None for a value that is not defined")
    return float(value)


@dataclass(frozen=True)
class PointStore:
    """The finished points of one experiment, one file each."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def write(self, key: str, tables: Mapping[str, list[Row]], about: Mapping[str, Any]) -> None:
        """Keep a finished point; `about` is what a reader may want to know (function, arguments, machine)."""
        content = {**about, "key": key, "tables": tables}
        write_atomically(self.path(key), pretty_json({**content, "checksum": sha256_json(content)}))

    def read(self, key: str) -> dict[str, Any] | None:
        """The kept content of a point (with "tables"), or None if it is absent or not exactly as it was written."""
        try:
            content = json.loads(self.path(key).read_bytes())
            checksum = content.pop("checksum")
            return content if checksum == sha256_json(content) and content["key"] == key else None
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        except OSError as error:
            raise UserError(f"cannot read {self.path(key)}: {error.strerror or error}") from error
