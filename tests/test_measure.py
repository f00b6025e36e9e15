"""What is measured and how it is counted, in virtual time and with a tiny model on the CPU; the plan, its file and its budget."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from repro.config import DEVICES, MODELS, Deployment
from repro.engine import Engine, Observer, VirtualClock
from repro.errors import UserError
from repro.executor.simulated import SimulatedExecutor
from repro.executor.step_times import StepTimes
from repro.measure import kept, load
from repro.measure.budget import seconds_of
from repro.measure.load import GREEDY, NUM_PARTS, POINTS, Load, Window, predict, run
from repro.memory import ContiguousKVCacheManager, reserve_oracle
from repro.metrics import PIECES
from repro.scheduler import Batching, Scheduler, SchedulerConfig
from repro.sequence import Request, SamplingParams
from repro.systems import SYSTEMS

MAX_LEN = 512
DEPLOYMENT = Deployment(MODELS["opt-125m"], DEVICES["a100-40gb"], 1, 2048)
WINDOW = dict(warm_s=2.0, stop_s=12.0, max_model_len=MAX_LEN)


def constant(step_s, per_context_s=0.0):
    return StepTimes("constant", False, (1,), (step_s,), per_context_s, (0,), (1,), ((step_s,),), step_s)


class OneByOne(SimulatedExecutor):
    """Advances no iterations together."""

    def lookahead(self, output, now_s, until_s):
        return 1


# Budgets


@pytest.mark.parametrize("text, seconds", [
    ("90s", 90.0), ("30m", 1800.0), ("2h", 7200.0), ("1.5h", 5400.0), (" 5m ", 300.0), ("0", 0.0), ("0s", 0.0), ("0m", 0.0),
])
def test_a_budget_is_a_length_of_time(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-5m", "1e3s", "5 m", "5min", "inf", "infs", "nan", "5m\n3", "٣m", "9" * 400 + "h"])
def test_anything_else_is_refused_with_the_way_out(text):
    with pytest.raises(UserError, match="write a number and s, m or h, such as 30m"):
        seconds_of(text)


# Windows


def watched(manager, config, requests, window, steps, executor=SimulatedExecutor):
    engine = Engine(Scheduler(manager, config), executor(steps), VirtualClock(), [window])
    engine.run(requests)
    return engine


def request_level(requests, window, step_s=1.0):
    config = SchedulerConfig(batching=Batching.REQUEST, max_num_seqs=4, max_num_batched_tokens=None)
    manager = ContiguousKVCacheManager(64, 16, reservation=reserve_oracle, max_model_len=MAX_LEN)
    return watched(manager, config, requests, window, constant(step_s))


def requests(*lengths, n=1):
    sampling = GREEDY if n == 1 else SamplingParams(n=n, ignore_eos=True)
    return [Request(index, 0.0, 10, length, sampling) for index, length in enumerate(lengths)]


def test_members_of_a_static_batch_that_have_finished_give_no_useful_tokens():
    """Outputs of 2 and 5 tokens, a second a step: the prompts' step gives two tokens, one step gives two, three steps give one."""
    window = Window(0.0, 5.0)
    request_level(requests(2, 5), window)
    assert window.tokens.tolist() == [2, 2, 1, 1, 1]
    assert window.iterations == 5 and window.prompt_tokens == 20


def test_each_sample_of_a_request_counts():
    window = Window(0.0, 5.0)
    request_level(requests(2, 5, n=2), window)
    assert window.tokens.tolist() == [4, 4, 2, 2, 2]


def test_an_iteration_over_an_edge_counts_by_the_share_of_its_time():
    window = Window(0.5, 3.0)  # parts of half a second; steps of a second with 2, 2 and 1 useful tokens
    request_level(requests(2, 5), window)
    assert window.tokens == pytest.approx([1, 1, 1, 0.5, 0.5])
    assert window.iterations == pytest.approx(2.5) and window.prompt_tokens == pytest.approx(10)
    assert window.rates == pytest.approx([2, 2, 2, 1, 1])
    longer = Window(0.25, 1.5)
    request_level(requests(3), longer, step_s=2.0)  # one iteration is longer than the window
    assert longer.tokens == pytest.approx([0.125] * NUM_PARTS) and longer.iterations == pytest.approx(0.625)


def test_steps_that_grow_are_told_apart_by_the_windows_edges():
    """One request whose steps become ten times as long: those before, between and after the edges are not averaged."""
    config, growing, found = SchedulerConfig(), constant(0.01, 3e-4), []
    for executor in (SimulatedExecutor, OneByOne):
        window = Window(2.0, 8.0)
        manager = Load("vllm", "alpaca", None, 0.0, 1.0).manager_on(DEPLOYMENT)
        watched(manager, config, requests(350), window, growing, executor)
        found.append(window)
    assert found[0].tokens == pytest.approx(found[1].tokens, rel=0.01)
    assert found[1].tokens[0] > 1.5 * found[1].tokens[-1] > 0


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_window_around_everything_counts_each_token_of_the_trace_once(name, n):
    """Preempted requests compute their tokens again, static batches compute more than was asked for: neither counts twice."""
    asked = Load(name, "alpaca", None, 0.0, 0.5, n=n, max_model_len=MAX_LEN)
    window = Window(0.0, 1e6)
    engine = watched(asked.manager_on(DEPLOYMENT), asked.system_on(DEPLOYMENT).scheduler, asked.requests, window, constant(0.1), OneByOne)
    assert window.tokens.sum() == pytest.approx(n * asked.trace.output_tokens.sum())
    assert window.prompt_tokens >= asked.trace.prompt_tokens.sum() * (1 - 1e-9)
    assert window.iterations == pytest.approx(engine.scheduler.iteration)
    assert (engine.scheduler.num_preemptions > 0) is (name == "vllm")


def test_the_parts_add_up_to_the_window():
    asked = Load("vllm", "alpaca", None, 2.0, 12.0, max_model_len=MAX_LEN)
    counted = {}
    for start, stop in ((2.0, 12.0), *zip(np.arange(2.0, 12.0, 2.0), np.arange(4.0, 14.0, 2.0))):
        window = counted[start, stop] = Window(start, stop)
        watched(asked.manager_on(DEPLOYMENT), asked.system_on(DEPLOYMENT).scheduler, asked.requests[:400], window, constant(0.037), OneByOne)
    whole = counted.pop((2.0, 12.0))
    assert whole.tokens == pytest.approx([window.tokens.sum() for window in counted.values()])
    assert whole.iterations == pytest.approx(sum(window.iterations for window in counted.values()))


# Runs


def both(asked, steps):
    """The same run with iterations advanced together and one by one."""
    return [run(asked, DEPLOYMENT, executor(steps), VirtualClock(), asked.manager_on(DEPLOYMENT), asked.requests)
            for executor in (SimulatedExecutor, OneByOne)]


def assert_close(one, other, rel):
    assert one.keys() == other.keys()
    for name, value in one.items():
        close = value == other[name] if isinstance(value, str | None) else value == pytest.approx(other[name], rel=rel, abs=1e-9)
        assert close, f"{name}: {value} and {other[name]}"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("rate", [None, 3.0, 30.0])
def test_iterations_advanced_together_give_the_numbers_of_single_ones(name, rate):
    asked = Load(name, "alpaca", rate, **WINDOW)
    together, single = both(asked, constant(0.03))
    assert_close(together, single, rel=1e-9)
    # Where steps grow, a part of the window takes its share of iterations as if those advanced together took equally long.
    together, single = both(asked, constant(0.03, 1e-5))
    parts = {"tokens_per_s_low", "tokens_per_s_high"}
    assert_close({**together, **dict.fromkeys(parts)}, {**single, **dict.fromkeys(parts)}, rel=1e-3)
    for part in parts:
        assert together[part] == pytest.approx(single[part], rel=0.01)


def test_a_prediction_is_a_run_in_virtual_time_and_says_what_it_is():
    asked = Load("vllm", "alpaca", None, **WINDOW)
    found = predict(asked, DEPLOYMENT, constant(0.03))
    assert found["evidence"] == "modelled" and found["device"] == "constant"
    assert both(asked, constant(0.03))[0].items() <= found.items()
    assert sum(found[piece] for piece in PIECES) == pytest.approx(1)
    assert found["tokens_per_s_low"] <= found["tokens_per_s"] <= found["tokens_per_s_high"]
    assert found["finished_rate"] * asked.trace.output_tokens.mean() == pytest.approx(found["tokens_per_s"])
    assert found["trace_hash"] == asked.trace.hash and found["kind"] == "saturated" and found["latency_s_per_token"] is None


def test_saturated_requests_are_all_there_at_the_start_and_are_exactly_as_long_as_the_trace_says():
    asked = Load("vllm", "alpaca", None, n=2, **WINDOW)
    assert not asked.trace.arrival_s.any() and len(asked.trace) > 2000
    for request, prompt, output in zip(asked.requests, asked.trace.prompt_tokens, asked.trace.output_tokens):
        assert (request.prompt_tokens, request.output_tokens, request.arrival_s) == (prompt, output, 0.0)
        assert request.sampling == SamplingParams(n=2, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize("rate, step_s, mark", [
    (None, 0.03, "steady"), (None, 2e-3, "queue ran empty"),
    (8.0, 0.005, "steady"), (100.0, 0.03, "overloaded"), (2.0, 0.005, "too short"),
])
def test_marks(rate, step_s, mark):
    pool = replace(DEPLOYMENT, kv_slots=2048 if mark != "queue ran empty" else 200_000)
    found = predict(Load("vllm", "alpaca", rate, **WINDOW), pool, constant(step_s))
    assert found["mark"] == mark
    assert (found["num_unfinished"] > 0) is (mark == "overloaded")


def test_the_latency_of_an_overloaded_run_is_a_lower_bound(monkeypatch):
    asked = Load("vllm", "alpaca", 100.0, **WINDOW)
    bound = predict(asked, DEPLOYMENT, constant(0.03))
    monkeypatch.setattr(load, "END", 1000)
    whole = predict(asked, DEPLOYMENT, constant(0.03))
    assert bound["num_unfinished"] > 0 == whole["num_unfinished"]
    assert bound["latency_s_per_token"] < whole["latency_s_per_token"]
    assert bound["mark"] == whole["mark"] == "overloaded"
    same = ("tokens_per_s", "mean_batch", "token_states", "num_finished", "preemptions")
    assert [bound[name] for name in same] == pytest.approx([whole[name] for name in same])  # the window has passed by then


def test_only_requests_that_arrive_in_the_window_have_a_latency():
    """Ten of 12 s are warm-up: the mean is that of the others alone."""
    asked = Load("vllm", "alpaca", 5.0, 10.0, 12.0, max_model_len=MAX_LEN)
    engine = Engine(Scheduler(asked.manager_on(DEPLOYMENT), asked.system_on(DEPLOYMENT).scheduler), SimulatedExecutor(constant(0.03)))
    late = [outcome.normalized_latency_s for outcome in engine.run(asked.requests) if outcome.request.arrival_s >= 10.0]
    assert 5 < len(late) < 20
    assert predict(asked, DEPLOYMENT, constant(0.03))["latency_s_per_token"] == pytest.approx(np.mean(late))


def test_a_window_in_which_nothing_happens_has_no_numbers_that_are_none():
    asked = Load("vllm", "alpaca", 1.0, 11.99, 12.0, max_model_len=MAX_LEN)
    found = predict(asked, DEPLOYMENT, constant(1e-3))
    assert not (asked.trace.arrival_s >= 11.99).any()
    assert found["latency_s_per_token"] is None and found["mark"] == "too short"
    assert found["mean_batch"] is None and found["token_states"] is None and found["tokens_per_s"] == 0


@pytest.mark.parametrize("bad, named", [
    (dict(warm_s=-1.0), "window"), (dict(warm_s=3.0), "window"), (dict(stop_s=float("inf")), "window"), (dict(warm_s=float("nan")), "window"),
    (dict(workload="wmt"), "unknown workload 'wmt'; known: alpaca, sharegpt"),
])
def test_a_load_that_cannot_be_is_refused(bad, named):
    with pytest.raises(UserError, match=named):
        Load(**(dict(system="vllm", workload="alpaca", rate=None, warm_s=1.0, stop_s=3.0) | bad))


# Kept rows


@pytest.fixture
def own(tmp_path, monkeypatch):
    """This machine's own rows: a function that writes them."""
    for name in ("REPRO_ROOT", "REPRO_VARIANT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(tmp_path))

    def write(*rows):
        path = tmp_path / "measured" / "serving" / "serving.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
        return path

    return write


def row(key, code="one", **others):
    return {"key": key, "code": code, "kind": key.split("/")[0], "device": "GPU", "model": "opt-13b", "kv_slots": 1000} | others


def test_own_rows_go_before_recorded_ones(own):
    path, evidence = kept.find("auto", kept.SERVING)
    assert evidence == "recorded" and path.parts[-4:] == ("recorded", "h200", "serving", "serving.csv") and path.is_file()
    mine = own(row("saturated/a"))
    assert kept.find("auto", kept.SERVING) == kept.find("auto", kept.SERVING, needs="saturated") == (mine, "measured")
    assert kept.find("auto", kept.SERVING, needs="step") == kept.find("h200", kept.SERVING) == (path, "recorded")
    assert kept.find("auto", kept.KERNELS)[1] == "recorded"
    assert kept.given("auto", kept.SERVING, "saturated") == {"path": mine, "evidence": "measured"}
    assert kept.given("none", kept.SERVING) is None


def test_a_gpu_that_nobody_recorded_is_named_with_those_that_are(own):
    with pytest.raises(UserError, match="gpu = 'a100' is not recorded; known: auto, h200"):
        kept.find("a100", kept.SERVING)


def test_recorded_rows_that_are_missing_are_none_or_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    monkeypatch.delenv("REPRO_RESULTS_DIR", raising=False)
    (tmp_path / "experiments" / "recorded" / "h200").mkdir(parents=True)
    assert kept.given("auto", kept.SERVING) is None
    path, evidence = kept.find("auto", kept.SERVING)
    with pytest.raises(UserError, match="serving.csv is missing; restore it, or measure on a GPU: python -m repro.measure"):
        kept.read(path, evidence)


def test_values_are_read_as_numbers_and_what_is_not_defined_as_none(own):
    path = own(row("saturated/a", seed=0, rate=None, tokens_per_s=2802.0, latency_s_per_token="nan", free=1e-3, mark="steady"))
    (found,) = kept.read(path, "measured")
    expected = row("saturated/a", seed=0, rate=None, tokens_per_s=2802.0, latency_s_per_token=None, free=1e-3, mark="steady")
    assert found == expected | {"evidence": "measured"}
    assert type(found["seed"]) is int and type(found["tokens_per_s"]) is float


@pytest.mark.parametrize("text", ["key,code,seed\na,b,zero\n", "key,code,seed\na,b,0,1,2\n"])
def test_a_damaged_file_is_named(own, text):
    path = own(row("a"))
    path.write_text(text)
    with pytest.raises(UserError, match="serving.csv is damaged"):
        kept.read(path, "measured")


def test_of_each_point_the_newest_measurement_is_read(own):
    path = own(row("steps", seconds=1.0), row("steps", seconds=2.0), row("saturated/a", seconds=3.0),
               row("steps", "two", seconds=4.0), row("steps", "two", seconds=5.0))
    assert [(found["key"], found["seconds"]) for found in kept.read(path, "measured")] == [("saturated/a", 3), ("steps", 4), ("steps", 5)]


@pytest.mark.parametrize("other", [{"device": "another GPU"}, {"model": "opt-1.3b"}, {"kv_slots": 500}])
def test_rows_of_another_setting_are_not_mixed_in(own, other):
    path = own(row("saturated/a", **other), row("saturated/b"))
    assert [found["key"] for found in kept.read(path, "measured")] == ["saturated/b"]


# Measuring first


@pytest.fixture
def first(own, monkeypatch):
    """repro.measure.first with a driver and without processes: (module, commands, exit codes by module)."""
    from repro.measure import first

    commands, codes = [], {}

    def run(command):
        commands.append(command[2:])
        if command[2] == "repro.kernels.bench" and not codes.get(command[2]):
            folder = Path(command[4])
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
        return SimpleNamespace(returncode=codes.get(command[2], 0))

    monkeypatch.setattr(first, "nvidia_driver", lambda: True)
    monkeypatch.setattr(first, "subprocess", SimpleNamespace(run=run))
    return first, commands, codes


def test_kernels_once_and_serving_with_what_is_left_of_the_budget(first, monkeypatch):
    module, commands, _ = first
    now = iter([0.0, 130.0, 0.0, 0.4])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    module.measure_first("30m")
    module.measure_first("30m")
    folder = str(kept.own_folder())
    assert commands == [
        ["repro.kernels.bench", "--out", f"{folder}/kernels"],
        ["repro.measure", "--out", f"{folder}/serving", "--budget", "1670s"],
        ["repro.measure", "--out", f"{folder}/serving", "--budget", "1800s"],
    ]


def test_kernels_that_take_the_whole_budget_leave_none(first, monkeypatch):
    module, commands, _ = first
    now = iter([0.0, 130.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    module.measure_first("2m")
    assert [command[0] for command in commands] == ["repro.kernels.bench"]


def test_without_a_driver_or_a_budget_nothing_is_started(first, monkeypatch):
    module, commands, _ = first
    module.measure_first("0")
    monkeypatch.setattr(module, "nvidia_driver", lambda: False)
    module.measure_first("2h")
    assert commands == []
    with pytest.raises(UserError, match="budget 'soon'"):
        module.measure_first("soon")


def test_a_part_that_fails_is_said_and_the_other_one_goes_on(first, capsys):
    module, commands, codes = first
    codes |= {"repro.kernels.bench": 2, "repro.measure": -9}
    module.measure_first("30m")
    module.measure_first("30m")
    said = capsys.readouterr().err
    assert [command[0] for command in commands] == ["repro.kernels.bench", "repro.measure"] * 2  # what has failed is tried again
    assert "repro.kernels.bench ended with code 2, see above; figures are drawn from the rows that there are" in said
    assert "repro.measure ended with code -9; figures" in said


# The plan


torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from repro.executor.torch import models  # noqa: E402
from repro.measure import __main__ as program  # noqa: E402
from repro.measure import bench as bench_module  # noqa: E402
from repro.measure import calibrate, generate, plan  # noqa: E402
from repro.measure.bench import Bench, Durations, IdleClock  # noqa: E402

TIMING = {"sharegpt": plan.Timing(8.0, 28.0, 30.0, 52.0)}
FEW = ("vllm", "orca-max")


@pytest.fixture
def planned(monkeypatch):
    """Steps of a bench that measures nothing: `planned.steps(rows)`; it fails at the call number `planned.fail_at`."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    state = SimpleNamespace(calls=0, fail_at=None, error=KeyboardInterrupt, clock=clock)

    def measured(took_s, **found):
        state.calls += 1
        if state.calls == state.fail_at:
            raise state.error("no memory left")
        clock.now += took_s
        return found

    def measure(load):
        return measured(load.stop_s + 2, kind=load.kind, system=load.system, rate=load.rate, n=load.n, finished_rate=1 / 3, stop_s=load.stop_s)

    fake = SimpleNamespace(on_gpu=True, loaded=SimpleNamespace(config=SimpleNamespace(max_model_len=2048)), measure=measure)
    monkeypatch.setattr(plan, "recompute_row", lambda bench, size: measured(3, kind="recompute", block_size=size))
    monkeypatch.setattr(generate, "fits", lambda bench: True)
    monkeypatch.setattr(generate, "generate_row", lambda bench, workload: measured(60, kind="generate", workload=workload))
    monkeypatch.setattr(calibrate, "cells", lambda bench: (measured(10, kind="step", seqs=seqs, seconds=None) for seqs in range(6)))
    monkeypatch.setattr(plan, "time", clock)
    state.steps = lambda rows, timing=TIMING, systems=FEW: plan.steps(fake, rows, timing, systems)
    state.work = lambda rows, budget_s=1e9, **others: plan.work_through(state.steps(rows, **others), rows, budget_s, say=lambda text: None, model="m")
    return state


def keys_of(rows):
    return list(dict.fromkeys(row["key"] for row in rows.rows))


def test_the_order_is_that_of_what_a_point_tells_and_systems_take_turns(planned, tmp_path):
    rows = plan.Rows(tmp_path / "serving.csv", "c")
    assert planned.work(rows, timing=plan.GPU_TIMING, systems=tuple(SYSTEMS)) == (0, 0)
    keys = keys_of(rows)
    assert keys[:10] == [f"saturated/{workload}/{name}" for workload in ("sharegpt", "alpaca") for name in SYSTEMS]
    assert keys[10:19] == [f"recompute/{2**power}" for power in range(9)]
    assert keys[19:23] == ["saturated/sharegpt/vllm/3", "saturated/sharegpt/orca-max/3", "generate/sharegpt", "steps"]
    assert keys[23:53] == [f"latency/{w}/{name}/{m}" for m in ("0.8", "0.5", "0.95") for w in ("sharegpt", "alpaca") for name in SYSTEMS]
    assert keys[53:77] == [f"sharing/{method}/{width}/{name}" for method in ("parallel", "beam") for width in (2, 4, 6)
                           for name in SYSTEMS if name != "faster-transformer"]
    assert keys[77:81] == [f"prefix/{prefix}/{name}" for prefix in (80, 341) for name in ("vllm", "orca-oracle")]
    assert keys[81:84] == ["blocks/16/sharegpt/recompute", "blocks/16/sharegpt/swap", "blocks/16/alpaca"] and len(keys) == 81 + 3 * 7
    assert {key.partition("/")[0] for key in keys} == set(POINTS)
    assert {rows.find(key)["kind"] for key in keys[53:]} == {"sharing", "prefix", "blocks"}
    assert len([row for row in rows.rows if row["key"] == "steps"]) == 6
    found = rows.find("latency/sharegpt/vllm/0.8")
    assert found["rate"] == pytest.approx(0.8 / 3) and found["multiple"] == 0.8
    assert found["stop_s"] == pytest.approx(8 + 60)  # few requests: a window twice as long, and no longer than that
    assert rows.find("saturated/sharegpt/vllm")["n"] == 1 and rows.find("saturated/sharegpt/vllm/3")["n"] == 3


def test_killed_at_any_moment_and_resumed_the_rows_are_the_same(planned, tmp_path):
    whole = plan.Rows(tmp_path / "whole.csv", "c")
    assert planned.work(whole) == (0, 0)
    total, expected = planned.calls, (tmp_path / "whole.csv").read_bytes()
    for number in range(1, total + 1):
        path = tmp_path / f"{number}.csv"
        planned.calls, planned.fail_at = 0, number
        with pytest.raises(KeyboardInterrupt):
            planned.work(plan.Rows(path, "c"))
        planned.calls, planned.fail_at = 0, None
        before = len(plan.Rows(path, "c").rows)
        planned.work(plan.Rows(path, "c"))
        assert path.read_bytes() == expected
        assert planned.calls == total - before


def test_killed_while_it_writes_the_file_is_whole(planned, tmp_path, monkeypatch):
    from repro import store

    path = tmp_path / "serving.csv"
    rows = plan.Rows(path, "c")
    rows.add("a", [{"x": 1.5}])
    before = path.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(store.os, name, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                rows.add("b", [{"y": 2}])
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
        assert plan.Rows(path, "c").find("a")["x"] == "1.5"


def test_rows_of_other_code_stay_but_do_not_count_unless_they_are_named(tmp_path):
    path = tmp_path / "serving.csv"
    plan.Rows(path, "old").add("a", [{"x": 1}, {"x": 2}])
    plan.Rows(path, "old").add("b", [{"x": 3}])
    new = plan.Rows(path, "new")
    assert new.rows == [] and new.find("a") is None
    new.add("a", [{"x": 4, "y": 5}])
    for rows, expected in ((plan.Rows(path, "new"), {"a": "4", "b": None}), (plan.Rows(path, "old"), {"a": "1", "b": "3"}),
                           (plan.Rows(path, "new", ["old"]), {"a": "4", "b": "3"})):
        assert {key: (rows.find(key) or {}).get("x") for key in "ab"} == expected
        assert [row["x"] for row in rows.all] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["\n", "system,latency\nvllm,1\n", "key,code\na,b,c\n"])
def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path, text):
    path = tmp_path / "serving.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="does not hold rows of this program"):
        plan.Rows(path, "c")
    assert path.read_text() == text


def test_what_a_budget_cannot_hold_is_left_out_and_counted_and_cheaper_points_still_run(planned, tmp_path):
    whole = plan.Rows(tmp_path / "whole.csv", "c")
    planned.work(whole)
    every = keys_of(whole)
    rows = plan.Rows(tmp_path / "some.csv", "c")
    # One saturated run of 30 s and its nine cheaper points; the other system's latency has no rate, which also counts.
    assert planned.work(rows, 58.0) == (len(every) - 10, 0)
    assert keys_of(rows) == ["saturated/sharegpt/vllm", *(f"recompute/{2**power}" for power in range(9))]
    assert planned.work(plan.Rows(tmp_path / "none.csv", "c"), 0.0) == (len(every), 0)
    assert not (tmp_path / "none.csv").exists()
    again = plan.Rows(tmp_path / "some.csv", "c")
    assert planned.work(again) == (0, 0) and sorted(keys_of(again)) == sorted(every)


def test_a_point_that_cannot_be_measured_is_left_out_and_the_next_ones_run(planned, tmp_path):
    planned.fail_at, planned.error = 3, UserError
    rows, said = plan.Rows(tmp_path / "serving.csv", "c"), []
    assert plan.work_through(planned.steps(rows), rows, 1e9, said.append) == (0, 1)
    assert rows.find("recompute/1") is None and rows.find("recompute/2") is not None
    assert "recompute/1: not measured: no memory left" in said


def test_the_hash_of_the_code_knows_all_that_measures_and_the_setting(monkeypatch):
    seen = {}
    monkeypatch.setattr(plan.keys, "identify", lambda function, arguments: seen.update(arguments, f=function) or SimpleNamespace(code="1"))
    assert plan.code_hash(model="a", device="x") != plan.code_hash(model="b", device="x")
    assert plan.code_hash(model="a", device="x") == plan.code_hash(device="x", model="a")
    assert [seen["f"], *seen["others"]] == [calibrate.cells, generate.generate_row, plan.recompute_row]


# A real engine


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny():
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=MAX_LEN)
    return models.from_config(config, "tiny")


@pytest.fixture(scope="module")
def bench():
    return Bench(tiny(), 2048, "cpu", "float32", MAX_LEN)


def serve_all(engine, batch):
    outcomes = engine.run(batch)
    assert len(outcomes) == len(batch) and all(outcome.finish_s > 0 for outcome in outcomes)


class Saving(Observer):
    """Blocks of the pool that are used after each iteration, and those that its sequences refer to."""

    def __init__(self):
        self.seen = []

    def observe(self, engine, output, start_s):
        usage = engine.scheduler.manager.usage(engine.scheduler.stored_lengths(output.iteration))
        self.seen.append((usage.physical_blocks, usage.logical_blocks))


@pytest.mark.parametrize("changes", [
    *({"system": name} for name in SYSTEMS), {"n": 3}, {"n": 2, "beams": True}, {"n": 6, "beams": True, "system": "orca-oracle"},
    {"n": 4, "beams": True, "preemption": "swap"}, {"n": 4, "beams": True, "preemption": "recompute"}, {"block_size": 64, "preemption": "swap"}, {"block_size": 1, "preemption": "recompute"},
    {"workload": "translation", "prefix_tokens": 80}, {"workload": "translation", "prefix_tokens": 80, "system": "orca-oracle"},
], ids=str)
def test_the_real_engine_decides_as_the_simulator_and_every_output_is_as_long_as_the_trace_says(bench, changes):
    """All requests are there at the start, so no decision depends on time: step for step the same batches and blocks."""
    asked = Load(**{"system": "vllm", "workload": "alpaca", "rate": None, "warm_s": 0.0, "stop_s": 1.0, "max_model_len": MAX_LEN} | changes)
    few, seen = slice((160 if asked.preemption else 40) // asked.n), []
    for real in (True, False):
        watched, blocks = Durations(), Saving()
        if real:
            manager, batch = bench.prepare(asked)
        else:
            manager, batch = asked.manager_on(bench.deployment), asked.requests
            if asked.stored_prefix_tokens:
                manager.store_prefix(load.PREFIX, asked.stored_prefix_tokens)
        scheduler = Scheduler(manager, asked.system_on(bench.deployment).scheduler)
        executor = bench.executor if real else OneByOne(constant(0.01), asked.parents)
        serve_all(Engine(scheduler, executor, IdleClock() if real else VirtualClock(), [watched, blocks]), batch[few])
        bench.executor.flush()
        seen.append((watched.outputs, blocks.seen, scheduler.num_preemptions))
    assert seen[0] == seen[1] and len(seen[0][0]) > 40
    assert seen[0][2] > 0 or asked.preemption is None
    finished = bench.executor.finished
    assert {key: [len(one.tokens) for one in state.sequences] for key, state in finished.items()} == \
        {request.request_id: [request.output_tokens] * asked.n for request in batch[few]}


@pytest.mark.parametrize("rate", [None, 40.0])
def test_a_measured_row_has_what_a_prediction_has_and_the_state_of_the_machine(bench, rate):
    asked = Load("vllm", "alpaca", rate, 0.1, 0.5, n=2 if rate is None else 1, max_model_len=MAX_LEN)
    found = bench.measure(asked)
    assert predict(asked, bench.deployment, constant(0.01)).keys() <= found.keys()
    assert found["evidence"] == "measured" and found["device"] == "CPU" and found["wrong_lengths"] == 0
    assert found["tokens_per_s"] > 0 and sum(found[piece] for piece in PIECES) == pytest.approx(1)
    assert found["seconds"] >= 0.4 and found["host_share"] == 0.0 and found["watts"] is None


def test_a_wrong_length_is_noticed(bench, monkeypatch):
    flush = bench.executor.flush

    def one_more():
        flush()
        next(iter(bench.executor.finished.values())).sequences[0].tokens.append(0)

    monkeypatch.setattr(bench.executor, "flush", one_more)
    assert bench.measure(Load("vllm", "alpaca", None, 0.0, 0.4, max_model_len=MAX_LEN))["wrong_lengths"] == 1


def test_a_host_that_hardly_ever_waits_for_the_gpu_is_the_limit_and_idle_time_is_waiting(bench, monkeypatch):
    monkeypatch.setattr(bench, "on_gpu", True)  # a CPU is never waited for
    monkeypatch.setattr(bench_module, "subprocess", SimpleNamespace(run=missing, SubprocessError=OSError))
    busy = bench.measure(Load("vllm", "alpaca", None, 0.0, 0.2, max_model_len=MAX_LEN))
    assert busy["mark"] == "client-bound" and busy["host_share"] == 1.0 and busy["sm_mhz"] is None
    idle = bench.measure(Load("vllm", "alpaca", 2.0, 0.0, 1.0, max_model_len=MAX_LEN))
    assert idle["mark"] == "too short" and 0 < idle["host_share"] < 0.9


def missing(*arguments, **options):
    raise FileNotFoundError("nvidia-smi")


def test_the_clock_knows_how_long_there_was_nothing_to_do():
    clock = IdleClock()
    clock.wait_until(0.05)
    time.sleep(0.02)
    clock.wait_until(0.0)
    assert 0.03 < clock.idle_s <= clock.now - 0.02


def test_the_state_of_a_gpu_is_read_or_none(monkeypatch):
    said, asked = SimpleNamespace(stdout="1965, 3201, 59, 657.25\n"), []
    run = lambda command, **options: asked.append(command) or said  # noqa: E731
    monkeypatch.setattr(bench_module, "subprocess", SimpleNamespace(run=run, SubprocessError=OSError))
    assert bench_module.gpu_state("0a1b") == {"sm_mhz": 1965.0, "memory_mhz": 3201.0, "celsius": 59.0, "watts": 657.25}
    assert "--id=GPU-0a1b" in asked[0]  # of several GPUs the one that is measured
    said.stdout = "[N/A], 3201, 59, 657.25\n"
    assert set(bench_module.gpu_state("0a1b").values()) == set(bench_module.gpu_state(None).values()) == {None}


def test_recomputation_leaves_the_engine_as_it_was(bench):
    before = bench.executor
    found = plan.recompute_row(bench, 32)
    assert found["block_size"] == 32 and found["seconds"] > 0 and bench.executor is before
    assert bench.measure(Load("vllm", "alpaca", None, 0.0, 0.1, max_model_len=MAX_LEN))["wrong_lengths"] == 0


def test_the_grid_makes_a_table_and_keeps_to_the_pool(bench, monkeypatch):
    monkeypatch.setattr(calibrate, "CPU_GRID", calibrate.Grid((1, 8, 500), (0, 4, 300), (8, 600), steps=3, cycles=2))
    rows = list(calibrate.cells(bench))
    assert {(row["seqs"], row["prompt_tokens"]) for row in rows} == {(1, 0), (8, 0), (0, 8), (4, 8)}
    for row in rows[:4]:  # two contexts each; the mean over the steps that count
        assert row["seconds"] > 0 and row["context_tokens"] / row["seqs"] > calibrate.SHORT_CONTEXT
    steps = StepTimes.of("here", rows, False)
    assert steps.seqs == (1, 8) and steps.mixed_seqs == (0, 4) and steps.mixed_prompt == (8,)


@pytest.mark.parametrize("slots", [600, 900, 1152, 1280, 2048, 6000, 12000, 12500, 14000, 15728])
def test_a_pool_of_any_size_gives_a_table_without_holes(monkeypatch, slots):
    """Cells that a pool cannot hold are left out, but never a part of a row: the table could not be used then, nor mended."""
    cell = lambda bench, count, prompt, cycles: calibrate._row(count, prompt, 10.0, 0.01)  # noqa: E731
    monkeypatch.setattr(calibrate, "_mixed", cell)
    monkeypatch.setattr(calibrate, "_decode", lambda bench, count, context, steps: calibrate._row(count, 0, 10.0 * context, 0.01))
    for on_gpu, limit in ((True, 2048), (False, MAX_LEN)):
        deployment = Deployment(MODELS["opt-125m"], DEVICES["a100-40gb"], 1, slots)
        fake = SimpleNamespace(on_gpu=on_gpu, deployment=deployment, use_blocks=lambda size: None,
                               loaded=SimpleNamespace(config=SimpleNamespace(max_model_len=limit)))
        steps = StepTimes.of("here", calibrate.cells(fake), padded=on_gpu)
        grid = calibrate.GPU_GRID if on_gpu else calibrate.CPU_GRID
        assert steps.mixed_seqs and steps.mixed_prompt
        if slots == 15728:
            assert steps.mixed_prompt == grid.mixed_prompt and steps.mixed_seqs == grid.mixed_seqs


def test_a_pool_whose_graphs_could_not_be_made_is_not_taken_for_ready(monkeypatch):
    bench = Bench(tiny(), 512, "cpu", "float32", MAX_LEN)
    monkeypatch.setattr(bench, "on_gpu", True)
    monkeypatch.setattr(bench_module.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "_warm_up", lambda longest: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    for _ in range(2):  # not even at the second attempt
        with pytest.raises(UserError, match="out of GPU memory for graphs of a pool of blocks of 32"):
            bench.use_blocks(32)
    monkeypatch.setattr(bench, "_warm_up", lambda longest: None)
    bench.use_blocks(32)
    assert bench.executor.manager.block_size == 32


def test_only_some_kinds_and_systems_are_measured(planned, tmp_path):
    rows = plan.Rows(tmp_path / "serving.csv", "c")
    keys = [step.key for step in planned.steps(rows, systems=("vllm",)) if step.kind in ("sharing", "prefix", "blocks")]
    assert len(keys) == 6 + 2 + 21 and all(key.startswith("blocks") or key.endswith("/vllm") for key in keys)


def test_latency_without_saturated_runs_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "Bench", lambda *arguments: pytest.fail("this is work"))
    with pytest.raises(UserError, match="rates follow from saturated runs, and .* has none; add saturated"):
        program.main(["--out", str(tmp_path), "--device", "cpu", "--only", "latency", "steps"])


def test_the_program_measures_only_the_kinds_that_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_module, "Bench", lambda model, kv_slots, device, dtype: Bench(tiny(), kv_slots, device, dtype))
    monkeypatch.setattr(plan, "CPU_TIMING", {"alpaca": plan.Timing(0.05, 0.15, 0.2, 0.2)})
    assert program.main(["--out", str(tmp_path), "--device", "cpu", "--systems", "vllm", "--kv-slots", "2048", "--only", "saturated"]) == 0
    assert {row["key"] for row in kept.read(tmp_path / "serving.csv", "measured")} == {"saturated/alpaca/vllm"}
    assert "left out" not in capsys.readouterr().out


def test_the_program_measures_goes_on_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_module, "Bench", lambda model, kv_slots, device, dtype: Bench(tiny(), kv_slots, device, dtype))
    monkeypatch.setattr(plan, "CPU_TIMING", {"alpaca": plan.Timing(0.05, 0.15, 0.2, 0.2)})
    monkeypatch.setattr(calibrate, "CPU_GRID", calibrate.Grid((1, 8), (0, 4), (8, 64), steps=3, cycles=1))
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--systems", "vllm", "--kv-slots", "2048"]
    assert program.main([*arguments, "--budget", "20s"]) == 0
    assert "1 points left out, as the budget of 20s would be overrun: call again" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["points_left_out"] == 1 and manifest["kv_slots"] == 2048 and "earlier_parts" not in manifest  # the steps: 60 s
    rows = (tmp_path / "serving.csv").read_bytes()
    assert program.main([*arguments, "--budget", "0"]) == 0  # nothing is measured again
    assert (tmp_path / "serving.csv").read_bytes() == rows
    assert program.main([*arguments, "--budget", "2h"]) == 0
    assert "points left out" not in capsys.readouterr().out.splitlines()[-1]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["points_left_out"] == 0 and [part["points_left_out"] for part in manifest["earlier_parts"]] == [1, 1]
    found = kept.read(tmp_path / "serving.csv", "measured")
    assert {row["kind"] for row in found} == {"saturated", "latency", "step"} and {row["device"] for row in found} == {"CPU"}
    assert {row["model"] for row in found} == {"smollm2"}
    assert {row.get("wrong_lengths") for row in found} == {0, None}


@pytest.mark.parametrize("arguments, named", [
    (["--budget", "soon"], "budget 'soon'"), (["--kv-slots", "0"], "--kv-slots 0 must be at least 1"), ([], "no CUDA GPU here"),
])
def test_what_the_program_cannot_do_it_says_before_any_work(tmp_path, monkeypatch, arguments, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=named):
        program.main(["--out", str(tmp_path / "new"), *arguments])
    assert not (tmp_path / "new").exists()


def test_two_programs_do_not_measure_into_one_folder(tmp_path):
    from repro.store import locked

    with locked(tmp_path / ".lock", wait=False, about="the other one"), pytest.raises(UserError, match="the other one"):
        program.main(["--out", str(tmp_path), "--device", "cpu"])


def test_generate_counts_only_the_tokens_that_were_asked_for(bench, monkeypatch):
    nothing = SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None, mem_get_info=lambda: (generate.SPARE_BYTES, 0))
    monkeypatch.setattr(generate.torch, "cuda", nothing)
    made = []
    monkeypatch.setattr(generate, "_run", lambda model, prompts, new_tokens: made.append((list(prompts), new_tokens)))
    small = replace(bench.loaded.config, max_model_len=MAX_LEN)
    fake = SimpleNamespace(deployment=bench.deployment, loaded=replace(bench.loaded, config=small), device_name="GPU")
    assert not generate.fits(fake)
    found = generate.generate_row(fake, "alpaca")
    trace = Load("vllm", "alpaca", None, 0.0, 1.0).trace
    assert found["batch"] == 4 and found["num_finished"] == 8 and len(made) == 3  # one to warm up
    assert made[1] == (trace.prompt_tokens[:4].tolist(), trace.output_tokens[:4].max())
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(trace.output_tokens[:8].sum())
