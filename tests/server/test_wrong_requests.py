"""Every wrong request is the client's error, in OpenAI's form, and leaves no block behind."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import httpx
from serving import FAST, served, simulated, until

GOOD = {"model": "opt-13b", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "opt-13b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}

NAMES = """
model prompt messages n max_tokens temperature top_p top_k seed stop stream stream_options logprobs top_logprobs
min_tokens ignore_eos priority stop_token_ids repetition_penalty presence_penalty frequency_penalty use_beam_search echo
user receipt what"""


@pytest.fixture(scope="module")
def address():
    with served(simulated()) as address:
        yield address


def error_of(answer: httpx.Response) -> dict:
    """The error, which has OpenAI's form."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


@pytest.mark.parametrize(
    ("changed", "param", "said"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "prompt = 5 cannot be used; give a text, token ids, or a list of them"),
        ({"prompt": []}, "prompt", "from 1 to 256"),
        ({"prompt": ["a", 5]}, "prompt", "5 is neither a text nor a list of token ids"),
        ({"prompt": [True]}, "prompt", "True is neither"),
        ({"prompt": [40_000]}, None, "a token id must be a whole number from 0 to 31999, not 40000"),
        ({"prompt": "\ud800"}, "prompt", "character 0 is half of a character"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens = 0 must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens", "max_tokens = '3' must be"),
        ({"max_tokens": 10**40}, "max_tokens", "must be a whole number from 1 to"),
        ({"max_tokens": 4000}, None, "exceed the 2048"),
        ({"temperature": -1}, "temperature", "temperature = -1 must be"),
        ({"temperature": [1]}, "temperature", "temperature ="),
        ({"top_p": 1.5}, "top_p", "top_p = 1.5 must be"),
        ({"n": 0}, "n", "n = 0 must be a whole number from 1 to 256"),
        ({"stop": ["a", 1]}, "stop", "one of stop"),
        ({"stop": ["a"] * 100}, "stop", "at most 64"),
        ({"stop": "a" * 300}, "stop", "more than 256 characters"),
        ({"n": 200, "prompt": ["a"] * 6}, "n", "6 prompts x n = 200 are more than 1024 choices"),
        ({"stream": "yes"}, "stream", "stream = 'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream = true"),
        ({"max_token": 4}, "max_token", "did you mean max_tokens?"),
        ({"echo": True}, "echo", "echo = True is not there; leave it out"),
        ({"min_tokens": 4}, "min_tokens", "min_tokens = 4 is more than max_tokens = 3"),
        ({"use_beam_search": True}, "use_beam_search", "needs n"),
        ({"use_beam_search": True, "n": 2}, None, "no model that could rank beams"),
        ({"logprobs": 100}, "logprobs", "logprobs = 100 must be a whole number from 0 to 20"),
        ({"model": 5}, "model", "model = 5 cannot be used"),
    ],
)
def test_what_is_wrong_is_named(address, changed, param, said):
    answer = httpx.post(f"{address}/v1/completions", content=json.dumps({**GOOD, **changed}))
    error = error_of(answer)
    assert answer.status_code == 400 and error["param"] == param and said in error["message"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages = 'hi' cannot be used"),
        ({"messages": [{"role": "user"}]}, "messages = None cannot be used"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
            "type",
        ),
        ({"top_logprobs": 2}, "needs logprobs = true"),
        ({"tools": [{"type": "function"}]}, "is not there"),
        ({"response_format": {"type": "json_object"}}, "is not there"),
    ],
)
def test_what_is_wrong_in_a_chat_is_named(address, changed, said):
    answer = httpx.post(f"{address}/v1/chat/completions", json={**CHAT, **changed})
    assert answer.status_code == 400 and said in error_of(answer)["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"n": NaN}', b"[" * 100_000, b"1" * 9999]
)
def test_what_is_no_json_object(address, body):
    answer = httpx.post(f"{address}/v1/completions", content=body)
    assert answer.status_code == 400 and "JSON" in error_of(answer)["message"]


def test_other_paths_models_methods_and_sizes(address):
    for path in ("/", "/v1", "/v1/embeddings", "/docs", "/openapi.json", "/v1/completions/", "/v1/../etc/passwd"):
        answer = httpx.get(f"{address}{path}")
        assert answer.status_code == 404 and error_of(answer)["type"] == "not_found_error"
    for answer in (
        httpx.post(f"{address}/v1/completions", json={**GOOD, "model": "gpt-4"}),
        httpx.get(f"{address}/v1/models/gpt-4"),
    ):
        assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"
    assert httpx.get(f"{address}/v1/completions").status_code == 405
    answer = httpx.post(f"{address}/v1/completions", json={**GOOD, "prompt": "x" * 10_000_000})
    assert answer.status_code == 413 and error_of(answer)["code"] == "request_too_large"


def anything(random: random.Random, depth: int = 0) -> object:
    """A value of JSON's, often one that a check may stumble over."""
    leaves = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3.5,
        -0.0,
        1e308,
        10**30,
        "",
        "x",
        "a" * 300,
        "\ud83d",
        "\u0000",
        0.1,
        -1e-300,
    ]
    if depth > 2 or random.random() < 0.7:
        return random.choice(leaves)
    inner = [anything(random, depth + 1) for _ in range(random.randrange(4))]
    return inner if random.random() < 0.5 else {str(place): one for place, one in enumerate(inner)}


def backend_of(kind: str):
    if kind == "simulated":
        return simulated(cost_model=replace(FAST, fixed_s=1e-6))
    pytest.importorskip("torch")
    from talking import talking
    from tiny import llm

    from repro.server.backend import RealBackend

    return RealBackend(llm(talking(), system="vllm-v1", max_num_batched_tokens=24, max_num_seqs=8))


@pytest.mark.parametrize(("kind", "count"), [("simulated", 1000), ("real", 400)])
def test_a_thousand_random_requests_are_never_the_servers_fault(kind, count):
    dice, backend, codes = random.Random(5), backend_of(kind), []
    with served(backend) as address, httpx.Client(base_url=address, timeout=60) as client:
        for _ in range(count):
            is_chat = dice.random() < 0.4
            body = dict(CHAT if is_chat else GOOD) | {"model": backend.name}
            for name in dice.sample(NAMES.split(), dice.choice([1, 1, 2, 3])):
                body[name] = anything(dice)
            data = json.dumps(body).encode()
            if dice.random() < 0.1:
                data = data[: dice.randrange(len(data))]
            answer = client.post("/v1/chat/completions" if is_chat else "/v1/completions", content=data)
            codes.append(answer.status_code)
            assert answer.status_code < 500, (body, answer.text)
            assert "server_error" not in answer.text  # in a stream, whose status is sent before
            if answer.status_code != 200:
                error_of(answer)
        until(lambda: not backend.feed.handles)
    assert 20 < codes.count(200) < 0.95 * count
