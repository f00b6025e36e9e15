"""OpenAI's client at a server without a model: its queue, its memory and its cache are real."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import httpx
import openai
from serving import CACHED, client_of, is_whole, served, simulated, streamed, until

from repro.engine.scheduler import SchedulerOutput
from repro.server.simulated import SleepingExecutor
from repro.simulate.cost_model import CostModel

MODEL = "opt-13b"
SLOW = CostModel("slow", 0.02, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm", "orca-max", "faster-transformer"])
def test_a_text_streamed_is_the_text_not_streamed(name):
    asked = {"model": MODEL, "prompt": ["Once upon a time", [5, 6, 7]], "n": 2, "seed": 3, "max_tokens": 40}
    with served(simulated(name, kv_slots=16_384)) as address:
        client = client_of(address)
        whole = client.completions.create(**asked, stop=["time", "people want"])
        stream = client.completions.create(
            **asked, stop=["time", "people want"], stream=True, stream_options={"include_usage": True}
        )
        texts, reasons, usage = streamed(stream)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
        assert usage.to_dict() | CACHED == whole.usage.to_dict() | CACHED and usage.prompt_tokens == 4 + 3
        assert len(set(texts.values())) > 2 and not any("time" in text for text in texts.values())


def test_a_stream_may_count_as_it_goes():
    """vLLM's continuous_usage_stats, which guidellm asks for; the last chunk has the usage of all choices."""
    asked = {"model": MODEL, "prompt": [5, 6, 7], "n": 2, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    with served(simulated()) as address:
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = client_of(address).completions.create(**asked, stream=True, stream_options=options)
    for index in range(2):
        usages = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        assert [one.completion_tokens for one in usages] == [1, 2, 3, 4]
        assert {one.total_tokens - one.completion_tokens for one in usages} == {3}
    assert last.choices == [] and last.usage.completion_tokens == 8


def test_a_chat_and_log_probabilities():
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    asked = {"model": MODEL, "messages": messages, "seed": 1, "max_tokens": 12}
    with served(simulated()) as address:
        client = client_of(address)
        made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True})
        (choice,) = made.choices
        assert choice.finish_reason == "length" and made.usage.completion_tokens == 12
        assert "".join(one.token for one in choice.logprobs.content).strip() == choice.message.content
        assert all(len(one.top_logprobs) == 2 and one.logprob < 0 for one in choice.logprobs.content)
        texts, reasons, _ = streamed(
            client.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        )
        assert (texts, reasons) == ({0: choice.message.content}, {0: "length"})
        plain = client.completions.create(model=MODEL, prompt="a b c", max_tokens=5, logprobs=1, temperature=0)
        assert len(plain.choices[0].logprobs.tokens) == 5 == len(plain.choices[0].logprobs.text_offset)
        assert [one.id for one in client.models.list()] == [MODEL] and client.models.retrieve(MODEL).id == MODEL


def test_a_client_that_goes_takes_its_request_with_it():
    """Streaming and waiting, running and queued."""
    backend = simulated(cost_model=SLOW)
    with served(backend) as address:
        with client_of(address).completions.create(
            model=MODEL, prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
            assert not is_whole(backend)
        until(lambda: is_whole(backend))
        with pytest.raises(openai.APITimeoutError):
            client_of(address, timeout=0.3).completions.create(
                model=MODEL, prompt=["x", "y"], n=3, max_tokens=2000, extra_body={"ignore_eos": True}
            )
        until(lambda: is_whole(backend))
    assert [event.kind for event in backend.feed.events].count("abort") == 7 == backend.metrics.success["abort"]


def test_a_full_queue_answers_429():
    """A pool that holds one request: the second waits, the third is refused."""
    backend = simulated(kv_slots=256, cost_model=SLOW, max_waiting=1)
    long = {"model": MODEL, "prompt": [7] * 150, "max_tokens": 90, "stream": True, "extra_body": {"ignore_eos": True}}
    with served(backend) as address:
        client = client_of(address)
        first = client.completions.create(**long)
        next(iter(first))
        second = client.completions.create(**long | {"prompt": [8] * 150})
        until(lambda: len(backend.feed.engine.scheduler.waiting) == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait, and no more than 1 may") as error:
            client.completions.create(model=MODEL, prompt="z")
        assert error.value.response.headers["retry-after"] == "1"
        first.close()
        assert len(streamed(second)[1]) == 1


def test_a_key_is_asked_for():
    with served(simulated(), api_key="sësame") as address:
        for key in ("none", "ses", "sesamee"):
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                client_of(address, api_key=key).models.list()
        assert httpx.get(f"{address}/v1/models").json()["error"]["code"] == "invalid_api_key"
        good = {"Authorization": "Bearer sësame".encode()}
        assert httpx.get(f"{address}/v1/models", headers=good).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200


def test_a_hundred_streams_at_once():
    backend = simulated(kv_slots=4096)

    async def main(address: str) -> list[int]:
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)

        async def one(index: int) -> int:
            asked = {"prompt": f"number {index}", "max_tokens": 30, "extra_body": {"ignore_eos": True}}
            stream = await client.completions.create(model=MODEL, stream=True, **asked)
            return sum([1 async for chunk in stream if chunk.choices])

        return await asyncio.gather(*map(one, range(100)))

    with served(backend) as address:
        assert asyncio.run(main(address)) == [30] * 100


def test_requests_of_many_threads_are_preempted_and_all_end():
    backend = simulated(kv_slots=512)
    with served(backend) as address:
        client, found = client_of(address), []

        def ask(index: int) -> None:
            made = client.completions.create(
                model=MODEL, prompt=[index] * 40, max_tokens=120, extra_body={"ignore_eos": True}
            )
            found.append(made.usage.completion_tokens)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert found == [120] * 12 and backend.feed.engine.scheduler.num_preemptions


def test_a_prompt_that_is_there_already_is_found_and_that_is_said():
    """Whole blocks of 16, also of a text, but never a prompt's last token."""
    with served(simulated()) as address:
        client = client_of(address)
        for prompt, found in ((list(range(64)), 48), ("one two three four five six seven eight " * 5, 32)):
            usages = [client.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage for _ in range(2)]
            assert [one.prompt_tokens_details.cached_tokens for one in usages] == [0, found]


@pytest.mark.parametrize(
    ("name", "n", "most"), [("vllm-v1", 1, 240 - 3), ("vllm-v1", 2, 240 - 3), ("vllm", 2, 112 - 3)]
)
def test_a_chat_without_a_limit_may_fill_the_pool(name, n, most):
    """It fits even where the pool holds less than the model could take."""
    asked = {"messages": [{"role": "user", "content": "x"}], "n": n, "extra_body": {"ignore_eos": True}}
    with served(simulated(name, kv_slots=256)) as address:
        usage = client_of(address).chat.completions.create(model=MODEL, **asked).usage
        assert most < usage.completion_tokens / n <= 256


def test_an_iteration_is_due_so_long_after_the_one_before(monkeypatch):
    """What the scheduler takes meanwhile is part of it; after a rest the next one begins when it comes."""
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("repro.server.simulated.time", clock)
    executor = SleepingExecutor(SLOW, lambda group, seq: False)
    for waited in (0.005, 0.03, 0.0):
        executor.execute(SchedulerOutput(0))
        now[0] += waited
    executor.rest()
    now[0] += 7
    executor.execute(SchedulerOutput(3))
    assert slept == pytest.approx([0.02, 0.015, 0.0, 0.02])
