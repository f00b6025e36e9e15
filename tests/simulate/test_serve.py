"""One run as one call, and the bisection of a crossing."""

import gc
from dataclasses import replace

import pytest

from repro.engine.config import DEPLOYMENTS
from repro.engine.sequence import SamplingParams
from repro.engine.systems import SYSTEMS, contiguous_system, register, system
from repro.errors import UserError
from repro.simulate.beams import recording
from repro.simulate.metrics import PIECES, UsageSamples
from repro.simulate.panels import system_for
from repro.simulate.profiles import cost_model, faster_transformer_costs
from repro.simulate.serve import crossing, serve
from repro.workloads import make_trace
from repro.workloads.chatbot import chatbot_trace

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
        with pytest.raises(UserError, match="one of the project's systems"):
            register(contiguous_system("orca-max", lambda request, max_model_len: 1))
    finally:
        SYSTEMS.pop("orca-tight", None)
    with pytest.raises(UserError, match="unknown system 'orca-tight'; known: .*vllm"):
        system("orca-tight")


def test_a_reservation_shorter_than_the_output_is_refused():
    short = contiguous_system("orca-short", lambda request, max_model_len: request.output_tokens // 2)
    with pytest.raises(UserError, match="reservation .* too short"):
        serve(short, OPT_13B, make_trace("sharegpt", 1.0, 60.0, seed=0), COSTS)


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_names_stand_for_the_papers_own_setting(name):
    trace = make_trace("sharegpt", 4.0, 30.0, seed=1)
    log, by_name = [], []
    costs = faster_transformer_costs(OPT_13B) if name == "faster-transformer" else COSTS
    served = serve(system_for(name, OPT_13B, "sharegpt"), OPT_13B, trace, costs, log=log)
    named = serve(name, "opt-13b", trace, log=by_name)
    assert [one.finish_s for one in named.outcomes] == [one.finish_s for one in served.outcomes]
    assert named.events is by_name and by_name == log


def test_the_default_cost_model_follows_block_size_deployment_and_sampling():
    trace = make_trace("alpaca", 20.0, 20.0, seed=0)
    beam = SamplingParams(n=2, use_beam_search=True)
    beams = recording("instruction")
    costs = cost_model("a100-2023", DEPLOYMENTS["opt-66b"], 8, beam_search=True)
    expected = serve("vllm", "opt-66b", trace, costs, 8, beam, beams=beams).latency_s_per_token
    assert serve("vllm", "opt-66b", trace, None, 8, beam, beams=beams).latency_s_per_token == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vlm", "opt-13b"), "unknown system 'vlm'; known: .*vllm"),
        (("vllm", "opt-12b"), "unknown deployment 'opt-12b'; known: .*opt-13b"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, message):
    with pytest.raises(UserError, match=message):
        serve(*arguments, make_trace("sharegpt", 1.0, 10.0, seed=0))


def test_a_batch_limit_set_by_hand_is_known_for_the_papers_panels_only():
    with pytest.raises(UserError, match="unknown workload 'chatbot'; known: alpaca, sharegpt"):
        serve("faster-transformer", "opt-13b", chatbot_trace(1.0, 20.0, 0))


def test_the_pool_over_time_is_what_the_sampling_observer_saw():
    trace = make_trace("sharegpt", 4.0, 30.0, seed=2)
    seen = UsageSamples(0.0, float("inf"), 0.5)
    alone = serve("vllm", "opt-13b", trace, observers=[seen])
    served = serve("vllm", "opt-13b", trace, usage_every_s=0.5)
    assert [one.finish_s for one in served.outcomes] == [one.finish_s for one in alone.outcomes]
    usage = served.usage
    assert served.samples.samples == seen.samples and len(usage) == len(seen.samples) > 30
    assert usage.index.name == "time_s" and usage.index.is_monotonic_increasing
    assert (usage.index >= 0).all() and usage.index[-1] <= max(one.finish_s for one in served.outcomes)
    assert (usage[list(PIECES)].sum(axis=1) == usage["total"]).all()
    assert (usage["token_states"] / usage["total"]).mean() == pytest.approx(seen.mean("token_states"))


def test_what_was_not_recorded_is_refused_with_the_remedy():
    trace = make_trace("alpaca", 1.0, 10.0, seed=0)
    served = serve("vllm", "opt-13b", trace)
    with pytest.raises(UserError, match=r"log=\[\]"):
        served.events  # noqa: B018
    with pytest.raises(UserError, match="usage_every_s"):
        served.usage  # noqa: B018
    for interval in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="usage_every_s = .* must be a finite number"):
            serve("vllm", "opt-13b", trace, usage_every_s=interval)
