"""Fig. 18b: waste grows with the block size, recorded kernel times are found, and the study's checks."""

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro import paths
from repro.errors import UserError
from repro.harness import experiment
from repro.report.claims import judge_entry, load
from repro.studies import fig18b_block_size as study

HEADER = "benchmark,contender,heads,batch,context,block_size,us,device\n"


def test_waste_grows_with_the_block_size_and_is_about_half_a_block():
    few = {"block_sizes": [4, 16, 64], "rate_sharegpt": 1.5, "rate_alpaca": 10.0, "duration_s": 60.0, "gpu": "none"}
    run = experiment.open("fig18b_block_size", overrides=few)
    rows = rows_of(study, run.params)
    served = rows["served"]
    assert set(served["effects"]) == {study.WASTE} and rows["kernel"].empty  # no recording, no kernel
    wasted = served.set_index(["workload", "block_size"])["wasted"]
    for workload in ("sharegpt", "alpaca"):
        assert wasted[workload].is_monotonic_increasing
        # Half a block a sequence, less half a slot: 63 / 15 of that between blocks of 64 and of 16.
        assert 3 < wasted[workload, 64] / wasted[workload, 16] < 5.5
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []


def test_recorded_kernel_times_are_taken_over_the_reference_block_size(tmp_path):
    path = tmp_path / "kernels.csv"
    path.write_text(
        HEADER + "block_sizes,ours,40 x 128,64.0,ragged,8.0,120,GPU\n"
        "block_sizes,ours,40 x 128,64.0,ragged,16.0,100,GPU\n"
        "block_sizes,ours,40 x 128,32.0,256,16.0,7,GPU\n"
        "decode,ours,40 x 128,64.0,ragged,16.0,8,GPU\n"
    )
    rows = study.kernel_times(path, "recorded")
    assert [(row["block_size"], row["relative"], row["evidence"], row["device"]) for row in rows] == [
        (8, 1.2, "recorded", "GPU"),
        (16, 1.0, "recorded", "GPU"),
    ]


def test_the_kernel_counts_end_to_end_where_it_is_slower_and_blocks_are_no_larger_than_the_reference(
    tmp_path, monkeypatch
):
    times = {4: 99, 8: 120, 16: 100, 128: 101}
    params = parameters("fig18b_block_size", block_sizes=list(times), gpu="h200")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    path = paths.folders().experiments / "recorded" / "h200" / "kernels" / "kernels.csv"
    path.parent.mkdir(parents=True)
    path.write_text(
        HEADER + "".join(f"block_sizes,ours,40 x 128,64.0,ragged,{size}.0,{us},GPU\n" for size, us in times.items())
    )
    both = [point.arguments for point in study.points(params) if point.arguments.get("kernel")]
    assert {(run["block_size"], run["kernel"]) for run in both} == {(8, 1.2), (16, 1.0)}


def test_a_slower_kernel_serves_more_slowly():
    run = dict(workload="sharegpt", rate=1.5, duration_s=60.0, block_size=8, seed=0, lengths=None)
    as_measured, slower = (study.served_with(kernel=kernel, **run)["latency_s_per_token"] for kernel in (1.0, 2.0))
    assert slower > 1.05 * as_measured


@pytest.mark.parametrize("turn, large, small", [(False, "reproduced", "differs"), (True, "differs", "reproduced")])
def test_only_the_papers_ranking_counts(turn, large, small):
    run = experiment.open("fig18b_block_size")
    served = pd.DataFrame(
        [
            {
                "effects": effects,
                "workload": workload,
                "block_size": size,
                "latency_s_per_token": 1 / size if turn else size,
            }
            for effects in (study.WASTE, study.BOTH)
            for workload in ("sharegpt", "alpaca")
            for size in run.params.block_sizes
        ]
    )
    kernel = pd.DataFrame({"block_size": [8, 16], "relative": [1.04, 1.0]})
    judged = {one.claim_id: one for one in run.judgements({"served": served, "kernel": kernel})}
    verdicts = {name: judge_entry(load()[name], one.ours)[0] for name, one in judged.items()}
    assert verdicts == {"fig18b-block-size": large, "fig18b-small-blocks": small}
    assert "at most 4 % longer" in judged["fig18b-small-blocks"].note


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"block_sizes": [3]}, "block_size"),
        ({"block_sizes": []}, "block_sizes"),
        ({"rate_alpaca": -1.0}, "rate_alpaca"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("fig18b_block_size", **wrong)
