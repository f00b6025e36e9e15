"""Points on other machines: a Dask cluster of two workers on this one, which the tests start and kill."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_project import FakeProject

from repro.errors import UserError
from repro.harness import cluster, keys
from repro.harness.cluster import can_travel, check_pool
from repro.harness.computing import Computed, Failure, Task, failure
from repro.harness.point import Point
from repro.harness.tables import Rows
from repro.harness.workers import PointError

needs_dask = "Dask is an extra that set-up leaves out: .venv/bin/python -m pip install distributed"


@pytest.mark.parametrize("named", ["dask://host", "dask://:8786", "tcp://host:1", "ray://host:1", "dask://host:70000"])
def test_what_is_no_address_of_a_scheduler_is_refused(named: str) -> None:
    with pytest.raises(UserError, match="POOL=.* must be dask://HOST:PORT"):
        check_pool(named)


def test_without_dask_its_address_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UserError, match="needs the package distributed.*pip install distributed"):
        check_pool("dask://host:8786")
    assert check_pool("") == ""


def test_what_measures_time_or_is_a_notebook_cells_own_stays_here() -> None:
    cell = type(os.path.join)(compile("def of_a_cell(): pass", "", "exec").co_consts[0], {"__name__": "__main__"})
    cell.__module__ = "__main__"
    assert can_travel(Point(partial, {"path": Path("a.csv"), "function": len}))
    assert not can_travel(Point(partial, {}, alone=True))
    assert not can_travel(Point(cell, {}))
    assert not can_travel(Point(partial, {"policies": {"mine": cell}}))
    assert not can_travel(Point(partial, {"lock": threading.Lock()}))


def test_a_worker_refuses_what_it_would_compute_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(get_worker=lambda: SimpleNamespace(address="tcp://there:1"))
    monkeypatch.setitem(sys.modules, "distributed", here)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("1,2\n")
    point = Point(_name, {"name": str(lengths)}, "runs")
    same = keys.identify(point.function, point.arguments)
    task = pickle.dumps(Task("k", "a point", point, vars(same)))

    def asked(code: str = same.code, key: str = same.key, pickled: bytes = task) -> object:
        return cluster._compute("a point", code, key, pickled)

    computed = asked()
    assert isinstance(computed, Computed) and computed.tables == {"runs": [{"name": str(lengths)}]}
    assert "made" in computed.about and computed.about["seconds"] >= 0
    lengths.write_text("1,3\n")
    lacking = pickle.dumps(Rows).replace(b"Rows", b"Cols")
    for refused, words in (
        (asked(), "has other content in a file"),
        (asked(code="0" * 64), f"has the code {same.code[:12]}, the run has 000000000000"),
        (asked(pickled=lacking), "lacks what the run's code .* has .*Cols"),
    ):
        assert isinstance(refused, Failure) and refused.kind == "refused"
        assert re.search(f"the worker tcp://there:1 {words}", refused.cause), refused


def _name(name: str) -> dict[str, str]:
    return {"name": name}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    """Its points say which process computes them."""
    made = FakeProject(tmp_path, monkeypatch, processes=True)
    made.edit_study('log.write(f"{rate} {seed}\\n")', 'log.write(f"{os.getpid()} {rate} {seed}\\n")')
    return made


@pytest.fixture
def workers(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    """Process -> address of the two workers of a cluster, which POOL names. They know no folder of results."""
    distributed = pytest.importorskip("distributed", reason=needs_dask)
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(project.folder / "nobody's"))
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(**settings) as made, distributed.Client(made, set_as_default=False) as client:
        monkeypatch.delenv("REPRO_RESULTS_DIR")
        monkeypatch.setenv("POOL", made.scheduler_address.replace("tcp://", "dask://"))
        yield {process: address for address, process in client.run(os.getpid).items()}


def kept(project: FakeProject) -> list[dict[str, object]]:
    folder = project.folder / "results" / "tiny" / "points"
    return [json.loads(path.read_text()) for path in folder.glob("[0-9a-f]*.json")]


def test_workers_compute_and_this_process_keeps_the_same_rows(
    project: FakeProject, workers: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = project.open(sleep=0.05).rows()
    assert {int(call.split()[0]) for call in project.calls()} <= set(workers)
    assert len(kept(project)) == 6 and not (project.folder / "nobody's").exists()
    assert all(point["made"]["python"] for point in kept(project))
    monkeypatch.setenv("POOL", "")
    for path in (project.folder / "results" / "tiny" / "points").glob("*.json"):
        path.unlink()
    assert project.open(sleep=0.05).rows().hash() == rows.hash()
    assert not {int(call.split()[0]) for call in project.calls()} & set(workers)


def test_a_killed_workers_point_is_computed_by_another(project: FakeProject, workers: dict[int, str]) -> None:
    def kill() -> None:
        while not (log.is_file() and log.read_text().endswith("\n")):
            time.sleep(0.02)
        killed.append(int(log.read_text().split()[0]))
        os.kill(killed[0], signal.SIGKILL)

    killed: list[int] = []
    log = project.folder / "log"
    killer = threading.Thread(target=kill)
    killer.start()
    rows = project.open(sleep=0.5).rows()["runs"]
    killer.join()
    computed = [call.split(maxsplit=1) for call in project.calls()]
    again = [point for process, point in computed if int(process) == killed[0]]
    assert killed[0] in workers and len(rows) == 6
    assert any(int(process) != killed[0] and point == again[0] for process, point in computed)


def test_a_worker_with_other_code_is_refused_by_both_hashes(project: FakeProject, workers: dict[int, str]) -> None:
    project.open().rows()
    project.calls()
    project.edit_study("SLOPE = 0.1", "SLOPE = 0.2")  # the workers keep in memory what they have imported
    with pytest.raises(UserError, match=r"worker tcp://.* has the code [0-9a-f]{12}, the run has [0-9a-f]{12}; give"):
        project.open().rows()
    assert project.calls() == [] and len(kept(project)) == 6


def test_what_measures_time_is_computed_here(project: FakeProject, workers: dict[int, str]) -> None:
    project.edit_study("weight=rate)", "weight=rate, alone=rate > 1)")
    project.open().rows()
    calls = [call.split() for call in project.calls()]
    assert {rate == "1.0" for process, rate, _ in calls if int(process) in workers} == {True}
    assert {rate == "1.0" for process, rate, _ in calls if int(process) not in workers} == {False}


def test_a_point_that_fails_far_away_is_named_and_the_others_are_kept(
    project: FakeProject, workers: dict[int, str]
) -> None:
    with pytest.raises(PointError, match="(?s)one.rate=2.0, seed=.*ZeroDivisionError: by nought.*2 of 6 points failed"):
        project.open(fault="bug").rows()
    assert len(kept(project)) == 4


def test_a_scheduler_that_is_gone_is_one_line() -> None:
    class Gone:
        def nthreads(self) -> None:
            raise OSError("timed out")

        def get_executor(self, pure: bool) -> None:
            pass

    with pytest.raises(UserError, match="the Dask scheduler is gone .timed out.; finished points are kept"):
        cluster.Cluster(Gone()).size  # noqa: B018
    task = Task("k", "a point", Point(_name, {}), {})
    assert "the Dask scheduler is gone" in failure(task, CancelledError()).cause


def test_a_scheduler_that_nobody_runs_is_one_line(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason=needs_dask)
    monkeypatch.setattr("repro.harness.cluster._CONNECT_S", 1)
    monkeypatch.setenv("POOL", "dask://127.0.0.1:9")
    with pytest.raises(UserError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        project.open().rows()
