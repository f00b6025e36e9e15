"""The study of what follows by arithmetic: its rows, its verdicts, its figures."""

import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.report import claims
from repro.report.claims import Verdict, judge_entry
from repro.studies import fig01_memory as study

RUN = experiment.open("fig01_memory")


@pytest.fixture(scope="module")
def rows():
    return rows_of(study, RUN.params)


def test_every_claim_that_it_judges_holds_unless_the_source_contradicts_itself(rows):
    known = claims.load()
    verdicts = {judged.claim_id: judge_entry(known[judged.claim_id], judged.ours)[0] for judged in RUN.judgements(rows)}
    contradictory = {name for name, verdict in verdicts.items() if verdict is Verdict.CONTRADICTORY}
    assert contradictory == {"table1-slots-66b", "table1-params", "cow-of-shared-prefix"}
    assert {verdict for name, verdict in verdicts.items() if name not in contradictory} == {Verdict.REPRODUCED}
    assert len(verdicts) == 25


def test_table1_in_digits(rows):
    table = rows["table1"].set_index("deployment")
    assert table["slots_of_printed_memory"].to_dict() == {"opt-13b": 15_728, "opt-66b": 9_557, "opt-175b": 60_074}
    assert table["slots_in_runs"]["opt-66b"] == 9_700
    assert table["weights_gb"].round(1).to_dict() == {"opt-13b": 25.7, "opt-66b": 131.4, "opt-175b": 349.2}


def test_fig3_accounts_for_every_slot_of_the_chunks(rows):
    chunks = rows["chunks"].set_index("request")
    held = chunks[["token_states", "reserved", "internal"]].sum(axis=1)
    assert held.to_dict() == {"A": 2048, "B": 512}
    assert chunks["token_states"].to_dict() == {"A": 8, "B": 4}
    gap = chunks["start"]["B"] - (chunks["start"]["A"] + held["A"])
    assert gap == 512


def test_rows_are_exact_and_belong_to_no_device(rows):
    for table in rows.values():
        assert set(table["evidence"]) == {"exact"}
        assert table["device"].isna().all() and table["seed"].isna().all()


def test_other_parameters_judge_only_what_they_compute():
    run = experiment.open("fig01_memory", overrides={"deployments": ["opt-66b"]})
    judged = {judgement.claim_id: judgement for judgement in run.judgements(rows_of(study, run.params))}
    assert "kv-bytes-per-token" not in judged
    assert list(judged["table1-params"].ours) == ["opt-66b"]
    other = experiment.open("fig01_memory", overrides={"deployments": ["opt-66b"], "chunk_slots": [64, 16]})
    rows = rows_of(study, other.params)
    assert "fig3-unused-slots" not in {judgement.claim_id for judgement in other.judgements(rows)}
    assert set(study.draw(rows, other.params)) == {"fig01_memory", "fig03_contiguous"}


def test_the_figures_have_captions(rows):
    assert set(study.draw(rows, RUN.params)) == set(RUN.file.captions)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"deployments": ()}, "leaves nothing to run"),
        ({"deployments": ("opt-30b",)}, "opt-13b"),
        ({"deployments": ("llama-13b",)}, "opt-13b"),
        ({"chunk_slots": (2048, 500)}, "power of two"),
        ({"chunk_slots": (8, 512)}, "at least 10 slots"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes, message):
    with pytest.raises(UserError, match=message):
        parameters("fig01_memory", **changes)
