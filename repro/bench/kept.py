"""Where rows measured on a GPU are kept: this machine's own, or those recorded with the project.

`make reproduce` on a GPU machine measures into results/measured; experiments/recorded/<gpu> holds rows that were
measured once and are kept as evidence. Which of the two a row comes from is its kind of evidence."""

import csv
import math
from pathlib import Path
from typing import Any

from repro import paths
from repro.bench.rows import Row
from repro.errors import UserError

#: this machine's own rows if there are any, else those of DEFAULT
AUTO = "auto"
#: no rows at all
NONE = "none"
DEFAULT = "h200"
KERNELS, SERVING = "kernels", "serving"
#: rows measured with other ones of these do not go together
_SETTING = {KERNELS: ("device", "contenders"), SERVING: ("device", "model", "dtype", "kv_slots")}
_TEXT = {"key", "code", "kind", "system", "workload", "trace_hash", "mark", "evidence", "device", "model", "dtype"}
_TEXT |= {"preemption", "benchmark", "contender", "contenders", "heads", "context", "blocks", "direction", "launch"}
_TEXT |= {"remark"}


def own_folder() -> Path:
    """Where this machine's measurements go."""
    return paths.folders("paper").points / "measured"


def find(gpu: str, kind: str, needs: str | None = None) -> tuple[Path, str]:
    """The rows file of a kind of measurement, and its evidence ("measured" or "recorded"). The file need not be there.

    This machine's own file is taken only if it has a row whose `kind` is `needs` (None: any): a short budget may not
    have come so far. UserError for a GPU that is not recorded."""
    own = own_folder() / kind / f"{kind}.csv"
    if gpu == AUTO and own.is_file() and (needs is None or any(row["kind"] == needs for row in read(own, "measured"))):
        return own, "measured"
    folder = paths.folders().experiments / "recorded"
    known = sorted(path.name for path in folder.glob("*") if path.is_dir())
    if gpu != AUTO and gpu not in known:
        raise UserError(f"gpu = {gpu!r} is not recorded; known: {AUTO}, {', '.join(known)}")
    return folder / (DEFAULT if gpu == AUTO else gpu) / kind / f"{kind}.csv", "recorded"


def recordings(gpu: str, kind: str, needs: str | None = None) -> list[tuple[Path, str]]:
    """The file that `find` gives and, of recorded rows, those of later recordings, in folders beside it such as
    serving_v1: a prediction needs the step times of the same hour."""
    first, evidence = find(gpu, kind, needs)
    later = sorted(first.parent.parent.glob(f"{kind}_*/{first.name}")) if evidence == "recorded" else []
    return [(path, evidence) for path in (first, *later)]


def given(gpu: str, kind: str, needs: str | None = None) -> dict[str, Any] | None:
    """The same as arguments of a point that reads the file; None if it is not there, or for NONE."""
    if gpu == NONE:
        return None
    path, evidence = find(gpu, kind, needs)
    return {"path": path, "evidence": evidence} if path.is_file() else None


def runs(gpu: str, *kinds: str) -> dict[str, Any]:
    """Arguments of a point that reads runs of these kinds. UserError if there are none."""
    path, evidence = find(gpu, SERVING, needs=kinds[0])
    if not any(row["kind"] in kinds for row in read(path, evidence)):
        raise UserError(f"gpu = {gpu!r}: {path} holds no run of the kind {' or '.join(kinds)}; measure for longer")
    return {"path": path, "evidence": evidence}


def read(path: Path, evidence: str) -> list[Row]:
    """Rows as numbers and text; empty cells are None. Of a recording of several calls, those that belong together: with
    the setting of its last row, and of each point the newest. UserError if the file is missing or damaged."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing; restore it, or measure on a GPU: python -m repro bench {path.stem} --out {path.parent}"
        )
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it, or remove it") from error
    rows = [row | {"evidence": evidence} for row in rows]
    if not rows or "key" not in rows[0]:
        return rows
    last = {name: row[name] for row in rows for name in _SETTING.get(path.stem, ()) if row.get(name) is not None}
    rows = [row for row in rows if all(row.get(name) in (None, value) for name, value in last.items())]
    newest = {row["key"]: row["code"] for row in rows}
    return [row for row in rows if row["code"] == newest[row["key"]]]


def _value(name: str, text: str) -> Any:
    if not text or name in _TEXT:
        return text or None
    number = float(text)
    if math.isnan(number):
        return None
    return int(number) if number.is_integer() and "." not in text else number
