"""Runs of a tiny experiment: what is computed, kept, recomputed, and what survives being killed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_project import FakeProject

from repro import hashing
from repro.errors import UserError
from repro.harness import experiment, store
from repro.harness import workers as runner
from repro.harness.store import PointStore
from repro.harness.tables import Rows, csv_of, tables_hash
from repro.harness.workers import PointError
from repro.hashing import sha256_file
from repro.report.embedding import read_embedded

pytestmark = pytest.mark.heavy(20)

ALL = ["1.0 0", "1.0 1", "2.0 0", "2.0 1", "3.0 0", "3.0 1"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path / "a folder {with} ünïcode", monkeypatch)


@pytest.fixture
def with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path / "a folder {with} ünïcode", monkeypatch, processes=True)


def point_files(project: FakeProject) -> list[Path]:
    return sorted((project.folder / "results" / "tiny" / "points").glob("[0-9a-f]*.json"))


def test_rows_come_in_the_order_of_the_points_whoever_computes_them(
    with_workers: FakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOBS", "2")
    with_workers.open(sleep=0.01).rows()
    csv = with_workers.folder / "results" / "custom" / "tiny" / "runs.csv"
    by_two = csv.read_bytes()
    for path in point_files(with_workers):
        path.unlink()
    monkeypatch.setenv("JOBS", "1")
    rows = with_workers.open(sleep=0.01).rows()["runs"]
    assert csv.read_bytes() == by_two
    assert list(zip(rows["rate"], rows["seed"], strict=True)) == [
        (3.0, 0),
        (3.0, 1),
        (1.0, 0),
        (1.0, 1),
        (2.0, 0),
        (2.0, 1),
    ]
    assert list(rows.columns)[:4] == ["evidence", "device", "seed", "trace_hash"]  # as the study gives them
    assert with_workers.open(sleep=0.01).rows().hash() == tables_hash({"runs": sha256_file(csv)})
    assert by_two.splitlines()[1] == b"exact,none,0,,3.0,0.3"


def test_finished_points_are_never_computed_again(project: FakeProject) -> None:
    first = project.open().rows()
    assert project.calls() == ALL
    again = project.open().rows()
    assert project.calls() == [] and again["runs"].equals(first["runs"])
    project.open(seeds=[1, 2]).rows()
    assert project.calls() == ["1.0 2", "2.0 2", "3.0 2"]
    assert len(project.open("smoke").rows()["runs"]) == 3 and project.calls() == []


def test_a_result_that_is_deleted_in_the_midst_is_computed_again(
    project: FakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, deleted = runner.compute, []

    def careless(tasks: list, kept: store.PointStore, *others: object) -> None:
        compute(tasks, kept, *others)
        if tasks and (len(deleted) < 2 or always):
            deleted.append(kept.path(tasks[0].key).unlink())

    monkeypatch.setattr(runner, "compute", careless)
    always = False
    assert len(project.open().rows()["runs"]) == 6 and len(project.calls()) == 6 + 2
    always = True
    with pytest.raises(UserError, match="finished points vanish from .*points; end what removes them"):
        project.open(seeds=[5]).rows()


def test_equal_points_count_once(project: FakeProject) -> None:
    assert len(project.open(rates=[1, 1.0], seeds=[0]).rows()["runs"]) == 1


@pytest.mark.parametrize("damage", ["truncated", "edited", "exchanged", "empty", "not JSON", "nested"])
def test_damaged_results_are_computed_again_and_never_used(project: FakeProject, damage: str) -> None:
    before = project.open().rows()
    project.calls()
    path, other = point_files(project)[:2]
    text = path.read_text()
    path.write_text(
        {
            "truncated": text[: len(text) // 2],
            "edited": text.replace('"latency": 0', '"latency": 5').replace('"latency": 1', '"latency": 6'),
            "exchanged": other.read_text(),
            "empty": "",
            "not JSON": "\x00\x01",
            "nested": "[" * 100_000,
        }[damage]
    )
    rows = project.open().rows()
    assert len(project.calls()) == 1 and rows["runs"].equals(before["runs"]) and path.read_text() != ""
    assert PointStore(path.parent).read(path.stem) is not None


def test_editing_what_computes_recomputes_and_editing_what_draws_does_not(project: FakeProject) -> None:
    project.open().rows()
    project.calls()
    project.edit_study("figure.add_subplot()", 'figure.add_subplot(title="new")')
    project.edit_study("    return []\n", "    return list()\n")
    project.edit_study('    """A helper."""', '    """Another docstring."""  # and a comment')
    project.open().rows()
    assert project.calls() == []
    project.edit_study("SLOPE = 0.1", "SLOPE = 0.2")  # a constant that only the helper of the point's function uses
    rows = project.open().rows()
    assert project.calls() == ALL and rows["runs"]["latency"].iloc[0] == pytest.approx(0.6)


def test_a_data_file_counts_by_content_not_by_name(project: FakeProject, tmp_path: Path) -> None:
    lengths, moved = tmp_path / "lengths.csv", tmp_path / "other" / "lengths.csv"
    moved.parent.mkdir()
    lengths.write_text("1,2\n")
    moved.write_text("1,2\n")
    project.open(lengths=str(lengths)).rows()
    assert project.calls() == ALL
    project.open(lengths=str(moved)).rows()
    assert project.calls() == []
    moved.write_text("1,3\n")
    project.open(lengths=str(moved)).rows()
    assert project.calls() == ALL


@pytest.mark.parametrize(
    "fault, error, cause",
    [
        ("user", UserError, "this rate cannot be"),
        ("bug", PointError, "ZeroDivisionError: by nought"),
        ("nan", PointError, "'latency' is nan"),
    ],
)
def test_a_point_that_fails_is_named_and_the_others_are_kept(
    project: FakeProject, fault: str, error: type[Exception], cause: str
) -> None:
    with pytest.raises(error) as caught:
        project.open(fault=fault).rows()
    message = str(caught.value)
    assert "tiny: one(rate=2.0, seed=" in message and cause in message and "2 of 6 points failed" in message
    assert len(point_files(project)) == 4
    project.calls()
    with pytest.raises(error):
        project.open(fault=fault).rows()
    assert {call.split()[0] for call in project.calls()} == {"2.0"}


@pytest.mark.parametrize(
    "fault, cause", [("bug", "ZeroDivisionError: by nought"), ("killed", "its worker process was killed twice")]
)
def test_so_is_one_that_fails_in_a_worker_process(with_workers: FakeProject, fault: str, cause: str) -> None:
    test_a_point_that_fails_is_named_and_the_others_are_kept(with_workers, fault, PointError, cause)


def test_a_run_killed_at_any_moment_resumes(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    script = project.folder / "go.py"
    script.write_text(
        "from repro.harness import experiment\n"
        "if __name__ == '__main__':\n    experiment.open('tiny', overrides={'sleep': 0.4}).rows()\n"
    )
    monkeypatch.setenv("JOBS", "2")
    process = subprocess.Popen([sys.executable, str(script)], env=os.environ, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(point_files(project)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1.2)  # the workers notice that they are alone and end
    kept = {path: path.stat().st_mtime_ns for path in point_files(project)}
    assert 2 <= len(kept) < 6
    project.calls()
    done = subprocess.run([sys.executable, str(script)], env=os.environ, check=True, capture_output=True, text=True)
    assert 0 < len(project.calls()) <= 6 - len(kept)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert "an earlier run was killed while it computed tiny: one(" in done.stdout
    assert [path.name for path in point_files(project)[0].parent.glob(".*")] == []


def test_measurements_run_with_nothing_beside_them(with_workers: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBS", "2")
    with_workers.edit_study("weight=rate)", "weight=rate, alone=rate > 1)")
    with_workers.edit_study(
        "    time.sleep(sleep)\n",
        "    time.sleep(0.1)\n    log = open(os.environ['FAKE_LOG'], 'a')\n"
        "    log.write(f'end {rate} {seed}\\n'); log.close()\n",
    )
    with_workers.open().rows()
    lines = (with_workers.folder / "log").read_text().splitlines()
    assert {line.split()[-2] for line in lines[:4]} == {"1.0"}  # these two may overlap
    assert lines[5::2] == [f"end {line}" for line in lines[4::2]] and len(lines) == 12


def test_two_runs_at_once_do_no_harm(project: FakeProject) -> None:
    script = project.folder / "go.py"
    script.write_text(
        "from repro.harness import experiment\nif __name__ == '__main__':\n    experiment.open('tiny').rows()\n"
    )
    runs = [subprocess.Popen([sys.executable, str(script)], env={**os.environ, "JOBS": "1"}) for _ in range(2)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0]
    project.calls()
    assert len(project.open().rows()["runs"]) == 6 and project.calls() == []


def test_a_folder_that_cannot_be_written_is_named_before_any_work(
    project: FakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(blocked))
    with pytest.raises(UserError, match=f"cannot write {blocked}"):
        project.open().rows()
    assert project.calls() == []


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "kept.json"
    hashing.write_atomically(path, b"old")
    monkeypatch.setattr(hashing.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        hashing.write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_rows_hold_plain_values_only() -> None:
    import numpy as np

    returned = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": None, "e": "text"}
    tables = store.check_tables(returned, "t")
    assert tables == {"t": [{"a": 3, "b": 0.5, "c": True, "d": None, "e": "text"}]}
    assert [type(value) for value in tables["t"][0].values()] == [int, float, bool, type(None), str]
    assert store.check_tables({"t": [returned, returned], "u": returned, "v": []}, None) == {
        "t": 2 * tables["t"],
        "u": tables["t"],
        "v": [],
    }
    for bad in (3, [3], {"a": [1]}, {"a": float("inf")}, {1: 2}, {"a": np.zeros(3)}):
        with pytest.raises((TypeError, ValueError)):
            store.check_tables(bad, "t")
    for bad in ([returned], {"t": 3}, {1: returned}, returned):
        with pytest.raises(TypeError):
            store.check_tables(bad, None)


def test_figures_have_equal_bytes_for_equal_rows_and_say_what_they_show(project: FakeProject) -> None:
    run = project.open()
    rows = run.rows()
    run.draw(rows)
    files = sorted((project.folder / "figures").glob("tiny.*"))
    assert [path.name for path in files] == ["tiny.json", "tiny.png", "tiny.runs.csv", "tiny.svg"]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    project.open().draw(project.open().rows())
    assert [path.read_bytes() for path in files] == before
    png, svg = map(read_embedded, (files[1], files[3]))
    assert png == svg
    assert files[2].read_bytes() == csv_of(rows["runs"])
    sidecar = json.loads(files[0].read_bytes())
    table = {"file": "tiny.runs.csv", "rows": 6, "keys": ["rate", "seed"], "sha256": sha256_file(files[2])}
    assert sidecar == {**png, "tables": {"runs": table}, "cheap": True, "parameters": sidecar["parameters"]}
    assert sidecar["parameters"]["rates"] == [3.0, 1.0, 2.0]
    assert png["rows_hash"] == rows.hash() and png["evidence"] == ["exact"] and png["devices"] == ["none"]
    assert {name: png[name] for name in run.hashes()} == run.hashes()
    manifest = json.loads(run.manifest_path.read_bytes())
    assert manifest["figures"] == {"tiny": png["rows_hash"]} and manifest["points"] == 6
    assert manifest["computed_by"][0]["python"] == ".".join(map(str, sys.version_info[:3]))

    run.draw(
        Rows({"runs": rows["runs"][rows["runs"]["seed"] == 0]}, rows.keys_of)
    )  # other rows: it says so, and claims no code
    assert read_embedded(files[1])["rows_hash"] != png["rows_hash"]
    assert read_embedded(files[1])["code_hash"] is None


@pytest.mark.parametrize(
    "scale, overrides, variant",
    [
        ("smoke", {}, "smoke"),
        ("paper", {"seeds": [5]}, "custom"),
        ("smoke", {"seeds": [5]}, "custom"),
        ("paper", {"seeds": [0, 1]}, "paper"),  # the same as in the file
    ],
)
def test_only_the_committed_parameters_at_paper_scale_write_to_figures(
    project: FakeProject, scale: str, overrides: dict[str, object], variant: str
) -> None:
    run = project.open(scale, **overrides)
    run.draw(run.rows())
    run.judge(run.rows())
    where = project.folder / ("figures" if variant == "paper" else f"results/{variant}/figures")
    names = ["claims.json", "machines.json", "tiny.json", "tiny.png", "tiny.runs.csv", "tiny.svg"]
    assert sorted(path.name for path in where.iterdir()) == names
    assert (project.folder / "figures").exists() is (variant == "paper")


def test_unknown_experiments_scales_and_bad_values_are_refused(
    project: FakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stem in ("tinny", "../tiny", "", "tiny.yaml"):
        with pytest.raises(UserError, match="unknown experiment .*; known: tiny"):
            experiment.open(stem)
    with pytest.raises(UserError, match="unknown scale 'big'; known: paper, smoke"):
        project.open("big")
    with pytest.raises(UserError, match="rates must be positive, not -1"):
        project.open(rates=[1, -1])
    with pytest.raises(UserError, match="overrides: unknown parameter 'sedes'.*did you mean 'seeds'"):
        project.open(sedes=[1])
    for jobs in ("0", "two", "-1", "1.5"):
        monkeypatch.setenv("JOBS", jobs)
        with pytest.raises(UserError, match="JOBS="):
            project.open().rows()
    assert project.calls() == []
