"""The study of batching: memory against the batch, by the managers."""

import pandas as pd
import pytest

from repro.engine.errors import UserError
from repro.report import claims
from repro.report.claims import judge_entry
from repro.studies import fig01_batching as study

SHORT = study.Params(limits=(1, 4, 8, 16, 64), duration_s=120.0, seeds=(0, 1))


def rows_of(params: study.Params) -> pd.DataFrame:
    return pd.DataFrame([point.function(**point.arguments) for point in study.points(params)])


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return rows_of(SHORT)


def test_a_reserving_system_takes_2048_slots_a_request_until_the_pool_is_full(rows: pd.DataFrame) -> None:
    mine = rows[rows["system"] == study.EXISTING].groupby(["kv_gb", "limit"])[["batch", "memory_gb"]].mean()
    per_request = 2048 * 819_200 / 2**30
    for limit, held in ((1, 1), (4, 4), (8, 8), (16, 8), (64, 8)):
        assert mine.loc[13.0, limit].tolist() == pytest.approx([held, 26 + held * per_request])
    assert mine.loc[(12.0, 64), "batch"] == pytest.approx(7) and mine.loc[(14.0, 64), "batch"] == pytest.approx(8)


def test_paging_holds_more_requests_in_less_memory(rows: pd.DataFrame) -> None:
    table = rows[rows["kv_gb"] == 13.0].groupby(["system", "limit"])[["batch", "memory_gb", "tokens_per_s"]].mean()
    vllm, existing = table.loc["vllm"], table.loc[study.EXISTING]
    assert (vllm["memory_gb"] - 26 < 0.4 * (existing["memory_gb"] - 26)).loc[:8].all()
    assert vllm["memory_gb"].is_monotonic_increasing and vllm["tokens_per_s"].is_monotonic_increasing
    assert vllm.loc[64, "batch"] > 4 * existing.loc[64, "batch"]
    # The same batch runs at the same speed, whoever manages the memory.
    assert vllm.loc[4, "tokens_per_s"] == pytest.approx(existing.loc[4, "tokens_per_s"], rel=1e-6)
    # A batch of one: an iteration of 26.24 + 0.4186 ms a token, and a little for prompts.
    assert vllm.loc[1, "tokens_per_s"] == pytest.approx(1 / 0.02666, rel=0.01)


def test_the_verdict_is_given_for_the_papers_parameters_only(rows: pd.DataFrame) -> None:
    assert study.judge(rows, SHORT) == []
    (judged,) = study.judge(rows, study.Params(seeds=SHORT.seeds))
    judge_entry(claims.load()[judged.claim_id], judged.ours)
    assert judged.ours["existing"] == 8 and judged.interval["existing"] == [7, 8]
    assert judged.interval["vllm"][0] < judged.ours["vllm"] < judged.interval["vllm"][1]


def test_the_figure_can_be_drawn(rows: pd.DataFrame) -> None:
    assert set(study.draw(rows, SHORT)) == set(study.CAPTION)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"limits": ()}, "at least one"),
        ({"limits": (0, 4)}, "from 1 to 256"),
        ({"kv_gb": (1.0,)}, "cannot hold one request"),
        ({"kv_gb": (13.0, float("inf"))}, "finite"),
        ({"rate": 0.0}, "above 0"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study.Params(**changes)
