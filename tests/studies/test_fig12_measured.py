"""Fig. 12 measured: the recorded rows against their replay, what is drawn of rows that are not all there, and what is
judged."""

import csv

import pytest
from loads import parameters
from loads import rows_of as all_rows

from repro.bench import kept
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import OF_THE_PAPER
from repro.errors import UserError
from repro.harness import experiment
from repro.report import claims
from repro.simulate.load import Load, predict
from repro.simulate.metrics import PIECES
from repro.simulate.step_times import StepTimes
from repro.studies import fig12_measured as study

SLOTS = DEPLOYMENTS["opt-13b"].kv_slots
STEPS = StepTimes("here", False, (1,), (0.02,), 0.0, (0,), (1, 1000), ((0.02, 0.1),), 0.02)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where this machine's own rows would be, and nothing there."""
    for name in ("REPRO_ROOT", "REPRO_VARIANT", "REPRO_STUDIES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(tmp_path))
    return tmp_path / "measured" / "serving"


def write(folder, rows):
    folder.mkdir(parents=True)
    with (folder / "serving.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def ran(system, workload, rate=None, n=1, multiple=None, steps=STEPS, **changes):
    """A row as the program writes it, of a run in virtual time."""
    asked = Load(system, workload, rate, 2.0, 6.0, n=n)
    found = predict(asked, DEPLOYMENTS["opt-13b"], steps)
    key = "/".join(map(str, filter(None, (asked.kind, workload, system, multiple, n if n > 1 else None))))
    setting = {"model": "opt-13b", "dtype": "float16", "kv_slots": SLOTS, "device": "GPU"}
    return {"key": key, "code": "c", **found, "multiple": multiple, **setting} | changes


GENERATE = {
    "key": "generate/sharegpt",
    "code": "c",
    "kind": "generate",
    "system": "transformers generate",
    "workload": "sharegpt",
    "tokens_per_s": 100.0,
    "trace_hash": "t",
    "model": "opt-13b",
    "dtype": "float16",
    "kv_slots": SLOTS,
    "device": "GPU",
}


def rows_of(gpu="auto"):
    return all_rows(study, parameters("fig12_measured", gpu=gpu))


def draw(rows):
    return study.draw(rows, parameters("fig12_measured"))


def judged(rows):
    return experiment.open("fig12_measured").judgements(rows)


CAPTIONS = set(experiment.parameter_file("fig12_measured").captions)


def texts(figure):
    return [text.get_text() for axis in figure.axes for text in axis.texts]


def test_the_recorded_runs_hold_what_their_replay_holds():
    """Memory and batch follow from decisions: shares of the pool within 2 points, batches within 5 %, for every run."""
    rows = rows_of("h200")
    runs = (rows[name][rows[name]["n"] == 1] for name in ("saturated", "replayed"))
    measured, replayed = (table.set_index(["workload", "system"]) for table in runs)
    assert len(measured) == len(replayed) == 2 * len(OF_THE_PAPER)
    for run, row in measured.iterrows():
        again = replayed.loc[run]
        for piece in PIECES:
            assert again[piece] == pytest.approx(row[piece], abs=0.02), (run, piece)
        assert again["mean_batch"] == pytest.approx(row["mean_batch"], rel=0.05), run
        assert (
            again["trace_hash"] == row["trace_hash"]
            and again["evidence"] == "replayed"
            and row["evidence"] == "recorded"
        )


def test_recorded_outputs_have_the_lengths_of_the_trace_and_the_order_is_the_papers():
    for row in kept.read(*kept.find("h200", kept.SERVING)):
        assert row.get("wrong_lengths") in (0, None)
    rows = rows_of("h200")
    for workload in ("sharegpt", "alpaca"):
        ours = study.ratios(rows, workload)
        assert ["vllm", *ours] == list(OF_THE_PAPER) and list(ours) == sorted(ours, key=ours.get)
        assert all(ratio > 1 and 0 < off < ratio for ratio, off in ours.values())
        assert study.paper_ratios(workload).keys() == ours.keys()


def test_a_run_is_replayed_from_its_own_row(folder):
    """Every step as long as the mean one: where all steps are equal the replay is the run."""
    constant = StepTimes("here", False, (1,), (0.0231,), 0.0, (0,), (1,), ((0.0231,),), 0.0231)
    write(folder, [ran("vllm", "alpaca", steps=constant)])
    rows = rows_of()
    measured, again = (rows[name].iloc[0] for name in ("saturated", "replayed"))
    for name in study.METRICS:
        if name != "latency_s_per_token":
            assert again[name] == pytest.approx(measured[name], rel=1e-6), name


def test_what_a_short_budget_left_out_is_drawn_as_missing(folder):
    write(folder, [ran("vllm", "sharegpt"), ran("orca-max", "sharegpt")])
    rows = rows_of()
    assert rows.distinct("evidence") == ["measured", "replayed"]
    figures = draw(rows)
    assert set(figures) == {"fig12_measured", "fig12_measured_memory"} <= CAPTIONS
    assert texts(figures["fig12_measured"]).count("not\nmeasured") == 2 * len(OF_THE_PAPER) - 2
    assert study.ratios(rows, "alpaca") == {} and set(study.ratios(rows, "sharegpt")) == {"orca-max"}
    assert judged(rows) == []


def test_latency_is_drawn_once_there_are_rows_and_what_is_not_steady_is_marked(folder):
    saturated = [ran(name, "sharegpt") for name in OF_THE_PAPER]
    rate = {row["system"]: row["finished_rate"] for row in saturated}
    latency = [
        ran(name, "sharegpt", multiple * rate[name], multiple=multiple, mark=mark)
        for name in ("vllm", "orca-max")
        for multiple, mark in ((0.5, "steady"), (0.8, "too short"), (0.95, "overloaded"))
    ]
    write(folder, [*saturated, *latency])
    rows = rows_of()
    figures = draw(rows)
    assert set(figures) == CAPTIONS
    left, right = figures["fig12_measured_latency"].axes[:2]
    assert sorted(text.get_text() for text in left.texts) == ["", "", "?", "?"]  # of two a lower bound, an arrow
    assert [text.get_text() for text in right.texts] == ["not measured"]
    curves = [line for line in left.lines if len(line.get_xdata()) == 3]
    assert [0.5, 0.8, 0.95] in [pytest.approx(line.get_xdata()) for line in curves]  # in units of what vLLM sustains


def test_a_saturated_run_that_is_not_steady_says_so_above_its_bar(folder):
    write(folder, [ran("vllm", "sharegpt", mark="client-bound"), ran("orca-max", "sharegpt")])
    said = texts(draw(rows_of())["fig12_measured"])
    assert sum(text.startswith("client-bound\n") for text in said) == 1 and not any("steady" in text for text in said)


def test_claims_are_judged_only_from_rows_that_are_there(folder):
    rows = [ran("vllm", "sharegpt", tokens_per_s=2400.0), GENERATE, ran("vllm", "sharegpt", n=3, tokens_per_s=700.0)]
    write(folder, rows)
    (found,) = judged(rows_of())
    assert (found.claim_id, found.ours, found.evidence) == ("hf-24x", 24.0, "measured") and "GPU" in found.note
    with (folder / "serving.csv").open("a", newline="") as file:
        header = (folder / "serving.csv").read_text().splitlines()[0].split(",")
        csv.DictWriter(file, header).writerow(ran("orca-max", "sharegpt", n=3, tokens_per_s=200.0))
    assert {one.claim_id: one.ours for one in judged(rows_of())} == {"hf-24x": 24.0, "tgi-3.5x": 3.5}


def test_the_recorded_runs_give_claims_on_memory_batches_and_ratios_their_second_verdict(tmp_path):
    found = judged(rows_of("h200"))
    claims.record(found, "fig12_measured", tmp_path)
    seconds = {one["id"]: one["measured"] for one in claims.read(tmp_path) if one["experiment"]}
    assert len(seconds) == len(found) == 17 and {one["device"] for one in seconds.values()} == {"NVIDIA H200"}
    verdicts = {name: one["verdict"] for name, one in seconds.items()}
    assert verdicts["fig2-token-states"] == verdicts["throughput-2-to-4x"] == "reproduced"
    assert verdicts["prefill-and-decode-bounds"] == "reproduced"
    assert verdicts["more-requests-batched"] == "differs"  # 2.57 against 2.2
    assert seconds["rate-vs-oracle-sharegpt"]["covers"] == "1 of 3"
    assert "Saturated throughput" in seconds["rate-vs-oracle-sharegpt"]["note"]


@pytest.mark.parametrize("other", [{"model": "opt-1.3b"}, {"kv_slots": 8000}])
def test_another_model_or_pool_says_nothing_about_the_claims(folder, other):
    write(folder, [ran("vllm", "sharegpt", **other), GENERATE | other])
    rows = rows_of()
    assert judged(rows) == []
    figure = draw(rows)["fig12_measured"]
    assert any(str(other.get("model", "8,000")).upper() in text.get_text() for text in figure.texts)


def test_own_rows_without_a_saturated_run_leave_the_recorded_ones_in_place(folder):
    write(folder, [{"key": "recompute/16", "code": "c", "kind": "recompute", "device": "GPU", "seconds": 0.01}])
    assert rows_of().distinct("evidence") == ["recorded", "replayed"]


def test_an_unknown_gpu_is_refused_before_any_work():
    with pytest.raises(UserError, match="gpu = 'tpu' is not recorded"):
        parameters("fig12_measured", gpu="tpu")


def test_a_recorded_file_without_runs_is_named(tmp_path, monkeypatch):
    recorded = tmp_path / "root" / "experiments" / "recorded" / "h200" / "serving"
    write(recorded, [{"key": "recompute/16", "code": "c", "kind": "recompute", "device": "GPU", "seconds": 0.01}])
    params = parameters("fig12_measured")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path / "root"))
    with pytest.raises(
        UserError, match="serving.csv holds no run of the kind saturated or latency or generate; measure for longer"
    ):
        study.points(params)
