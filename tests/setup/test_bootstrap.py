"""Set-up is done once, again when the lock changes, from scratch after an interruption; each lack says so."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from repro.setup import bootstrap
from repro.setup.environment import ROOT

PIN = re.findall(r"^torch==(\S+)", bootstrap.LOCK.read_text(encoding="utf-8"), re.MULTILINE)[0]


class FakePip:
    """Stands in for pip: records what it is asked for, and "installs" torch as an empty dist-info folder."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refused: dict[str, list[str]] = {}
        self.interrupt_at = ""

    def __call__(self, env: Path, arguments: list[str], label: str) -> tuple[bool, list[str]]:
        wanted = arguments[-1]
        self.asked.append(wanted)
        if wanted == self.interrupt_at:
            raise KeyboardInterrupt
        if wanted in self.refused:
            return False, self.refused[wanted]
        if wanted.startswith("torch"):
            packages = bootstrap.site_packages(env)
            for old in packages.glob("torch-*.dist-info"):
                old.rmdir()
            (packages / f"torch-{wanted.split('==')[1].lstrip('=')}.dist-info").mkdir()
        return True, []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in an awkwardly named folder, on a machine without a driver and outside conda."""
    folder = tmp_path / "a checkout, é"
    folder.mkdir()
    for name in ("requirements.lock", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    monkeypatch.setattr(bootstrap, "ROOT", folder)
    monkeypatch.setattr(bootstrap, "LOCK", folder / "requirements.lock")
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: False)
    monkeypatch.delenv("CONDA_DEFAULT_ENV", raising=False)
    return folder


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A fake pip, and an environment that is quick to make: a link to this Python, a folder of packages."""

    def make(env: Path) -> None:
        if (env / ".unfinished").exists():
            shutil.rmtree(env)
        (env / "bin").mkdir(parents=True, exist_ok=True)
        (env / f"lib/python3.{sys.version_info.minor}/site-packages").mkdir(parents=True, exist_ok=True)
        if not bootstrap.interpreter(env).exists():
            bootstrap.interpreter(env).symlink_to(sys.executable)

    fake = FakePip()
    monkeypatch.setattr(bootstrap, "run_pip", fake)
    monkeypatch.setattr(bootstrap, "make_environment", make)
    return fake


STEPS = [f"torch=={PIN}+cpu", "requirements.lock", bootstrap.MODEL]


def test_set_up_is_done_once_and_again_when_the_lock_changes(project: Path, pip: FakePip) -> None:
    bootstrap.set_up()
    assert pip.asked == STEPS
    assert bootstrap.set_up() == project / ".venv/bin/python"
    assert pip.asked == STEPS
    with bootstrap.LOCK.open("a") as lock:
        lock.write("six==1.17.0\n")
    bootstrap.set_up()
    assert pip.asked == [*STEPS, *STEPS[1:]]  # the right torch is there already
    assert len(list((project / ".venv").glob(".ready-*"))) == 1


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_set_up_is_done_from_scratch(project: Path, pip: FakePip, step: str) -> None:
    pip.interrupt_at = step
    assert bootstrap.main([]) == 130
    (leftover := project / ".venv" / "half a package").touch()
    pip.interrupt_at = ""
    pip.asked.clear()
    assert bootstrap.main([]) == 0
    assert pip.asked == STEPS
    assert not leftover.exists()


def test_a_pip_that_fails_says_why_and_keeps_what_is_whole(
    project: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.refused["requirements.lock"] = ["ERROR: No space left on device"]
    assert bootstrap.main([]) == 2
    message = capsys.readouterr().err
    assert "No space left" in message
    assert "Free some disk" in message
    assert not list((project / ".venv").glob(".ready-*"))
    pip.refused.clear()
    pip.asked.clear()
    assert bootstrap.main([]) == 0
    assert pip.asked == STEPS[1:]


def test_an_index_without_a_cpu_build_gives_the_one_it_has(project: Path, pip: FakePip) -> None:
    pip.refused[f"torch=={PIN}+cpu"] = ["ERROR: No matching distribution found"]
    bootstrap.set_up()
    assert pip.asked == [STEPS[0], f"torch=={PIN}", *STEPS[1:]]


def test_without_a_network_the_first_refusal_is_final(
    project: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.refused[STEPS[0]] = ["WARNING: Retrying after connection broken by ...", "ERROR: No matching distribution"]
    assert bootstrap.main([]) == 2
    assert pip.asked == STEPS[:1]
    assert "check the network" in capsys.readouterr().err


def test_a_driver_that_appears_brings_the_cuda_build_and_one_that_goes_changes_nothing(
    project: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.set_up()
    pip.asked.clear()
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: True)
    bootstrap.set_up()
    assert pip.asked[0] == f"torch==={PIN}"
    pip.asked.clear()
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: False)
    bootstrap.set_up()
    assert pip.asked == []


def test_a_gpu_machine_whose_index_has_only_the_cpu_build_is_set_up_once(
    project: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.set_up()
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: True)
    for requirement in (f"torch==={PIN}", f"torch=={PIN}"):
        pip.refused[requirement] = ["ERROR: No matching distribution found"]
    bootstrap.set_up()
    pip.asked.clear()
    bootstrap.set_up()
    assert pip.asked == []


def test_a_missing_model_is_a_warning_and_is_not_asked_for_again_unbidden(
    project: Path, pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.refused[bootstrap.MODEL] = ["ERROR: no network"]
    assert bootstrap.main([]) == 0
    assert "make model" in capsys.readouterr().err
    pip.asked.clear()
    assert bootstrap.main([]) == 0
    assert pip.asked == []
    assert bootstrap.main(["model"]) == 1
    pip.refused.clear()
    assert bootstrap.main(["model"]) == 0


def test_our_conda_environment_is_used_and_any_other_is_not(
    project: Path, pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conda = tmp_path / "conda"
    (conda / "bin").mkdir(parents=True)
    (conda / "lib/python3.12/site-packages").mkdir(parents=True)
    monkeypatch.setenv("CONDA_PREFIX", str(conda))
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "base")
    assert bootstrap.prefix() == project / ".venv"
    monkeypatch.setenv("CONDA_DEFAULT_ENV", bootstrap.conda_name())
    assert bootstrap.set_up() == conda / "bin/python"
    assert bootstrap.set_up() == conda / "bin/python"
    assert pip.asked == STEPS
    assert not (project / ".venv").exists()


def test_a_python_that_is_too_old_is_told_so(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 1))
    assert bootstrap.main([]) == 2
    error = capsys.readouterr().err
    assert "Python 99.1 or newer is needed" in error
    assert error.count("\n") == 1
    for name in ("__init__", "setup/__init__", "setup/bootstrap", "setup/environment"):  # what it runs before that
        tree = ast.parse((ROOT / "repro" / f"{name}.py").read_text(encoding="utf-8"), feature_version=(3, 6))
        for node in ast.walk(tree):
            evaluated = getattr(node, "returns", None) or (isinstance(node, ast.arg) and node.annotation) or None
            assert isinstance(evaluated, (ast.Name, ast.Constant, type(None))), f"{name}: {ast.unparse(node)}"


def test_a_python_without_ensurepip_names_the_package_to_install(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ensurepip", None)  # as on Debian without python3-venv
    with pytest.raises(bootstrap.SetupError, match=r"apt install python3\.\d+-venv"):
        bootstrap.make_environment(project / ".venv")


def test_the_environment_finds_the_package_wherever_the_checkout_is_moved(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one test with a real virtual environment and pip (which is asked for nothing from outside)."""
    real = bootstrap.run_pip
    monkeypatch.setattr(bootstrap, "run_pip", lambda env, arguments, label: real(env, ["--version"], label))
    (project / "repro").mkdir()
    (project / "repro/__init__.py").touch()
    python = bootstrap.set_up()
    assert "pip " in (project / ".venv/setup.log").read_text(encoding="utf-8")
    moved = project.with_name("moved ü")
    project.rename(moved)
    where = subprocess.run(
        [moved / python.relative_to(project), "-c", "import repro; print(repro.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    ).stdout
    assert Path(where.strip()) == moved / "repro/__init__.py"


def test_the_lock_is_exact_and_holds_what_the_project_asks_for() -> None:
    lines = bootstrap.LOCK.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "-"))]
    exact = re.compile(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)( ; sys_platform == \"linux\")?")
    locked = {match[1]: match[2] for match in map(exact.fullmatch, pins) if match}
    assert len(locked) == len(pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in project["dependencies"] + project["optional-dependencies"]["test"]:
        name, _, version = asked.split(";")[0].partition("==")
        assert name in locked
        assert version in ("", locked[name])


def test_no_package_index_is_named() -> None:
    for name in ("Makefile", "requirements.lock", "environment.yml", "pyproject.toml", "repro/setup/bootstrap.py"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8"), name


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
class TestMake:
    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--no-print-directory", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)

    def test_help_is_the_default_and_lists_every_target(self) -> None:
        listing = self.make().stdout
        phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert phony is not None
        for target in phony[1].split():
            assert f"make {target} " in listing

    def test_the_variables_reach_the_command(self) -> None:
        run = self.make("-n", "reproduce", "SCALE=smoke", "LENGTHS=my é.csv", "ONLY=a b", "JOBS=3")
        command = " ".join(run.stdout.replace("\\\n", " ").split())
        assert command.endswith('-m repro reproduce --scale "smoke" --lengths "my é.csv" --only a b --jobs "3"')

    def test_without_a_python_one_line_says_what_to_do(self) -> None:
        run = self.make("setup", "PYTHON=/no/such python")
        assert run.returncode == 2
        assert run.stderr.startswith("error: Python 3.11 or newer is needed, and /no/such python is not; ")
