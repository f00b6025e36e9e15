"""The study of the chatbot: its rows, its verdicts, its figure."""

import pandas as pd
import pytest

from repro.engine.errors import UserError
from repro.report import claims
from repro.report.claims import judge_entry
from repro.studies import fig17_chatbot as study

SHORT = study.Params(max_seconds=120.0, seeds=(0,), band_seeds=(0,), precision=0.1)


def rows_of(params: study.Params) -> pd.DataFrame:
    return pd.DataFrame([point.function(**point.arguments) for point in study.points(params)])


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return rows_of(SHORT)


def test_every_setting_is_run_and_every_row_says_what_it_is(rows: pd.DataFrame) -> None:
    found = rows[rows["part"] == "crossing"]
    assert len(found) == 4 * (1 + len(study.CONVERSATIONS) - 1 + len(study.ASSUMPTIONS) - 1)
    assert set(rows["evidence"]) == {"modelled"} and rows["trace_hash"].notna().all()
    assert rows.groupby("part")["full_prompts"].max().to_dict()["crossing"] > 0.9  # one endless conversation


def test_full_prompts_leave_the_orcas_nothing_to_differ_in(rows: pd.DataFrame) -> None:
    found = rows[(rows["part"] == "crossing") & (rows["assumption"] == study.DRAWN)]
    rates = found.groupby(["conversations", "system"])["crossing_rate"].mean().unstack()
    orcas = rates[["orca-max", "orca-pow2", "orca-oracle"]]
    apart = orcas.max(axis=1) / orcas.min(axis=1)
    assert apart["one endless"] < 1.1 < apart["2 rounds"]
    assert (rates["vllm"] > orcas.max(axis=1)).all()


def test_verdicts_are_given_for_the_papers_parameters_only(rows: pd.DataFrame) -> None:
    assert study.judge(rows, SHORT) == []
    known = claims.load()
    judged = {one.claim_id: one for one in study.judge(rows, study.Params(seeds=SHORT.seeds))}
    assert set(judged) == {"fig17-chatbot", "fig17-orcas-alike"}
    for claim_id, one in judged.items():
        judge_entry(known[claim_id], one.ours)  # raises for a key that the claim does not have
    ratios, spans = judged["fig17-chatbot"].ours, judged["fig17-chatbot"].interval
    assert all(spans[name][0] <= ratio <= spans[name][1] and ratio > 1 for name, ratio in ratios.items())


def test_the_figure_can_be_drawn(rows: pd.DataFrame) -> None:
    assert len(study.draw(rows, SHORT)["fig17_chatbot"].axes) == 3
    assert set(study.draw(rows, SHORT)) == set(study.CAPTION)


def test_a_system_that_the_paper_does_not_draw_can_be_compared() -> None:
    params = study.Params(systems=("faster-transformer", "vllm"), max_seconds=30.0, seeds=(0,), crossings=False)
    assert len(study.draw(rows_of(params), params)["fig17_chatbot"].axes) == 1


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"systems": ("orca-max", "orca-pow2")}, "compares vllm"),
        ({"systems": ("vllm",)}, "compares vllm"),
        ({"band_seeds": ()}, "at least one"),
        ({"max_seconds": -1.0}, "above 0"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study.Params(**changes)
