"""The project's own systems are found to be what they are, and servers that take little, cost little, or die."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(package, reason=WHY)

import httpx
from switched import JUDGED, MAX_LEN, simulated, v1
from virtual import virtual

from repro.engine.systems import System, system
from repro.judge.claims import CLAIMS, Finding
from repro.judge.client import Client, Gone
from repro.judge.suite import PROBES, judge
from repro.simulate.cost_model import CostModel

pytestmark = pytest.mark.heavy(20)

#: What each of the project's systems does by its design, claims in the order of PROBES without the throughput: + holds,
#: - does not. ? cannot be told: a system that reserves the model's length a sample refuses so many of any prompt.
SYSTEMS = {
    "vllm-v1": "+++++++",
    "vllm-v1 without its cache": "--++++-",
    "vllm": "-++-+++",
    "orca-oracle": "-++-+--",
    "orca-pow2": "-++-+--",
    "orca-max": "-++-+-?",
    "faster-transformer": "-+--+-?",
}
MARKS = {"+": "holds", "-": "does not hold", "?": "undecided"}


def served_system(name: str) -> System:
    if name.startswith("vllm-v1"):
        return replace(v1(0), prefix_caching=name == "vllm-v1")
    return system(name)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_projects_systems_are_found_to_be_what_they_are(name, monkeypatch):
    with virtual(monkeypatch, lambda: simulated(served_system(name), 0, kv_slots=2048)) as server:
        verdicts = {claim: one.verdict for claim, one in server.findings().items()}
    assert verdicts == {claim: MARKS[mark] for claim, mark in zip(JUDGED, SYSTEMS[name])} | {"throughput": "reported"}


def test_a_verdict_has_the_numbers_that_it_follows_from(monkeypatch):
    with virtual(monkeypatch, lambda: simulated(v1(0), 0)) as server:
        found = server.findings()
        slots = server.backend.feed.manager.num_blocks * server.backend.feed.manager.block_size
    for claim, one in found.items():
        assert one.low <= one.value <= one.high and one.repeats >= CLAIMS[claim].least
        assert one.statistic and one.evidence and (one.threshold or claim == "throughput")
    numbers = {claim: json.loads(one.numbers) for claim, one in found.items()}
    assert 0.8 * slots <= numbers["full_pool_preempts"]["tokens_held"] <= slots
    assert numbers["full_pool_preempts"]["server_says:vllm:num_preemptions_total"] > 0
    assert numbers["prefix_reuse"]["server_says:vllm:prefix_cache_hits_total"] > 0
    assert numbers["prefix_reuse"]["seen_s"] < numbers["prefix_reuse"]["second_half_new_s"]
    assert numbers["prefix_reuse"]["second_half_new_s"] < numbers["prefix_reuse"]["fresh_s"]
    assert numbers["throughput"]["at_16"] > 5 * numbers["throughput"]["at_1"]
    assert numbers["throughput"]["knee_clients"] in (16, 32)  # 16 run at once


def test_a_server_whose_prompts_cost_nothing_is_not_judged_by_their_times(monkeypatch):
    monkeypatch.setattr("switched.costs", lambda seed: CostModel("flat", 0.01, 0, 0, 0, 0, 0, 0, 0))
    with virtual(monkeypatch, lambda: simulated(v1(0, max_num_batched_tokens=MAX_LEN), 0)) as server:
        found = server.findings()
    by_times = {"prefix_reuse", "samples_computed_once", "chunked_prefill", "first_come_order"}
    assert {claim for claim, one in found.items() if one.verdict == "undecided"} == by_times
    assert all("too near to tell" in found[claim].note and found[claim].repeats == 0 for claim in by_times)


def test_a_cap_of_sequences_is_not_taken_for_memory(monkeypatch):
    """A pool that four times the sequences could not fill: nothing is ever driven out, and what samples take of it
    cannot be told."""
    with virtual(monkeypatch, lambda: simulated(v1(0, max_num_seqs=4), 0, kv_slots=16 * MAX_LEN)) as server:
        found = server.findings()
    assert found["full_pool_preempts"].verdict == "does not hold"
    assert "no more than 4 run at once" in found["full_pool_preempts"].note
    assert found["samples_stored_once"].verdict == "undecided"


def test_the_budget_is_kept_and_what_it_was_too_short_for_is_undecided(monkeypatch):
    with virtual(monkeypatch, lambda: simulated(v1(0), 0)) as server:
        found = server.findings(budget_s=5.0)
        assert server.loop.now_s < 5.5
    assert len(found) == len(PROBES)
    late = {claim: one.note for claim, one in found.items() if one.verdict == "undecided"}
    assert late.pop("samples_stored_once") == "the size of the pool was not found"
    assert "the pool was not filled in time: 8 requests of 256 tokens would take" in late.pop("full_pool_preempts")
    assert late and all("its part of the time was up; give a larger --budget" in note for note in late.values())


def test_a_server_that_dies_leaves_what_was_found_before(monkeypatch):
    with virtual(monkeypatch, lambda: simulated(v1(0), 0)) as server:
        found: list[Finding] = []

        def die(claim: str) -> None:
            if claim == "iteration_batching":
                server.loop.call_later(0.1, setattr, server.transport, "is_down", True)

        with pytest.raises(Gone, match="http://virtual does not answer: .*; is a server running there"):
            server.run(lambda http: judge(Client(http), "it", 120.0, 0, found.append, die))
    assert [one.claim for one in found] == ["prefix_reuse", "samples_computed_once"]


def test_a_server_that_takes_little_is_judged_all_the_same(monkeypatch):
    """No lists of prompts, nothing but OpenAI's own parameters, no length of the model, no page of metrics."""
    with virtual(monkeypatch, lambda: simulated(v1(0), 0)) as server:
        inner = server.transport.handle_async_request

        async def plain(request: httpx.Request) -> httpx.Response:
            body = json.loads(await request.aread() or b"{}")
            strange = {"ignore_eos", "logprobs"} & set(body)
            if strange or isinstance(body.get("prompt"), list) or request.url.path == "/metrics":
                return httpx.Response(400, json={"error": {"message": f"no {strange}"}})
            response = await inner(request)
            if request.url.path == "/v1/models":
                cards = json.loads(await response.aread())
                return httpx.Response(200, json={"data": [{"id": card["id"]} for card in cards["data"]]})
            return response

        monkeypatch.setattr(server.transport, "handle_async_request", plain)
        monkeypatch.setattr("repro.judge.ground._USUAL_LEN", MAX_LEN)
        found = server.findings()
    assert {claim: one.verdict for claim, one in found.items() if one.verdict != "holds"} == {"throughput": "reported"}
    assert all("takes no ignore_eos" in one.note and "a chunk counts as a token" in one.note for one in found.values())
