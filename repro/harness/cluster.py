"""Points on other machines: POOL=dask://HOST:PORT names a Dask scheduler whose workers compute in place of local ones.

The machines share no folder: a point travels to a worker, its rows travel back, and this process alone keeps them. A
worker counts only if its own code is that of this run, by the rule that keys results (repro.harness.keys). A worker
that dies loses nothing: Dask gives its point to another one, at most four times. What measures time stays here, and so
does what a notebook's cell defines, as its source is not on the other machine.

Dask is no part of the environment: it is imported where POOL asks for it."""

from __future__ import annotations

import functools
import pickle
import pickletools
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import cloudpickle

from repro.errors import UserError
from repro.harness import keys
from repro.harness.computing import AGAIN, GONE, Computed, Failure, Task, computed
from repro.harness.point import Point
from repro.harness.sources import Sources
from repro.setup.machine import machine

if TYPE_CHECKING:
    from distributed import Client

_CONNECT_S = 20
_ALLOWED = "dask://HOST:PORT, the address of a Dask scheduler; leave it out to compute on this machine"


def check_pool(named: str) -> str:
    """The scheduler's address as Dask writes it, "" for none. UserError for any other text, or without Dask."""
    if not named:
        return ""
    found = re.fullmatch(r"dask://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):([0-9]{1,5})", named)
    if found is None or not 1 <= int(found[2]) <= 65535:
        raise UserError(f"POOL={named!r} must be {_ALLOWED}")
    try:
        import distributed  # noqa: F401
    except ModuleNotFoundError:
        raise UserError(
            f"POOL={named!r} needs the package distributed, which set-up leaves out; add it with "
            "`.venv/bin/python -m pip install distributed`, here and on the workers' machines"
        ) from None
    return f"tcp://{found[1]}:{found[2]}"


def can_travel(point: Point) -> bool:
    """Whether another machine can compute a point and check its code: it measures no time, and nothing in it is a
    notebook cell's own, which pickle would send as it is."""
    if point.alone:
        return False
    try:
        pickled = cloudpickle.dumps((point.function, point.arguments))
    except Exception:  # cloudpickle raises any; a local worker says what is wrong
        return False
    return all(argument != "__main__" for _, argument, _ in pickletools.genops(pickled))


class Cluster:
    """The workers of a Dask scheduler, as `compute` sees any pool."""

    def __init__(self, client: Client) -> None:
        self._client, self._executor = client, client.get_executor(pure=False)

    @property
    def workers(self) -> int:
        """How many there are now: they may come and go. UserError if the scheduler is gone."""
        try:
            return len(self._client.nthreads())
        except OSError as error:
            raise UserError(f"{GONE} ({error}); {AGAIN}") from None

    @property
    def size(self) -> int:
        """Points to have in flight now: two a worker, so that none waits for this machine."""
        return 2 * max(1, self.workers)

    def submit(self, task: Task) -> Future[Failure | Computed]:
        about = task.about
        return self._executor.submit(_compute, task.label, about["code"], about["key"], cloudpickle.dumps(task))


@contextmanager
def connected(named: str) -> Iterator[Cluster]:
    """The cluster at this address of `check_pool`. UserError if nobody answers, it has no workers, or one of them
    computes several points in one process."""
    from distributed import Client

    try:
        client = Client(named, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise UserError(f"no Dask scheduler answers at {named} ({error}); start it with `dask scheduler`") from None
    with closing(client):
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            start = f"start them with `dask worker {named} --nthreads 1`"
            raise UserError(f"the Dask scheduler at {named} has no workers; {start}") from None
        if several := [worker for worker, threads in client.nthreads().items() if threads > 1]:
            raise UserError(
                f"the worker {several[0]} has more than one thread, and a point needs a process of its own; start it "
                f"with `dask worker {named} --nworkers N --nthreads 1`"
            )
        yield Cluster(client)


#: The project's code in a worker of a cluster as it was when a point first needed it. What is imported stays in memory,
#: so a checkout that has changed since must not pass for what runs.
_sources = functools.cache(Sources)
_machine = functools.cache(machine)


def _compute(label: str, code: str, key: str, pickled: bytes) -> Failure | Computed:
    """In a worker of a cluster: compute one point if the code here and the files that it reads are those of the run."""
    from distributed import get_worker

    who = f"the worker {get_worker().address}"
    remedy = "give it the run's checkout and start it again"
    try:
        task: Task = pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        cause = f"{who} lacks what the run's code {code[:12]} has ({error}); {remedy}"
        return Failure(label, "refused", cause)
    try:
        here = keys.identify(task.point.function, task.point.arguments, _sources())
    except UserError as error:
        return Failure(label, "refused", f"{who}: {error}")
    if here.code != code:
        return Failure(label, "refused", f"{who} has the code {here.code[:12]}, the run has {code[:12]}; {remedy}")
    if here.key != key:
        cause = f"{who} has other content in a file that the point reads; copy the run's file to the same path there"
        return Failure(label, "refused", cause)
    outcome = computed(task)
    if isinstance(outcome, Computed):
        outcome.about["made"] = _machine()
    return outcome
