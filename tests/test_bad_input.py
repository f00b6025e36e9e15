"""Whatever a user hands in: it is taken, or refused with one line and exit code 2, and then nothing is written or
computed.

Random command lines, environment variables, parameter files, lengths and data sets. Known malformed ones have their own
messages in test_cli.py, test_parameters.py, test_workloads.py, test_workloads_hub.py and test_llm.py (model folders,
pickles).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from fake_project import PARAMETERS, FakeProject
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from repro.cli import main
from repro.errors import UserError
from repro.harness import experiment, notebook
from repro.setup.environment import ROOT
from repro.workloads import lengths_from_csv, make_trace

pytestmark = pytest.mark.heavy(45)

VARIABLES = (
    "JOBS",
    "SCALE",
    "LENGTHS",
    "HUB",
    "REPRO_RESULTS_DIR",
    "REPRO_FIGURES_DIR",
    "REPRO_ROOT",
    "REPRO_STUDIES",
    "REPRO_VARIANT",
)
# No NUL: neither arguments nor variables can hold one. Lone surrogates stand for bytes that are not UTF-8.
texts = st.text(st.characters(exclude_characters="\0"), max_size=12)
odd = st.sampled_from(
    [
        "",
        " ",
        "nan",
        "-1",
        "1e9",
        "0",
        "4097",
        "paper",
        "smoke",
        "custom",
        "tiny",
        "../tiny",
        "/",
        ".",
        "..",
        "/proc/1/x",
        "~",
        "\n",
        "ü é",
        "\udcff",
        "x" * 5000,
        "a/" * 3000,
        "null",
        "[1]",
        "{",
        "*",
        "--",
        "-p",
        "%s",
        "${HOME}",
        "rates=[1]",
        "seeds=[]",
        "rates=[.nan]",
        "seeds=[0, 0]",
        "sleep=-1",
        "lengths=/etc",
        "fault=x",
        "=",
        "rates=&a [*a]",
        "rates=!!python/name:os.system",
        "tiny.yaml",
        "/dev/null",
    ]
)
values = odd | texts
commands = st.sampled_from(["reproduce", "run", "list", "verify", "diff", "page", "nothing"])
options = st.sampled_from(
    [
        "--only",
        "--scale",
        "--lengths",
        "--jobs",
        "-p",
        "--variant",
        "--recompute",
        "--lines",
        "--help",
        "tiny",
        "experiments",
    ]
)

patient = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    """A checkout whose notebooks are not executed: what is refused is refused before."""
    project = FakeProject(tmp_path / "checkout", monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def executed(run: experiment.Run, overrides: object) -> Path:
        return run.folders.of_results(run.stem) / "executed.ipynb"

    monkeypatch.setattr(notebook, "execute", executed)
    return project


def files(folder: Path) -> set[Path]:
    return {path for path in folder.parent.rglob("*") if ".cache" not in path.parts and "__pycache__" not in path.parts}


def is_handled(arguments: list[str], project: FakeProject, changes: dict[str, str] | None = None) -> None:
    """The command ends as the command line promises; after a 2 everything is as it was."""
    before = files(project.folder)
    output, errors = io.StringIO(), io.StringIO()
    kept = dict(os.environ)
    os.environ.update(changes or {})
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
        assert code in (0, 2)
        assert code == 0 or "usage:" in errors.getvalue()
    else:
        assert code in (0, 1, 2)
        message = errors.getvalue()
        if code == 2:
            assert message.removeprefix("tiny: A tiny thing\n").startswith("repro: "), message
            assert message.count("repro: ") == 1 and len(message) < 12_000 and "Traceback" not in message
    finally:
        os.environ.clear()
        os.environ.update(kept)
    if code == 2:
        assert files(project.folder) == before
    assert project.calls() == []


@patient
@given(st.lists(commands, max_size=1), st.lists(options | values, max_size=5))
@example(["run"], ["tiny", "--lengths", "x" * 5000])
@example(["verify"], ["x" * 5000])
@example(["diff"], ["x" * 5000, "\udcff"])
def test_any_command_line(project: FakeProject, command: list[str], rest: list[str]) -> None:
    is_handled([*command, *rest], project)


@patient
@given(st.sampled_from((["reproduce"], ["run", "tiny"], ["verify"], ["list"])), st.sampled_from(VARIABLES), values)
@example(["reproduce"], "REPRO_ROOT", "x" * 5000)
@example(["reproduce"], "REPRO_RESULTS_DIR", "x" * 5000)
@example(["reproduce"], "REPRO_RESULTS_DIR", "/dev/null")
@example(["reproduce"], "REPRO_STUDIES", "..")
@example(["reproduce"], "LENGTHS", "a/" * 3000)
def test_any_environment_variable(project: FakeProject, command: list[str], name: str, value: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):  # this system cannot even set it
        value.encode("utf-8", "surrogateescape")
        is_handled(command, project, {name: value})


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


@patient
@given(st.data())
def test_any_parameter_file(project: FakeProject, data: st.DataObject) -> None:
    good = PARAMETERS.encode()
    kind = data.draw(st.sampled_from(("bytes", "mutated", "tree", "huge")))
    if kind == "bytes":
        content = data.draw(st.binary(max_size=60))
    elif kind == "mutated":
        at = data.draw(st.integers(0, len(good)))
        content = good[:at] + data.draw(st.binary(max_size=4)) + good[at + data.draw(st.integers(0, 9)) :]
    elif kind == "tree":
        names = st.sampled_from(("rates", "seeds", "fault", "sleep", "lengths", "other"))
        section = st.dictionaries(names, trees, max_size=3)
        content = json.dumps({"title": "t", "params": data.draw(section), "smoke": data.draw(section)}).encode()
    else:
        content = (
            b"title: t\nparams:\n  rates: [" + b"1, " * 20_000 + b"1" + data.draw(st.sampled_from((b"]", b"", b"]]")))
        )
    project.parameter_file.write_bytes(content)
    for scale in experiment.SCALES:
        try:
            run = experiment.open("tiny", scale)
            assert all(isinstance(rate, float) for rate in run.params.rates)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000 + len(str(project.folder))
    is_handled(["list"], project)


ODD_VALUES: tuple[object, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    1e308,
    10**30,
    "",
    "x",
    "../x",
    [],
    [0],
    [-1],
    [1.5],
    [[]],
    ["x"],
    [None],
    {},
    {"x": 1},
    [1, 1],
    "a\0b",
)


@pytest.mark.parametrize("stem", sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml")))
def test_any_value_of_any_parameter_of_the_real_experiments(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken or refused with a UserError, before anything is computed."""
    for name in ("REPRO_ROOT", "REPRO_STUDIES", "REPRO_VARIANT"):
        monkeypatch.delenv(name, raising=False)
    usual = experiment.open(stem, "smoke").params
    for name in type(usual).model_fields:
        for value in ODD_VALUES:
            try:
                run = experiment.open(stem, "smoke", {name: value})
                run.study.points(run.params)
            except UserError as error:
                assert "\n" not in str(error)


csv_lines = st.text("0123456789,;.\"' \n\r\tprompt_tokensoutputé-\0", max_size=30)


@settings(patient, max_examples=200)
@given(st.binary(max_size=40) | st.builds(lambda text: ("prompt_tokens,output_tokens\n" + text).encode(), csv_lines))
def test_any_lengths_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"{abs(hash(content))}.csv"
    path.write_bytes(content)
    try:
        pairs = lengths_from_csv(path).pairs
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 500 + len(str(path))
    else:
        assert pairs.shape[1] == 2 and pairs.min() >= 1


@settings(patient, max_examples=25)
@given(
    st.sampled_from((".json", ".jsonl", ".parquet")),
    st.binary(max_size=30)
    | st.builds(lambda tree: json.dumps(tree, allow_nan=True).encode(), trees)
    | st.builds(
        lambda tree: json.dumps([{"conversations": tree}, {"instruction": tree, "input": "", "output": tree}]).encode(),
        trees,
    ),
    st.sampled_from(("sharegpt", "alpaca")),
)
def test_any_data_set_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, content: bytes, workload: str
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    os.utime(path, ns=(abs(hash(content)) % 2**60,) * 2)  # data sets are cached by name and time
    with pytest.raises(UserError) as caught, contextlib.redirect_stderr(io.StringIO()):
        make_trace(workload, 1.0, 10.0, 0, lengths=str(path), tokenizer=str(tmp_path))
    assert "\n" not in str(caught.value)


def test_yaml_of_a_megabyte_and_bombs_are_refused_soon(project: FakeProject) -> None:
    bomb = "title: t\nparams:\n  a: &a [1, 1]\n" + "".join(
        f"  {name}: &{name} [{', '.join([f'*{last}'] * 9)}]\n" for last, name in zip("abcdefghijkl", "bcdefghijklm")
    )
    for text in (
        bomb,
        "title: t\nparams: {rates: [" + "9" * 1_000_000 + "]}",
        "title: " + "x" * 1_000_000 + "\nparams: 3",
    ):
        project.parameter_file.write_text(text)
        with pytest.raises(UserError) as caught:
            experiment.open("tiny")
        assert len(str(caught.value)) < 600 + len(str(project.folder))


def test_a_huge_lengths_file_is_read_in_seconds(tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "123,45\n" * 300_000)
    assert len(lengths_from_csv(path).pairs) == 300_000
    path.write_text("prompt_tokens,output_tokens\n" + "1" * 3_000_000 + ",1\n")
    with pytest.raises(UserError, match="line 2: not CSV .field larger") as caught:
        lengths_from_csv(path)
    assert len(str(caught.value)) < 500 + len(str(path))
