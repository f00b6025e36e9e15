"""The simulator against the real engine: its arithmetic, rows that it must predict exactly, and a whole run with a tiny
model on this CPU."""

from dataclasses import replace

import pandas as pd
import pytest
from loads import parameters
from test_fig12_measured import folder, write  # noqa: F401 (a fixture)

from repro.bench.serving import calibrate
from repro.engine.config import DEPLOYMENTS
from repro.errors import UserError
from repro.harness.experiment import open as open_experiment
from repro.simulate.load import Load, predict
from repro.simulate.step_times import StepTimes
from repro.studies import sim_vs_real as study


def rows_of(points):
    return pd.DataFrame([row for point in points for row in point.function(**point.arguments)])


def grid():
    """The rows of a machine's step times."""
    about = {
        "key": "steps",
        "code": "c",
        "kind": "step",
        "model": "opt-13b",
        "dtype": "float16",
        "kv_slots": 8000,
        "device": "GPU",
    }
    decode = [
        {"seqs": n, "prompt_tokens": 0, "context_tokens": n * context, "seconds": 0.01 + 1e-4 * n + 1e-7 * n * context}
        for n in (2, 8, 32, 64, 256)
        for context in (10, 500)
    ]
    mixed = [
        {"seqs": n, "prompt_tokens": prompt, "context_tokens": 10 * n, "seconds": 0.011 + 1e-4 * n + 2e-5 * prompt}
        for n in (0, 8, 64)
        for prompt in (16, 256, 2000)
    ]
    return [about | row for row in decode + mixed]


def measured_runs():
    """Runs of that very machine, as the program writes them."""
    steps, pool = StepTimes.of("GPU", grid(), padded=True), replace(DEPLOYMENTS["opt-13b"], kv_slots=8000)
    loads = {
        "saturated/sharegpt/vllm": (Load("vllm", "sharegpt", None, 2.0, 6.0), None),
        "saturated/sharegpt/vllm/3": (Load("vllm", "sharegpt", None, 2.0, 6.0, n=3), None),
        "latency/alpaca/orca-max/0.8": (Load("orca-max", "alpaca", 3.0, 2.0, 20.0, seed=1), 0.8),
        "v1/saturated/sharegpt/2048": (Load("vllm-v1", "sharegpt", None, 2.0, 6.0), None),
        "v1/saturated/sharegpt/512": (Load("vllm-v1", "sharegpt", None, 2.0, 6.0, budget=512), None),
        "v1/latency/alpaca/0.8": (Load("vllm-v1", "alpaca", 3.0, 2.0, 20.0, seed=1), 0.8),
    }
    for key, (asked, multiple) in loads.items():
        yield {
            "key": key,
            "code": "c",
            **predict(asked, pool, steps),
            "kind": key.partition("/")[0],
            "multiple": multiple,
            "model": "opt-13b",
            "dtype": "float16",
            "kv_slots": 8000,
            "device": "GPU",
        }


def test_runs_of_a_machine_that_is_its_table_are_predicted_exactly(folder):
    """Through the file and back: trace, window, pool, samples and rates are those of the measured run."""
    write(folder, [*measured_runs(), *grid()])
    *on_gpu, here = study.points(parameters("sim_vs_real"))
    assert (
        len(on_gpu) == 6
        and here.function is study.measured_here
        and here.alone
        and not any(point.alone for point in on_gpu)
    )
    rows = rows_of(on_gpu)
    assert set(rows["evidence"]) == {"measured", "modelled"} and set(rows["machine"]) == {"GPU"}
    found = study.errors(rows)
    assert len(found) == 6 and found.abs().max().max() < 1e-6 and list(found) == list(study.QUANTITIES)
    assert found["latency_s_per_token"].notna().sum() == 2  # saturated runs have none
    assert found["first_token_median_s"].notna().sum() == 2 and found["gap_median_s"].notna().all()
    assert set(rows["kind"]) == {"saturated", "latency"} and set(rows["budget"].dropna()) == {512}
    figure = study.draw({"runs": rows}, parameters("sim_vs_real"))["sim_vs_real"]
    for axis in figure.axes[:6]:
        points = [line for line in axis.lines if line.get_marker() not in ("None", None, "")]
        assert points and all(line.get_xdata() == pytest.approx(line.get_ydata()) for line in points)


def test_recorded_runs_are_predicted_within_the_bounds_that_the_project_sets_itself(folder):
    """The H200 from its step times alone, with the bounds of docs/a100.md: saturated throughput of each system within 5
    %, in the median closer, since below saturation the arrivals decide it; the median error of latency below 10 %, of
    memory and batch below 5 %."""
    *on_gpu, _ = study.points(parameters("sim_vs_real", gpu="h200"))
    found = study.errors(rows_of(on_gpu))
    # Two traces, five systems, saturated and three rates; three samples. V1: three token budgets and three rates.
    assert len(found) == 2 * 5 * (1 + 3) + 2 + 2 * (3 + 3)
    full = found.xs("saturated", level="kind")["tokens_per_s"].abs()
    # A budget of 8,192 lies beyond the table of step times, which is continued by a line.
    assert full.drop(index=8192, level="budget").max() < 5 and full.max() < 10 and full.median() < 2
    today = found.xs("vllm-v1", level="system").abs().median()
    assert today["first_token_median_s"] < 10 and today["gap_median_s"] < 10 and today["tokens_per_s"] < 5
    typical = found.abs().median()
    assert typical["latency_s_per_token"] < 10
    assert typical["mean_batch"] < 5 and typical["token_states"] < 5


def test_without_a_grid_on_this_machine_the_recorded_rows_are_taken(folder):
    write(folder, list(measured_runs()))
    assert all(point.arguments["evidence"] == "recorded" for point in study.points(parameters("sim_vs_real"))[:-1])


def test_errors_are_the_prediction_over_the_measurement():
    shared = {"machine": "m", "workload": "alpaca", "kind": "saturated", "system": "vllm", "n": 1, "multiple": None}
    shared |= {"budget": None}
    values = {"real": (100.0, None, 40.0, 0.5), "simulated": (103.0, None, 38.0, 0.5)}
    rows = [shared | {"world": world} | dict(zip(study.QUANTITIES, numbers)) for world, numbers in values.items()]
    late = shared | {"kind": "latency", "multiple": 0.6}
    rows += [
        late | {"world": world} | dict.fromkeys(study.QUANTITIES, value)
        for world, value in (("simulated", 1.0), ("real", 2.0))
    ]
    rows += [row | {"n": 3, "tokens_per_s": 1.0} for row in rows[:2]]  # the same run with three samples is another run
    rows += [row | {"budget": 512, "tokens_per_s": 1.0} for row in rows[:2]]  # and so it is with another token budget
    found = study.errors(pd.DataFrame(rows)).sort_index()
    assert list(found) == list(study.QUANTITIES)
    first = found.loc["m", "alpaca", "saturated", "vllm", 1, 1.0, 0]
    assert first[["tokens_per_s", "mean_batch"]].tolist() == pytest.approx([3.0, -5.0])
    assert pd.isna(first["latency_s_per_token"])
    assert found.loc["m", "alpaca", "latency", "vllm", 1, 0.6, 0].tolist() == [-50.0] * len(study.QUANTITIES)
    assert found.loc["m", "alpaca", "saturated", "vllm", 3, 1.0, 0]["tokens_per_s"] == 0
    assert found.loc["m", "alpaca", "saturated", "vllm", 1, 1.0, 512]["tokens_per_s"] == 0


def test_what_rows_of_before_do_not_have_is_left_out():
    """Neither a quantity that was not measured then, nor the budget, is asked of them."""
    shared = {"machine": "m", "workload": "alpaca", "kind": "latency", "system": "vllm", "n": 1, "multiple": 0.5}
    rows = [shared | {"world": world, "tokens_per_s": 1.0} for world in ("real", "simulated")]
    rows[1]["gap_median_s"] = 0.1
    assert list(study.errors(pd.DataFrame(rows))) == ["tokens_per_s"]


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(gpu="tpu"), "'tpu' is not recorded"),
        (dict(cpu_systems=("orca",)), "unknown system 'orca'"),
        (dict(stop_s=0.0), "stop_s"),
        (dict(warm_s=10.0), "a window from 10.0 to 10.0 s"),
        (dict(multiples=(-0.5,)), "multiples"),
    ],
)
def test_bad_parameters_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=named):
        parameters("sim_vs_real", **changes)


def test_a_tiny_model_is_measured_and_predicted_on_this_cpu(monkeypatch):
    """The smoke scale, on a smaller grid of steps. What decides cannot differ; how long steps take is this machine's,
    so only roughly."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(calibrate, "CPU_GRID", calibrate.Grid((1, 8, 40), (0, 8, 32), (8, 64, 256), steps=4, cycles=2))
    smoke = open_experiment("sim_vs_real", "smoke")
    assert smoke.measures_time and smoke.params.cpu_model == "tiny"
    (here,) = [point for point in study.points(smoke.params) if point.alone]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = rows_of([here])
    finally:
        torch.set_num_threads(before)
    assert rows["system"].tolist() == ["vllm", "vllm", "orca-max", "orca-max", "vllm", "vllm"]
    assert (
        rows["world"].tolist() == ["real", "simulated"] * 3
        and rows["kind"].tolist() == ["saturated"] * 4 + ["latency"] * 2
    )
    assert set(rows.loc[rows["world"] == "real", "evidence"]) == {"measured"} and set(rows["machine"]) == {
        "CPU, a tiny LLaMA"
    }
    hashes = rows.groupby(["kind", "system"])["trace_hash"].nunique()
    assert (hashes == 1).all()  # both worlds ran the same trace
    found = study.errors(rows)
    full = found.xs("saturated", level="kind")
    assert (
        len(found) == 3 and full["tokens_per_s"].between(-80, 400).all()
    )  # other work may take the processor at any time
    # Orca (Max) reserves the model's length whatever happens: its batch is four requests in both worlds.
    assert full["mean_batch"].xs("orca-max", level="system").abs().max() < 5
    tables = {"runs": rows}
    assert set(study.draw(tables, smoke.params)) == set(smoke.file.captions)
    assert study.judge(tables, smoke.params) == []
