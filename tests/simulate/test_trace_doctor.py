"""The trace doctor: its numbers are those of a serving run, its answers follow from its table; and its command."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import repro
from repro.cli import main
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.config import DEVICES, MODELS, Deployment
from repro.engine.loop import Engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.prompts import requests_of
from repro.simulate.trace_doctor import QUESTIONS, Running, Setting, answer, ask, compare, in_short, replay
from repro.workloads import Trace
from repro.workloads.public import read_trace
from repro.workloads.samples import SAMPLE

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "trace_doctor.ipynb"
OPT = repro.DEPLOYMENTS["opt-13b"]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(SAMPLE, speed=1.5)


def numbers_of(outcomes: Sequence, preemptions: int) -> dict[str, float]:
    latency = [outcome.normalized_latency_s for outcome in outcomes]
    first = [outcome.first_token_s - outcome.request.arrival_s for outcome in outcomes]
    quantiles = {
        f"{name}_{level}": np.percentile(values, level)
        for name, values in (("latency", latency), ("first_token", first))
        for level in (50, 90, 99)
    }
    return quantiles | {"latency_mean": np.mean(latency), "preemptions": preemptions}


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        (Setting(), {}),
        (Setting(block_size=64), {}),
        (Setting(preemption="swap"), {"preemption": repro.PreemptionMode.SWAP}),
        (Setting(max_num_seqs=16), {"max_num_seqs": 16}),
        (Setting(max_num_batched_tokens=4096), {"max_num_batched_tokens": 4096}),
        (Setting(at_once=True), {}),
    ],
)
def test_its_numbers_are_those_of_serve(trace: Trace, setting: Setting, changes: dict[str, object]) -> None:
    served_trace = replace(trace, arrival_s=np.zeros(len(trace))) if setting.at_once else trace
    system = repro.SYSTEMS["vllm"].with_scheduler(**changes)
    served = repro.serve(system, "opt-13b", served_trace, block_size=setting.block_size)
    row = replay(trace, setting, OPT)
    assert row["latency_mean"] == served.latency_s_per_token and row["evidence"] == "modelled"
    expected = numbers_of(served.outcomes, served.engine.scheduler.num_preemptions)
    assert {name: row[name] for name in expected} == expected
    assert row["latency_low"] <= row["latency_mean"] <= row["latency_high"]
    assert row["tokens_per_s"] * served.engine.clock.now == pytest.approx(trace.output_tokens.sum(), rel=0.02)


def test_cut_prompts_are_those_of_the_chunked_scheduler(trace: Trace) -> None:
    manager = PagedKVCacheManager(OPT.num_blocks(16), 16, watermark=0.0)
    scheduler = ChunkedPrefillScheduler(manager, ChunkedPrefillConfig(max_num_seqs=64, max_num_batched_tokens=512))
    engine = Engine(scheduler, SimulatedExecutor(repro.cost_model("a100-2023", OPT)))
    expected = numbers_of(engine.run(requests_of(trace, SamplingParams())), scheduler.num_preemptions)
    row = replay(trace, Setting(chunked=True, max_num_seqs=64, max_num_batched_tokens=512), OPT)
    assert {name: row[name] for name in expected} == expected and row["preemptions"] > 0


def test_requests_running_are_weighed_by_time() -> None:
    watch = Running()
    watch.stretches = [(1.0, 5, True), (6.0, 2, False), (3.0, 9, True)]
    assert watch.summary(False) == {"running_10": 2, "running_50": 2, "running_90": 9, "waiting_share": 0.4}
    assert watch.summary(True) == {"running_10": 5, "running_50": 9, "running_90": 9, "waiting_share": 0.4}
    watch.stretches = [(1.0, 5, False)]
    assert watch.summary(True)["running_50"] == 5


def test_stretches_of_equal_iterations_count_as_the_single_ones(trace: Trace) -> None:
    class Single(Running):
        next_s = 0.0  # no two iterations are advanced together

    together, single = Running(), Single()
    for watch in (together, single):
        repro.serve("vllm", "opt-13b", trace, observers=[watch])
    assert len(single.stretches) > 3 * len(together.stretches)
    counts = ("running_10", "running_50", "running_90")
    assert [together.summary(False)[name] for name in counts] == [single.summary(False)[name] for name in counts]
    assert together.summary(False)["waiting_share"] == pytest.approx(single.summary(False)["waiting_share"])


def test_no_more_run_than_the_cap_and_the_pool_allow(trace: Trace) -> None:
    assert replay(trace, Setting(max_num_seqs=8), OPT)["running_90"] == 8
    fit = ask("fit", trace)
    assert fit.loc["all at once", "running_50"] > fit.loc["as they arrive", "running_50"]
    fewest = (trace.prompt_tokens + 1).min()
    assert fit["running_90"].max() * fewest < OPT.kv_slots


def test_what_the_page_says_of_the_sample_is_so() -> None:
    sample = read_trace(SAMPLE)
    fit = ask("fit", sample).loc[:, ["running_10", "running_50", "running_90"]].to_numpy().tolist()
    assert (len(sample), round(sample.card.duration_s)) == (263, 148) and fit[1] == [26, 36, 47] and fit[0][1] == 16
    for question, setting, times in (("seqs", "16", 10.1), ("block", "256", 1.76)):
        latency = ask(question, sample)["latency_90"]
        assert latency[setting] / latency.min() == pytest.approx(times, abs=0.1)
    for question in ("budget", "preemption"):
        assert answer(question, ask(question, sample)).startswith("It makes no difference above 5 %")


def test_answers_follow_from_the_table() -> None:
    table = pd.DataFrame({"latency_90": [0.1, 0.104, 0.2]}, index=["8", "16", "32"])
    assert answer("block", table).endswith("0.1 s/token, has 8, 16. Times as much 32: 2.00.")
    assert answer("seqs", table[:2]).startswith("It makes no difference above 5 %")
    columns = ["running_10", "running_50", "running_90", "waiting_share"]
    rows = {"as they arrive": [1, 2, 3, 0.25], "all at once": [4, 5, 6, 0.5]}
    fit = pd.DataFrame(rows, index=columns).T
    assert answer("fit", fit) == (
        "With a queue that is never empty 5 requests run in the median, 4 to 6 for 80 % of the time. As they arrive 2 "
        "requests run in the median, 1 to 3 for 80 %; others wait for 25 %."
    )
    fit.loc["all at once", "waiting_share"] = 0.0
    assert answer("fit", fit).startswith("All fit at once. As they")


def test_equal_settings_are_replayed_once_in_any_number_of_processes(trace: Trace) -> None:
    class Line:
        def __init__(self, todo: Sequence[tuple[str, float]]) -> None:
            self.todo, self.done, self.closed = len(todo), 0, False
            lines.append(self)

        def start(self, key: str, kind: str, cost: float) -> None: ...

        def finish(self, key: str, seconds: float) -> None:
            self.done += 1

        def show(self) -> None: ...

        def close(self) -> None:
            self.closed = True

    lines: list[Line] = []
    settings = {"one": Setting(), "again": Setting(), ("x", 2): Setting(max_num_seqs=16)}
    table = compare(trace, settings, display=Line)
    assert [(line.todo, line.done, line.closed) for line in lines] == [(2, 2, True)]
    assert list(table.index) == list(settings) and table.loc["one"].equals(table.loc["again"])
    pd.testing.assert_frame_equal(table, compare(trace, settings, OPT, jobs=2))
    assert in_short(table).shape == (3, 7)


def test_a_deployment_of_ones_own_takes_longer_requests(tmp_path: Path) -> None:
    (tmp_path / "long.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9000,10\n1,200,30\n")
    mine = Deployment(MODELS["llama-3.1-8b"], DEVICES["a100-80gb"], 1, kv_slots=100_000)
    long = read_trace(tmp_path / "long.csv", max_model_len=mine.model.max_model_len)
    row = replay(long, Setting(chunked=True, max_num_batched_tokens=2048), mine)
    assert row["running_90"] == 2 and row["preemptions"] == 0
    with pytest.raises(UserError, match="raise that cap"):
        replay(long, Setting(), mine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 3},
        {"preemption": "none"},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 100},
        {"chunked": 1},
        {"at_once": "yes"},
        {"chunked": True, "preemption": "swap"},
        {"cap": 3},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Setting(**wrong)


def test_wrong_arguments_are_refused(trace: Trace) -> None:
    for call in (
        lambda: ask("speed", trace),
        lambda: answer("speed", pd.DataFrame()),
        lambda: compare(trace, {}),
        lambda: compare(trace, [Setting()]),
        lambda: compare(trace, {"a": 16}),
        lambda: compare("trace.csv", {"a": Setting()}),
        lambda: compare(trace, {"a": Setting()}, "opt-14b"),
        lambda: compare(trace, {"a": Setting()}, jobs=0),
    ):
        with pytest.raises(UserError):
            call()


# ---- the command ----


def test_the_command_says_card_answers_and_tables(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(SAMPLE), "--speed", "1.5", "--jobs", "1", "--questions", "fit", "preemption"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(str(trace.card)) and "trace: 4/4 points, 4 computed" in said
    for name in ("fit", "preemption"):
        table = ask(name, trace)
        assert f"{QUESTIONS[name][0]} {answer(name, table)}\n{in_short(table).to_string()}" in said
    assert "token budget" not in said and said.endswith("Modelled, not measured: opt-13b on 1 x a100-40gb\n")


def test_the_command_takes_lengths_with_a_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n10,20\n")
    asked = ["trace", str(lengths), "--jobs", "1", "--questions", "preemption"]
    assert main([*asked, "--rate", "2", "--duration", "20"]) == 0
    assert "lengths.csv: 1 pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "opt-14b"], "unknown model 'opt-14b'"),
        (["--questions", "speed"], "unknown question 'speed'; known: block, budget, fit, preemption, seqs"),
        (["--jobs", "none"], "JOBS='none'"),
        (["--rate", "2", "--speed", "2"], "--rate draws arrivals"),
        (["--start", "1e9"], "is left"),
    ],
)
def test_the_command_refuses_in_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(SAMPLE), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_the_notebook_runs_to_its_end() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names: dict[str, object] = {}
    with contextlib.chdir(NOTEBOOK.parent):
        for cell in cells:
            exec("".join(cell["source"]), names)
    assert names["faster"].card.rate_per_s == pytest.approx(2 * names["trace"].card.rate_per_s)
