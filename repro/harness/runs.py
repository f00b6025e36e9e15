"""What was kept of runs: tables and what is known of them, from a file, a folder, or a commit with figures.

Three things hold tables: results/<experiment>/ with its manifest.json, figures/ with <experiment>.<table>.csv and the
sidecars of the figures drawn from them, and any commit of the latter. This module does not know what rows mean."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import paths
from repro.errors import UserError
from repro.harness.tables import Rows
from repro.hashing import read_json


@dataclass(frozen=True)
class KeptRun:
    """`about` has the entries of a manifest or sidecar (parameters, code_hash ...)."""

    rows: Rows
    about: dict[str, Any]


def table_files(about: Mapping[str, Any]) -> dict[str, str]:
    """Table -> the name of its file, as a manifest or sidecar says."""
    return {name: table.get("file", f"{name}.csv") for name, table in (about.get("tables") or {}).items()}


def kept_runs(named: str) -> dict[str, KeptRun]:
    """Experiment -> run. `named` is a table's file, a folder of results or figures, or a commit of this checkout.

    UserError if it is none of these or holds no tables."""
    path = Path(named)
    folder = path.parent if path.is_file() else path
    found = _results(folder) or _figures(folder.iterdir(), Path) if folder.is_dir() else _of_commit(named)
    if path.is_file():
        found = {
            stem: KeptRun(Rows({table: run.rows[table]}, run.rows.keys_of), run.about)
            for stem, run in found.items()
            for table, file in table_files(run.about).items()
            if file == path.name
        }
    if not found:
        raise UserError(
            f"{named} holds no tables: name a table's CSV file with its manifest or figures beside it, a folder of "
            "results or figures, or a commit with figures"
        )
    return found


def _results(folder: Path) -> dict[str, KeptRun]:
    manifests = sorted([*folder.glob("manifest.json"), *folder.glob("*/manifest.json")])
    kept = {path: about for path in manifests if "tables" in (about := read_json(path))}
    return {path.resolve().parent.name: _run(about, path.with_name) for path, about in kept.items()}


def _figures(files: Iterable[Path], source: Callable[[Path], Path | bytes]) -> dict[str, KeptRun]:
    """The tables that the sidecars among `files` name; `source` gives a file's path or its content."""
    by_name = {file.name: file for file in files}
    found: dict[str, KeptRun] = {}
    for name in sorted(by_name):
        about = read_json(source(by_name[name])) if name.endswith(".json") else {}
        stem, tables = about.get("experiment"), about.get("tables")
        if isinstance(tables, dict) and stem not in found and by_name.keys() >= set(table_files(about).values()):
            found[stem] = _run(about, lambda file: source(by_name[file]))
    return found


def _run(about: dict[str, Any], source: Callable[[str], Path | bytes]) -> KeptRun:
    keys = {name: tuple(table["keys"]) for name, table in about["tables"].items()}
    return KeptRun(Rows.read({name: source(file) for name, file in table_files(about).items()}, keys), about)


def _of_commit(named: str) -> dict[str, KeptRun]:
    folder = paths.folders().figures
    listing = _git(folder, "ls-tree", "--name-only", "-z", "--end-of-options", named, "./")
    if listing is None:
        raise UserError(f"{named!r} is neither a file, a folder nor a commit of this checkout")
    files = [Path(name) for name in listing.decode("utf-8", "replace").split("\0") if name]
    return _figures(files, lambda file: _git(folder, "show", "--end-of-options", f"{named}:./{file.name}") or b"")


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
