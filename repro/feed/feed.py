"""An engine that is fed while it runs, for whatever executor: which requests are whose, and what has come of them.

A real engine (`repro.llm.serving`) and a simulated server's (`repro.server.simulated`) are both a `Feed`."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from repro.engine.events import Event
from repro.engine.loop import Engine, Outcome
from repro.engine.memory.prefix_cache import Start
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.feed.driver import Driver
from repro.feed.handle import Handle
from repro.feed.receipts import Receipts
from repro.sampling_params import SamplingParams


class QueueFull(UserError):
    """Too many requests wait; the same request may be given again later."""


class Watcher(Protocol):
    """Is told in the engine's thread how each of its requests ends: "stop", "length" or "abort". The feed still knows
    its handle then."""

    def ended(self, request: Request, outcome: Outcome, reason: str) -> None: ...


class Watchers(tuple[Watcher, ...]):
    """Several as one, told in their order."""

    def ended(self, request: Request, outcome: Outcome, reason: str) -> None:
        for one in self:
            one.ended(request, outcome, reason)


class Feed:
    """Requests by number, and the handle that each belongs to. A subclass opens the engine, and says when one ends.

    `max_waiting`: as many requests may wait in the queue; who comes then is refused (None: nobody is)."""

    engine: Engine
    driver: Driver
    events: list[Event] | None  # what the scheduler decides, if it is kept

    def __init__(self, watcher: Watcher | None = None, max_waiting: int | None = None) -> None:
        self.handles: dict[int, Handle] = {}  # by the number of each of its requests
        self.receipts = Receipts()
        self.woken: dict[Handle, None] = {}  # something has come of them in this iteration
        self._watcher, self._max_waiting, self.next_id = watcher, max_waiting, 0
        self._arrival_s: float | None = None  # of what is queued now, if it came before this moment

    def open_engine(self) -> contextlib.AbstractContextManager[Engine]:
        """The engine, for as long as the context lasts."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Ends the handles whose requests have ended."""
        raise NotImplementedError

    def submit(self, handle: Handle, request: Request, sample: int) -> None:
        """Sample number `sample` of a handle is about to be queued as `request`; UserError if it cannot be run."""
        raise NotImplementedError

    def forget(self, request_id: int) -> None:
        """A request was taken back, or its result was fetched."""
        raise NotImplementedError

    def add_all(
        self, prompts: list[list[int]], sampling: list[SamplingParams], priority: int, arrival_s: float
    ) -> Future[list[Handle]]:
        """Queue prompts, token ids, all or none of them, without waiting for it. `arrival_s` is when they came, by the
        engine's clock. UserError for what cannot be run, now or from what is returned; there QueueFull, too."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin, in a thread of its own; raises what `open_engine` raises."""
        self.driver = Driver(self.open_engine, self._after_step, self._end)
        self.engine.observers = (self.receipts, *self.engine.observers)  # nothing has been added yet

    def drain(self) -> None:
        """Wait until all that was added has ended."""
        for handle in set(self.handles.values()):
            handle._result.exception()

    def close(self) -> None:
        """Take back what has not finished, and end."""
        self.driver.close()

    def later_all(self, adding: list[Callable[[], Handle]], arrival_s: float) -> Future[list[Handle]]:
        """Have all of these queued between two iterations, or none of them. They have arrived at `arrival_s` by the
        engine's clock, though they are read first and wait until an iteration has ended. QueueFull if as many wait as
        may."""

        def add() -> list[Handle]:
            waiting = len(self.engine.scheduler.waiting)
            if self._max_waiting is not None and waiting >= self._max_waiting:
                raise QueueFull(f"{waiting} requests wait, and no more than {self._max_waiting} may; try again later")
            added: list[Handle] = []
            self._arrival_s = arrival_s
            try:
                for one in adding:
                    added.append(one())
            except UserError as error:
                for handle in added:
                    self.take_back(handle, str(error))
                raise
            finally:
                self._arrival_s = None
            return added

        return self.driver.later(add)

    # In the engine's thread

    def queue(self, handle: Handle, requests: list[Request]) -> None:
        """Add a handle's requests, numbered from `next_id` on, or none of them: UserError if one cannot be run."""
        try:
            for sample, request in enumerate(requests):
                if self._arrival_s is not None:
                    request.arrival_s = self._arrival_s
                self.submit(handle, request, sample)
                handle.outcomes.append(self.engine.add(request))
                self.handles[request.request_id] = handle
                handle.requests.append(request)
        except UserError:
            self._drop(request.request_id)
            self._remove(handle)
            raise
        self.next_id += len(requests)

    def take_back(self, handle: Handle, reason: str) -> None:
        """End a handle before its time; nothing happens if it has ended."""
        if not handle.is_done:
            self._remove(handle)
            handle.end(UserError(reason))

    def take_back_all(self, reason: str) -> None:
        for handle in set(self.handles.values()):
            self.take_back(handle, f"{handle.name} was taken back: {reason}")

    def complete(self, request: Request, outcome: Outcome, reason: str) -> None:
        """A request has come to its end, and its tokens are known."""
        handle = self.handles[request.request_id]
        if request is handle.requests[0] and (start := self._starts.get(request.request_id)) is not None:
            handle.cached_tokens = start.found
        self._tell(handle, request, outcome, reason)

    def _after_step(self) -> None:
        self.after_step()
        self._wake()

    def _wake(self) -> None:
        """Tell those that wait, each event loop once: to wake one costs the engine more than a token does."""
        woken, self.woken = self.woken, {}
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
        for handle in woken:
            for waker in list(handle.wakers):
                waker()
            for loop, event in list(handle.listening):
                by_loop.setdefault(loop, []).append(event)
        for loop, events in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_set_all, events)

    def callback_failed(self, handle: Handle, error: Exception) -> None:
        """A user's `on_piece` has raised: its own request ends, between two iterations."""
        handle.on_piece = None
        reason = f"{handle.name} was taken back: its on_piece raised {type(error).__name__}: {error}"
        self.driver.later(lambda: self.take_back(handle, reason))

    def _remove(self, handle: Handle) -> None:
        for request, outcome in zip(handle.requests, handle.outcomes):
            if request.request_id in self.handles:
                with contextlib.suppress(UserError):  # it has ended, but its last token is not known yet
                    self.engine.abort(request.request_id)
                self._tell(handle, request, outcome, "abort")

    def _tell(self, handle: Handle, request: Request, outcome: Outcome, reason: str) -> None:
        self._keep_receipt(handle, request, outcome)
        if self._watcher is not None:
            self._watcher.ended(request, outcome, reason)
        self._drop(request.request_id)

    def _keep_receipt(self, handle: Handle, request: Request, outcome: Outcome) -> None:
        """A request has ended: when the engine says, or now."""
        at_s = self.engine.clock.now if math.isnan(outcome.finish_s) else outcome.finish_s
        handle.receipts[request.request_id] = self.receipts.end(request, at_s)

    @property
    def _starts(self) -> dict[int, Start]:
        """What a prefix cache remembers of each request."""
        return getattr(self.engine.scheduler.manager, "starts", {})

    def _drop(self, request_id: int) -> None:
        self.handles.pop(request_id, None)
        self._starts.pop(request_id, None)  # or an engine that runs for weeks would remember each
        self.forget(request_id)

    def _end(self, failure: Exception | None) -> None:
        for handle in set(self.handles.values()):
            handle.end(failure)
        self.handles.clear()
        self._wake()


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
