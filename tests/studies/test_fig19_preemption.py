"""Fig. 19: the shape of the micro curves, that both ways of preemption really run, and the study's checks."""

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.report import paper
from repro.report.claims import judge_entry, load
from repro.studies import fig19_preemption as study

FEW = {"rates": [6.0, 4.0], "block_sizes": [16, 64], "duration_s": 60.0, "seeds": [0]}


@pytest.fixture(scope="module")
def small():
    run = experiment.open("fig19_preemption", overrides=FEW)
    return run, rows_of(study, run.params)


def test_swapping_falls_with_the_block_size_and_recomputation_does_not_depend_on_it(small):
    alone = small[1]["alone"].pivot(index="block_size", columns="way", values="milliseconds")
    for way in ("swap-in", "swap-out", "swap-in+out"):
        assert alone[way].is_monotonic_decreasing
    assert alone["recompute"].nunique() == 1
    assert (alone["swap-in"] + alone["swap-out"]).tolist() == pytest.approx(alone["swap-in+out"].tolist())


def test_the_two_calibrated_numbers_describe_the_papers_swap_curves(small):
    alone = small[1]["alone"].set_index(["way", "block_size"])["milliseconds"]
    for size, drawn in paper.points("fig19a", "swap-in+out"):
        # At block size 1 the paper's line bends: 256 blocks cost less than twice 128.
        assert alone["swap-in+out", size] == pytest.approx(drawn, rel=0.08)


def test_runs_preempt_and_differ_by_the_way_of_preemption(small):
    run, rows = small
    served = rows["end_to_end"]
    assert (served["preemptions"] > 0).all()
    assert all(difference > 0 for rate in run.params.rates for difference in study.differences(served, rate).values())
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []


def test_the_papers_parameters_are_judged(small):
    papers = experiment.open("fig19_preemption")
    runs = [
        {"way": way, "rate": rate, "block_size": size, "latency_s_per_token": 0.1 + 0.01 * (way == "swap")}
        for rate in papers.params.rates
        for size in papers.params.block_sizes
        for way in study.MODES
    ]
    rows = {"alone": small[1]["alone"], "recorded": pd.DataFrame(), "end_to_end": pd.DataFrame(runs)}
    judged = {judgement.claim_id: judgement for judgement in papers.judgements(rows)}
    assert judged["fig19b-comparable"].ours == 10
    assert judged["fig19a-20-percent"].ours > 100


def test_recorded_swaps_out_and_in_are_added_up(tmp_path):
    path = tmp_path / "kernels.csv"
    line = "swap,{},{},16.0,{},{},GPU\n"
    path.write_text(
        "benchmark,contender,tokens,block_size,direction,us,device\n"
        + line.format("ours one launch", 256.0, "out", 4000)
        + line.format("ours one launch", 256.0, "in", 5000)
        + line.format("ours one launch", 1024.0, "in", 1)
        + "copy,x,,16.0,,7,GPU\n"
    )
    (row,) = study.recorded_swaps(path, "recorded")
    assert (row["milliseconds"], row["block_size"], row["evidence"], row["device"]) == (9.0, 16, "recorded", "GPU")


def test_recorded_recomputations_are_those_of_256_tokens(tmp_path):
    path = tmp_path / "serving.csv"
    path.write_text(
        "kind,seconds,device,block_size,tokens\nsaturated,28.0,GPU,,\nrecompute,0.25,GPU,8,256\nrecompute,9.0,GPU,8,512\n"
    )
    (row,) = study.recorded_recomputations(path, "recorded")
    assert (row["way"], row["block_size"], row["milliseconds"], row["evidence"], row["device"]) == (
        "recompute",
        8,
        250.0,
        "recorded",
        "GPU",
    )
    path.write_text("kind,seconds\nsaturated,28.0\n")
    assert study.recorded_recomputations(path, "recorded") == []


def recorded(times):
    return pd.DataFrame(
        [
            {"way": way, "block_size": size, "milliseconds": ms, "device": "GPU", "evidence": "recorded"}
            for way, curve in times.items()
            for size, ms in zip(study.BLOCK_SIZES, curve)
        ]
    )


FLAT, FALLING = [10.0] * 8 + [10.9], [float(900 - 100 * index) for index in range(9)]


@pytest.mark.parametrize(
    "changed, held",
    [
        ({}, True),
        ({study.RECOMPUTE: [10.0] * 8 + [11.1]}, False),
        ({study.SWAP_2023: FLAT}, False),
        ({study.SWAP_2023: [*FALLING[:7], 250.0, 260.0]}, False),  # rises once
        ({study.SWAP_BATCHED: FALLING}, True),  # how ours swaps is no part of the claim
    ],
)
def test_the_shapes_are_judged_by_recorded_rows_alone(changed, held):
    times = {study.RECOMPUTE: FLAT, study.SWAP_2023: FALLING, study.SWAP_BATCHED: FLAT} | changed
    judged, share = study.judge_recorded(recorded(times))
    verdict, _ = judge_entry(load()["fig19a-recompute-flat"], judged.ours)
    assert (verdict == "reproduced", judged.evidence, judged.device) == (held, "recorded", "GPU")
    assert share.claim_id == "fig19a-20-percent" and share.ours == pytest.approx(
        max(100 * one / other for one, other in zip(times[study.RECOMPUTE], times[study.SWAP_2023])), rel=1e-5
    )


@pytest.mark.parametrize("lost", [None, study.RECOMPUTE, study.SWAP_2023])
def test_without_all_recorded_rows_the_shapes_are_not_judged(lost):
    rows = recorded({study.RECOMPUTE: FLAT, study.SWAP_2023: FALLING, study.SWAP_BATCHED: FLAT})
    kept = rows[rows["way"] != lost] if lost else rows[rows["block_size"] != 64]
    assert study.judge_recorded(kept) == study.judge_recorded(rows[:0]) == []


def test_where_only_a_part_was_measured_here_the_evidence_is_the_weaker_and_both_devices_are_named():
    rows = recorded({study.RECOMPUTE: FLAT, study.SWAP_2023: FALLING, study.SWAP_BATCHED: FLAT})
    rows.loc[rows["way"] == study.RECOMPUTE, ["evidence", "device"]] = ["measured", "mine"]
    judged, _ = study.judge_recorded(rows)
    assert judged.evidence == "recorded"
    assert judged.facts["devices"] == "mine, GPU"
    note = experiment.parameter_file("fig19_preemption").notes["fig19a-recompute-flat"]
    assert note.format(**judged.facts).startswith("mine, GPU, ")


def test_a_gpu_that_is_not_recorded_leaves_the_rest_as_it_is(small):
    params = parameters("fig19_preemption", **FEW, gpu="none")
    assert not [point for point in study.points(params) if point.function.__name__.startswith("recorded")]
    run, rows = small

    def labels(rows, params):
        (legend,) = study.draw(rows, params)["fig19_preemption"].legends
        return {text.get_text() for text in legend.get_texts()}

    without = {**rows, "recorded": rows["recorded"][:0]}
    assert labels(rows, run.params) - labels(without, params) == {
        f"recorded: {label}" for label, *_ in study.RECORDED.values()
    }


def test_the_committed_rows_have_every_block_size(small):
    judged, _ = study.judge_recorded(small[1]["recorded"])
    assert judge_entry(load()[judged.claim_id], judged.ours)[0] == "reproduced"


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"rates": []}, "rates"),
        ({"rates": [0.0]}, "rates"),
        ({"block_sizes": [48]}, "block_size"),
        ({"seeds": [-1]}, "seeds"),
        ({"duration_s": 0.0}, "duration_s"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("fig19_preemption", **wrong)
