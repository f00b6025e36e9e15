"""The plan of what is measured, its file and its budget, and the program, with a tiny model on the CPU."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from test_load import MAX_LEN
from test_warm_engine import tiny

from repro import cli, hashing, paths
from repro.bench import kept
from repro.bench.catalogue import BENCHMARKS
from repro.bench.rows import Recording
from repro.engine.config import DEVICES, Deployment
from repro.engine.systems import OF_THE_PAPER
from repro.errors import UserError
from repro.simulate import load
from repro.simulate.load import Load, predict
from repro.simulate.step_times import StepTimes

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from repro.bench import run  # noqa: E402
from repro.bench.serving import calibrate, generate, plan  # noqa: E402
from repro.bench.serving.warm_engine import WarmEngine  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.heavy(30)]

TIMING = {"sharegpt": plan.Timing(8.0, 28.0, 30.0, 52.0)}
FEW = ("vllm", "orca-max")


@pytest.fixture(scope="module")
def warm():
    return WarmEngine(tiny(), 2048, "cpu", "float32", MAX_LEN)


@pytest.fixture
def planned(monkeypatch):
    """Steps of an engine that measures nothing: `planned.steps(rows)`; it fails at call number `planned.fail_at`. Each
    call is told to `planned.watch`."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    state = SimpleNamespace(calls=0, fail_at=None, error=KeyboardInterrupt, clock=clock, watch=lambda: None)

    def measured(took_s, **found):
        state.watch()
        state.calls += 1
        if state.calls == state.fail_at:
            raise state.error("no memory left")
        clock.now += took_s
        return found

    def measure(load):
        return measured(
            load.stop_s + 2,
            kind=load.kind,
            system=load.system,
            rate=load.rate,
            n=load.n,
            budget=load.budget,
            finished_rate=1 / 3,
            stop_s=load.stop_s,
        )

    fake = SimpleNamespace(
        on_gpu=True, loaded=SimpleNamespace(config=SimpleNamespace(max_model_len=2048)), measure=measure
    )
    monkeypatch.setattr(calibrate, "recompute_row", lambda warm, size: measured(3, kind="recompute", block_size=size))
    monkeypatch.setattr(generate, "fits", lambda warm: True)
    monkeypatch.setattr(
        generate, "generate_row", lambda warm, workload: measured(60, kind="generate", workload=workload)
    )
    monkeypatch.setattr(
        calibrate, "cells", lambda warm: (measured(10, kind="step", seqs=seqs, seconds=None) for seqs in range(6))
    )
    monkeypatch.setattr(calibrate, "prefill", lambda warm: [measured(10, kind="prefill", seconds=None)])
    monkeypatch.setattr(calibrate, "chunks", lambda warm: [measured(10, kind="chunk", seconds=None)])
    monkeypatch.setattr(run, "time", clock)
    state.steps = lambda rows, timing=TIMING, systems=FEW: plan.steps(fake, rows, timing, systems)
    state.work = lambda rows, budget_s=1e9, **others: run.work_through(
        lambda: state.steps(rows, **others), rows, budget_s, {"model": "m"}, say=lambda text: None
    )
    return state


def keys_of(rows):
    return list(dict.fromkeys(row["key"] for row in rows.rows))


def test_the_order_is_that_of_what_a_point_tells_and_systems_take_turns(planned, tmp_path):
    rows = Recording(tmp_path, "serving", "c")
    assert planned.work(rows, timing=plan.GPU_TIMING, systems=tuple(OF_THE_PAPER)) == (0, 0)
    keys = keys_of(rows)
    assert keys[:10] == [f"saturated/{workload}/{name}" for workload in ("sharegpt", "alpaca") for name in OF_THE_PAPER]
    assert keys[10:19] == [f"recompute/{2**power}" for power in range(9)]
    assert keys[19:23] == ["saturated/sharegpt/vllm/3", "saturated/sharegpt/orca-max/3", "generate/sharegpt", "steps"]
    assert keys[23:53] == [
        f"latency/{w}/{name}/{m}"
        for m in ("0.8", "0.5", "0.95")
        for w in ("sharegpt", "alpaca")
        for name in OF_THE_PAPER
    ]
    assert keys[53:77] == [
        f"sharing/{method}/{width}/{name}"
        for method in ("parallel", "beam")
        for width in (2, 4, 6)
        for name in OF_THE_PAPER
        if name != "faster-transformer"
    ]
    assert keys[77:81] == [f"prefix/{prefix}/{name}" for prefix in (80, 341) for name in ("vllm", "orca-oracle")]
    assert (
        keys[81:84] == ["blocks/16/sharegpt/recompute", "blocks/16/sharegpt/swap", "blocks/16/alpaca"]
        and keys[81 + 3 * 7] == "prefill"
    )
    assert {key.partition("/")[0] for key in keys} == set(BENCHMARKS["serving"].kinds)
    assert {rows.find(key)["kind"] for key in keys[53:103]} == {"sharing", "prefix", "blocks", "prefill"}
    assert keys[103:] == [
        "chunks",
        *(f"v1/saturated/{workload}/2048" for workload in ("sharegpt", "alpaca")),
        *(f"v1/latency/{workload}/{m}" for m in ("0.8", "0.5", "0.95") for workload in ("sharegpt", "alpaca")),
        *(f"v1/saturated/{workload}/{budget}" for budget in (512, 8192) for workload in ("sharegpt", "alpaca")),
        *(f"v1-prefix/{prefix}/{how}" for prefix in (80, 341) for how in ("vllm", "vllm-cached", "vllm-v1")),
        *(f"v1-samples/{n}/{name}" for n in (2, 4, 6) for name in ("vllm", "vllm-v1")),
    ]
    assert {key: rows.find(key)["kind"] for key in keys[104:]} == {key: key.partition("/")[0] for key in keys[104:]}
    assert {rows.find(key)["system"] for key in keys[104:] if key.startswith("v1/")} == {"vllm-v1"}
    assert rows.find("v1/latency/alpaca/0.5")["rate"] == pytest.approx(0.5 / 3)
    assert rows.find("v1/saturated/alpaca/512")["budget"] == 512 and not rows.find("v1/saturated/alpaca/2048")["budget"]
    assert len([row for row in rows.rows if row["key"] == "steps"]) == 6
    found = rows.find("latency/sharegpt/vllm/0.8")
    assert found["rate"] == pytest.approx(0.8 / 3) and found["multiple"] == 0.8
    assert found["stop_s"] == pytest.approx(8 + 60)  # few requests: a window twice as long, and no longer than that
    assert rows.find("saturated/sharegpt/vllm")["n"] == 1 and rows.find("saturated/sharegpt/vllm/3")["n"] == 3


def test_killed_at_any_moment_and_resumed_the_rows_are_the_same(planned, tmp_path):
    """From each moment of a whole run. A resumed run is killed again at its first moment with more rows, from which the
    next one begins: so each of them leads to the end of the whole run. Every tenth also goes there by itself."""
    path, files = tmp_path / "whole.csv", []
    planned.watch = lambda: files.append(path.read_bytes() if path.exists() else b"")
    assert planned.work(Recording(tmp_path, "whole", "c")) == (0, 0)
    total, planned.watch = planned.calls, lambda: None
    files.append(path.read_bytes())
    assert total > 60 and len(set(files)) > 50
    for number in range(1, total + 1):
        path, before = tmp_path / f"{number}.csv", files[number - 1]
        if before:
            path.write_bytes(before)
        kept = len(Recording(tmp_path, str(number), "c").rows)  # each of a call
        more = next(later for later in range(number, total + 1) if files[later] != before)

        def work(until, path=path, kept=kept):
            planned.calls, planned.fail_at = kept, until
            try:
                planned.work(Recording(tmp_path, path.stem, "c"))
            except KeyboardInterrupt:
                assert planned.calls == until
            else:
                assert planned.calls == total
            return path.read_bytes() if path.exists() else b""

        assert work(until=number) == before
        assert work(until=more + 1) == files[more]
        if number % 10 == 1:
            path.write_bytes(before) if before else path.unlink()
            assert work(until=None) == files[total]


def test_killed_while_it_writes_the_file_is_whole(planned, tmp_path, monkeypatch):
    path = tmp_path / "serving.csv"
    rows = Recording(tmp_path, "serving", "c")
    rows.add("a", [{"x": 1.5}])
    before = path.read_bytes()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(hashing.os, name, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                rows.add("b", [{"y": 2}])
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
        assert Recording(tmp_path, "serving", "c").find("a")["x"] == "1.5"


def test_rows_of_other_code_stay_but_do_not_count_unless_they_are_named(tmp_path):
    Recording(tmp_path, "serving", "old").add("a", [{"x": 1}, {"x": 2}])
    Recording(tmp_path, "serving", "old").add("b", [{"x": 3}])
    new = Recording(tmp_path, "serving", "new")
    assert new.rows == [] and new.find("a") is None
    new.add("a", [{"x": 4, "y": 5}])
    for rows, expected in (
        (Recording(tmp_path, "serving", "new"), {"a": "4", "b": None}),
        (Recording(tmp_path, "serving", "old"), {"a": "1", "b": "3"}),
        (Recording(tmp_path, "serving", "new", ["old"]), {"a": "4", "b": "3"}),
    ):
        assert {key: (rows.find(key) or {}).get("x") for key in "ab"} == expected
        assert [row["x"] for row in rows.all] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["\n", "system,latency\nvllm,1\n", "key,code\na,b,c\n"])
def test_a_file_that_is_none_of_ours_is_left_alone(tmp_path, text):
    path = tmp_path / "serving.csv"
    path.write_text(text)
    with pytest.raises(UserError, match="does not hold rows of this program"):
        Recording(tmp_path, "serving", "c")
    assert path.read_text() == text


def test_what_a_budget_cannot_hold_is_left_out_and_counted_and_cheaper_points_still_run(planned, tmp_path):
    whole = Recording(tmp_path, "whole", "c")
    planned.work(whole)
    every = keys_of(whole)
    rows = Recording(tmp_path, "some", "c")
    # One saturated run of 30 s and its nine cheaper points; the other system's latency has no rate, which also counts.
    assert planned.work(rows, 58.0) == (len(every) - 10, 0)
    assert keys_of(rows) == ["saturated/sharegpt/vllm", *(f"recompute/{2**power}" for power in range(9))]
    assert planned.work(Recording(tmp_path, "none", "c"), 0.0) == (len(every), 0)
    assert not (tmp_path / "none.csv").exists()
    again = Recording(tmp_path, "some", "c")
    assert planned.work(again) == (0, 0) and sorted(keys_of(again)) == sorted(every)


def test_a_point_that_cannot_be_measured_is_left_out_and_the_next_ones_run(planned, tmp_path):
    planned.fail_at, planned.error = 3, UserError
    rows, said = Recording(tmp_path, "serving", "c"), []
    assert run.work_through(lambda: planned.steps(rows), rows, 1e9, {}, say=said.append) == (0, 1)
    assert rows.find("recompute/1") is None and rows.find("recompute/2") is not None
    assert "recompute/1: not measured: no memory left" in said


def test_the_hash_of_the_code_knows_all_that_measures_and_the_setting():
    assert run.hash_of("1", dict(model="a", device="x")) != run.hash_of("1", dict(model="b", device="x"))
    assert run.hash_of("1", dict(model="a", device="x")) != run.hash_of("2", dict(model="a", device="x"))
    assert run.hash_of("1", dict(model="a", device="x")) == run.hash_of("1", dict(device="x", model="a"))
    assert {calibrate.cells, calibrate.chunks, calibrate.prefill, calibrate.recompute_row} < set(plan.Serving.measures)
    assert generate.generate_row in plan.Serving.measures


# The program


def program(arguments):
    """`python -m repro bench serving`, with its errors as they are raised."""
    options = cli._parser().parse_args(["bench", "serving", *arguments])
    with paths.environment({"REPRO_COMMAND": "python -m repro bench serving"}):
        return options.command(options)


def test_only_some_kinds_and_systems_are_measured(planned, tmp_path):
    rows = Recording(tmp_path, "serving", "c")
    keys = [step.key for step in planned.steps(rows, systems=("vllm",)) if step.kind in ("sharing", "prefix", "blocks")]
    assert "saturated/sharegpt/orca-max/3" not in {step.key for step in planned.steps(rows, systems=("vllm",))}
    assert len(keys) == 6 + 2 + 21 and all(key.startswith("blocks") or key.endswith("/vllm") for key in keys)


def test_latency_without_saturated_runs_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "WarmEngine", lambda *arguments: pytest.fail("this is work"))
    with pytest.raises(UserError, match="rates follow from saturated runs, and .* has none; add saturated"):
        program(["--out", str(tmp_path), "--device", "cpu", "--only", "latency", "steps"])


def test_the_program_measures_only_the_kinds_that_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        plan, "WarmEngine", lambda model, kv_slots, device, dtype: WarmEngine(tiny(), kv_slots, device, dtype)
    )
    monkeypatch.setattr(plan, "CPU_TIMING", {"alpaca": plan.Timing(0.05, 0.15, 0.2, 0.2)})
    assert (
        program(
            [
                "--out",
                str(tmp_path),
                "--device",
                "cpu",
                "--systems",
                "vllm",
                "--kv-slots",
                "2048",
                "--only",
                "saturated",
            ]
        )
        == 0
    )
    assert {row["key"] for row in kept.read(tmp_path / "serving.csv", "measured")} == {"saturated/alpaca/vllm"}
    assert "left out" not in capsys.readouterr().out


def test_the_program_measures_goes_on_and_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        plan, "WarmEngine", lambda model, kv_slots, device, dtype: WarmEngine(tiny(), kv_slots, device, dtype)
    )
    monkeypatch.setattr(plan, "CPU_TIMING", {"alpaca": plan.Timing(0.05, 0.15, 0.2, 0.2)})
    monkeypatch.setattr(calibrate, "CPU_GRID", calibrate.Grid((1, 8), (0, 4), (8, 64), steps=3, cycles=1))
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--systems", "vllm", "--kv-slots", "2048"]
    arguments += ["--only", "saturated", "steps", "latency"]
    assert program([*arguments, "--budget", "20s"]) == 0
    assert "1 points left out, as the budget of 20s would be overrun: call again" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert (
        manifest["points_left_out"] == 1 and manifest["kv_slots"] == 2048 and "earlier_parts" not in manifest
    )  # the steps: 60 s
    rows = (tmp_path / "serving.csv").read_bytes()
    assert program([*arguments, "--budget", "0"]) == 0  # nothing is measured again
    assert (tmp_path / "serving.csv").read_bytes() == rows
    assert program([*arguments, "--budget", "2h"]) == 0
    assert "points left out" not in capsys.readouterr().out.splitlines()[-1]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["points_left_out"] == 0 and [part["points_left_out"] for part in manifest["earlier_parts"]] == [
        1,
        1,
    ]
    found = kept.read(tmp_path / "serving.csv", "measured")
    assert {row["kind"] for row in found} == {"saturated", "latency", "step"} and {row["device"] for row in found} == {
        "CPU"
    }
    assert {row["model"] for row in found} == {"smollm2"}
    assert {row.get("wrong_lengths") for row in found} == {0, None}


def test_v1_is_measured_alone_and_each_run_can_be_predicted_from_its_row(tmp_path, monkeypatch):
    """On the CPU: what it takes to predict, V1's runs, and nothing else; through the file and back."""
    monkeypatch.setattr(
        plan, "WarmEngine", lambda model, kv_slots, device, dtype: WarmEngine(tiny(), kv_slots, device, dtype)
    )
    monkeypatch.setattr(plan, "CPU_TIMING", {"alpaca": plan.Timing(0.05, 0.3, 0.4, 0.4)})
    grid = calibrate.Grid((1, 8), (0, 4), (8, 64), steps=3, cycles=1, chunks=(8,), stored=(0, 32, 64))
    monkeypatch.setattr(calibrate, "CPU_GRID", grid)
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--kv-slots", "2048"]
    assert program([*arguments, "--only", "steps", "chunks", "v1"]) == 0
    before = (tmp_path / "serving.csv").read_bytes()
    assert program([*arguments, "--only", "v1", "--budget", "0"]) == 0  # nothing is left to measure
    assert (tmp_path / "serving.csv").read_bytes() == before
    rows = kept.read(tmp_path / "serving.csv", "measured")
    steps = StepTimes.of("CPU", [row for row in rows if row["kind"] in ("step", "chunk")], padded=False)
    runs = {row["key"]: row for row in rows if row["kind"] == "v1"}
    assert list(runs) == [
        "v1/saturated/alpaca/2048",
        *(f"v1/latency/alpaca/{multiple}" for multiple in ("0.8", "0.5", "0.95")),
        *(f"v1/saturated/alpaca/{budget}" for budget in (512, 8192)),
    ]
    deployment = Deployment(tiny().config, DEVICES["a100-40gb"], 1, 2048)
    for key, row in runs.items():
        asked = Load.of(row)
        found = predict(asked, deployment, steps)
        assert asked.system == "vllm-v1" and row["wrong_lengths"] == 0 and found.keys() <= row.keys()
        assert found["trace_hash"] == row["trace_hash"] and row["gap_median_s"] > 0 < found["gap_median_s"]
        assert (row["first_token_median_s"] is not None) is ("latency" in key) is (row["multiple"] is not None)


@pytest.mark.parametrize("place", range(12))
def test_prefixes_and_samples_are_measured_beside_v1(monkeypatch, warm, place):
    monkeypatch.setattr(plan, "WINDOW", {"warm_s": 0.05, "stop_s": 0.4})
    monkeypatch.setattr(load, "FLOOD", {"alpaca": 60.0, "translation": 60.0})  # as fast as this CPU may be
    step = list(plan.sharing_beside_v1(warm, partial(Load, max_model_len=MAX_LEN)))[place]
    (row,) = step.measure()
    assert row["kind"] == step.kind and row["wrong_lengths"] == 0 and row["tokens_per_s"] > 0
    asked = Load.of(row)
    finds = asked.prefix_cache or asked.system == "vllm-v1"
    assert (row["found_percent"] is not None) is finds
    if finds:
        assert row["found_percent"] > (0 if asked.prefix_tokens else -1)
    assert step.key.endswith("-cached") is asked.prefix_cache


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--budget", "soon"], "budget 'soon'"),
        (["--kv-slots", "0"], "--kv-slots 0 must be at least 1"),
        ([], "no CUDA GPU here"),
    ],
)
def test_what_the_program_cannot_do_it_says_before_any_work(tmp_path, monkeypatch, arguments, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=named):
        program(["--out", str(tmp_path / "new"), *arguments])
    assert not (tmp_path / "new").exists()


def test_two_programs_do_not_measure_into_one_folder(tmp_path):
    from repro.harness.store import locked

    with locked(tmp_path / ".lock", wait=False, about="the other one"), pytest.raises(UserError, match="the other one"):
        program(["--out", str(tmp_path), "--device", "cpu"])
