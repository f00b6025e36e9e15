"""A response's receipt: it adds up, and to what /metrics says of the same requests."""

from __future__ import annotations

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import httpx
import openai
from serving import FAST, client_of, samples_of, served, simulated, until

from repro.feed.receipt import CAUSES

MODEL = "opt-13b"


def checked(receipts: list[dict], count: int) -> list[dict]:
    """The receipts of a response, each of which adds up."""
    assert len(receipts) == count
    for one in receipts:
        assert tuple(one["causes"]) == CAUSES and min(one["causes"].values()) >= 0
        assert sum(one["causes"].values()) == pytest.approx(one["latency_s"], rel=0, abs=1e-9)
    return receipts


def agree(said: dict[str, float], receipts: list[dict]) -> None:
    """What /metrics says of exactly these requests."""
    assert said["vllm:e2e_request_latency_seconds_count"] == len(receipts)
    total = sum(one["latency_s"] for one in receipts)
    assert said["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(total, rel=0, abs=1e-9)
    queued = sum(one["causes"]["queued"] for one in receipts)
    assert said["vllm:request_queue_time_seconds_sum"] == pytest.approx(queued, rel=0, abs=1e-9)
    assert said["vllm:num_preemptions_total"] == sum(one["num_preemptions"] for one in receipts)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm", "orca-max"])
def test_receipts_of_a_simulated_server(name):
    """Of requests that wait for each other, and where memory is not reserved drive each other out."""
    backend = simulated(name, kv_slots=4096 if name == "orca-max" else 512)
    asked = {"model": MODEL, "max_tokens": 150, "n": 2, "extra_body": {"ignore_eos": True, "receipt": True}}
    with served(backend) as address:
        made = client_of(address).completions.create(**asked, prompt=[[index] * 100 for index in range(8)])
        found = checked(made.receipt, 16 if name == "vllm-v1" else 8)
        agree(samples_of(httpx.get(f"{address}/metrics").text), found)
    assert sorted(one["request_id"] for one in found) == list(range(len(found)))
    behind = [culprit for one in found for culprit in one["culprits"].get("queued", [])]
    assert behind and {culprit["request_id"] for culprit in behind} <= set(range(len(found)))
    seconds = {cause: sum(one["causes"][cause] for one in found) for cause in CAUSES}
    driven_out = {"vllm-v1": "preempted", "vllm": "swapped", "orca-max": None}[name]  # two samples are swapped
    assert {cause for cause in ("preempted", "swapped") if seconds[cause]} == {driven_out} - {None}
    assert all(driven_out in one["culprits"] for one in found if one["num_preemptions"])


def test_a_static_batch_answers_before_it_is_done():
    """The receipt ends with the request's own last token."""
    backend = simulated("faster-transformer", kv_slots=16_384)
    asked = {"model": MODEL, "prompt": ["a b c"], "extra_body": {"ignore_eos": True, "receipt": True}}
    with served(backend) as address:
        (one,) = checked(client_of(address).completions.create(**asked, max_tokens=5).receipt, 1)
        assert one["causes"]["own_steps"] > 0 and not one["culprits"]


@pytest.mark.parametrize("option", [{"stream_options": {"include_receipt": True}}, {"receipt": True}])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_has_it_at_its_end(option, with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    if with_usage and "stream_options" in option:
        options, option = {"stream_options": {"include_usage": True, "include_receipt": True}}, {}
    with served(simulated()) as address:
        client = client_of(address)
        for create, prompt in (
            (client.completions.create, {"prompt": "x y"}),
            (client.chat.completions.create, {"messages": [{"role": "user", "content": "x"}]}),
        ):
            extra = {"extra_body": {**option, "ignore_eos": True}}
            chunks = list(create(model=MODEL, **prompt, max_tokens=4, n=2, stream=True, **options, **extra))
            checked(chunks[-1].receipt, 2)
            assert chunks[-1].choices == [] and (chunks[-1].usage is not None) == with_usage
            assert not any(hasattr(chunk, "receipt") for chunk in chunks[:-1])


def test_nobody_gets_a_receipt_who_does_not_ask_and_none_is_kept():
    backend = simulated()
    with served(backend) as address:
        client = client_of(address)
        made = client.completions.create(model=MODEL, prompt="x", max_tokens=3)
        assert not hasattr(made, "receipt")
        *_, last = client.completions.create(model=MODEL, prompt="x", max_tokens=3, stream=True)
        assert not hasattr(last, "receipt")
        assert not hasattr(client.completions.create(model=MODEL, prompt="x", extra_body={"receipt": False}), "receipt")
        until(lambda: not backend.feed.receipts._lives and not len(backend.feed.receipts))
        for body, said in (({"receipt": 1}, "receipt = 1"), ({"receipts": True}, "did you mean receipt?")):
            with pytest.raises(openai.BadRequestError, match=said):
                client.completions.create(model=MODEL, prompt="x", extra_body=body)
        with pytest.raises(
            openai.BadRequestError,
            match="stream_options takes include_usage, continuous_usage_stats, include_receipt, not",
        ):
            options = {"stream_options": {"include_costs": True}}
            client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=options)


def test_one_that_is_taken_back_has_its_receipt_too():
    backend = simulated(cost_model=FAST)
    handle = backend.feed.add_all([[1, 2]], [_sampling()], 0, 0.0).result(20)[0]
    until(lambda: handle.pieces)
    handle.abort()
    (receipt,) = handle.receipts.values()
    assert sum(receipt.causes.values()) == pytest.approx(receipt.latency_s, rel=0, abs=1e-9)
    assert receipt.latency_s > 0 and receipt.causes["own_steps"] >= 0 and not backend.feed.receipts._lives
    backend.feed.close()


def _sampling():
    from repro.sampling_params import SamplingParams

    return SamplingParams(max_tokens=2000, ignore_eos=True)


@pytest.mark.parametrize("system", ["vllm-v1", "vllm"])
def test_receipts_of_a_real_model(system):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from talking import talking
    from tiny import llm

    from repro.llm.pool import PoolSize
    from repro.server.backend import RealBackend

    small = {"max_num_batched_tokens": 24, "max_num_seqs": 4} if system == "vllm-v1" else {"max_num_seqs": 4}
    backend = RealBackend(llm(talking(), system=system, pool=PoolSize(num_blocks=24), **small))
    prompts = [[7 + place] * 12 for place in range(6)]
    with served(backend) as address:
        asked = {"model": "tiny", "max_tokens": 40, "temperature": 0, "extra_body": {"receipt": True}}
        found = checked(client_of(address).completions.create(**asked, prompt=prompts).receipt, 6)
        agree(samples_of(httpx.get(f"{address}/metrics").text), found)
    assert sum(one["num_preemptions"] for one in found) > 0 and sum(one["recomputed_tokens"] for one in found) > 0
    assert all(one["causes"]["prompt"] > 0 and one["causes"]["own_steps"] > 0 for one in found)
