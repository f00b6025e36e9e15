"""The study of batching: memory against the batch, by the managers."""

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import claims
from repro.report.claims import judge_entry
from repro.studies import fig01_batching as study

STEM = "fig01_batching"
SHORT = parameters(STEM, limits=[1, 4, 8, 16, 64], duration_s=120.0, seeds=[0, 1])


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(study, SHORT)


@pytest.fixture
def runs(rows: Rows) -> pd.DataFrame:
    return rows["batches"]


def test_a_reserving_system_takes_2048_slots_a_request_until_the_pool_is_full(runs: pd.DataFrame) -> None:
    mine = runs[runs["system"] == study.EXISTING].groupby(["kv_gb", "limit"])[["batch", "memory_gb"]].mean()
    per_request = 2048 * 819_200 / 2**30
    for limit, held in ((1, 1), (4, 4), (8, 8), (16, 8), (64, 8)):
        assert mine.loc[13.0, limit].tolist() == pytest.approx([held, 26 + held * per_request])
    assert mine.loc[(12.0, 64), "batch"] == pytest.approx(7) and mine.loc[(14.0, 64), "batch"] == pytest.approx(8)


def test_paging_holds_more_requests_in_less_memory(runs: pd.DataFrame) -> None:
    table = runs[runs["kv_gb"] == 13.0].groupby(["system", "limit"])[["batch", "memory_gb", "tokens_per_s"]].mean()
    vllm, existing = table.loc["vllm"], table.loc[study.EXISTING]
    assert (vllm["memory_gb"] - 26 < 0.4 * (existing["memory_gb"] - 26)).loc[:8].all()
    assert vllm["memory_gb"].is_monotonic_increasing and vllm["tokens_per_s"].is_monotonic_increasing
    assert vllm.loc[64, "batch"] > 4 * existing.loc[64, "batch"]
    # The same batch runs at the same speed, whoever manages the memory.
    assert vllm.loc[4, "tokens_per_s"] == pytest.approx(existing.loc[4, "tokens_per_s"], rel=1e-6)
    # A batch of one: an iteration of 26.24 + 0.4186 ms a token, and a little for prompts.
    assert vllm.loc[1, "tokens_per_s"] == pytest.approx(1 / 0.02666, rel=0.01)


def test_the_verdict_is_given_for_the_papers_parameters_only(rows: Rows) -> None:
    run = experiment.open(STEM, overrides={"seeds": [0, 1]})
    assert run.params.as_in_paper and not SHORT.as_in_paper
    (judged,) = run.judgements(rows)
    assert "13 GB of K/V hold 8.0 and" in judged.note
    judge_entry(claims.load()[judged.claim_id], judged.ours)
    assert judged.ours["existing"] == 8 and judged.interval["existing"] == [7, 8]
    assert judged.interval["vllm"][0] < judged.ours["vllm"] < judged.interval["vllm"][1]


def test_the_figure_can_be_drawn(rows: Rows) -> None:
    assert set(study.draw(rows, SHORT)) == set(experiment.parameter_file(STEM).captions)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"limits": ()}, "at least one"),
        ({"limits": (0, 4)}, "limits.*at least 1"),
        ({"limits": (4, 300)}, "limits.*at most 256"),
        ({"kv_gb": (1.0,)}, "cannot hold one request"),
        ({"kv_gb": (13.0, float("inf"))}, "finite"),
        ({"rate": 0.0}, "above 0"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parameters(STEM, **changes)
