"""What OpenAI's client makes of answers that are no plain success; and its helpers, which ask more of an answer."""

from __future__ import annotations

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import openai
from serving import client_of, served, simulated, until
from test_simulated_server import SLOW

MODEL = "opt-13b"
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", name="client")
def _client():
    with served(simulated()) as address:
        yield client_of(address)


@pytest.mark.parametrize(
    ("asked", "kind", "param", "code"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model", "model_not_found"),
        ({"n": 0}, openai.BadRequestError, "n", None),
        ({"top_p": 2}, openai.BadRequestError, "top_p", None),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools", "unsupported"),
        ({"extra_body": {"maximum": 3}}, openai.BadRequestError, "maximum", "unknown_parameter"),
        (
            {"messages": [{"role": "user", "content": "x" * 5_000_000}]},
            openai.APIStatusError,
            None,
            "request_too_large",
        ),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, openai.BadRequestError, "messages", None),
    ],
)
def test_an_error_is_the_clients_exception(client, asked, kind, param, code):
    for stream in (False, True):
        with pytest.raises(kind) as error:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES} | asked, stream=stream)
        assert error.value.param == param and code in (None, error.value.code)
        assert error.value.type.endswith("_error") and error.value.message


def test_the_helper_that_puts_a_stream_together(client):
    asked = {"model": MODEL, "messages": MESSAGES, "n": 2, "seed": 4, "stop": "time"}  # it refuses what is cut off
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    said = [(choice.message.role, choice.message.content, choice.finish_reason) for choice in whole.choices]
    assert [(one.message.role, one.message.content, one.finish_reason) for one in final.choices] == said
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_headers_and_the_raw_answer(client):
    raw = client.completions.with_raw_response.create(model=MODEL, prompt="x", max_tokens=2)
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert raw.parse().object == "text_completion"
    with client.completions.with_streaming_response.create(model=MODEL, prompt="x", max_tokens=2, stream=True) as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        *_, last, nothing, nothing_more = raw.read().split(b"\n")
        assert (last, nothing, nothing_more) == (b"data: [DONE]", b"", b"")


def test_a_client_that_tries_again_gets_through_a_full_queue():
    """It waits as long as Retry-After says."""
    backend = simulated(kv_slots=256, cost_model=SLOW, max_waiting=1)
    long = {"model": MODEL, "max_tokens": 30, "stream": True, "extra_body": {"ignore_eos": True}}
    with served(backend) as address:
        patient = client_of(address, max_retries=5)
        running = [client_of(address).completions.create(**long, prompt=[7] * 200)]
        next(iter(running[0]))
        running.append(client_of(address).completions.create(**long, prompt=[8] * 200))
        until(lambda: len(backend.feed.engine.scheduler.waiting) == 1)
        assert patient.completions.create(model=MODEL, prompt="z", max_tokens=1).usage.completion_tokens == 1
        for stream in running:
            stream.close()
