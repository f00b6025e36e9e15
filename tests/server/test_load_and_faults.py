"""Many clients at once, and clients that misbehave below HTTP: the server goes on, and nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
from contextlib import suppress
from dataclasses import replace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

import httpx
import serving
from serving import FAST, served, simulated, until
from wire import Wire

from repro.errors import UserError
from repro.server import app, run

PATH = "/v1/completions"
ASKED = {"prompt": [7, 8, 9], "ignore_eos": True, "stream": True, "seed": 1}


@pytest.fixture
def servers(monkeypatch):
    """The servers that are begun."""
    found = []

    def server_of(*arguments):
        found.append(run.server_of(*arguments))
        return found[-1]

    monkeypatch.setattr(serving, "server_of", server_of)
    return found


def test_five_hundred_streams_at_once_of_which_some_vanish(servers):
    """More than the system runs at once: some wait in the queue meanwhile."""
    backend = simulated(kv_slots=16_384, cost_model=replace(FAST, fixed_s=0.005))

    async def one(address: str, index: int, all_are_answered: asyncio.Barrier, open_ones: set[int]) -> bool:
        vanishes = index % 5 == 0
        async with Wire(address) as wire:
            wire.send(PATH, ASKED | {"max_tokens": 1000 if vanishes else 20, "prompt": [index] * 4})
            status, _ = await wire.head()
            assert status == 200
            await all_are_answered.wait()
            open_ones.add(len(servers[0].server_state.connections))
            if vanishes:
                await wire.reader.readuntil(b"\n\n")
                return False
            said = (await wire.reader.readuntil(b"data: [DONE]\n\n")).count(b'"text"')
            return said == 20

    async def main(address: str) -> tuple[list[bool], int]:
        barrier, open_ones = asyncio.Barrier(500), set[int]()
        whole = await asyncio.gather(*[one(address, index, barrier, open_ones) for index in range(500)])
        return whole, max(open_ones)

    with served(backend) as address:
        whole, most = asyncio.run(main(address))
        until(lambda: not backend.feed.handles)
    assert most == 500
    assert whole == [index % 5 > 0 for index in range(500)]
    assert backend.metrics.success == {"stop": 0, "length": 400, "abort": 100}


def test_who_reads_slowly_gets_it_all_and_holds_nobody_up(servers):
    """The server keeps the tokens, not the text that they are written as: that is megabytes."""
    backend = simulated(cost_model=replace(FAST, fixed_s=1e-6))
    asked = {"messages": [{"role": "user", "content": "x"}], "n": 4, "logprobs": True, "top_logprobs": 20}

    async def main(address: str) -> None:
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before it is connected
            slow.connect((httpx.URL(address).host, httpx.URL(address).port))
            async with Wire(address) as wire:
                wire.reader, wire.writer = await asyncio.open_connection(sock=slow, limit=4096)
                wire.send("/v1/chat/completions", ASKED | asked | {"max_tokens": 900, "prompt": None})
                assert (await wire.head())[0] == 200
                async with Wire(address) as other:
                    assert len((await other.ask(PATH, ASKED | {"max_tokens": 5})).events()) == 5
                while backend.feed.handles:  # the engine has done with it, and has its memory back
                    await asyncio.sleep(0.01)
                while len(servers[0].server_state.connections) > 1:  # the other one's
                    await asyncio.sleep(0.01)
                (slow_one,) = servers[0].server_state.connections
                kept = slow_one.transport.get_write_buffer_size()
                size, tail = 0, b""
                while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                    piece = await wire.reader.read(2**16)
                    size, tail = size + len(piece), (tail + piece)[-100:]
        assert size > 6_000_000 > 8 * kept > 0

    with served(backend) as address:
        asyncio.run(main(address))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot bound it")
def test_who_reads_nothing_is_cut_off(monkeypatch, servers):
    """Or a server could never end, which waits for those that it answers."""
    monkeypatch.setattr(run, "SLOWEST_READ_S", 0.5)
    backend = simulated(cost_model=replace(FAST, fixed_s=1e-6))
    body = json.dumps(ASKED | {"prompt": [[1], [2], [3]], "max_tokens": 1000, "n": 4, "logprobs": 20}).encode()
    with served(backend) as address, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((httpx.URL(address).host, httpx.URL(address).port))
        deaf.sendall(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: servers[0].server_state.connections)
        until(lambda: not servers[0].server_state.connections)


def test_a_body_that_does_not_come_is_the_clients_error(monkeypatch):
    monkeypatch.setattr(app, "SLOWEST_BODY_S", 0.1)

    async def main(address: str) -> None:
        async with Wire(address) as wire:
            wire.writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 90\r\n\r\n{{".encode())
            status, headers = await wire.head()
            error = json.loads(await wire.reader.readexactly(int(headers[b"content-length"])))["error"]
            assert status == 408 and error["message"] == "the body has not come within 0.1 s; send all of it"
            assert await wire.reader.read() == b""  # it is hung up

    with served(simulated()) as address:
        asyncio.run(main(address))


def test_clients_that_vanish_at_any_moment():
    """In the headers, in the body, before the answer, within it."""
    dice = random.Random(3)
    backend = simulated(kv_slots=1024, cost_model=replace(FAST, fixed_s=0.002))

    async def one(address: str) -> None:
        body = json.dumps(ASKED | {"max_tokens": 400, "n": dice.choice([1, 3]), "stream": dice.random() < 0.7}).encode()
        request = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        async with Wire(address) as wire:
            wire.writer.write(request[: dice.choice([dice.randrange(len(request)), len(request)])])
            with suppress(TimeoutError):
                await asyncio.wait_for(wire.reader.read(dice.randrange(1, 2000)), dice.uniform(0.0, 0.05))

    async def main(address: str) -> None:
        for _ in range(10):
            await asyncio.gather(*[one(address) for _ in range(30)])

    with served(backend) as address:
        asyncio.run(main(address))
        until(lambda: not backend.feed.handles)
        assert httpx.post(f"{address}{PATH}", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert backend.metrics.success["abort"] > 50


def test_what_is_no_http():
    dice = random.Random(4)
    begins = [b"", b"GET / HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: ", b"\x16\x03\x01\x02\x00"]

    async def one(address: str) -> None:
        async with Wire(address) as wire:
            wire.writer.write(dice.choice(begins) + dice.randbytes(dice.randrange(1, 400)) + b"\r\n\r\n")
            wire.writer.write_eof()
            answer = await asyncio.wait_for(wire.reader.read(), 20)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer

    async def main(address: str) -> None:
        await asyncio.gather(*[one(address) for _ in range(200)])

    with served(simulated()) as address:
        asyncio.run(main(address))
        assert httpx.get(f"{address}/health").status_code == 200


def test_one_client_too_many_is_told_so():
    backend = simulated(cost_model=replace(FAST, fixed_s=0.01))

    async def main(address: str) -> None:
        async with Wire(address) as first, Wire(address) as second:
            for wire in (first, second):
                wire.send(PATH, ASKED | {"max_tokens": 30})
                assert (await wire.head())[0] == 200
            async with Wire(address) as third:
                refused = await third.ask(PATH, ASKED | {"max_tokens": 1})
                assert refused.status == 503 and refused.json()["error"]["code"] == "too_many_connections"
                assert "2 clients are connected, and this process may open no more files" in refused.body.decode()
                assert await third.reader.read() == b""
            await second.reader.readuntil(b"[DONE]\n\n")
        async with Wire(address) as wire:
            until_there = asyncio.get_running_loop().time() + 20
            while (await wire.ask(PATH, ASKED | {"max_tokens": 1})).status != 200:  # until the two are gone
                assert asyncio.get_running_loop().time() < until_there
                await wire.__aenter__()

    with served(backend, most=2) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [(1024, 20_000, 19_872), (1024, -1, 65_408), (90_000, -1, 89_872), (-1, -1, 65_408), (256, 256, 128)],
)
def test_the_limit_of_files_is_raised_as_far_as_it_goes(monkeypatch, soft, hard, most):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: raised.append(limits))
    assert run.most_clients() == most
    assert raised == ([(most + 128, hard)] if soft == 1024 else [])


def test_a_limit_that_is_too_low_is_one_line(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (100, 200))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    with pytest.raises(UserError, match=r"may open 200 files, too few for a server.* at least 256 \(ulimit -n\)"):
        run.most_clients()
