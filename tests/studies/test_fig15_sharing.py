"""Fig. 15: what parallel samples save is what their prompts' full blocks are, and the study's checks."""

import numpy as np
import pandas as pd
import pytest

from repro.engine.errors import UserError
from repro.studies import fig15_sharing as study
from repro.studies.common import trace_of


def rows_of(params):
    return pd.DataFrame([point.function(**point.arguments) for point in study.points(params)])


@pytest.fixture(scope="module")
def small():
    params = study.Params(workloads=("alpaca",), duration_s=30.0, seeds=(0,), methods=("parallel",))
    return params, rows_of(params)


def test_more_samples_save_more_and_never_more_than_their_prompts_hold(small):
    _, rows = small
    main = rows[rows["dependence"] == study.AS_DRAWN]
    assert main["saving"].is_monotonic_increasing
    assert (main["saving"] < main["prompt_share"]).all()
    # n sequences that share s blocks save (n - 1) s: one and the same s explains all widths.
    shared = main["saving"] * main["width"] / (main["width"] - 1)
    assert shared.max() < 1.2 * shared.min()


def test_one_prompt_of_known_length(monkeypatch):
    """With prompts of 32 tokens and 17 outputs, two samples hold 3 blocks each, 2 of them shared, once they have
    parted."""

    def fixed(*arguments):
        trace = trace_of(*arguments)
        ones = np.ones(len(trace), dtype=np.int64)
        return study.replace(trace, prompt_tokens=32 * ones, output_tokens=17 * ones)

    monkeypatch.setattr(study, "trace_of", fixed)
    row = study.saving("parallel", "alpaca", 20.0, None, 1.0, None, 2, 0, study.AS_DRAWN, None)
    assert 100 * 2 / 6 <= row["saving"] <= 50  # all shared while the prompt runs: 50 %


def test_outputs_dealt_out_anew_keep_the_prompts_and_fit_the_model():
    trace = trace_of("sharegpt", 5.0, 200.0, 0, None)
    other = study.without_dependence(trace, 2048)
    assert (other.prompt_tokens == trace.prompt_tokens).all() and other.hash != trace.hash
    assert (other.prompt_tokens + other.output_tokens).max() <= 2048
    assert other.output_tokens.mean() == pytest.approx(trace.output_tokens.mean(), rel=0.02)


def test_figures_and_verdicts(small):
    params, rows = small
    assert set(study.draw(rows, params)) == set(study.CAPTION)
    assert study.judge(rows, params) == []  # not the paper's parameters
    defaults = study.Params(methods=("parallel",))
    rows = pd.concat([rows.assign(workload=workload) for workload in defaults.workloads])
    judged = {judgement.claim_id: judgement for judgement in study.judge(rows, defaults)}
    assert list(judged["fig15-parallel-alpaca"].ours) == ["2", "4", "6"]
    assert len(judged["sharing-parallel-sharegpt"].ours) == 2


def test_beams_share_more_than_parallel_samples_and_more_the_more_of_them_are_replaced(small):
    params = study.Params(
        workloads=("alpaca",), widths=(4,), beam_seconds=20.0, seeds=(0,), methods=("beam",), turnovers=(0.05, 0.5)
    )
    rows = rows_of(params)
    made_up = rows.dropna(subset=["turnover"]).set_index("turnover")["saving"]
    recorded = rows[rows["turnover"].isna() & (rows["dependence"] == study.AS_DRAWN)]["saving"].iloc[0]
    parallel = small[1].query("width == 4 and dependence == @study.AS_DRAWN")["saving"].iloc[0]
    assert parallel < made_up[0.05] < recorded < made_up[0.5]
    assert set(study.draw(rows, params)) == set(study.CAPTION)
    # The same rows, as if they were the paper's runs:
    rows = pd.concat(
        [rows.assign(workload=workload, width=width) for workload in study.WORKLOADS for width in (2, 4, 6)]
    )
    judged = {judgement.claim_id: judgement for judgement in study.judge(rows, study.Params(methods=("beam",)))}
    assert judged["beam-sharing-up-to-55"].ours == pytest.approx(recorded, rel=1e-5)
    assert "replaced at a step" in judged["sharing-beam-sharegpt"].note


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"methods": ("greedy",)}, "unknown method 'greedy'"),
        ({"workloads": ("chat",)}, "unknown workload 'chat'"),
        ({"widths": (0,)}, "n = 0"),
        ({"rate_alpaca": 0.0}, "rate_alpaca"),
        ({"turnovers": (1.5,)}, "turnover = 1.5"),
        ({"methods": ("beam",), "beams": "no-such-file.json"}, "no-such-file.json"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        study.Params(**wrong)
