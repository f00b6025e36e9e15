"""The formats of public traces: what their columns are called, and a file's rows with their line numbers.

A format is known by its columns or keys, never by the file's name, and a file may be compressed with gzip. The sources
of what is known of each format are in docs/workloads.md."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from repro.checks import by_name
from repro.errors import UserError
from repro.workloads.lengths import COLUMNS

_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


def _microseconds(text: Any) -> float:
    """A date as whole microseconds since 1970, which a float holds exactly; without a zone it is taken as UTC."""
    date = datetime.fromisoformat(text)
    return float(((date if date.tzinfo else date.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND)


def _number(value: Any) -> float:
    if isinstance(value, bool) or (isinstance(value, str) and ("_" in value or not value.isascii())):
        raise ValueError(value)
    return float(value)


def count(value: Any) -> int:
    """A whole number of tokens. ValueError for anything else, and for more than 9 digits: no context is that long."""
    text = value if isinstance(value, str) else str(value) if type(value) is int else ""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ValueError(value)
    return int(text)


@dataclass(frozen=True)
class Format:
    """What a request's time, prompt and output are called; `read` takes a time to a number, `per_second` of them a
    second."""

    name: str
    label: str
    columns: tuple[str, str, str]
    read: Callable[[Any], float] = _number
    per_second: float = 1.0
    is_json: bool = False
    remark: str = ""


AZURE = Format(
    "azure", "Azure LLM inference trace", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _microseconds, 1e6
)
MOONCAKE = Format(
    "mooncake",
    "Mooncake",
    ("timestamp", "input_length", "output_length"),
    read=lambda value: _number(None if isinstance(value, str) else value),  # what is quoted is of some other unit
    per_second=1e3,
    is_json=True,
    remark="; what prompts share (hash_ids) is not used",
)
FORMATS = by_name(
    AZURE,
    Format("burstgpt", "BurstGPT", ("Timestamp", "Request tokens", "Response tokens")),
    Format("plain", "plain CSV", ("arrival_s", *COLUMNS)),
    MOONCAKE,
)
#: a row's line, and its time, prompt and output as they stand in the file
Row = tuple[int, list[Any]]


def unfit(path: Path, line: int, what: str) -> UserError:
    return UserError(f"{path}, line {line}: {what}")


def rows_of(path: Path) -> tuple[Format, Iterator[Row]]:
    """A file's format and its rows. UserError with the line for what is none of the formats, or cannot be read."""
    lines = _lines(path)
    skipped = next(((number, text) for number, text in enumerate(lines) if text.strip()), None)
    if skipped is None:
        raise unfit(path, 1, "the file is empty")
    before, first = skipped
    lines = itertools.chain([first], lines)
    if first.lstrip().startswith("{"):
        return MOONCAKE, _json_rows(path, lines, before)
    rows = csv.reader(lines, strict=True)
    try:
        header = [name.strip().casefold() for name in next(rows)]
    except csv.Error as error:
        raise unfit(path, before + 1, f"not CSV ({error})") from error
    for kind in FORMATS.values():
        columns = [name.casefold() for name in kind.columns]
        if not kind.is_json and all(header.count(name) == 1 for name in columns):
            return kind, _csv_rows(path, rows, len(header), [header.index(name) for name in columns], before)
    if first.lstrip().startswith("[") or set(COLUMNS) <= set(header):
        remedy = "give a rate: make_trace(..., lengths=FILE) in Python, --rate on the command line"
        raise unfit(path, before + 1, f"these are lengths without arrivals; {remedy}")
    known = "; ".join(f"{kind.label}: {', '.join(kind.columns)}" for kind in FORMATS.values())
    raise unfit(path, before + 1, f"the columns {first.strip()[:80]!r} are none of these: {known}")


def _lines(path: Path) -> Iterator[str]:
    """The file's lines as text, unpacked if they are packed."""
    line = 0
    try:
        with open(path, "rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            with gzip.GzipFile(fileobj=file) if packed else file as whole:
                for line, text in enumerate(whole, start=1):
                    yield text.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise unfit(path, line, "not UTF-8 text") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise unfit(path, line + 1, f"the compressed file is damaged or cut off ({error})") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"cannot read the trace {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def _csv_rows(path: Path, rows: Any, width: int, places: list[int], before: int) -> Iterator[Row]:
    try:
        for row in rows:
            if row and len(row) != width:
                raise unfit(path, before + rows.line_num, f"{len(row)} values where the header has {width}")
            if row:
                yield before + rows.line_num, [row[place].strip() for place in places]
    except csv.Error as error:
        raise unfit(path, before + rows.line_num, f"not CSV ({error})") from error


def _json_rows(path: Path, lines: Iterator[str], before: int) -> Iterator[Row]:
    for line, text in enumerate(lines, start=before + 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise unfit(path, line, f"not JSON, one request a line ({error})") from error
        columns = MOONCAKE.columns
        if missing := [name for name in columns if not isinstance(row, dict) or name not in row]:
            raise unfit(path, line, f"no {', '.join(missing)}; a request has {', '.join(columns)}")
        yield line, [row[name] for name in columns]
