"""The environment of a run: offline unless asked, inside the project, and never against what the user has set."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro.setup import environment
from repro.setup.environment import ROOT, prepare_environment

FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR")


@pytest.mark.parametrize(("hub", "offline"), [(None, True), ("", True), ("0", True), ("1", False)])
def test_the_hub_is_asked_only_on_request(hub: str | None, offline: bool) -> None:
    environ = {} if hub is None else {"HUB": hub}
    prepare_environment(environ)
    assert ("HF_HUB_OFFLINE" in environ) is offline
    assert ("HF_DATASETS_OFFLINE" in environ) is offline


def test_runs_keep_to_the_results_folder_and_a_reader_keeps_his_own_jupyter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "is_writable", lambda folder: True)
    run: dict[str, str] = {"REPRO_RESULTS_DIR": str(tmp_path)}
    prepare_environment(run)
    assert all(Path(run[name]).is_relative_to(tmp_path) for name in FOLDERS)
    lab: dict[str, str] = {}
    prepare_environment(lab, private=False)
    assert not set(FOLDERS) & set(lab)


def test_a_home_that_cannot_be_written_moves_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "is_writable", lambda folder: False)
    lab: dict[str, str] = {"REPRO_RESULTS_DIR": str(tmp_path)}
    prepare_environment(lab, private=False)
    assert all(Path(lab[name]).is_relative_to(tmp_path) for name in (*FOLDERS, "HF_HOME"))


def test_what_the_user_has_set_stays() -> None:
    own = {"HF_HUB_OFFLINE": "0", "MPLCONFIGDIR": "/mine", "TRITON_CACHE_DIR": "/mine too"}
    environ = dict(own)
    prepare_environment(environ)
    assert environ | own == environ


def test_threads_wait_without_spinning() -> None:
    """As OpenMP knows it, and GNU's and Intel's libraries of it: before torch is imported, which reads it once."""
    environ: dict[str, str] = {"KMP_BLOCKTIME": "200"}
    prepare_environment(environ)
    assert (environ["OMP_WAIT_POLICY"], environ["GOMP_SPINCOUNT"]) == ("PASSIVE", "0")
    assert environ["KMP_BLOCKTIME"] == "200"  # the user's own


def test_threads_of_a_model_wait_without_spinning_whoever_starts_the_process() -> None:
    pytest.importorskip("torch")
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    program = "import repro; repro.LLM; import os; print(os.environ['OMP_WAIT_POLICY'], os.environ['GOMP_SPINCOUNT'])"
    said = subprocess.run(
        [sys.executable, "-c", program], env={**environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert said.stdout == "PASSIVE 0\n", said.stderr


def test_writable_looks_at_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert environment.is_writable(tmp_path / "not" / "yet")
    (tmp_path / "file").touch()
    assert not environment.is_writable(tmp_path / "file" / "below")


def test_a_driver_is_one_that_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has a driver")
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for status, present in ((9, False), (0, True)):
        tool.write_text(f"#!/bin/sh\nexit {status}\n")
        tool.chmod(0o755)
        assert environment.nvidia_driver() is present
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.nvidia_driver() is False


def test_a_run_under_all_circumstances_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """No make, no network, a closed home, one core, an odd folder and locale; each alone:
    tests/environment_trials.py."""
    import environment_trials

    assert environment_trials.main(["together"]) == 0
    said = capsys.readouterr().out
    assert "together: 6 files, as they should be" in said or "together: not here" in said
