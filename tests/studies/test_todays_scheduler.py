"""Today's scheduler on the paper's loads: the ladder's rungs differ by what they say, and n samples are counted."""

import numpy as np
import pytest
from loads import parameters

from repro.errors import UserError
from repro.harness import experiment
from repro.studies import todays_scheduler as study
from repro.studies.base import where

STEM = "todays_scheduler"


def seen(load: str, scheduler: str, rate: float, duration_s: float = 30.0):
    return study.measures(load, scheduler, study.LOADS[load].trace(load, rate, duration_s, 0))


def test_chunks_shorten_the_longest_gaps_and_change_nothing_that_is_stored():
    then, wide, now = (seen("chatbot", scheduler, 1.0) for scheduler in ("2023", "chunks", "512"))
    assert wide["gap_99_ms"] == then["gap_99_ms"]  # no prompt of 1,024 tokens is cut beside so few others
    assert now["gap_99_ms"] < then["gap_99_ms"]
    assert then["found_percent"] == now["found_percent"] == 0
    assert now["computed_percent"] >= 100 <= then["computed_percent"]


def test_the_cache_finds_what_is_alike_and_nothing_else():
    assert seen("sharegpt", "cache", 1.0)["found_percent"] < 1  # only what a preempted one left behind
    shared = seen("translation", "cache", 5.0)
    assert 80 < shared["found_percent"] < 95 and shared["computed_percent"] < 20
    assert seen("translation", "chunks", 5.0)["computed_percent"] == 100


def test_n_samples_two_ways():
    """At a rate that fills no pool: one group computes its prompt once and copies its last block; n requests compute
    all but whole blocks again, and copy nothing."""
    then, now = (seen("alpaca x 4", scheduler, 1.0) for scheduler in ("2023", "cache"))
    assert then["computed_percent"] == 100 and 0.5 < then["copies_a_prompt"] <= 3
    assert now["copies_a_prompt"] == 0 and 100 < now["computed_percent"] < 400
    assert now["found_percent"] == pytest.approx(100 - now["computed_percent"] / 4)
    assert now["blocks_percent"] > then["blocks_percent"]


def test_a_prompt_is_done_when_its_last_sample_is():
    trace = study.LOADS["alpaca x 2"].trace("alpaca x 2", 5.0, 20.0, 0)
    served = study.run("alpaca x 2", "cache", trace)
    assert len(served.outcomes) == 2 * len(trace)
    pairs = [max(a.finish_s, b.finish_s) for a, b in study.prompts_of(served, 2)]
    expected = np.mean((np.array(pairs) - trace.arrival_s) / trace.output_tokens)
    assert study.latency(served, 2) == pytest.approx(expected)


def test_the_study_runs_and_draws(smoke_rows):
    run = experiment.open(STEM, "smoke")
    rows = smoke_rows(run)
    assert len(rows["crossing"]) == len(rows["served"]) == len(run.params.loads) * len(study.SYSTEMS)
    assert (rows["crossing"]["evidence"] == "modelled").all()
    alone = where(rows["crossing"], load="alpaca").set_index("scheduler")["crossing_rate"]
    assert alone["chunks"] == alone["cache"]  # nothing is alike
    assert set(study.draw(rows, run.params)) | set(study.tables(rows, run.params)) == set(run.file.captions)
    assert len(study.tables(rows, run.params)["todays_scheduler_samples"]) == 2
    assert run.judgements(rows) == []


@pytest.mark.parametrize(
    "wrong, match",
    [({"loads": ["alpacas"]}, "unknown load 'alpacas'"), ({"share": 1.5}, "share"), ({"loads": []}, "loads")],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters(STEM, **wrong)
