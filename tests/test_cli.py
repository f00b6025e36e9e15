"""The command line on a tiny experiment: notebooks are executed, errors are one line, nothing finished is lost."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from committed import TOURS, committed
from fake_project import CELLS, FakeProject

import repro
from repro.cli import main
from repro.harness.notebook import read_notebook
from repro.harness.tables import csv_of
from repro.report import embedding

pytestmark = pytest.mark.heavy(50)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path / "a folder {with} ünïcode", monkeypatch)


def written(project: FakeProject) -> list[str]:
    """The files that runs have left, without those of the points and of caches."""
    return sorted(
        str(path.relative_to(project.folder))
        for name in ("results", "figures")
        for path in (project.folder / name).rglob("*")
        if path.is_file() and not {"points", ".cache", ".matplotlib"} & set(path.parts)
    )


def test_reproduce_goes_on_after_a_failure(project: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    project.add_experiment("failing", fault="user")
    assert main(["reproduce"]) == 1
    output = capfd.readouterr()
    assert "repro: failing: one(rate=2.0, seed=0" in output.err and "Traceback" not in output.err
    assert "failing  FAILED in" in output.out and "tiny     done in" in output.out
    assert "tiny: 6/6 points, 6 computed in" in output.err  # the kernel's progress, live
    assert "claims: " in output.out and "figures/index.html" in output.out
    assert written(project) == [
        "figures/claims.json",
        "figures/index.html",
        "figures/machines.json",
        "figures/notebooks/notebook.css",
        "figures/notebooks/tiny.html",
        "figures/tiny.json",
        "figures/tiny.png",
        "figures/tiny.runs.csv",
        "figures/tiny.svg",
        "results/failing/failing.ipynb",
        "results/tiny/manifest.json",
        "results/tiny/runs.csv",
        "results/tiny/tiny.ipynb",
    ]
    executed = read_notebook(project.folder / "results" / "tiny" / "tiny.ipynb")
    assert all(cell["execution_count"] for cell in executed)
    made = json.loads((project.folder / "results" / "tiny" / "manifest.json").read_text())["computed_by"][0]
    assert made["command"] == "python -m repro reproduce"


@pytest.fixture
def drawn(project: FakeProject) -> FakeProject:
    run = project.open()
    run.draw(run.rows())
    project.calls()
    return project


def test_verify_computes_what_is_cheap_again(drawn: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    before = written(drawn)
    assert main(["verify"]) == 0
    output = capfd.readouterr().out
    assert output.count("rows, parameters and code match; computed and drawn again: the same") == 2
    assert len(drawn.calls()) == 6 and written(drawn) == before
    shutil.rmtree(drawn.folder / "results")  # a fresh clone: figures, rows and sidecars are all there is
    assert main(["verify", "tiny"]) == 0
    sidecar = drawn.folder / "figures" / "tiny.json"
    sidecar.write_text(sidecar.read_text().replace('"cheap": true', '"cheap": false'))
    drawn.calls()
    capfd.readouterr()
    assert main(["verify", "tiny"]) == 0
    assert "drawn again from its rows: the same" in capfd.readouterr().out and drawn.calls() == []
    assert main(["verify", "tiny", "--recompute"]) == 0 and len(drawn.calls()) == 6


def test_verify_does_not_expect_measured_times_to_come_out_equal_twice(
    project: FakeProject, capfd: pytest.CaptureFixture[str]
) -> None:
    project.edit_study("weight=rate)", "weight=rate, alone=True)")
    project.edit_study("return SLOPE * rate + seed", "return SLOPE * rate + time.perf_counter()")
    run = project.open()
    run.draw(run.rows())
    project.calls()
    sidecar = project.folder / "figures" / "tiny.json"
    assert json.loads(sidecar.read_text())["cheap"] is False
    for options in ([], ["--recompute"]):
        assert main(["verify", "tiny", *options]) == 0
        assert "drawn again from its rows: the same" in capfd.readouterr().out
    sidecar.write_text(sidecar.read_text().replace('"cheap": false', '"cheap": true'))  # drawn by an earlier version
    assert main(["verify", "tiny"]) == 0 and project.calls() == []


def test_verify_names_the_first_thing_that_was_changed(drawn: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    figures, rows = drawn.folder / "figures", drawn.folder / "results" / "tiny" / "runs.csv"

    def says(*expected: str) -> None:
        assert main(["verify", "all"]) == 1
        output = capfd.readouterr().out
        assert all(text in output for text in expected), output

    def changed(path: Path, old: str, new: str, *expected: str) -> None:
        kept = path.read_text()
        assert old in kept
        path.write_text(kept.replace(old, new))
        says(*expected)
        path.write_text(kept)

    changed(rows, "3.0", "3.1", "rows_hash is", "manifest.json")
    changed(figures / "tiny.runs.csv", "3.0", "3.1", "rows_hash is", "tiny.json")
    changed(
        figures / "tiny.json",
        '"exact"',
        '"measured"',
        "evidence is ['exact'] in the figure and ['measured'] in tiny.json",
    )
    changed(
        figures / "tiny.svg",
        "stroke-linejoin",
        "stroke-linecap",
        "tiny.svg: drawn again from these rows, it comes out differ",
    )
    changed(drawn.parameter_file, "[3, 1, 2]", "[3, 1]", "parameters_hash is")
    drawn.edit_study("SLOPE = 0.1", "SLOPE = 0.3")
    says("code_hash is")
    drawn.edit_study("SLOPE = 0.3", "SLOPE = 0.1")
    for path in (rows, figures / "tiny.runs.csv"):
        path.unlink()
    says("its rows cannot be checked: no tables are beside it")


def test_verify_notices_rows_that_the_code_does_not_give(drawn: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows, figures, sidecars and manifest forged together, hashes and all: only computing again can tell."""
    run, forged = drawn.open(), drawn.open().rows()
    forged["runs"] = forged["runs"].assign(latency=1.0)
    drawn.calls()
    run.draw(forged)
    code = run.hashes()["code_hash"]
    for file_format in ("png", "svg"):
        path = drawn.folder / "figures" / f"tiny.{file_format}"
        embedded = {**embedding.read_embedded(path), "code_hash": code}
        path.write_bytes(embedding.figure_bytes(run.study.draw(forged, run.params)["tiny"], file_format, embedded))
    sidecar = drawn.folder / "figures" / "tiny.json"
    sidecar.write_text(sidecar.read_text().replace('"code_hash": null', f'"code_hash": "{code}"'))
    (drawn.folder / "results" / "tiny" / "runs.csv").write_bytes(csv_of(forged["runs"]))
    assert main(["verify"]) == 1
    said = "computed again, its rows differ: table runs: latency of row 1 is 1.0 kept and 0.3 now"
    assert said in capfd.readouterr().out


def test_verify_tells_a_rounding_from_a_change(drawn: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows of another processor, or of a version that wrote all digits."""
    run, kept = drawn.open(), drawn.open().rows()
    kept["runs"] = kept["runs"].assign(latency=kept["runs"]["latency"] * (1 + 4e-16))
    rows_hash, code = kept.hash(), run.hashes()["code_hash"]
    kept.write(drawn.folder / "results" / "tiny")
    manifest = drawn.folder / "results" / "tiny" / "manifest.json"
    about = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(about | {"tables": kept.described(), "rows_hash": rows_hash, "code_hash": code}))
    run.draw(kept)
    capfd.readouterr()
    assert main(["verify"]) == 0
    assert capfd.readouterr().out.count("the same, but for roundings (less than 1e-09 of a number)") == 2


def test_lengths_go_to_a_folder_of_their_own_with_all_figures(
    project: FakeProject, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.csv").write_text("1,2\n")
    assert main(["reproduce", "--scale", "smoke", "--only", "tiny", "--lengths", str(tmp_path / "pairs.csv")]) == 0
    assert written(project) == [
        f"results/custom/{name}"
        for name in (
            "figures/claims.json",
            "figures/index.html",
            "figures/machines.json",
            "figures/notebooks/notebook.css",
            "figures/notebooks/tiny.html",
            "figures/tiny.json",
            "figures/tiny.png",
            "figures/tiny.runs.csv",
            "figures/tiny.svg",
            "tiny/manifest.json",
            "tiny/runs.csv",
            "tiny/tiny.ipynb",
        )
    ]
    figures = project.folder / "results" / "custom" / "figures"
    assert main(["verify", str(figures / "tiny.png")]) == 0  # against its own manifest
    manifest = json.loads((project.folder / "results" / "custom" / "tiny" / "manifest.json").read_text())
    assert manifest["parameters"]["lengths"]["file"] == "pairs.csv" and manifest["parameters"]["seeds"] == [0]


@pytest.mark.parametrize(
    "cells, code, said",
    [
        (
            (*CELLS[:2], "import sys; sys.exit(0)", *CELLS[2:]),
            1,
            "the notebook ended early, before 'figures = run.draw(rows)'",
        ),
        (CELLS[:2], 1, "the notebook ran, but it drew no figure"),
        ((*CELLS[:2], "rows['nothing']"), 1, "KeyError: 'nothing'"),
        ((CELLS[0], "from repro.errors import UserError; raise UserError('too bad')"), 2, "repro: too bad\n"),
        (
            (CELLS[0], "raise ModuleNotFoundError(\"No module named 'torch.nn'\")"),
            2,
            "repro: tiny: this needs torch, which",
        ),
    ],
)
def test_a_notebook_that_does_not_finish_is_no_success(
    project: FakeProject, capfd: pytest.CaptureFixture[str], cells: tuple[str, ...], code: int, said: str
) -> None:
    project.write_notebook(*cells)
    project.open(rates=[1], seeds=[0]).rows()  # so that the kernel need not start a worker
    assert main(["run", "tiny", "-p", "rates=[1]", "-p", "seeds=[0]"]) == code
    assert said in capfd.readouterr().err


def test_a_killed_kernel_is_explained_with_the_point_it_computed(
    project: FakeProject, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny", "-p", "fault=kernel killed"]) == 1
    (message,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("repro: ")]
    assert "the notebook's kernel was killed while it computed tiny: one(rate=2.0, seed=0" in message
    assert "Finished points are kept" in message


def test_a_function_defined_in_a_notebook_enters_the_key_with_its_source(project: FakeProject) -> None:
    project.edit_study("    lengths: str | None\n", "    lengths: Callable[[int], int] | str | None\n")
    project.edit_study("import os,", "from collections.abc import Callable\nimport os,")
    project.edit_study("SLOPE * rate + seed", "SLOPE * rate + seed + 0 * (policy(1) if policy else 0)")
    project.edit_study("def latency(rate, seed):", "def latency(rate, seed, policy):")
    project.edit_study("latency(rate, seed)}", "latency(rate, seed, lengths)}")
    sweep = (
        'def policy(length):\n    return length {}\n\nexperiment.open("tiny", overrides=dict(lengths=policy)).rows()'
    )
    project.write_notebook(
        CELLS[0],
        "from repro.harness import experiment",
        sweep.format("+ 1"),
        sweep.format("+ 1  # the same"),
        sweep.format("+ 2"),
        'run = experiment.open("tiny", scale, overrides)\nrun.draw(run.rows())',
    )
    assert main(["run", "tiny"]) == 0
    assert len(project.calls()) == 3 * 6  # two sources of the policy, and none


def test_ctrl_c_says_how_to_go_on(project: FakeProject) -> None:
    command = [sys.executable, "-m", "repro", "run", "tiny", "-p", "sleep=2"]

    def heed() -> None:  # a shell in the background ignores SIGINT, and its children inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    points = project.folder / "results" / "tiny" / "points"
    deadline = time.monotonic() + 120
    while not list(points.glob("[0-9a-f]*.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error.endswith("repro: interrupted; finished points are kept, the same command goes on from there\n")
    assert "Traceback" not in error
    assert 1 <= len(list(points.glob("[0-9a-f]*.json"))) < 6
    assert not list(points.glob(".in-flight*"))  # the kernel ended in good order


def test_a_disk_that_is_full_under_the_page_or_a_log_is_one_line(
    project: FakeProject, capfd: pytest.CaptureFixture[str]
) -> None:
    """Points, figures and notebooks: test_interruption.py."""
    (project.folder / "figures").mkdir()
    # The device on which every write finds a full disk.
    (project.folder / "figures" / f".index.html.{os.getpid()}.tmp").symlink_to("/dev/full")
    assert main(["page"]) == 2
    page = capfd.readouterr().err
    with open("/dev/full", "w") as log:
        command = [sys.executable, "-m", "repro", "list"]
        done = subprocess.run(command, stdout=log, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    for said, named in ((page, f"{project.folder}/figures/index.html"), (done.stderr, "the output cannot be written")):
        assert said.count("\n") == 1 and named in said and "No space left on device; free space on " in said


def test_a_reader_that_has_seen_enough_is_no_error(project: FakeProject) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        command = [sys.executable, "-m", "repro", "list"]
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_lengths_of_the_hub_are_no_file(project: FakeProject, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study's own source finds them (docs/workloads.md)."""
    monkeypatch.setenv("JOBS", "1")
    assert main(["run", "tiny", "--scale", "smoke", "--lengths", "hub"]) == 0
    manifest = json.loads((project.folder / "results" / "custom" / "tiny" / "manifest.json").read_text())
    assert manifest["parameters"]["lengths"] == "hub"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "tinny"], "unknown experiment 'tinny'; known: tiny"),
        (["run", "../experiments/tiny"], "unknown experiment"),
        (["run", "tiny", "-p", "sedes=[1]"], "unknown parameter 'sedes' (did you mean 'seeds'?)"),
        (["run", "tiny", "-p", "seeds=1"], "parameter 'seeds' must be a list"),
        (["run", "tiny", "-p", "seeds=[1"], "not valid YAML"),
        (["run", "tiny", "-p", "seeds"], "must have the form name=value"),
        (["run", "tiny", "-p", "rates=[.nan]"], "parameter 'rates' must be a list, each entry a finite number, not"),
        (["run", "tiny", "-p", "rates=[-1]"], "rates must be positive"),
        (["run", "tiny", "--scale", "large"], "unknown scale 'large'; known: paper, smoke"),
        (["run", "tiny", "--lengths", "no.csv"], "there is no lengths file no.csv"),
        (["run", "tiny", "--jobs", "none"], "JOBS='none' must be a number of worker processes"),
        (["reproduce", "--only", "tiny,other"], "unknown experiment 'other'"),
        (["reproduce", "--scale", ""], "unknown scale ''"),
        (["verify", "nothing"], "there is no figure"),
        (["verify"], "there are no figures in"),
        (["verify", "../notebooks/tiny.ipynb"], "there is no figure"),
        (["diff", "none", "figures"], "'none' is neither a file, a folder nor a commit"),
        (["diff", "--", "--output=x", "figures"], "'--output=x' is neither a file"),
        (["diff", "experiments", "experiments"], "experiments holds no tables"),
        (["diff", ".", ".", "--lines", "-1"], "--lines -1 must be"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    project: FakeProject,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("JOBS", "1")  # so that --jobs is undone
    assert main(arguments) == 2
    output = capfd.readouterr()
    assert output.err.startswith("repro: ") and output.err.count("\n") == 1 and said in output.err
    assert written(project) == [] and project.calls() == []


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "there is no notebook"),
        ("{", "is not a notebook"),
        ('{"cells": 3}', "is not a notebook"),
        ("[]", "is not a notebook"),
        ('{"cells": []}', "must carry the tag 'parameters'"),
    ],
)
def test_a_bad_notebook_is_refused(
    project: FakeProject, capfd: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = project.folder / "notebooks" / "tiny.ipynb"
    path.write_text(content) if content is not None else path.unlink()
    assert main(["run", "tiny"]) == 2
    assert said in capfd.readouterr().err and written(project) == []


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["run"], ["run", "a", "b"], ["list", "--x"], ["-p"]])
def test_unknown_commands_and_options_exit_with_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage:" in capfd.readouterr().err


def test_list_names_the_experiments(project: FakeProject, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capfd.readouterr().out == "tiny  A tiny thing\n"


def test_help_needs_no_heavy_library() -> None:
    program = (
        "import sys; from repro.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'pandas', 'matplotlib', 'papermill'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL, env=os.environ)


def test_the_version_is_said_and_a_shell_can_complete_names(project: FakeProject, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "repro"]
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    assert said == f"repro {repro.__version__}\n"
    offered = {}
    for line in ("repro ru", "repro run ti", "repro reproduce --only t", "repro run tiny --sc"):
        found = tmp_path / "found"
        asked = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": " "}
        environ = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(found)}
        subprocess.run(command, env=environ, check=True, capture_output=True)
        offered[line] = found.read_text().split()
    assert list(offered.values()) == [["run"], ["tiny"], ["tiny"], ["--scale"]]


def faults_of_notebook(path: Path) -> list[str]:
    """What keeps a notebook from being thin: definitions, outputs, a parameters cell that is not the first."""
    cells = read_notebook(path)
    faults = []
    if "parameters" not in cells[0]["metadata"].get("tags", []):
        faults.append("its first code cell is not the one tagged 'parameters'")
    for cell in cells:
        source = "".join(cell["source"])
        first_line = source.strip().splitlines()[0]
        if cell.get("outputs") or cell.get("execution_count") is not None:
            faults.append(f"outputs are kept at {first_line!r}")
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if any(isinstance(node, definitions) for node in ast.walk(ast.parse(source))):
            faults.append(f"something is defined at {first_line!r}")
    return faults


def test_faults_of_a_notebook_are_found(project: FakeProject) -> None:
    path = project.write_notebook(*CELLS)
    assert faults_of_notebook(path) == []
    project.write_notebook(*CELLS, "def f():\n    pass")
    assert faults_of_notebook(path) == ["something is defined at 'def f():'"]
    content = json.loads(project.write_notebook(*CELLS).read_text())
    content["cells"][1]["execution_count"] = 1
    content["cells"][2]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "x"}]
    content["cells"].insert(0, {**content["cells"][2], "outputs": []})
    path.write_text(json.dumps(content))
    assert len(faults_of_notebook(path)) == 3


NOTEBOOKS = sorted(path for path in (committed() / "notebooks").glob("*.ipynb") if path.stem not in TOURS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_projects_notebooks_are_thin_and_have_their_parameter_file(path: Path) -> None:
    assert faults_of_notebook(path) == []
    assert (committed() / "experiments" / f"{path.stem}.yaml").is_file()


def test_every_experiment_has_its_notebook_and_its_parameters_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    from repro.harness import experiment

    for name in ("REPRO_ROOT", "REPRO_STUDIES"):
        monkeypatch.delenv(name, raising=False)
    for stem in sorted(path.stem for path in (committed() / "experiments").glob("*.yaml")):
        assert (committed() / "notebooks" / f"{stem}.ipynb") in NOTEBOOKS
        for scale in experiment.SCALES:
            assert experiment.open(stem, scale).study.points(experiment.open(stem, scale).params)
