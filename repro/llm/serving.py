"""An engine that is fed while it runs: requests join and leave between two iterations, tokens come as they are made.

    with llm.serving() as serving:
        answer = serving.add("The capital of France is", SamplingParams(max_tokens=50))  # returns at once
        for piece in answer:                       # or: async for piece in answer
            print(piece.text, end="")
        other = serving.add("Once upon a time", on_piece=print)
        other.abort()                              # in any state; its memory is free before the next iteration

One thread steps the engine (`repro.llm.driver`), so scheduler and memory see one thread."""

import asyncio
import contextlib
import math
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from repro.checks import whole
from repro.engine.clock import WallClock
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer, Outcome
from repro.errors import UserError
from repro.llm.detokenizer import Detokenizer
from repro.llm.driver import Driver
from repro.llm.requests import Asked, Encoder, asked_of
from repro.llm.results import RequestResult, result_of
from repro.llm.state import SequenceState
from repro.sampling_params import SamplingParams

if TYPE_CHECKING:
    from repro.llm.llm import LLM


@dataclass(frozen=True)
class Piece:
    """One token of sample number `sample`. `text` is what can be said for certain now: none while a character or a stop
    text may be incomplete; a sample's pieces join to its text. The last piece has the reason (see `Sample`). A beam has
    this one piece, with all of its text."""

    sample: int
    token_id: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer:
    """What comes of one request, for any thread: its pieces in the order in which they come, then `result`."""

    def __init__(self, serving: "Serving", one: Asked, on_piece: Callable[[Piece], None] | None) -> None:
        self._serving, self._asked, self._on_piece = serving, one, on_piece
        self._pieces: list[Piece] = []
        self._result: Future[RequestResult] = Future()
        self._wakers: list[Callable[[], None]] = []
        self._outcomes: list[Outcome] = []
        tokenizer, sampling = serving.llm.tokenizer, one.sampling
        self._texts = [
            None if tokenizer is None else Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            for _ in range(sampling.n)
        ]

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._result.done()

    def result(self, timeout_s: float | None = None) -> RequestResult:
        """All of it, waited for. UserError if the request was taken back; what has ended the engine, if that has;
        TimeoutError."""
        return self._result.result(timeout_s)

    def abort(self) -> None:
        """Take the request back. Nothing happens if it has ended."""
        if not self.is_done:
            self._serving._driver.call(lambda: self._serving._abort(self, f"{self._asked.name} was taken back"))

    def __iter__(self) -> Iterator[Piece]:
        changed, place = threading.Event(), 0
        self._wakers.append(changed.set)
        while place < len(self._pieces) or not self.is_done:
            changed.clear()
            if place < len(self._pieces):
                yield self._pieces[place]
                place += 1
            elif not self.is_done:
                changed.wait()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The same for asyncio. An iteration that is given up takes the request back."""
        loop, changed, place = asyncio.get_running_loop(), asyncio.Event(), 0
        self._wakers.append(lambda: loop.call_soon_threadsafe(changed.set))
        try:
            while place < len(self._pieces) or not self.is_done:
                changed.clear()
                if place < len(self._pieces):
                    yield self._pieces[place]
                    place += 1
                elif not self.is_done:
                    await changed.wait()
        finally:
            if not self.is_done:
                with contextlib.suppress(UserError):  # the engine has ended meanwhile
                    self._serving._driver.later(lambda: self._serving._abort(self, f"{self._asked.name} was given up"))

    # In the engine's thread

    def _deliver(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if self._on_piece is not None:
            self._on_piece(piece)
        self._wake()

    def _end(self, result: RequestResult | Exception) -> None:
        self._result.set_exception(result) if isinstance(result, Exception) else self._result.set_result(result)
        self._wake()

    def _wake(self) -> None:
        for waker in list(self._wakers):
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                waker()

    def _token(self, row: SequenceState) -> None:
        """A sample has got a token."""
        text, ends = self._texts[row.index], row.stopped or len(row.tokens) == row.request.request.output_tokens
        said = "" if text is None else text.add(row.tokens[-1]) + (text.finish() if ends else "")
        reason = ("stop" if row.stopped else "length") if ends else None
        self._deliver(Piece(row.index, row.tokens[-1], said, reason, row.stop_reason))


class Serving:
    """What `LLM.serving` gives. It has the model's turn until it ends; what has not finished then is taken back.

    `events` is what the scheduler decides, request by request in the numbers that it gives them."""

    def __init__(self, llm: "LLM", seed: int | None = None, observers: tuple[Observer, ...] = ()) -> None:
        self.llm, self.events = llm, list[Event]()
        self.seed = secrets.randbits(48) if seed is None else whole("seed", seed, -math.inf, math.inf) % 2**64
        self._observers = observers
        self._encoder = Encoder(llm.loaded)
        self._count = self._next_id = 0
        self._answers: dict[int, Answer] = {}  # by the number of each of its requests
        self._driver = Driver(self._open_engine, self._finish, self._end)

    def add(
        self,
        prompt: str | list[int],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        on_piece: Callable[[Piece], None] | None = None,
    ) -> Answer:
        """Queue a prompt now. `on_piece` is called with each piece, by the engine's thread: it should be quick.

        UserError, and nothing has changed, for a prompt that cannot be run, and when the serving has ended."""
        ids = self._encoder.encode(prompt, "the request")
        (one,) = asked_of([prompt], sampling, None, [priority])
        one.ids = ids
        return self._driver.call(lambda: self._add(one, on_piece))

    def drain(self) -> None:
        """Wait until all that was added has ended."""
        for answer in set(self._answers.values()):
            answer._result.exception()

    def close(self) -> None:
        """Take back what has not finished, and give the model back."""
        self._driver.close()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # In the engine's thread

    @contextlib.contextmanager
    def _open_engine(self) -> Iterator[Engine]:
        llm = self.llm
        with llm.loaded.turns.take():
            manager = llm._begin()
            self._engine = Engine(llm.system.decide(manager, self.events), llm.executor, WallClock(), self._observers)
            llm.executor.on_token = self._token
            try:
                yield self._engine
                for answer in set(self._answers.values()):
                    self._abort(answer, f"{answer._asked.name} was taken back: the serving has ended")
                llm.executor.flush()
                llm._keep(manager)
            finally:
                llm.executor.on_token = None

    def _end(self, failure: Exception | None) -> None:
        for answer in set(self._answers.values()):
            answer._end(failure)
        self._answers.clear()

    def _add(self, one: Asked, on_piece: Callable[[Piece], None] | None) -> Answer:
        one.index, one.arrival_s = self._count, self._engine.clock.now
        requests, answer = self.llm._requests(one, self._next_id, self.seed), Answer(self, one, on_piece)
        try:
            for sample, request in enumerate(requests):
                self.llm.executor.submit(request, one.ids, sample, one.name)
                answer._outcomes.append(self._engine.add(request))
                self._answers[request.request_id] = answer
                one.requests.append(request)
        except UserError:
            self.llm.executor.forget(request.request_id)
            self._take_back(answer)
            raise
        self._count, self._next_id = self._count + 1, self._next_id + len(requests)
        return answer

    def _take_back(self, answer: Answer) -> None:
        for request in answer._asked.requests:
            if self._answers.pop(request.request_id, None) is not None:
                with contextlib.suppress(UserError):  # it has ended, and waits for others of its prompt
                    self._engine.abort(request.request_id)
                self.llm.executor.forget(request.request_id)

    def _abort(self, answer: Answer, reason: str) -> None:
        if not answer.is_done:
            self._take_back(answer)
            answer._end(UserError(reason))

    def _token(self, row: SequenceState) -> None:
        answer = self._answers.get(row.request.request.request_id)
        if answer is None:  # taken back while its last iteration ran
            return
        try:
            answer._token(row)
        except Exception as error:  # noqa: BLE001 - of the user's callback
            reason = f"{answer._asked.name} was taken back: its on_piece raised {type(error).__name__}: {error}"
            answer._on_piece = None
            self._driver.later(lambda: self._abort(answer, reason))

    def _finish(self) -> None:
        """Complete the answers all of whose requests have ended and whose tokens are known."""
        executor = self.llm.executor
        if not self._engine.scheduler.has_work:
            executor.flush()
        for answer in {self._answers.get(request_id) for request_id in executor.finished}:
            if answer is None:  # taken back while its last iteration ran
                continue
            ids = [request.request_id for request in answer._asked.requests]
            if not all(one in executor.finished for one in ids):
                continue
            states = [executor.finished[one] for one in ids]
            for one in ids:
                del self._answers[one]
                self.llm.executor.forget(one)
            result = result_of(answer._asked, states, answer._outcomes, self.llm.tokenizer)
            if answer._asked.sampling.use_beam_search:
                for sample, beam in enumerate(result.samples):
                    reasons = beam.finish_reason, beam.stop_reason
                    answer._deliver(Piece(sample, beam.token_ids[-1], beam.text or "", *reasons))
            answer._end(result)
        for request_id in [one for one in executor.finished if one not in self._answers]:
            self.llm.executor.forget(request_id)
