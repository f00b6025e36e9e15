"""Runs that are killed, starved of disk, doubled, or whose clock jumps: nothing finished is lost, nothing half-written
is used.

What one process does to its own files is tested in test_experiment.py and test_cli.py (kill -9 between points, Ctrl-C,
a worker or a kernel that is killed, damaged files). Here are whole commands, as a user starts them.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_project import FakeProject

from repro import hashing
from repro.cli import main
from repro.errors import UserError
from repro.harness import experiment, notebook
from repro.harness.store import locked
from repro.harness.workers import left_in_flight
from repro.setup.environment import ROOT

pytestmark = pytest.mark.heavy(30)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path / "a folder {with} ünïcode", monkeypatch)


def command(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "repro", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def is_whole(project: FakeProject) -> None:
    """Every file that a reader may meet is whole, whenever the run was killed."""
    for name in ("results", "figures"):
        for path in (project.folder / name).rglob("[!.]*.json"):
            if ".cache" not in path.parts:
                assert json.loads(path.read_bytes())
        for path in (project.folder / name).rglob("[!.]*.png"):
            assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


# Killed


def test_a_command_killed_again_and_again_ends_with_the_same_bytes(project: FakeProject) -> None:
    """kill -9 of the command at random moments; its kernel and workers follow it, and the next run goes on."""
    rng = random.Random(7)
    arguments = ("run", "tiny", "-p", "sleep=0.3")
    computed: list[str] = []
    for _ in range(2):
        process = command(*arguments)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=rng.uniform(2.0, 4.0))
        process.send_signal(signal.SIGKILL)
        process.wait()
        is_whole(project)
        computed += project.calls()
    assert command(*arguments).wait(timeout=120) == 0
    computed += project.calls()
    assert 6 <= len(computed) <= 6 + 2  # a kill costs at most the point that was in flight
    where = project.folder / "results" / "custom"
    names = ("tiny/runs.csv", "figures/tiny.png", "figures/tiny.svg", "figures/tiny.runs.csv", "figures/claims.json")
    resumed = {name: (where / name).read_bytes() for name in names}
    shutil.rmtree(project.folder / "results")
    run = project.open(sleep=0.3)
    run.draw(run.rows())
    run.judge(run.rows())
    assert {name: (where / name).read_bytes() for name in names} == resumed


def test_what_killed_runs_were_computing_is_said_in_one_short_line(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert left_in_flight(tmp_path) == ""
    many = [f"tiny: one(x={number}, y='{'z' * 60}')" for number in range(7)]
    for labels, end in ((["tiny: one(x=0)"], "one(x=0)"), (many, " ... and 6 others")):
        left = [tmp_path / f".in-flight.{process}.json" for process in (gone.pid, os.getpid())]
        for path in left:
            path.write_text(json.dumps(labels))
        found = left_in_flight(tmp_path)
        assert found.startswith("tiny: one(x=0") and found.endswith(end) and len(found) < 80
        assert [path.exists() for path in left] == [False, True]


def test_a_kernel_that_crashes_is_explained(project: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    """Papermill's own command would end with 138 and a traceback, whatever killed the kernel. (Memory: test_cli.py.)"""
    project.write_notebook('scale = "paper"\noverrides = {}', "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert main(["run", "tiny"]) == 1
    (message,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("repro: ")]
    assert (
        "the notebook's kernel was killed" in message and "JOBS=1" in message and "Finished points are kept" in message
    )


# Two at once


def test_the_second_of_two_commands_is_refused_and_the_first_one_ends_well(
    project: FakeProject, capfd: pytest.CaptureFixture[str]
) -> None:
    first = command("reproduce")
    lock = project.folder / "results" / ".cache" / "run.lock"
    deadline = time.monotonic() + 60
    while not (lock.exists() and lock.read_text()):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.05)
    for arguments in (["reproduce"], ["run", "tiny"]):
        assert main(arguments) == 2
        message = capfd.readouterr().err
        assert message.count("\n") == 1
        assert f"another run holds {lock}: process {first.pid}, python -m repro reproduce; wait until" in message
    assert first.wait(timeout=120) == 0
    assert main(["verify", "tiny"]) == 0


def test_the_lock_goes_with_its_process(project: FakeProject, tmp_path: Path) -> None:
    path = tmp_path / "below" / "x.lock"
    program = (
        "import sys, time; from pathlib import Path; from repro.harness.store import locked\n"
        "with locked(Path(sys.argv[1]), False, 'me'): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another run holds .*: me; wait"), locked(path, wait=False):
        raise AssertionError("two hold it")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(path, wait=False, about="longer than before"):
        pass
    with locked(path, wait=True):
        assert path.read_text() == "longer than before"


def test_two_notebooks_may_judge_at_once(project: FakeProject) -> None:
    """The ledger is read, changed and written: without a lock one of two loses its verdicts."""
    program = """
import sys, time
from repro.report import claims
from repro.harness import experiment
from repro.report.claims import ledger

read = ledger.read
def slow(directory):
    found = read(directory)
    time.sleep(0.5)
    return found
ledger.read = slow
run = experiment.open("tiny")
numbers = [claim for claim in claims.load().values() if isinstance(claim.value, (int, float))]
claim = numbers[int(sys.argv[1])]
judgement = claims.Judgement(claim.id, claim.value, "exact")
object.__setattr__(run, "stem", "tiny" + sys.argv[1])
run.study.judge = lambda rows, params: [judgement]
run.judge({})
"""
    runs = [subprocess.Popen([sys.executable, "-c", program, str(number)]) for number in range(2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    ledger = json.loads((project.folder / "figures" / "claims.json").read_text(encoding="utf-8"))
    assert {entry["experiment"] for entry in ledger if entry["experiment"]} == {"tiny0", "tiny1"}


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 kB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up(
    project: FakeProject, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(small_disk / "results"))
    monkeypatch.setenv("IPYTHONDIR", str(project.folder / "ipython"))
    run = project.open()
    monkeypatch.setenv("REPRO_FIGURES_DIR", str(project.folder / "figures"))
    # Room for some of the points and not for all: each takes at least one page of 4 kB.
    filler = small_disk / "filler"
    space = shutil.disk_usage(small_disk).free
    filler.write_bytes(b"\0" * (space - 5 * 4096))
    with pytest.raises(
        UserError, match="cannot write .*No space left on device; free space on the disk at .*small disk"
    ):
        run.rows()
    kept = sorted((small_disk / "results" / "tiny" / "points").glob("[0-9a-f]*.json"))
    assert 1 <= len(kept) < 6 and all(json.loads(path.read_bytes())["tables"]["runs"] for path in kept)
    assert main(["run", "tiny"]) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("repro: cannot ") and "space" in message
    filler.unlink()
    project.calls()
    assert len(project.open().rows()["runs"]) == 6 and len(project.calls()) == 6 - len(kept)


def test_a_closed_folder_for_figures_is_named_before_any_work(
    project: FakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("REPRO_FIGURES_DIR", str(tmp_path / "file"))
    assert main(["run", "tiny"]) == 2
    assert "figures cannot be written to" in capfd.readouterr().err and project.calls() == []


def test_a_disk_that_is_full_when_the_notebook_is_written(
    project: FakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("papermill.execute_notebook", full)
    with pytest.raises(UserError, match="No space left on device; make that folder writable and free space there"):
        notebook.execute(project.open(), {})


# Clocks


def test_a_clock_that_jumps_changes_nothing(project: FakeProject) -> None:
    """Results are kept by content: files from the future or the past are as good as any, edited ones are noticed."""
    project.open().rows()
    project.calls()
    files = [path for name in ("results", "experiments", "notebooks") for path in (project.folder / name).rglob("*.*")]
    study = Path(project.study().__file__)
    for year in (0, 2**32):
        for path in [*files, study]:
            os.utime(path, (year, year))
        project.open().rows()
        assert project.calls() == []
        slope = "SLOPE = 0.1" if year == 0 else "SLOPE = 0.2"
        project.edit_study(slope, "SLOPE = 0.2" if year == 0 else "SLOPE = 0.3")
        os.utime(study, (year + 1, year + 1))
        project.open().rows()
        assert len(project.calls()) == 6


def test_nothing_but_two_dates_is_read_off_a_clock_that_can_jump() -> None:
    """Durations come from the monotonic clocks; the wall clock is in the manifest (`utc`) and in what a server answers
    (OpenAI's `created`), and decides nothing."""
    found = []
    for path in sorted((ROOT / "repro").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = f"{node.value.id}.{node.attr}"
                if name in (
                    "time.time",
                    "time.time_ns",
                    "time.localtime",
                    "datetime.now",
                    "datetime.today",
                    "date.today",
                ):
                    found.append((path.name, name))
    assert sorted(found) == [("answers.py", "time.time"), ("machine.py", "datetime.now")]


def test_a_set_up_waits_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.setup import bootstrap

    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from repro.setup import bootstrap\n"
        "bootstrap.ROOT = Path(sys.argv[1])\n"
        "with bootstrap.one_at_a_time(): print('held', flush=True); time.sleep(0.7); Path(sys.argv[1], 'done').touch()"
    )
    other = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with bootstrap.one_at_a_time():
        assert (tmp_path / "done").exists()
    other.wait()


def test_points_are_safe_where_there_are_no_locks(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def none(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    with locked(project.folder / "x.lock", wait=False), locked(project.folder / "x.lock", wait=False):
        assert len(experiment.open("tiny").rows()["runs"]) == 6
    assert hashing.leftovers(project.folder) == []
