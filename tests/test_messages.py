"""What a user sees of an error: in a notebook one line without a traceback, and the line says what to do."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pandas as pd
import pytest
from fake_project import FakeProject
from IPython.core.interactiveshell import InteractiveShell
from loads import rows_of

import repro
from repro.errors import UserError
from repro.harness import workers
from repro.harness.tables import show_whole_tables
from repro.studies import fig11_workloads as study


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path, monkeypatch)


def shown(code: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that a cell with this code leaves in a notebook when it fails, but for those of the progress."""
    assert not InteractiveShell.instance().run_cell(code).success
    said = re.sub("\x1b[^m]*m", "", capsys.readouterr().out)
    return [line for line in said.splitlines() if line.strip() and " points, " not in line]


def test_errors_of_the_user_are_one_line_in_a_notebook(
    project: FakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = "from repro.harness import experiment\nrun = experiment.open('tiny'"
    for code, said in (
        (f"{opened}, overrides={{'sedes': [1]}})", "unknown parameter 'sedes'"),
        (f"{opened}, overrides='seeds')", "give a dict, parameter name"),
        (f"{opened})\nrun.draw('rows')", "run.rows() returns them"),
        (f"{opened})\nrun.compare(run.plan())", "run.rows() returns them"),
        (f"{opened}, overrides={{'fault': 'user'}})\nrun.rows()", "this rate cannot be"),
    ):
        lines = shown(code, capsys)
        assert len(lines) == 1 and "UserError" in lines[0] and said in lines[0], lines


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeProject(tmp_path, monkeypatch, processes=True)  # its workers end with it
    monkeypatch.setattr(workers, "wait", lambda *arguments, **options: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    try:
        *_, last = shown("from repro.harness import experiment\nexperiment.open('tiny').rows()", capsys)
    finally:
        signal.signal(signal.SIGINT, before)
    assert last.endswith("Interrupted: finished points are kept; run the cell again to go on from there")


def wrong_signature(request):
    return request.output_tokens


def a_float(request, max_model_len):
    return request.output_tokens * 1.5


def no_return(request, max_model_len):
    request.output_tokens + 1


def a_bug(request, max_model_len):
    longest = max_model_len
    return request.outputs + longest


def below_zero(request, max_model_len):
    return request.output_tokens - 1000


@pytest.mark.parametrize(
    "policy, said, line",
    [
        (wrong_signature, "wrong_signature raised TypeError", "def wrong_signature(request):"),
        (a_float, "a_float returned 1.5 (float)", "def a_float(request, max_model_len):"),
        (no_return, "no_return returned None (NoneType)", "def no_return(request, max_model_len):"),
        (a_bug, "a_bug raised AttributeError", "return request.outputs + longest"),
        (below_zero, "below_zero returned -999 (int)", "def below_zero(request, max_model_len):"),
    ],
)
def test_a_policy_is_tried_when_it_is_made_known(policy: object, said: str, line: str) -> None:
    with pytest.raises(UserError, match="must return for how many output tokens") as caught:
        repro.contiguous_system("mine", policy)
    assert said in str(caught.value) and f"`{line}`" in str(caught.value) and "\n" not in str(caught.value)


def test_a_policy_that_fails_for_some_requests_only_says_the_same() -> None:
    fair = repro.contiguous_system(
        "mine", lambda request, limit: request.output_tokens if request.request_id == 0 else 7.5
    )
    with pytest.raises(UserError, match=r"<lambda> returned 7.5 \(float\), line "):
        repro.serve(fair, "opt-13b", repro.make_trace("sharegpt", 2.0, 10.0, seed=0))


@pytest.mark.parametrize("stem", list(repro.experiments().data["experiment"]))
def test_a_lengths_file_is_read_before_any_work(stem: str, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("prompt_tokens,output_tokens\n5,x\n")
    run = repro.open(stem)
    for name in {"lengths", "sentences"} & set(type(run.params).model_fields):
        for file, said in (("none.csv", "cannot read the lengths file"), ("bad.csv", "line 2: output_tokens is 'x'")):
            with pytest.raises(UserError, match=said):
                repro.open(stem, overrides={name: str(tmp_path / file)})


def test_objects_say_what_they_are_in_a_line() -> None:
    run = repro.open("fig02_memory_waste", overrides={"kv_slots": 30000})
    assert repr(run).startswith("fig02_memory_waste (paper scale): ") and repr(run).endswith(" of them kept")
    assert "\nkv_slots = 30000\n" in repr(run.params) and len(repr(run.params)) < 500
    systems = repro.SYSTEMS
    of_2023 = "max_num_seqs = 2048, groups_count_once = True"
    assert repr(systems["vllm"]) == f"vLLM (vllm): paged memory, {of_2023}"
    oracle = f"Orca (Oracle) (orca-oracle): contiguous memory reserved by reserve_oracle, {of_2023}"
    assert repr(systems["orca-oracle"]) == oracle
    assert "preemption = swap" in repr(systems["vllm"].with_scheduler(preemption=repro.PreemptionMode.SWAP))


def test_a_notebook_shows_tables_whole_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pd.DataFrame({"row": range(137)})
    InteractiveShell.instance()
    with pd.option_context("display.max_rows", 60, "display.min_rows", 10, "display.max_colwidth", 50):
        assert table._repr_html_().count("<tr>") < 20
        show_whole_tables()
        assert table._repr_html_().count("<tr>") == 137
        long = pd.concat([table] * 3)._repr_html_()
        assert 190 < long.count("<tr>") < 210 and "411 rows" in long
        pd.set_option("display.max_rows", 7)
        show_whole_tables()
        assert pd.get_option("display.max_rows") == 7


def test_a_figure_of_other_lengths_is_not_called_sharegpt(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("prompt_tokens,output_tokens\n" + "50,20\n" * 9)
    for lengths, said in ((str(tmp_path / "mine.csv"), "mine.csv"), (None, "ShareGPT")):
        changed = {"lengths": lengths, "rate": 5.0, "duration_s": 20.0, "seeds": [0]}
        params = repro.open("fig11_workloads", overrides=changed).params
        figures = study.draw(rows_of(study, params), params)
        titles = [axis.get_title(loc) for axis in figures["fig11_workloads"].axes for loc in ("left", "center")]
        assert [title for title in titles if "input" in title][0].startswith(said), titles


def test_what_there_is_to_open_is_listed_with_titles() -> None:
    table = repro.experiments()
    assert len(table.data) >= 23 and table.data["title"].str.len().min() > 10
    assert "fig02_memory_waste" in table.to_html()
