"""The comparison of tokens: that it finds them equal, that it would notice if they were not, and what counts as no
difference."""

import importlib.util

import numpy as np
import pandas as pd
import pytest
from loads import parameters, rows_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from repro import kernels
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.llm.sampler import SamplingPlan
from repro.report.claims import judge_entry, load
from repro.studies import decoding_equivalence as study

SMALL = {"models": ["tiny-qwen2"], "prompts": 4, "output_tokens": 10, "mixed_prompts": 4, "mixed_tokens": 10}
RUN = experiment.open("decoding_equivalence", overrides=SMALL)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def computed():
    return rows_of(study, RUN.params)


@pytest.fixture
def rows(computed):
    return Rows({name: table.copy() for name, table in computed.items()}, study.TABLES)


def verdicts(rows):
    known = load()
    return {one.claim_id: judge_entry(known[one.claim_id], one.ours)[0] == "reproduced" for one in RUN.judgements(rows)}


def test_all_tokens_are_equal_under_every_variant(rows):
    for name, variants in (("greedy", study.GREEDY), ("mixed", study.MIXED)):
        table = rows[name]
        assert list(table["variant"]) == list(variants)
        assert (table["equal"] == 4).all() and table["differing"].isna().all()
        assert (table.loc[table["variant"].isin(study.TIGHT), "preemptions"] > 0).all()
    assert verdicts(rows) == {"accuracy-unchanged": True, "mixed-decoding": True}
    greedy, mixed = RUN.judgements(rows)
    assert "68 of 68" in greedy.note and "12 of 12" in mixed.note
    counts = RUN.tables(rows)["decoding_equivalence_counts"]
    assert {*study.draw(rows, RUN.params), *RUN.tables(rows)} == set(RUN.file.captions)
    assert list(counts["model"]) == list(rows["greedy"]["model"].unique())
    assert set(counts.columns) == {"model", *study.GREEDY, *(f"mixed: {variant}" for variant in study.MIXED)}
    total, mixed = RUN.params.prompts, RUN.params.mixed_prompts
    assert set(counts["swap"]) == {f"{total}/{total}"} and set(counts["mixed: swap"]) == {f"{mixed}/{mixed}"}


@pytest.mark.parametrize("table, claim_id", [("greedy", "accuracy-unchanged"), ("mixed", "mixed-decoding")])
@pytest.mark.parametrize("column, value", [("equal", 3), ("preemptions", 0)])
def test_a_request_that_differs_or_is_never_preempted_fails_its_claim_alone(rows, table, claim_id, column, value):
    rows[table].loc[rows[table]["variant"] == "swap", column] = value
    assert {name for name, held in verdicts(rows).items() if not held} == {claim_id}
    study.draw(rows, RUN.params)


def test_a_batch_that_was_never_whole_is_not_mixed(rows):
    rows["mixed"].loc[rows["mixed"]["variant"] == "one batch", "together"] -= 1
    assert verdicts(rows) == {"accuracy-unchanged": True, "mixed-decoding": False}


def test_an_undecided_token_is_no_difference_and_is_listed(rows):
    remark = "request 2, token 5: best two logits 1.0e-06 apart"
    rows["greedy"].loc[0, ["equal", "undecided", "differing"]] = 3, 1, remark
    assert verdicts(rows)["accuracy-unchanged"]
    assert f"tiny-qwen2, blocks of 1: {remark}" in RUN.judgements(rows)[0].note


def test_a_wrong_engine_is_noticed(monkeypatch):
    """One whose random numbers depend on the place in the batch, and one with wrong scores."""
    with monkeypatch.context() as patch:
        patch.setattr(SamplingPlan, "seeds", property(lambda plan: np.arange(len(plan.params))))
        found = pd.DataFrame(study.mixed_against_alone("tiny-qwen2", 4, 10))
    assert (found["equal"] == 2).all() and set(found["differing"]) == {"request 1; request 2"}  # the random ones
    decode = kernels.paged_decode_attention
    monkeypatch.setattr(
        kernels,
        "paged_decode_attention",
        lambda q, k, v, tables, lengths, scale, *rest, **options: decode(
            q, k, v, tables, lengths, 2 * scale, *rest, **options
        ),
    )
    found = pd.DataFrame(study.against_generate("tiny-qwen2", 4, 10))
    assert (found["equal"] < 4).all() and found["differing"].str.contains("best two logits").all()


def test_without_the_embedded_model_the_others_are_run_and_the_note_says_so(rows, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = experiment.open("decoding_equivalence", overrides=SMALL | {"models": ["smollm2", "tiny-qwen2"]})
    assert {point.arguments["name"] for point in study.points(run.params)} == {"tiny-qwen2"}
    assert all("SmolLM2 is not installed here" in judged.note for judged in run.judgements(rows))


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"models": ("no-such-model",)}, "no-such-model"),
        ({"models": ()}, "models"),
        ({"prompts": 17}, "prompts"),
        ({"mixed_tokens": 60}, "mixed_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("decoding_equivalence", **wrong)
