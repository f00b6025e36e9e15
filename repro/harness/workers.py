"""Computing the missing points of an experiment on all cores, so that nothing finished is ever lost.

Points go to worker processes one by one, the heaviest first, and the worker itself keeps the result. A point that
raises does not stop the others. A worker that dies (killed for memory, say) takes the pool with it: the points that
were in flight are then tried again one at a time, so that the one to blame is known by name. Workers are fresh
processes, never forks.

Where POOL names a cluster (repro.harness.cluster), its workers compute what can travel, and this process keeps it."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool, TerminatedWorkerError

from repro.errors import Brief, UserError
from repro.harness.cluster import Cluster, can_travel, check_pool, connected
from repro.harness.computing import Computed, Failure, Task, computed, failure, keep
from repro.harness.progress import Progress
from repro.harness.store import PointStore
from repro.hashing import WriteError, leftovers, temporary_name, write_atomically

_IN_FLIGHT = "in-flight"
#: Several workers share the cores, so none of them may start threads of its own.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class PointError(Brief, RuntimeError):
    """Points could not be computed; the message names each one and its cause. Finished points are kept."""


def number_of_workers(named: str) -> int:
    """The number in `named` (JOBS, say); if it is empty, the number of cores that this process may use."""
    if not named:
        return cpu_count()
    if named.isascii() and named.isdigit() and 1 <= int(named) <= 4096:
        return int(named)
    allowed = "a number of worker processes, 1 or more; leave it out to use all cores"
    raise UserError(f"JOBS={named!r} must be {allowed}")


def compute(tasks: list[Task], store: PointStore, name: str, kept: list[tuple[str, float, float]]) -> None:
    """Compute and keep every task's point, those marked `alone` after the others, one at a time.

    `name` is that of the whole; `kept` are points of earlier runs: function, seconds, weight. Raises UserError or
    PointError after all other points are finished; KeyboardInterrupt at once."""
    failures: list[Failure] = []
    shared, far = number_of_workers(os.environ.get("JOBS", "")), check_pool(os.environ.get("POOL", ""))
    travelling = {task.key for task in tasks if far and can_travel(task.point)}
    with ExitStack() as held:
        cluster = held.enter_context(connected(far)) if travelling else None
        todo = [(task.about["function"], task.point.weight) for task in tasks]
        progress = Progress(name, todo, kept, cluster.workers if cluster else shared)
        held.callback(progress.close)
        if cluster:
            note = held.enter_context(_in_flight_file(store))
            waiting = _heaviest_last([task for task in tasks if task.key in travelling])
            _compute_all(waiting, cluster, store, progress, failures, note)
        for alone in (False, True):
            here = [task for task in tasks if task.key not in travelling]
            waiting = _heaviest_last([task for task in here if task.point.alone is alone])
            suspects: list[tuple[Task, BaseException]] = []
            while waiting:
                suspects += _compute_in_pool(waiting, 1 if alone else shared, store, progress, failures)
            for suspect, _ in suspects:
                for task, error in _compute_in_pool([suspect], 1, store, progress, failures):
                    failures.append(Failure(task.label, "bug", _why_it_died(error)))
    _raise(failures, len(tasks))


def _compute_in_pool(
    waiting: list[Task], workers: int, store: PointStore, progress: Progress, failures: list[Failure]
) -> list[tuple[Task, BaseException]]:
    """Take tasks off the end of `waiting` and compute them, until none is left or a worker dies; the tasks that were in
    flight then, each with how it was noticed."""
    workers = min(workers, len(waiting))
    progress.give_up()  # what a worker that died left behind
    env = {} if waiting[0].point.alone else _ONE_THREAD
    with fresh_processes(workers, env) as pool, _in_flight_file(store) as note:
        return _compute_all(waiting, _Local(pool, workers, store), store, progress, failures, note)


@dataclass(frozen=True)
class _Local:
    """Worker processes of this machine, which keep what they compute."""

    pool: ProcessPoolExecutor
    size: int
    store: PointStore

    def submit(self, task: Task) -> Future[Failure | Computed | float]:
        return self.pool.submit(_compute_one, task, self.store)


def _compute_all(
    waiting: list[Task],
    pool: _Local | Cluster,
    store: PointStore,
    progress: Progress,
    failures: list[Failure],
    note: Callable[[list[Task]], None],
) -> list[tuple[Task, BaseException]]:
    """What `_compute_in_pool` does, in a pool that is there."""
    running: dict[Future[Failure | Computed | float], Task] = {}
    while waiting or running:
        size = pool.size
        while waiting and len(running) < size:
            task = waiting.pop()
            note([*running.values(), task])
            try:
                running[pool.submit(task)] = task
            except BrokenProcessPool as error:
                return [(task, error) for task in [*running.values(), task]]
            progress.start(task.key, task.about["function"], task.point.weight, task.label.partition(": ")[2])
        finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
        died: BrokenProcessPool | None = None
        for future in finished:
            error = CancelledError() if future.cancelled() else future.exception()
            if isinstance(error, BrokenProcessPool):
                died = error
                continue
            task = running.pop(future)
            outcome = future.result() if error is None else failure(task, error)
            if isinstance(outcome, Computed):
                outcome = keep(task, store, outcome)
            if isinstance(outcome, float):
                progress.finish(task.key, outcome)
                continue
            progress.give_up(task.key)
            failures.append(outcome)
            if outcome.kind in ("folder", "refused"):
                waiting.clear()
        if died is not None:
            return [(task, died) for task in running.values()]
        if finished:
            note(list(running.values()))
        progress.show()
    return []


def _heaviest_last(tasks: list[Task]) -> list[Task]:
    """In the order in which they are taken off the end."""
    return sorted(tasks, key=lambda task: -task.point.weight)[::-1]


@contextmanager
def fresh_processes(workers: int, env: Mapping[str, str]) -> Iterator[ProcessPoolExecutor]:
    """Worker processes with these changes of the environment, ended at once if the block is left by an exception."""
    pool = ProcessPoolExecutor(workers, initializer=_follow_parent, initargs=(os.getpid(),), env=dict(env))
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
    """Says on disk which points are being computed, so that the next run can say what a killed one was doing."""
    path = temporary_name(store.folder / _IN_FLIGHT, ".json")

    def note(tasks: list[Task]) -> None:
        write_atomically(path, json.dumps([task.label for task in tasks]).encode(), durable=False)

    note([])  # also finds a full or read-only folder before any work
    try:
        yield note
    finally:
        path.unlink(missing_ok=True)


def left_in_flight(folder: Path) -> str:
    """What killed runs were computing, in a few words ("" for nothing); removes what they left."""
    labels: list[str] = []
    for path in leftovers(folder):
        try:
            if path.name.startswith(f".{_IN_FLIGHT}."):
                labels += json.loads(path.read_text(encoding="utf-8"))
            path.unlink(missing_ok=True)
        except (OSError, ValueError):  # another run was quicker, or the disk was full: nothing depends on it
            pass
    others = f" and {len(labels) - 1} others" if len(labels) > 1 else ""
    return textwrap.shorten("; ".join(labels[:1]), 60, placeholder=" ...") + others


def _follow_parent(parent: int) -> None:
    """In a worker: end when the process that started it is gone (kill -9 gives it no chance to say so)."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compute_one(task: Task, store: PointStore) -> Failure | float:
    """In a worker: compute one point and keep it; the seconds that it took."""
    return keep(task, store, computed(task))


def _why_it_died(error: BaseException) -> str:
    if not isinstance(error, TerminatedWorkerError):
        return f"it could not be handed to a worker process: {error.__cause__ or error}"
    twice = "its worker process was killed twice, the second time with nothing beside it"
    return f"{twice}; most likely it needs more memory than there is"


def _raise(failures: list[Failure], total: int) -> None:
    """Raise what one failure stands for: a folder that cannot be written to, else a bug, else what a user can mend."""
    if not failures:
        return
    first = min(failures, key=lambda failure: ("folder", "refused", "bug", "user").index(failure.kind))
    if first.kind == "folder":
        raise WriteError(first.cause)
    others = f" ({len(failures)} of {total} points failed, this is the first; finished points are kept)"
    message = f"{first.label}: {first.cause}{others if total > 1 else ''}"
    raise (
        UserError(message) if first.kind in ("refused", "user") else PointError(f"{message}\n{first.details}".rstrip())
    )
