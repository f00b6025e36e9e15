"""A saturated queue: its lengths are as assumed, what it counts agrees with arithmetic, and the study judges only its
own assumptions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.report.claims import compare
from repro.report.claims.claim import judge_entry, load
from repro.studies import saturated_queue as study
from repro.studies.saturated import SETUPS, Setup, head, lengths, replay, requests, steps

LOAD = parameters("saturated_queue").load
SMALL = replace(LOAD, kv_slots=82_000, max_num_seqs=32, warmup_steps=60, steps=60, mean_output=32)


def test_lengths_are_uniform_and_prompts_do_not_depend_on_the_spread():
    prompts, outputs = lengths(20_000, LOAD, 100, seed=3)
    assert (prompts.min(), prompts.max(), outputs.min(), outputs.max()) == (1000, 7000, 1, 511)
    for values, bins in ((prompts, 6), (outputs, 7)):
        assert np.histogram(values, bins)[0] == pytest.approx(20_000 / bins, rel=0.06)
    same, equal = lengths(20_000, LOAD, 0, seed=3)
    assert (same == prompts).all() and set(equal) == {256}
    assert {request.output_tokens for request in requests(Setup("contiguous", declared=100), LOAD, 3)[0]} == set(
        range(1, 101)
    )


def test_a_declared_length_fills_the_pool_with_chunks_of_a_power_of_two():
    setup = Setup("contiguous", declared=16384)
    for scheduler, _output in steps(setup, replace(LOAD, warmup_steps=3, steps=3), requests(setup, LOAD, 0)[0]):
        assert scheduler.running.num_seqs == 405_239 // 32_768 == 12
        needed, free, largest = head(scheduler)
        assert needed == 32_768 and free == largest == 405_239 - 12 * 32_768


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_counts_and_shares_are_consistent(setup):
    row = replay("any", setup, SMALL, seed=1)
    assert row == replay("any", setup, SMALL, seed=1)
    assert sum(row[part] for part in ("token_states", "reserved", "internal", "rounding", "free")) == pytest.approx(
        100
        * (SMALL.kv_slots // setup.block_size * setup.block_size if setup.memory == "paged" else SMALL.kv_slots)
        / SMALL.kv_slots
    )
    assert (
        0 < row["tokens_per_step"] <= SMALL.max_num_seqs
        and row["delivered_tokens"] == row["tokens_per_step"] * SMALL.steps
    )
    assert (row["rounding"] > 0) == (setup.memory == "contiguous")
    assert 0 <= row["empty_slots_most"] < setup.block_size and (row["empty_slots_most"] > 0) == (
        setup.memory == "paged"
    )
    if setup.memory == "paged":
        assert row["blocked_pct"] == 0
    else:
        assert row["preemptions"] == row["discarded_tokens"] == 0


def test_a_row_is_what_the_steps_add_up_to():
    setup, slow = SETUPS["paged (equal outputs)"], replace(SMALL, mean_output=300, steps=300)
    row = replay("any", setup, slow, seed=0)
    seen = [
        (len(scheduler.running), [victim.generated_before for victim in output.preempted], output.iteration)
        for scheduler, output in steps(setup, slow, requests(setup, slow, 0)[0])
    ]
    assert [iteration for *_, iteration in seen] == list(range(60, 360))
    assert row["delivered_tokens"] == sum(count for count, *_ in seen)
    assert row["preemptions"] == sum(len(lost) for _, lost, _ in seen) > 0
    assert row["discarded_tokens"] == sum(sum(lost) for _, lost, _ in seen) > 0


def test_memory_alone_decides_and_an_empty_queue_is_noticed():
    setup = SETUPS["paged"]
    with pytest.raises(AssertionError, match="dry"):
        list(steps(setup, SMALL, requests(setup, SMALL, 0)[0][:20]))
    sequences = [len(scheduler.running) for scheduler, _ in steps(setup, SMALL, requests(setup, SMALL, 0)[0])]
    assert max(sequences) < SMALL.max_num_seqs


@pytest.fixture(scope="module")
def small_run():
    run = experiment.open("saturated_queue", overrides={"warmup_steps": 20, "steps": 60, "seeds": [0]})
    return run, rows_of(study, run.params)


def test_the_study_runs_draws_and_judges_only_the_documented_assumptions(small_run):
    run, rows = small_run
    assert set(rows["replay"]["setup"]) == set(SETUPS)
    assert all({"evidence", "device", "seed", "trace_hash"} <= set(table) for table in rows.values())
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []
    tokens = rows["replay"].set_index("setup")["tokens_per_step"]
    assert tokens["paged"] > 1.5 * tokens["contiguous (2048)"]


def test_judgements_have_the_claims_keys_and_follow_the_rows(small_run):
    _, rows = small_run
    papers, claims = experiment.open("saturated_queue"), load()
    kept = compare(papers.judgements(rows))
    assert kept["claim"].nunique() == 13 and "not run" not in set(kept["verdict"])
    penalty = kept[kept["measured"].notna()]
    assert set(penalty["claim"]) == {"explainer-no-uncertainty", "effective-tokens"}
    assert set(penalty["evidence"]) == {"recorded"}
    verdicts = dict(zip(kept["claim"], kept["verdict"]))
    assert verdicts["last-block-bound"] == verdicts["explainer-first-block"] == "reproduced"
    replays, queue = rows["replay"], rows["head"]
    worse = rows | {
        "replay": replays.assign(empty_slots_most=16),
        "head": queue.assign(largest_run=queue["free_slots"]),
    }
    judged = {one.claim_id: judge_entry(claims[one.claim_id], one.ours)[0] for one in papers.judgements(worse)}
    assert judged["last-block-bound"] == judged["explainer-first-block"] == "differs"


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"steps": 0}, "steps"),
        ({"seeds": []}, "seeds"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"shortest_prompt": 900}, "shortest_prompt"),
        ({"longest_prompt": 30_000}, "longest_prompt"),
        ({"kv_slots": 50_000}, "kv_slots"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("saturated_queue", **wrong)
