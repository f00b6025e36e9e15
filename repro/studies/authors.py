"""Rows on the authors' own trace: where they are kept, and how they are read.

The authors' lengths are not ours to ship; numbers computed from them are. `authors_trace` computes them from the file
and reads them without it; other studies draw them beside their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repro import paths
from repro.errors import UserError
from repro.harness.tables import read_table
from repro.report import paper
from repro.studies.base import DataFrame, Point

#: what such a row's evidence says after its kind
ON_AUTHORS_LENGTHS = " on the authors' lengths"


def kept(**tables: str) -> Point:
    """A point that reads kept rows into a study's tables: table -> the table of `authors_trace` that it holds."""
    folder = paths.folders().experiments / "authors_trace"
    return Point(read, {"files": {name: folder / f"{kept_as}.csv" for name, kept_as in tables.items()}}, weight=0.1)


def read(files: Mapping[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """table -> its rows. UserError if a file is missing or damaged."""
    if missing := [str(path) for path in files.values() if not path.is_file()]:
        raise UserError(
            f"{missing[0]} is missing; restore it, or compute it: python -m repro run authors_trace --lengths FILE.csv"
        )
    tables = {name: read_table(path) for name, path in files.items()}
    return {name: table.astype(object).where(table.notna(), None).to_dict("records") for name, table in tables.items()}


def crossings(latency: DataFrame, level: float) -> dict[tuple[str, str], float]:
    """(panel, system) -> the rate (req/s) at which the line between the latencies at the rates reaches `level`
    (s/token). Each rate has a trace of its own: no crossing could be bisected."""
    curves = latency.sort_values("rate").groupby(["panel", "system"], sort=False)[["rate", "latency_s_per_token"]]
    read = {key: paper.crossing(list(curve.itertuples(index=False, name=None)), level) for key, curve in curves}
    return {key: rate for key, rate in read.items() if rate is not None}
