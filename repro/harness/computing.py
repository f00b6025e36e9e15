"""One point, computed and kept, wherever that is: in a worker process, here or on another machine."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from repro.errors import UserError, left_out
from repro.harness.point import Point
from repro.harness.store import PointStore, Row, check_tables
from repro.hashing import WriteError

#: What is said where a cluster's scheduler ends before the points do.
GONE, AGAIN = "the Dask scheduler is gone", "finished points are kept; start it and run this again"


@dataclass(frozen=True)
class Task:
    """One missing point with its key, its name for messages, and what is written beside its rows."""

    key: str
    label: str
    point: Point
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Failure:
    """Why a point has no result."""

    label: str
    kind: str  # "folder" (nothing can be written), "refused" (a worker's code), "bug", "user" (a message for the user)
    cause: str
    details: str = ""


@dataclass(frozen=True)
class Computed:
    """A point's result on its way to the store: its rows by table, and what is known of it now."""

    tables: dict[str, list[Row]]
    about: dict[str, Any]


def computed(task: Task) -> Failure | Computed:
    """The point's rows, or why there are none."""
    try:
        start = time.perf_counter()
        tables = check_tables(task.point.function(**task.point.arguments), task.point.table)
        return Computed(tables, {**task.about, "seconds": round(time.perf_counter() - start, 6)})
    except Exception as error:
        return failure(task, error)


def keep(task: Task, store: PointStore, outcome: Failure | Computed) -> Failure | float:
    """Write what was computed to the store; the seconds that it took."""
    if isinstance(outcome, Failure):
        return outcome
    try:
        store.write(task.key, outcome.tables, outcome.about)
    except WriteError as error:
        return Failure(task.label, "folder", str(error))
    return outcome.about["seconds"]


def failure(task: Task, error: BaseException) -> Failure:
    """An error as the reason why a point has no result."""
    if isinstance(error, CancelledError):
        error = UserError(f"{GONE}; {AGAIN}")
    if isinstance(error, ModuleNotFoundError):
        error = left_out(error)
    if isinstance(error, UserError):
        return Failure(task.label, "user", str(error))
    details = "".join(traceback.format_exception(error))
    return Failure(task.label, "bug", f"{type(error).__name__}: {error}", details)
