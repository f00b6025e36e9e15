"""What was kept of runs: rows, and what is told about them, from a file, a folder, or a commit with figures.

Three things hold rows: results/<experiment>/rows.csv with its manifest.json, figures/<experiment>.csv with the sidecars
of the figures drawn from it, and any commit of the latter. This module does not know what rows mean.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro import paths
from repro.engine.errors import UserError
from repro.harness.tables import read_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class KeptRun:
    """`about` has the entries of a manifest or sidecar (parameters, code_hash ...); it is empty for bare rows."""

    rows: pd.DataFrame
    about: dict[str, Any]


def kept_runs(named: str) -> dict[str, KeptRun]:
    """Experiment -> run. `named` is a file of rows, a folder of results or figures, or a commit of this checkout.

    UserError if it is none of these or holds no rows.
    """
    path = Path(named)
    if path.is_file():
        name = path.resolve().parent.name if path.name == "rows.csv" else path.stem
        beside = _results(path.parent) if path.name == "rows.csv" else _figures(path.parent.iterdir(), Path.read_bytes)
        return {name: KeptRun(read_table(path), beside[name].about if name in beside else {})}
    found = _results(path) or _figures(path.iterdir(), Path.read_bytes) if path.is_dir() else _of_commit(named)
    if not found:
        raise UserError(
            f"{named} holds no rows: name a rows.csv, a folder of results or figures, or a commit with figures"
        )
    return found


def _results(folder: Path) -> dict[str, KeptRun]:
    files = sorted([*folder.glob("rows.csv"), *folder.glob("*/rows.csv")])
    return {
        file.resolve().parent.name: KeptRun(read_table(file), _object(file.with_name("manifest.json"), Path.read_bytes))
        for file in files
    }


def _figures(files: Iterable[Path], read: Callable[[Path], bytes]) -> dict[str, KeptRun]:
    """The rows that the sidecars among `files` name."""
    by_name = {file.name: file for file in files}
    found = {}
    for name in sorted(by_name):
        about = _object(by_name[name], read) if name.endswith(".json") else {}
        rows = about.get("rows")
        if isinstance(rows, str) and rows in by_name and rows.endswith(".csv"):
            found.setdefault(Path(rows).stem, KeptRun(read_table(read(by_name[rows])), about))
    return found


def _object(file: Path, read: Callable[[Path], bytes]) -> dict[str, Any]:
    try:
        content = json.loads(read(file))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _of_commit(named: str) -> dict[str, KeptRun]:
    folder = paths.folders().figures
    listing = _git(folder, "ls-tree", "--name-only", "-z", "--end-of-options", named, "./")
    if listing is None:
        raise UserError(f"{named!r} is neither a file, a folder nor a commit of this checkout")
    files = [Path(name) for name in listing.decode("utf-8", "replace").split("\0") if name]

    def read(file: Path) -> bytes:
        return _git(folder, "show", "--end-of-options", f"{named}:./{file.name}") or b""

    return _figures(files, read)


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
