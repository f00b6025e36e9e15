"""The ledger of servers: one row a claim of a server, in a CSV file that several calls write to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pandas as pd

from repro.errors import UserError
from repro.hashing import write_atomically
from repro.judge.claims import CLAIMS, Finding, Verdict

COLUMNS = [one.name for one in fields(Finding)]
_NUMBERS = ("value", "low", "high")
_FILE = "ledger.csv"


def file_of(out: str | Path) -> Path:
    """The file of a ledger that a user names: a CSV file, or a folder for one."""
    path = Path(out)
    return path if path.suffix == ".csv" else path / _FILE


def read(out: str | Path) -> pd.DataFrame:
    """All rows, in the order in which servers were judged; none if there is no file. UserError for another file."""
    path = file_of(out)
    if not path.exists():
        return pd.DataFrame(columns=COLUMNS)
    try:
        rows = pd.read_csv(path, dtype={"server": str, "note": str, "numbers": str}, keep_default_na=False)
        missing = set(COLUMNS) - set(rows.columns)
        rows = rows if missing else rows.astype({"repeats": int, "seed": int})
        for name in _NUMBERS if not missing else ():
            rows[name] = pd.to_numeric(rows[name])
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a ledger: {error}; name another file with --out") from None
    if missing:
        raise UserError(f"{path} is no ledger: it has no column {min(missing)}; name another file with --out")
    if rows.duplicated(["server", "claim"]).any():
        raise UserError(
            f"{path} has a claim of a server twice; remove one of the rows, or name another file with --out"
        )
    return rows[COLUMNS]


def write(out: str | Path, rows: pd.DataFrame) -> None:
    """WriteError if it cannot be."""
    write_atomically(file_of(out), rows.to_csv(index=False, lineterminator="\n").encode())


def record(out: str | Path, server: str, findings: Sequence[Finding]) -> None:
    """Put what is known of a server in place of what was. WriteError; UserError as `read`."""
    rows = read(out)
    new = pd.DataFrame([one.row() for one in findings], columns=COLUMNS)
    kept = rows[rows["server"] != server]
    write(out, pd.concat([kept, new], ignore_index=True) if len(kept) else new)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a claim and a column a server: the verdict, and the value it follows from."""
    cells = rows.assign(cell=[_cell(*one) for one in zip(rows["verdict"], rows["value"])])
    wide = cells.pivot(index="claim", columns="server", values="cell")
    claims = [name for name in CLAIMS if name in wide.index]
    return wide.reindex(index=claims, columns=list(dict.fromkeys(rows["server"]))).fillna("")


def _cell(verdict: str, value: float) -> str:
    if pd.isna(value):
        return verdict
    return f"{value:.4g} tokens/s" if verdict == Verdict.REPORTED else f"{verdict} ({value:.2f})"


def in_words(rows: pd.DataFrame) -> str:
    """The table, what its lines mean, and why a verdict is what it is where a number does not say so."""
    if rows.empty:
        return "no server was judged"
    wide = table(rows)
    lines = [wide.rename_axis(index=None, columns=None).to_string(), ""]
    width = max(map(len, wide.index))
    lines += [f"{name:{width}}  {CLAIMS[name].says}" for name in wide.index]
    notes = rows[rows["note"] != ""]
    if len(notes):
        lines.append("")
    lines += [
        f"{server}, {claim}: {note}" for server, claim, note in zip(notes["server"], notes["claim"], notes["note"])
    ]
    return "\n".join(lines)
