"""What /metrics says is what the event log says, count by count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import httpx
from serving import FAST, client_of, samples_of, served, simulated, until

from repro.server.metrics import Histogram

#: slow enough for a client to go before the end
SOME = replace(FAST, fixed_s=0.002)


def read(address: str) -> dict[str, float]:
    """Sample -> value, without vLLM's prefix."""
    found = samples_of(httpx.get(f"{address}/metrics").text)
    return {name.removeprefix("vllm:"): value for name, value in found.items()}


@pytest.mark.parametrize("name", ["vllm-v1", "vllm"])
def test_metrics_are_what_the_event_log_says(name):
    """With preemptions, hits in the cache, outputs that end by themselves, and one that is taken back."""
    backend = simulated(name, kv_slots=512, cost_model=SOME)
    with served(backend) as address:
        client = client_of(address)
        shared = list(range(100, 148))
        long = {"model": "opt-13b", "max_tokens": 150}
        client.completions.create(**long, prompt=shared, seed=0)
        client.completions.create(
            **long, prompt=[shared + [place] for place in range(8)], seed=1, extra_body={"ignore_eos": True}
        )
        client.completions.create(**long, prompt="that is", stop="the", n=2, seed=3)
        with client.completions.create(
            **long | {"max_tokens": 480}, prompt="x", stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        until(lambda: not backend.feed.handles)
        said = read(address)
    events = backend.feed.events
    kinds = Counter(event.kind for event in events)
    finished = [event for event in events if event.kind == "finish"]
    assert said["num_preemptions_total"] == kinds["preempt"] > 0
    ended = {reason: said[f"request_success_total:{reason}"] for reason in ("stop", "length", "abort")}
    assert ended["stop"] + ended["length"] == kinds["finish"] and ended["abort"] == kinds["abort"] == 1
    assert ended["length"] >= 8 and ended["stop"]
    admitted = {event.request_id for event in events if event.kind == "admit"}
    assert said["time_to_first_token_seconds_count"] == len(admitted) == kinds["arrive"]
    for span in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert said[f"{span}_seconds_count"] == kinds["finish"]
    prompts = [48] + [49] * 8 + [2] * (2 if name == "vllm-v1" else 1) + [1]
    assert said["prompt_tokens_total"] == sum(prompts)
    # The request that was taken back has no event with its tokens.
    tokens = sum(event.detail["tokens"] for event in finished)
    gaps = said["inter_token_latency_seconds_count"]
    if name == "vllm-v1":  # one sequence a request
        aborted = said["generation_tokens_total"] - tokens
        assert 1 <= aborted < 480 and gaps == tokens + aborted - len(admitted)
        assert said["prefix_cache_hits_total"] > 0
        computed = sum(event.detail["tokens"] for event in events if event.kind == "admit")
        assert said["iteration_tokens_total_sum"] == computed + gaps - kinds["preempt"]
    assert said["num_requests_running"] == said["num_requests_waiting"] == said["num_requests_swapped"] == 0
    assert said["kv_cache_usage_perc"] == said["repro:kv_slots_token_perc"] == said["repro:kv_blocks_of_nobody"] == 0
    assert said["cpu_cache_usage_perc"] == 0


def test_gauges_while_it_runs():
    backend = simulated(kv_slots=512, cost_model=SOME)
    with served(backend) as address:
        client = client_of(address)
        asked = {"model": "opt-13b", "prompt": [[place] * 100 for place in range(6)], "max_tokens": 150}
        with client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
            said = read(address)
        assert said["num_requests_running"] >= 1 and said["num_requests_running"] + said["num_requests_waiting"] <= 6
        assert 0 < said["repro:kv_slots_token_perc"] <= said["kv_cache_usage_perc"] <= 1
        assert said["repro:kv_blocks_of_nobody"] == 0
        until(lambda: not backend.feed.handles)


def test_a_histogram_counts_a_value_below_the_bound_that_it_equals():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 7):
        histogram.add(value)
    assert histogram.buckets == [("1.0", 2), ("2.0", 4), ("+Inf", 5)] and histogram.sum == 12
