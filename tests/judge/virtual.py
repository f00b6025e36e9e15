"""Virtual time for a client and a simulated server in one event loop: a suite of minutes takes a second, and each run
of it is the same.

The loop does not wait for its next timer, it moves the clock there. The engine keeps its thread, but thread and loop
take turns: the loop stands still while the thread works, and the thread's `sleep` is a timer of the loop. HTTP goes
from client to application without a socket, chunk by chunk. Server, engine and client are the product's own."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from repro.engine.clock import Clock
from repro.feed.driver import EngineEnded
from repro.judge.claims import Finding
from repro.judge.client import Client
from repro.judge.suite import judge
from repro.server.app import make_app
from repro.server.backend import SimulatedBackend


class _Selector(selectors.DefaultSelector):
    """Waits for nothing: moves the loop's clock instead."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list:
        if found := super().select(0):
            return found
        if timeout is None:
            raise RuntimeError("all of it waits, and nothing will come")
        self.loop.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    now_s = 0.0

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s


class Turns:
    """An engine's thread that works only while the loop stands still. In place of `Driver`, and of `time` where an
    iteration is slept through."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._mine, self._theirs = threading.Lock(), threading.Lock()  # whoever waits acquires, the other releases
        self._mine.acquire()
        self._theirs.acquire()
        self._inbox: list[tuple[Callable[[], Any], Future]] = []
        self._waits = self._ends = self._has_ended = False

    def perf_counter(self) -> float:
        return self._loop.now_s

    def sleep(self, seconds: float) -> None:
        """In the thread: let the loop go on until then."""
        self._loop.call_later(seconds, self._turn)
        self._pass()

    def driver(self, open_engine: Callable, after_step: Callable, at_end: Callable) -> Turns:
        """As `Driver`'s constructor."""
        self._parts = open_engine, after_step, at_end
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._theirs.acquire()
        return self

    def later(self, work: Callable[[], Any]) -> Future:
        done: Future = Future()
        if self._ends or self._has_ended:
            raise EngineEnded("this engine has ended; begin another one")
        self._inbox.append((work, done))
        if self._waits:
            self._waits = False
            self._loop.call_soon(self._turn)
        return done

    def close(self) -> None:
        """Nothing is asked any more: let what runs come to its end."""
        self._ends = True
        while not self._has_ended:
            self._turn()
        self._thread.join()

    def _turn(self) -> None:
        """In the loop: let the thread work until it sleeps or has nothing to do."""
        self._mine.release()
        self._theirs.acquire()

    def _pass(self) -> None:
        self._theirs.release()
        self._mine.acquire()

    def _run(self) -> None:
        open_engine, after_step, at_end = self._parts
        failure = None
        try:
            with open_engine() as engine:
                while not self._ends:
                    self._work()
                    if engine.scheduler.has_work:
                        engine.step()
                        after_step()
                    elif not self._inbox:
                        self._waits = True
                        self._pass()
        except Exception as error:  # noqa: BLE001 - all that wait must hear of it
            failure = error
        at_end(failure)
        self._has_ended = True
        self._theirs.release()

    def _work(self) -> None:
        inbox, self._inbox = self._inbox, []
        for work, done in inbox:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                done.set_exception(error)


class _LoopClock(Clock):
    """The loop's time as an engine sees it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @property
    def now(self) -> float:
        return self._loop.now_s

    def spend(self, durations_s: list[float]) -> None:
        pass

    def wait_until(self, moment: float) -> None:
        raise NotImplementedError


class _AtOnce:
    """In place of a pool of threads: `submit` does it."""

    def __init__(self, *unused: object) -> None:
        pass

    def submit(self, work: Callable, *arguments: object) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            done.set_exception(error)
        return done


class Direct(httpx.AsyncBaseTransport):
    """To an application without a socket. Chunks arrive when they are sent; a stream that is closed is a client that
    has gone. While `is_down` nobody is there."""

    def __init__(self, app: Callable) -> None:
        self._app, self.is_down = app, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("nobody is there")
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": await request.aread(), "more_body": False})
        headers = [(name.lower(), value) for name, value in request.headers.raw]
        place = {"path": request.url.path, "raw_path": request.url.raw_path, "query_string": request.url.query}
        scope = {"type": "http", "method": request.method, "headers": headers, "http_version": "1.1", **place}
        scope |= {"scheme": "http", "server": ("virtual", 80), "client": ("virtual", 1), "root_path": ""}
        task = asyncio.ensure_future(self._app(scope, asked.get, sent.put))
        start = await sent.get()
        return httpx.Response(start["status"], headers=start.get("headers", []), stream=_Body(self, task, asked, sent))


class _Body(httpx.AsyncByteStream):
    def __init__(self, direct: Direct, task: asyncio.Task, asked: asyncio.Queue, sent: asyncio.Queue) -> None:
        self._direct, self._task, self._asked, self._sent = direct, task, asked, sent

    async def __aiter__(self) -> AsyncIterator[bytes]:
        is_more = True
        while is_more:
            message = await self._sent.get()
            if self._direct.is_down:
                raise httpx.ReadError("the connection was reset")
            is_more = message.get("more_body", False)
            yield message.get("body", b"")

    async def aclose(self) -> None:
        self._asked.put_nowait({"type": "http.disconnect"})
        await self._task


@contextmanager
def virtual(monkeypatch: pytest.MonkeyPatch, make: Callable[[], SimulatedBackend]) -> Iterator[VirtualServer]:
    """A server in virtual time. Afterwards no block is held."""
    loop = VirtualLoop()
    turns = Turns(loop)
    with monkeypatch.context() as patch:
        patch.setattr("repro.feed.feed.Driver", turns.driver)
        patch.setattr(
            "repro.server.simulated.time", SimpleNamespace(perf_counter=turns.perf_counter, sleep=turns.sleep)
        )
        patch.setattr("repro.server.simulated.WallClock", lambda: _LoopClock(loop))
        patch.setattr("repro.server.app.ThreadPoolExecutor", _AtOnce)
        backend = make()
        server = VirtualServer(loop, backend, Direct(make_app(backend)))
        try:
            yield server
        finally:
            turns.close()
            loop.close()
        manager = backend.feed.manager
        assert manager.num_free_blocks == manager.num_blocks


class VirtualServer:
    def __init__(self, loop: VirtualLoop, backend: SimulatedBackend, transport: Direct) -> None:
        self.loop, self.backend, self.transport = loop, backend, transport

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.transport, base_url="http://virtual")

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
        """Run a coroutine with a client of the server to its end."""

        async def main() -> Any:
            async with self.http() as http:
                return await work(http)

        return self.loop.run_until_complete(main())

    def findings(self, seed: int = 0, budget_s: float = 120.0) -> dict[str, Finding]:
        """What a judge finds, by claim."""
        found: list[Finding] = []
        self.run(lambda http: judge(Client(http), "it", budget_s, seed, found.append))
        return {one.claim: one for one in found}
