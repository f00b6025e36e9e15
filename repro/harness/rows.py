"""Rows as CSV text, and its hash."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def rows_csv(rows: pd.DataFrame) -> bytes:
    """The rows as CSV text: column and row order as given, floats as their shortest exact form."""
    return rows.to_csv(index=False, lineterminator="\n").encode()


def rows_hash(rows: pd.DataFrame) -> str:
    """SHA-256 of the rows' CSV text, so that it equals the hash of a rows.csv that holds the same rows."""
    return hashlib.sha256(rows_csv(rows)).hexdigest()
