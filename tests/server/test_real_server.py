"""OpenAI's client at a real tiny model: what it gets is what `LLM.generate` and `LLM.chat` give."""

from __future__ import annotations

from collections import Counter

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)
pytest.importorskip("torch")
pytest.importorskip("transformers")

import httpx
import openai
from serving import CACHED, client_of, is_whole, samples_of, served, streamed, until
from talking import talking
from tiny import llm

from repro.llm.pool import PoolSize
from repro.sampling_params import SamplingParams
from repro.server.backend import RealBackend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", name="talking")
def _talking():
    return talking()


def engine_of(loaded, system):
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 8} if system == "vllm-v1" else {}
    return llm(loaded, system=system, **small)


ASKED = [
    {"temperature": 0, "max_tokens": 15},
    {"n": 3, "seed": 1, "max_tokens": 15},
    {"seed": 2, "max_tokens": 20, "stop": ["ab", "z", "lo an"]},
    {"seed": 4, "max_tokens": 12, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"n": 2, "seed": 5, "max_tokens": 9, "top_k": 20, "min_tokens": 4, "repetition_penalty": 1.2},
    {"seed": 6, "max_tokens": 9, "stop_token_ids": list(range(20, 60)), "ignore_eos": True},
]
OURS = ("top_k", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos", "use_beam_search")
PROMPTS = ["hello abc", [5, 9, 33, 2], ["an apple", "lo and behold"], [[4, 5, 6, 7, 8], [70]]]


def split(asked: dict) -> dict:
    """As the client takes it: what OpenAI does not know goes into extra_body."""
    ours = {name: value for name, value in asked.items() if name in OURS}
    return {name: value for name, value in asked.items() if name not in OURS} | {"extra_body": ours}


@pytest.mark.parametrize("system", ["vllm-v1", "vllm", "orca-oracle"])
def test_completions_are_those_of_generate(talking, system):
    """Streamed or not, texts or token ids, one or several."""
    engine = engine_of(talking, system)
    cases = [(PROMPTS[place % 4], asked) for place, asked in enumerate(ASKED)]
    expected = []
    for prompt, asked in cases:
        several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        made = engine.generate(several, SamplingParams(**asked), progress=False)
        expected.append([sample for result in made for sample in result.samples])
    with served(RealBackend(engine)) as address:
        client = client_of(address)
        for (prompt, asked), want in zip(cases, expected):
            whole = client.completions.create(model="tiny", prompt=prompt, **split(asked))
            assert [choice.text for choice in whole.choices] == [sample.text for sample in want]
            assert [choice.finish_reason for choice in whole.choices] == [sample.finish_reason for sample in want]
            assert whole.usage.completion_tokens == sum(len(sample.token_ids) for sample in want)
            options = {"stream": True, "stream_options": {"include_usage": True}}
            texts, reasons, usage = streamed(
                client.completions.create(model="tiny", prompt=prompt, **options, **split(asked))
            )
            assert texts == {place: sample.text for place, sample in enumerate(want)}
            assert reasons == {place: sample.finish_reason for place, sample in enumerate(want)}
            assert usage.to_dict() | CACHED == whole.usage.to_dict() | CACHED


def test_a_chat_is_that_of_chat(talking):
    engine = engine_of(talking, "vllm-v1")
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi"}]
    want = engine.chat(messages, SamplingParams(n=2, seed=3, max_tokens=10, logprobs=2), progress=False)[0]
    asked = {"model": "tiny", "messages": messages, "n": 2, "seed": 3, "max_completion_tokens": 10}
    with served(RealBackend(engine)) as address:
        client = client_of(address)
        made = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in made.choices] == want.texts
        for choice, sample in zip(made.choices, want.samples):
            said = choice.logprobs.content
            assert [one.logprob for one in said] == pytest.approx(sample.logprobs)
            best = [[other.logprob for other in one.top_logprobs] for one in said]
            assert best == [pytest.approx(list(one.values())[:2]) for one in sample.best_logprobs]
        texts, _, _ = streamed(client.chat.completions.create(**asked, stream=True))
        assert list(texts.values()) == want.texts
        room = client.chat.completions.create(model="tiny", messages=messages, temperature=0)
        assert room.usage.total_tokens == 64 and room.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="leaves no room for an answer"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 60}])


def test_beams_come_at_the_end(talking):
    engine = engine_of(talking, "vllm")
    want = engine.generate(["hello"], SamplingParams(n=2, use_beam_search=True, max_tokens=8), progress=False)[0]
    asked = {"model": "tiny", "prompt": "hello", "n": 2, "max_tokens": 8, "extra_body": {"use_beam_search": True}}
    with served(RealBackend(engine)) as address:
        made = client_of(address).completions.create(**asked)
        assert [choice.text for choice in made.choices] == want.texts
        assert made.usage.completion_tokens == sum(map(len, want.token_ids))
        texts, _, _ = streamed(client_of(address).completions.create(**asked, stream=True))
        assert list(texts.values()) == want.texts


def test_what_the_engine_refuses_is_the_clients_error_and_nothing_is_left(talking):
    """Also of several prompts, of which the last one cannot be run: the others are taken back."""
    backend = RealBackend(llm(talking, system="vllm-v1", pool=PoolSize(num_blocks=5)))
    with served(backend) as address:
        client = client_of(address)
        for prompt, longest, said in (
            ([1] * 60, 40, "exceed the 64"),
            ([500], 4, "token ids must be from 0 to 100"),
            ([1] * 10, 40, "does not fit into an empty pool"),
            (["a", "b", [1] * 10], 12, "does not fit into an empty pool"),
            ("", 70, "exceed the 64"),
        ):
            with pytest.raises(openai.BadRequestError, match=said):
                client.completions.create(model="tiny", prompt=prompt, max_tokens=longest)
        until(lambda: is_whole(backend))
        assert client.completions.create(model="tiny", prompt="x", max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_that_fails_says_so(talking, monkeypatch, streams):
    backend = RealBackend(engine_of(talking, "vllm-v1"))
    with served(backend, whole=False) as address:
        client = client_of(address)
        monkeypatch.setattr(backend.feed.llm.executor.runner, "decode", lambda batch: 1 / 0)
        if streams:  # its status is sent already
            with pytest.raises(openai.APIError, match="the engine has failed: ZeroDivisionError"):
                list(client.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True))
        else:
            with pytest.raises(openai.InternalServerError, match="the engine has failed: ZeroDivisionError"):
                client.completions.create(model="tiny", prompt="x", max_tokens=5)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="this engine has ended"):
                client.completions.create(model="tiny", prompt="x")
        assert httpx.get(f"{address}/health").status_code == 503
        assert httpx.get(f"{address}/metrics").status_code == 503


def test_metrics_of_a_real_engine_are_what_its_event_log_says(talking):
    """With preemptions; and a client that goes while its request waits, and one while it runs."""
    backend = RealBackend(llm(talking, system="vllm", pool=PoolSize(num_blocks=24), max_num_seqs=4), with_events=True)
    with served(backend) as address:
        client = client_of(address)
        prompts = [[7 + place] * 12 for place in range(8)]
        client.completions.create(model="tiny", prompt=prompts, max_tokens=40, temperature=0)
        for prompt in ([5, 6], [[place] * 20 for place in range(4, 10)]):
            with client.completions.create(model="tiny", prompt=prompt, max_tokens=40, stream=True) as stream:
                next(iter(stream))
        until(lambda: not backend.feed.handles)
        said = samples_of(httpx.get(f"{address}/metrics").text)
    kinds = Counter(event.kind for event in backend.feed.events)
    assert said["vllm:num_preemptions_total"] == kinds["preempt"] > 0
    assert said["vllm:request_success_total:length"] + said["vllm:request_success_total:stop"] == kinds["finish"] >= 8
    assert said["vllm:request_success_total:abort"] == kinds["abort"]
    assert kinds["finish"] + kinds["abort"] == kinds["arrive"] == 8 + 1 + 6
    assert said["vllm:e2e_request_latency_seconds_count"] == kinds["finish"]
