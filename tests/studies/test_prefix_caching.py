"""Prefix caching on Fig. 16's load: as good as declaring the prefix, and nothing with a time stamp in front."""

import pytest
from loads import parameters

from repro.errors import UserError
from repro.harness import experiment
from repro.studies import prefix_caching as study
from repro.studies.base import where
from repro.workloads.translation import translation_trace

STEM = "prefix_caching"


@pytest.mark.parametrize("scheduler", study.SCHEDULERS)
def test_what_is_found_serves_as_well_as_what_is_declared(scheduler):
    trace = translation_trace(341, 30.0, 20.0, 0)
    latency = {way: study.run(341, way, scheduler, trace).latency_s_per_token for way in study.WAYS}
    assert latency["cached"] == pytest.approx(latency["declared"], rel=0.03)
    assert latency["declared"] < 0.5 * latency["computed"]
    manager = study.run(341, "cached", scheduler, trace).engine.scheduler.manager
    assert manager.num_free_blocks == manager.num_blocks
    # All but the first requests find 21 blocks of the 341 tokens; a prompt is 28 tokens longer on average.
    assert (len(trace) - 2) * 336 <= manager.num_hit <= len(trace) * 336


@pytest.mark.parametrize("scheduler", study.SCHEDULERS)
def test_a_time_stamp_takes_it_away(scheduler):
    trace = translation_trace(80, 5.0, 20.0, 0)  # so few that nobody is driven out and finds blocks of its own
    stamped, computed = (study.run(80, way, scheduler, trace) for way in ("stamped", "computed"))
    assert stamped.engine.scheduler.manager.num_hit == 0
    assert stamped.latency_s_per_token == computed.latency_s_per_token


def test_the_study_runs_and_draws(smoke_rows):
    run = experiment.open(STEM, "smoke")
    rows = smoke_rows(run)
    found = rows["crossing"]
    assert len(found) == len(study.WAYS) * len(run.params.schedulers) and (found["evidence"] == "modelled").all()
    assert where(found, way="computed")["found_percent"].eq(0).all()
    assert where(found, way="cached")["found_percent"].between(60, 80).all()  # 80 of some 108 tokens
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []


@pytest.mark.parametrize(
    "wrong, match",
    [({"prefixes": [8]}, "prefixes"), ({"schedulers": ["2024"]}, "2024"), ({"duration_s": 0.0}, "duration_s")],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters(STEM, **wrong)
