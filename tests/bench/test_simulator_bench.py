"""`make bench`: what is measured on a GPU, and that its absence is said and is no failure."""

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from repro.bench import simulator as bench
from repro.setup.environment import ROOT


@pytest.fixture
def started(monkeypatch):
    """The commands that were started; those of a module in `fails` end with its status."""
    commands, fails = [], {}

    def run(command, **options):
        commands.append((command, options))
        return SimpleNamespace(returncode=fails.get(command[2], 0))

    monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(bench.doctor, "probe_torch", dict)
    monkeypatch.setattr(bench.doctor, "probe_driver", dict)
    return commands, fails


def test_without_a_gpu_nothing_is_started_and_the_reason_is_said(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.doctor, "why_no_gpu", lambda facts: "no NVIDIA driver")
    assert bench.measure_gpu(tmp_path) == 0
    assert started[0] == []
    said = capsys.readouterr().out
    assert "kernels, end_to_end, serving: not measured (no NVIDIA driver)" in said


def test_on_a_gpu_each_program_writes_a_folder_afresh_and_a_failure_does_not_stop_the_others(
    started, monkeypatch, tmp_path
):
    monkeypatch.setattr(bench.doctor, "why_no_gpu", lambda facts: None)
    commands, fails = started
    fails |= {"repro.bench.end_to_end": 3, "repro.bench.serving": 2}
    old = tmp_path / "serving" / "serving.csv"
    old.parent.mkdir()
    old.write_text("rows of an earlier call")
    assert bench.measure_gpu(tmp_path) == 3
    assert not old.exists()
    assert [command[:5] for command, _ in commands] == [
        [sys.executable, "-m", module, "--out", str(tmp_path / name)]
        for name, module in (
            ("kernels", "repro.bench.kernels"),
            ("end_to_end", "repro.bench.end_to_end"),
            ("serving", "repro.bench.serving"),
        )
    ]
    assert {options["cwd"] for _, options in commands} == {ROOT}  # one of them reads a file of the project


@pytest.mark.parametrize("name", bench.ON_GPU)
def test_the_programs_take_the_arguments_that_they_are_given(name, tmp_path):
    module, *arguments = bench.ON_GPU[name]
    assert find_spec(module) is not None
    told = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(argument in told for argument in ["--out", *arguments] if argument.startswith("--"))
