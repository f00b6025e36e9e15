"""Fig. 15: what parallel samples save is what their prompts' full blocks are, and the study's checks."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.simulate.beams import recording
from repro.studies import fig15_sharing as study
from repro.studies.common import trace_of
from repro.workloads import WORKLOADS

STEM = "fig15_sharing"


@pytest.fixture(scope="module")
def small():
    params = parameters(STEM, workloads=["alpaca"], window_s=[15.0, 40.0], seeds=[0], methods=["parallel"])
    return params, rows_of(study, params)["saving"]


def as_rows(saving):
    turnover = pd.DataFrame(study.turnover((2, 4, 6), None))
    return Rows({"saving": saving, "turnover": turnover}, study.TABLES)


def test_turnover_falls_with_the_steps_and_its_bins_make_up_the_whole():
    found = pd.DataFrame(study.turnover((2, 4, 6), None)).set_index(["kind", "width", "from_step"])["replaced"]
    for (kind, width), bins in found.groupby(["kind", "width"]):
        assert list(bins.index.get_level_values("from_step")) == list(range(0, 1024, study.BIN))
        assert bins.iloc[0] == bins.max() and bins.iloc[-1] < 0.85 * bins.iloc[0]
        assert bins.mean() == pytest.approx(100 * recording(kind).replaced_share(width))


def test_more_samples_save_more_and_never_more_than_their_prompts_hold(small):
    _, rows = small
    main = rows[rows["dependence"] == study.AS_DRAWN]
    assert main["saving"].is_monotonic_increasing
    assert (main["saving"] < main["prompt_share"]).all()
    # n sequences that share s blocks save (n - 1) s: one and the same s explains all widths.
    shared = main["saving"] * main["width"] / (main["width"] - 1)
    assert shared.max() < 1.2 * shared.min()


def test_one_prompt_of_known_length():
    """With prompts of 32 tokens and 17 outputs, two samples hold 3 blocks each, 2 of them shared, once they have
    parted."""

    def fixed(**arguments):
        trace = trace_of("alpaca", lengths=None, **arguments)
        ones = np.ones(len(trace), dtype=np.int64)
        return replace(trace, prompt_tokens=32 * ones, output_tokens=17 * ones)

    row = study.saving(replace(study.setup_of("parallel", "alpaca", 2, 20.0, 0), trace=fixed), rate=1.0, from_s=0.0)
    assert 100 * 2 / 6 <= row["saving"] <= 50  # all shared while the prompt runs: 50 %


def test_outputs_dealt_out_anew_keep_the_prompts_and_fit_the_model():
    trace, other = (make("sharegpt", 5.0, 200.0, 0, None) for make in (trace_of, study.independent_trace))
    assert (other.prompt_tokens == trace.prompt_tokens).all() and other.hash != trace.hash
    assert (other.prompt_tokens + other.output_tokens).max() <= 2048
    assert other.output_tokens.mean() == pytest.approx(trace.output_tokens.mean(), rel=0.02)


def test_figures_and_verdicts(small):
    params, rows = small
    run = experiment.open(STEM, overrides={"methods": ["parallel"]})
    assert set(study.draw(as_rows(rows), params)) == set(run.file.captions)
    assert not params.as_in_paper and run.params.as_in_paper
    rows = pd.concat([rows.assign(workload=workload) for workload in run.params.workloads])
    judged = {judgement.claim_id: judgement for judgement in run.judgements(as_rows(rows))}
    assert list(judged["fig15-parallel-alpaca"].ours) == ["2", "4", "6"]
    assert len(judged["sharing-parallel-sharegpt"].ours) == 2


def test_beams_share_more_than_parallel_samples_and_more_the_more_of_them_are_replaced(small):
    small_beams = {"workloads": ["alpaca"], "widths": [4], "window_s": [0.0, 20.0], "turnovers": [0.05, 0.5]}
    params = parameters(STEM, seeds=[0], methods=["beam"], **small_beams)
    rows = rows_of(study, params)["saving"]
    made_up = rows.dropna(subset=["turnover"]).set_index("turnover")["saving"]
    recorded = rows[rows["turnover"].isna() & (rows["dependence"] == study.AS_DRAWN)]["saving"].iloc[0]
    parallel = small[1].query("width == 4 and dependence == @study.AS_DRAWN")["saving"].iloc[0]
    assert parallel < made_up[0.05] < recorded < made_up[0.5]
    run = experiment.open(STEM, overrides={"methods": ["beam"]})
    assert set(study.draw(as_rows(rows), params)) == set(run.file.captions)
    # The same rows, as if they were the paper's runs:
    rows = pd.concat([rows.assign(workload=workload, width=width) for workload in WORKLOADS for width in (2, 4, 6)])
    judged = {judgement.claim_id: judgement for judgement in run.judgements(as_rows(rows))}
    assert judged["beam-sharing-up-to-55"].ours == pytest.approx(recorded, rel=1e-5)
    assert "replaced at a step" in judged["sharing-beam-sharegpt"].note


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"methods": ("greedy",)}, "one of 'parallel', 'beam', not .*greedy"),
        ({"workloads": ("chat",)}, "unknown workload 'chat'"),
        ({"widths": (0,)}, "n = 0"),
        ({"rate_alpaca": 0.0}, "rate_alpaca"),
        ({"turnovers": (1.5,)}, "turnover = 1.5"),
        ({"methods": ("beam",), "beams": "no-such-file.json"}, "no-such-file.json"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters(STEM, **wrong)
