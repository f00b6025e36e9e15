"""One run as one call, and the bisection of a crossing."""

import gc
from dataclasses import replace

import pytest

from repro.engine.config import DEPLOYMENTS
from repro.engine.errors import UserError
from repro.engine.systems import SYSTEMS, contiguous_system, register, system
from repro.simulate.profiles import cost_model
from repro.simulate.serve import crossing, serve
from repro.workloads import make_trace

OPT_13B = DEPLOYMENTS["opt-13b"]
COSTS = cost_model("a100-2023", OPT_13B)


@pytest.mark.parametrize("threshold", [0.013, 0.5, 0.999, 1.0, 1.001, 7.3, 400.0])
def test_crossing_finds_the_threshold_from_either_side(threshold):
    calls = []

    def latency(rate):
        calls.append(rate)
        return 0.4 if rate <= threshold else 0.6

    found = crossing(latency, start=1.0, precision=0.01)
    assert found == pytest.approx(threshold, rel=0.01)
    assert len(calls) < 50


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_request_finishes_after_it_arrived_and_none_is_lost(name):
    trace = make_trace("sharegpt", 2.0, 60.0, seed=3)
    served = serve(system(name), OPT_13B, trace, COSTS)
    assert len(served.outcomes) == len(trace)
    for outcome, arrival in zip(served.outcomes, trace.arrival_s):
        assert outcome.request.arrival_s == arrival
        assert arrival < outcome.first_token_s <= outcome.finish_s
    assert served.engine.scheduler.manager.num_free_blocks == served.engine.scheduler.manager.num_blocks
    assert gc.isenabled()


def test_lightly_loaded_latency_is_that_of_one_request_alone():
    """At 1 request a minute the systems do the same work, and latency follows from the formula."""
    trace = make_trace("alpaca", 1 / 60, 3600.0, seed=0)
    alone = 26.24e-3 + 0.4186e-3
    for name in ("vllm", "orca-oracle", "orca-max"):
        assert serve(system(name), OPT_13B, trace, COSTS).latency_s_per_token == pytest.approx(alone, rel=0.02)


def test_a_pool_too_small_for_a_request_is_refused_by_name():
    small = replace(OPT_13B, kv_slots=256)
    with pytest.raises(UserError, match="pool of 16 blocks"):
        serve(system("vllm"), small, make_trace("sharegpt", 1.0, 60.0, seed=0), COSTS)


def test_a_registered_system_runs_and_the_papers_own_cannot_be_replaced():
    tight = contiguous_system("orca-tight", lambda request, max_model_len: request.output_tokens)
    try:
        assert system(register(tight).name) is tight
        trace = make_trace("alpaca", 5.0, 30.0, seed=0)
        assert (
            serve(tight, OPT_13B, trace, COSTS).latency_s_per_token
            == serve(system("orca-oracle"), OPT_13B, trace, COSTS).latency_s_per_token
        )
        with pytest.raises(UserError, match="one of the paper's systems"):
            register(contiguous_system("orca-max", lambda request, max_model_len: 1))
    finally:
        SYSTEMS.pop("orca-tight", None)
    with pytest.raises(UserError, match="unknown system 'orca-tight'; known: .*vllm"):
        system("orca-tight")


def test_a_reservation_shorter_than_the_output_is_refused():
    short = contiguous_system("orca-short", lambda request, max_model_len: request.output_tokens // 2)
    with pytest.raises(UserError, match="reservation .* too short"):
        serve(short, OPT_13B, make_trace("sharegpt", 1.0, 60.0, seed=0), COSTS)
