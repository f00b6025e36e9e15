"""The study of the chatbot: its rows, its verdicts, its figure."""

import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import claims
from repro.report.claims import judge_entry
from repro.studies import fig17_chatbot as study

STEM = "fig17_chatbot"
SHORT = parameters(STEM, max_seconds=120.0, seeds=[0], precision=0.1)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(study, SHORT)


def test_every_setting_is_run_and_every_row_says_what_it_is(rows: Rows) -> None:
    found = rows["crossing"]
    assert len(found) == 4 * (1 + len(study.CONVERSATIONS) - 1 + len(study.ASSUMPTIONS) - 1)
    for table in rows.values():
        assert set(table["evidence"]) == {"modelled"} and table["trace_hash"].notna().all()
    assert found["full_prompts"].max() > 0.9  # one endless conversation


def test_full_prompts_leave_the_orcas_nothing_to_differ_in(rows: Rows) -> None:
    found = rows["crossing"][rows["crossing"]["assumption"] == study.DRAWN]
    rates = found.groupby(["conversations", "system"])["crossing_rate"].mean().unstack()
    orcas = rates[["orca-max", "orca-pow2", "orca-oracle"]]
    apart = orcas.max(axis=1) / orcas.min(axis=1)
    assert apart["one endless"] < 1.1 < apart["2 rounds"]
    assert (rates["vllm"] > orcas.max(axis=1)).all()


def test_verdicts_are_given_for_the_papers_parameters_only(rows: Rows) -> None:
    assert not SHORT.as_in_paper
    known = claims.load()
    judged = {one.claim_id: one for one in experiment.open(STEM, overrides={"seeds": [0]}).judgements(rows)}
    assert set(judged) == {"fig17-chatbot", "fig17-orcas-alike"}
    for claim_id, one in judged.items():
        judge_entry(known[claim_id], one.ours)  # raises for a key that the claim does not have
    ratios, spans = judged["fig17-chatbot"].ours, judged["fig17-chatbot"].interval
    assert all(spans[name][0] <= ratio <= spans[name][1] and ratio > 1 for name, ratio in ratios.items())


def test_the_figure_can_be_drawn(rows: Rows) -> None:
    assert len(study.draw(rows, SHORT)["fig17_chatbot"].axes) == 3
    assert set(study.draw(rows, SHORT)) == set(experiment.parameter_file(STEM).captions)


def test_a_system_that_the_paper_does_not_draw_can_be_compared() -> None:
    params = parameters(STEM, systems=["faster-transformer", "vllm"], max_seconds=30.0, seeds=[0], crossings=False)
    assert len(study.draw(rows_of(study, params), params)["fig17_chatbot"].axes) == 1


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
        parameters(STEM, **changes)
