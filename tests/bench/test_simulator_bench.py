"""`make bench`: what is measured on a GPU, that its absence is said and is no failure; each benchmark's options."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from repro import cli
from repro.bench import processes
from repro.bench.catalogue import BENCHMARKS
from repro.report import paper
from repro.setup.environment import ROOT


@pytest.fixture
def started(monkeypatch):
    """The commands that were started; those of a benchmark in `fails` end with its status."""
    commands, fails = [], {}

    def run(command, **options):
        commands.append((command, options))
        return SimpleNamespace(returncode=fails.get(command[4], 0))

    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(processes.doctor, "probe_torch", dict)
    monkeypatch.setattr(processes.doctor, "probe_driver", dict)
    return commands, fails


def test_without_a_gpu_nothing_is_started_and_the_reason_is_said(started, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processes.doctor, "why_no_gpu", lambda facts: "no NVIDIA driver")
    assert processes.measure_gpu(tmp_path) == 0
    assert started[0] == []
    said = capsys.readouterr().out
    assert "kernels, end_to_end, serving: not measured (no NVIDIA driver)" in said


def test_on_a_gpu_each_program_writes_a_folder_afresh_and_a_failure_does_not_stop_the_others(
    started, monkeypatch, tmp_path
):
    monkeypatch.setattr(processes.doctor, "why_no_gpu", lambda facts: None)
    commands, fails = started
    fails |= {"end_to_end": 3, "serving": 2}
    old = tmp_path / "serving" / "serving.csv"
    old.parent.mkdir()
    old.write_text("rows of an earlier call")
    assert processes.measure_all(tmp_path) == 3
    assert not old.exists()
    assert [command[:7] for command, _ in commands] == [
        [sys.executable, "-m", "repro", "bench", name, "--out", str(tmp_path / name)]
        for name in ("simulator", "kernels", "end_to_end", "serving")
    ]
    assert {options["cwd"] for _, options in commands} == {ROOT}


@pytest.mark.parametrize("name", processes.ON_GPU)
def test_the_programs_take_the_arguments_that_they_are_given(name, tmp_path):
    assert name in BENCHMARKS
    told = subprocess.run(
        [sys.executable, "-m", "repro", "bench", name, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert all(option in told for option in ["--out", *processes.ON_GPU[name]] if option.startswith("--"))


# Every benchmark

OPTIONS = {
    "simulator": [],
    "kernels": ["--contender"],
    "end_to_end": ["--model", "--dtype", "--runs", "--passes", "--requests", "--lengths", "--workload", "--plain"],
    "serving": ["--device", "--model", "--dtype", "--kv-slots", "--systems"],
    "mixed": [],
    "beams": ["--model", "--device", "--dtype", "--kv-gib", "--prompts", "--steps"],
    "anchors": [],
}


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_benchmark_is_listed_with_what_it_measures(capsys):
    listed = " ".join(help_of(capsys, "bench").split())
    assert set(OPTIONS) == set(BENCHMARKS)
    for name, description in BENCHMARKS.items():
        assert f" {name} {description.help}" in listed


@pytest.mark.parametrize("name", OPTIONS)
def test_every_benchmark_has_the_common_options_and_its_own(name, capsys):
    told = help_of(capsys, "bench", name)
    for option in ("--out", "--budget", "--only", "--also-code", "--commit", *OPTIONS[name]):
        assert f"  {option}" in told
    listed = re.sub(r"-\s+", "-", " ".join(told.split()))  # a line may end at a hyphen
    assert all(kind in listed for kind in (*BENCHMARKS[name].kinds, *BENCHMARKS[name].unasked))
    options = cli._parser().parse_args(["bench", name])
    assert options.only == BENCHMARKS[name].kinds and options.benchmark is BENCHMARKS[name]


def test_naming_benchmarks_imports_nothing_heavy():
    program = (
        "import sys; from repro import cli; cli._parser()\n"
        "assert not {'torch', 'numpy', 'pandas', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, env=os.environ)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["kernels"], "no CUDA GPU here, and bench kernels needs one"),
        (["end_to_end"], "no CUDA GPU here, and bench end_to_end needs one"),
        (["mixed"], "no CUDA GPU here, and bench mixed needs one"),
        (["end_to_end", "--runs", "12:orca"], "unknown system 'orca'"),
        (["end_to_end", "--lengths", "none.csv"], "none.csv is not there; name a CSV file"),
        (["beams", "--kv-gib", "0"], "kv_gib = 0.0 must be a finite number above 0"),
        (["simulator", "--budget", "soon"], "budget 'soon' is no length of time"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line_and_leaves_nothing(arguments, said, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *arguments, "--out", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("repro: ") and error.count("\n") == 1 and said in error
    assert not (tmp_path / "new").exists()


def test_anchors_are_solved_recorded_and_printed_as_the_profile_holds_them(tmp_path, monkeypatch, capsys):
    from repro.bench import anchors

    calls = []
    monkeypatch.setattr(anchors, "solve_anchor", lambda *point: calls.append(point) or 1.234)
    monkeypatch.setattr(anchors, "Parallel", lambda n_jobs: lambda jobs: [job[0](*job[1]) for job in jobs])
    splits = anchors.context_splits()
    for _ in range(2):  # the second call has nothing left to solve
        assert cli.main(["calibrate", "--out", str(tmp_path), "--only", "opt-175b"]) == 0
        said = capsys.readouterr().out.splitlines()
        for panel in ("opt-175b/sharegpt", "opt-175b/alpaca"):
            assert f"  {panel}: {{{', '.join(f'{split}: 1.23' for split in splits)}}}" in said
    assert calls == [
        (panel, split, *paper.points("fig12", panel, "vllm")[0])
        for panel in paper.figure("fig12")
        if panel.startswith("opt-175b")
        for split in splits
    ]
