"""The two scripts that measure a server, clients.py and serving_rate.py, at a small scale and without a network."""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import clients
import serving_rate
from clients import OUTPUT, PROMPT, Answered
from serving import served
from wire import Wire

from repro.server.log import RequestLog

pytestmark = pytest.mark.usefixtures("one_thread")


def stub(command, address, model, count, streams, folder):
    """A client of our own: one request after the other."""

    async def ask() -> list[Answered]:
        found = []
        async with Wire(address) as wire:
            for index in range(count):
                body = {"prompt": chr(65 + index) * PROMPT, "max_tokens": OUTPUT, "stream": True}
                options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
                *chunks, last = (await wire.ask("/v1/completions", body | options)).events()
                text, usage = "".join(chunk["choices"][0]["text"] for chunk in chunks), last["usage"]
                lengths = usage["prompt_tokens"], usage["completion_tokens"]
                found.append(Answered(*lengths, 1.0, 1.0, len(text)))
        return found

    return asyncio.run(ask())


def test_a_client_without_a_network(monkeypatch, tmp_path, capsys):
    """All but the published clients and the server's own process: the model, its tokenizer, the log."""
    pytest.importorskip("torch")
    from repro.llm import LLM
    from repro.llm.pool import PoolSize
    from repro.server.backend import RealBackend

    @contextmanager
    def here(arguments, folder):
        with RequestLog(str(arguments[arguments.index("--log") + 1])) as told:
            engine = LLM(folder / arguments[0], system="vllm-v1", pool=PoolSize(kv_slots=4096), quiet=True)
            with served(RealBackend(engine, log=told)) as address:
                yield SimpleNamespace(address=address)

    monkeypatch.setattr(clients, "served_alone", here)
    monkeypatch.setattr(clients, "CLIENTS", {"stub": ("1", stub)})
    monkeypatch.setattr(clients, "fetched", lambda name, version, folder: tmp_path)
    clients.main(["--requests", "5", "--folder", str(tmp_path), "--only", "stub"])
    said = capsys.readouterr().out
    assert "stub 1: 5 of 5 requests, 0 of a wrong length" in said and said.count("the server's log") == 2


def test_a_client_that_cannot_be_fetched_is_no_failure(monkeypatch, tmp_path, capsys):
    def fetched(name, version, folder):
        raise clients.NotFetched(f"{name} cannot be fetched")

    monkeypatch.setattr(clients, "fetched", fetched)
    monkeypatch.setattr(clients, "write_model", lambda folder: None)
    assert clients.main(["--folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "skipped: aiperf cannot be fetched",
        "skipped: guidellm cannot be fetched",
    ]


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        ({"first_ms": 15.1}, True),
        ({"first_ms": 15.3}, False),
        ({"gap_ms": 8.0}, False),
        ({"prompt": 99}, False),
        ({"output": 19}, False),
        ({"characters": 19}, False),
    ],
)
def test_what_a_client_says_is_compared(monkeypatch, tmp_path, changes, same):
    """5 ms and 2 % of the server's own median."""
    monkeypatch.setattr(clients, "ours", lambda log: ([10.0] * 9, [2.0] * 9))
    said = {"prompt": PROMPT, "output": OUTPUT, "first_ms": 11.0, "gap_ms": 2.5}
    answered = [Answered(**said | changes)] * 9
    assert clients.compared("it", answered, tmp_path, 9) is same
    assert not clients.compared("it", answered, tmp_path, 10)


def test_a_rate_over_http(capsys):
    assert serving_rate.main(["opt-13b", "--simulated", "a100-2023", "--requests", "6", "--output-tokens", "3"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^HTTP, (\w+).* 18 tokens in", said, re.MULTILINE) == ["whole", "streams"]
