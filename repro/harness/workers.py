"""Computing the missing points of an experiment on all cores, so that nothing finished is ever lost.

Points go to worker processes one by one, the heaviest first, and the worker itself keeps the result; whatever kills the
run loses only the points in flight. A point that raises does not stop the others. A worker that dies (killed for
memory, say) takes the pool with it: the points that were in flight are then tried again one at a time, so the one to
blame is known by name and the rest are still computed. Workers are fresh processes, never forks.

This module does not know what points compute, how keys are made, or what becomes of the rows.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import cpu_count
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool, TerminatedWorkerError

from repro.engine.errors import UserError
from repro.harness.progress import Progress
from repro.harness.store import PointStore, check_tables
from repro.hashing import leftovers, temporary_name, write_atomically

_IN_FLIGHT = "in-flight"
#: Several workers share the cores, so none of them may start threads of its own.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class PointError(RuntimeError):
    """Points could not be computed; the message names each one and its cause. Finished points are kept."""


@dataclass(frozen=True)
class Task:
    """One missing point: its key, the call, and what is written beside its rows."""

    key: str
    label: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    weight: float
    alone: bool
    about: Mapping[str, Any]
    table: str | None


@dataclass(frozen=True)
class Failure:
    """Why a point has no result. `kind` is "user" (its message is meant for the user), "folder" (no result can be
    written at all) or "bug"."""

    label: str
    kind: str
    cause: str
    details: str = ""


def number_of_workers(named: str) -> int:
    """The number in `named` (JOBS, say); if it is empty, the number of cores that this process may use."""
    if not named:
        return cpu_count()
    if not (named.isascii() and named.isdigit() and 1 <= int(named) <= 4096):
        raise UserError(
            f"JOBS={named!r} must be a number of worker processes, 1 or more; leave it out to use all cores"
        )
    return int(named)


def compute(tasks: list[Task], store: PointStore, progress: Progress) -> None:
    """Compute and keep every task's point.

    Tasks marked `alone` (wall-clock measurements) run after the others, one at a time, with nothing beside them. Raises
    UserError or PointError after all other points are finished; KeyboardInterrupt at once.
    """
    failures: list[Failure] = []
    shared = number_of_workers(os.environ.get("JOBS", ""))
    try:
        for alone in (False, True):
            todo = sorted((task for task in tasks if task.alone is alone), key=lambda task: -task.weight)
            for suspect, _ in _compute_together(todo, 1 if alone else shared, store, progress, failures):
                for task, error in _compute_together([suspect], 1, store, progress, failures):
                    failures.append(Failure(task.label, "bug", _why_it_died(error)))
    finally:
        progress.close()
    _raise(failures, len(tasks))


def _compute_together(
    todo: list[Task], workers: int, store: PointStore, progress: Progress, failures: list[Failure]
) -> list[tuple[Task, BaseException]]:
    """Work through `todo`; returns the tasks that were in flight whenever a worker died, and how it was noticed."""
    suspects: list[tuple[Task, BaseException]] = []
    waiting = todo[::-1]
    while waiting:
        with _pool(min(workers, len(waiting)), waiting[0].alone) as pool, _in_flight_file(store) as note:
            running: dict[Future[Failure | None], Task] = {}
            died: BaseException | None = None
            while (waiting or running) and died is None:
                while waiting and len(running) < workers:
                    task = waiting.pop()
                    note([*running.values(), task])
                    try:
                        running[pool.submit(_compute_one, task, store)] = task
                    except BrokenProcessPool as error:
                        died = error
                        running[Future()] = task
                        break
                finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in finished:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        died = error
                        continue
                    task = running.pop(future)
                    failure = future.result() if error is None else _failure(task, error)
                    if failure is None:
                        progress.advance(task.weight)
                    else:
                        failures.append(failure)
                        if failure.kind == "folder":
                            waiting.clear()
                if finished:
                    note(list(running.values()))
                progress.show()
            if died is not None:
                suspects += [(task, died) for task in running.values()]
    return suspects


@contextmanager
def _pool(workers: int, alone: bool) -> Iterator[ProcessPoolExecutor]:
    """Fresh worker processes, which are ended at once if the block is left by an exception."""
    pool = ProcessPoolExecutor(
        max_workers=workers, initializer=_follow_parent, initargs=(os.getpid(),), env={} if alone else _ONE_THREAD
    )
    with _interrupts_ignored():
        pool.submit(os.getpid)  # starts all workers
    try:
        yield pool
    except BaseException:
        pool.shutdown(kill_workers=True)
        raise
    pool.shutdown()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C for good: it is their parent's business to end them."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may change this
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _in_flight_file(store: PointStore) -> Iterator[Callable[[list[Task]], None]]:
    """Says on disk which points are being computed, so that a killed run can be told what it was doing."""
    path = temporary_name(store.folder / _IN_FLIGHT, ".json")

    def note(tasks: list[Task]) -> None:
        write_atomically(path, json.dumps([task.label for task in tasks]).encode(), durable=False)

    note([])  # also finds a full or read-only folder before any work
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)


def left_in_flight(folder: Path) -> list[str]:
    """The points that killed runs were computing; removes what those runs left. Living runs are left alone."""
    labels: list[str] = []
    for path in leftovers(folder):
        try:
            if path.name.startswith(f".{_IN_FLIGHT}."):
                labels += json.loads(path.read_text(encoding="utf-8"))
            path.unlink(missing_ok=True)
        except (OSError, ValueError):  # another run was quicker, or the disk was full: nothing depends on it
            pass
    return labels


def _follow_parent(parent: int) -> None:
    """In a worker: end when the process that started it is gone (kill -9 gives it no chance to say so)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compute_one(task: Task, store: PointStore) -> Failure | None:
    """In a worker: compute one point and keep it."""
    try:
        start = time.perf_counter()
        tables = check_tables(task.function(**task.arguments), task.table)
        about = {**task.about, "seconds": round(time.perf_counter() - start, 6)}
    except Exception as error:
        return _failure(task, error)
    try:
        store.write(task.key, tables, about)
    except UserError as error:
        return Failure(task.label, "folder", str(error))
    return None


def _why_it_died(error: BaseException) -> str:
    if isinstance(error, TerminatedWorkerError):
        return (
            "its worker process was killed twice, the second time with nothing beside it; most likely it needs more "
            "memory than there is"
        )
    return f"it could not be handed to a worker process: {error.__cause__ or error}"


def _failure(task: Task, error: BaseException) -> Failure:
    if isinstance(error, UserError):
        return Failure(task.label, "user", str(error))
    details = "".join(traceback.format_exception(error))
    return Failure(task.label, "bug", f"{type(error).__name__}: {error}", details)


def _raise(failures: list[Failure], total: int) -> None:
    for failure in failures:
        if failure.kind == "folder":
            raise UserError(failure.cause)
    if not failures:
        return
    first = failures[0]
    others = (
        f" ({len(failures)} of {total} points failed, this is the first; finished points are kept)" if total > 1 else ""
    )
    if all(failure.kind == "user" for failure in failures):
        raise UserError(f"{first.label}: {first.cause}{others}")
    first = next(failure for failure in failures if failure.kind == "bug")
    raise PointError(f"{first.label}: {first.cause}{others}\n{first.details}".rstrip())
