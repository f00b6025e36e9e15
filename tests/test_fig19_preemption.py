"""Fig. 19: the shape of the micro curves, that both ways of preemption really run, and the study's checks."""

import pandas as pd
import pytest

from repro import paper
from repro.errors import UserError
from repro.studies import fig19_preemption as study


@pytest.fixture(scope="module")
def small():
    params = study.Params(rates=(6.0, 4.0), block_sizes=(16, 64), duration_s=60.0, seeds=(0,))
    rows = []
    for point in study.points(params):
        found = point.function(**point.arguments)
        rows += found if isinstance(found, list) else [found]
    return params, pd.DataFrame(rows)


def test_swapping_falls_with_the_block_size_and_recomputation_does_not_depend_on_it(small):
    alone = small[1].query("part == 'alone'").pivot(index="block_size", columns="way", values="milliseconds")
    for way in ("swap-in", "swap-out", "swap-in+out"):
        assert alone[way].is_monotonic_decreasing
    assert alone["recompute"].nunique() == 1
    assert (alone["swap-in"] + alone["swap-out"]).tolist() == pytest.approx(alone["swap-in+out"].tolist())


def test_the_two_calibrated_numbers_describe_the_papers_swap_curves(small):
    alone = small[1].query("part == 'alone'").set_index(["way", "block_size"])["milliseconds"]
    for size, drawn in paper.points("fig19a", "swap-in+out"):
        # At block size 1 the paper's line bends: 256 blocks cost less than twice 128.
        assert alone["swap-in+out", size] == pytest.approx(drawn, rel=0.08)


def test_runs_preempt_and_differ_by_the_way_of_preemption(small):
    params, rows = small
    runs = rows[rows["part"] == "end to end"]
    assert (runs["preemptions"] > 0).all()
    assert all(difference > 0 for rate in params.rates for difference in study.differences(rows, rate).values())
    assert set(study.draw(rows, params)) == set(study.CAPTION)
    assert study.judge(rows, params) == []


def test_the_papers_parameters_are_judged(small):
    params = study.Params()
    runs = [{"part": "end to end", "way": way, "rate": rate, "block_size": size, "latency_s_per_token": 0.1 + 0.01 * (way == "swap")}
            for rate in params.rates for size in params.block_sizes for way in study.MODES]
    rows = pd.concat([small[1].query("part == 'alone'"), pd.DataFrame(runs)])
    judged = {judgement.claim_id: judgement for judgement in study.judge(rows, params)}
    assert judged["fig19b-comparable"].ours == 10
    assert judged["fig19a-20-percent"].ours > 100


def test_recorded_swaps_out_and_in_are_added_up(tmp_path):
    path = tmp_path / "kernels.csv"
    line = "swap,{},{},16.0,{},{},GPU\n"
    path.write_text("benchmark,contender,tokens,block_size,direction,us,device\n" + line.format("ours one launch", 256.0, "out", 4000)
                    + line.format("ours one launch", 256.0, "in", 5000) + line.format("ours one launch", 1024.0, "in", 1) + "copy,x,,16.0,,7,GPU\n")
    row, = study.recorded_swaps(path)
    assert (row["milliseconds"], row["block_size"], row["evidence"], row["device"]) == (9.0, 16, "recorded", "GPU")


@pytest.mark.parametrize("wrong, match", [({"rates": ()}, "rates"), ({"rates": (0.0,)}, "rates"), ({"block_sizes": (48,)}, "block_size"),
                                          ({"seeds": (-1,)}, "seeds"), ({"duration_s": 0.0}, "duration_s")])
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        study.Params(**wrong)
