"""What comes of one call, for threads and for asyncio. What a token is, is others' business: here a `Piece` is only
passed on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from repro.engine.loop import Outcome
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.feed.receipt import Receipt

if TYPE_CHECKING:
    from repro.feed.feed import Feed

R = TypeVar("R")
MOST_AT_ONCE = 64  # pieces of a handle


@dataclass(frozen=True)
class Piece:
    """One token of sample number `sample`. `text` is what can be said for certain now: none while a character or a stop
    text may be incomplete; a sample's pieces join to its text. The last piece has the reason (see `Sample`). A beam has
    this one piece, with all of its text. `logprob` and `best_logprobs` are the token's (see `Sample`)."""

    sample: int
    token_id: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprob: float | None = None
    best_logprobs: dict[int, float] | None = None


class Handle(Generic[R]):
    """What comes of one call, for any thread: its pieces in the order in which they come, then `result`."""

    def __init__(self, feed: Feed, name: str, on_piece: Callable[[Piece], None] | None = None) -> None:
        self.name, self.requests, self.outcomes = name, list[Request](), list[Outcome]()
        self.pieces: list[Piece] = []
        self.cached_tokens = 0  # of its prompt, found in a prefix cache; known at the end
        self.receipts: dict[int, Receipt] = {}  # where its time went, by the number of each request that has ended
        self.wakers: list[Callable[[], None]] = []  # called after an iteration in which something has come
        self.listening: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # set in their loops then
        self.on_piece = on_piece
        self._feed = feed
        self._result: Future[R] = Future()

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._result.done()

    def result(self, timeout_s: float | None = None) -> R:
        """All of it, waited for. UserError if the request was taken back; what has ended the engine, if that has;
        TimeoutError."""
        return self._result.result(timeout_s)

    def abort(self) -> None:
        """Take the request back. Nothing happens if it has ended."""
        if not self.is_done:
            self._feed.driver.call(lambda: self._feed.take_back(self, f"{self.name} was taken back"))

    def give_up(self) -> None:
        """The same without waiting, and without a word if the engine has ended."""
        if not self.is_done:
            with contextlib.suppress(UserError):
                self._feed.driver.later(lambda: self._feed.take_back(self, f"{self.name} was given up"))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return self.requests[0].prompt_tokens

    @property
    def output_tokens(self) -> int:
        """Tokens that have come so far, of all its samples."""
        return len(self.pieces)

    def __iter__(self) -> Iterator[Piece]:
        changed, place = threading.Event(), 0
        self.wakers.append(changed.set)
        while place < len(self.pieces) or not self.is_done:
            changed.clear()
            if place < len(self.pieces):
                yield self.pieces[place]
                place += 1
            elif not self.is_done:
                changed.wait()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same for asyncio. An iteration that is given up takes the request back."""
        async with contextlib.aclosing(together([self])) as batches:
            async for batch in batches:
                for _, piece in batch:
                    yield piece

    # In the engine's thread

    def deliver(self, piece: Piece) -> None:
        """A piece has come."""
        self.pieces.append(piece)
        if self.on_piece is not None:
            self.on_piece(piece)
        self._feed.woken[self] = None

    def end(self, result: R | Exception | None) -> None:
        """Nothing more will come."""
        self._result.set_exception(result) if isinstance(result, Exception) else self._result.set_result(result)
        self._feed.woken[self] = None


async def together(handles: list[Handle]) -> AsyncIterator[list[tuple[int, Piece]]]:
    """The pieces of several handles, each with its handle's place: lists of what has come since the list before, of at
    most MOST_AT_ONCE a handle. So whoever is slow has fewer lists to see to, but no long one. One that is given up
    takes all back."""
    changed, places = asyncio.Event(), [0] * len(handles)
    for handle in handles:
        handle.listening.append((asyncio.get_running_loop(), changed))
    try:
        while True:
            changed.clear()
            are_done = all(handle.is_done for handle in handles)  # before the pieces: no more come after it
            batch: list[tuple[int, Piece]] = []
            for index, handle in enumerate(handles):
                pieces = handle.pieces[places[index] : places[index] + MOST_AT_ONCE]
                batch += [(index, piece) for piece in pieces]
                places[index] += len(pieces)
            if batch:
                yield batch
            elif are_done:
                return
            else:
                await changed.wait()
    finally:
        for handle in handles:
            handle.give_up()


async def all_ended(handles: list[Handle]) -> None:
    """Returns when nothing more will come of any of them."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake(result: Future) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(changed.set)

    for handle in handles:
        handle._result.add_done_callback(wake)
    while not all(handle.is_done for handle in handles):
        changed.clear()
        await changed.wait()
