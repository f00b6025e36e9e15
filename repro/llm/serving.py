"""An engine that is fed while it runs: requests join and leave between two iterations, tokens come as they are made.

    with llm.serving() as serving:
        answer = serving.add("The capital of France is", SamplingParams(max_tokens=50))  # returns at once
        for piece in answer:                       # or: async for piece in answer
            print(piece.text, end="")
        other = serving.add("Once upon a time", on_piece=print)
        other.abort()                              # in any state; its memory is free before the next iteration

One thread steps the engine (`repro.feed.driver`), so scheduler and memory see one thread."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from repro.engine.clock import WallClock
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.sequence import Request
from repro.feed.feed import Feed, Watcher
from repro.feed.handle import Handle, Piece
from repro.llm.detokenizer import Detokenizer
from repro.llm.requests import Asked, Encoder, asked_of
from repro.llm.results import RequestResult, result_of
from repro.llm.sampler import seed_of
from repro.llm.state import RequestState, SequenceState
from repro.sampling_params import SamplingParams

if TYPE_CHECKING:
    from repro.llm.llm import LLM


class Answer(Handle[RequestResult]):
    """What comes of one prompt, for any thread: its pieces in the order in which they come, then `result`."""

    def __init__(self, serving: "Serving", one: Asked, on_piece: Callable[[Piece], None] | None) -> None:
        super().__init__(serving, one.name, on_piece)
        self.asked, self.states = one, dict[int, RequestState]()  # of its requests that have ended
        tokenizer, sampling = serving.llm.tokenizer, one.sampling
        self._texts = [
            None if tokenizer is None else Detokenizer(tokenizer, sampling.stop, sampling.min_tokens)
            for _ in range(sampling.n)
        ]

    @property
    def output_tokens(self) -> int:
        if self.asked.sampling.use_beam_search:  # each has one piece
            return sum(map(len, self.result().token_ids)) if self.is_done else 0
        return super().output_tokens

    def token(self, row: SequenceState) -> None:
        """A sample has got a token."""
        text, ends = self._texts[row.index], row.stopped or len(row.tokens) == row.request.request.output_tokens
        said = "" if text is None else text.add(row.tokens[-1]) + (text.finish() if ends else "")
        reason = ("stop" if row.stopped else "length") if ends else None
        logprob = row.logprobs[-1] if row.logprobs else None
        best = row.best_logprobs[-1] if row.best_logprobs else None
        self.deliver(Piece(row.index, row.tokens[-1], said, reason, row.stop_reason, logprob, best))

    def complete(self, tokenizer: object) -> None:
        """All its requests have ended."""
        states = [self.states[request.request_id] for request in self.requests]
        result = result_of(self.asked, states, self.outcomes, tokenizer)
        if self.asked.sampling.use_beam_search:
            for sample, beam in enumerate(result.samples):
                reasons = beam.finish_reason, beam.stop_reason
                self.deliver(Piece(sample, beam.token_ids[-1], beam.text or "", *reasons))
        self.end(result)


class Serving(Feed):
    """What `LLM.serving` gives. It has the model's turn until it ends; what has not finished then is taken back.

    `events` is what the scheduler decides, request by request in the numbers that it gives them; it grows without end,
    and a server does without it (None). `watcher` and `max_waiting` as in `Feed`."""

    def __init__(
        self,
        llm: "LLM",
        seed: int | None = None,
        observers: tuple[Observer, ...] = (),
        *,
        with_events: bool = True,
        watcher: Watcher | None = None,
        max_waiting: int | None = None,
    ) -> None:
        super().__init__(watcher, max_waiting)
        self.llm, self.events = llm, list[Event]() if with_events else None
        self.seed = seed_of(seed)
        self._observers = observers
        self._encoder = Encoder(llm.loaded)
        self._count = 0
        self.start()

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
        return self.driver.call(lambda: self._add(one, on_piece))

    def add_all(
        self, prompts: list[list[int]], sampling: list[SamplingParams], priority: int, arrival_s: float
    ) -> Future[list[Answer]]:
        asked = asked_of(prompts, sampling, None, [priority] * len(prompts))
        for one in asked:
            one.ids = self._encoder.encode(one.prompt, one.name)
        return self.later_all([lambda one=one: self._add(one, None) for one in asked], arrival_s)

    def encode(self, prompt: object, name: str) -> list[int]:
        """A text, or a list of token ids, as token ids. UserError for anything else."""
        return self._encoder.encode(prompt, name).tolist()

    def __enter__(self) -> "Serving":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # In the engine's thread

    @contextlib.contextmanager
    def open_engine(self) -> Iterator[Engine]:
        llm = self.llm
        with llm.loaded.turns.take():
            manager = llm._begin()
            self.engine = Engine(llm.system.decide(manager, self.events), llm.executor, WallClock(), self._observers)
            llm.executor.on_token = self._token
            try:
                yield self.engine
                self.take_back_all("the serving has ended")
                llm.executor.flush()
                llm._keep(manager)
            finally:
                llm.executor.on_token = None

    def submit(self, handle: Answer, request: Request, sample: int) -> None:
        self.llm.executor.submit(request, handle.asked.ids, sample, handle.asked.name)

    def forget(self, request_id: int) -> None:
        self.llm.executor.forget(request_id)

    def _add(self, one: Asked, on_piece: Callable[[Piece], None] | None) -> Answer:
        one.index, one.arrival_s = self._count, self.engine.clock.now
        answer = Answer(self, one, on_piece)
        self.queue(answer, self.llm._requests(one, self.next_id, self.seed))
        self._count += 1
        return answer

    def _token(self, row: SequenceState) -> None:
        answer = self.handles.get(row.request.request.request_id)
        if answer is None:  # taken back while its last iteration ran
            return
        try:
            answer.token(row)
        except Exception as error:  # noqa: BLE001 - of the user's callback
            self.callback_failed(answer, error)

    def after_step(self) -> None:
        """Complete the answers all of whose requests have ended and whose tokens are known."""
        executor = self.llm.executor
        if not self.engine.scheduler.has_work:
            executor.flush()
        for request_id, state in list(executor.finished.items()):
            answer = self.handles.get(request_id)
            if answer is None:  # taken back while its last iteration ran
                self.forget(request_id)
                continue
            answer.states[request_id] = state
            outcome = answer.outcomes[answer.requests.index(state.request)]
            self.complete(state.request, outcome, "stop" if state.ranked[0].stopped else "length")
            if len(answer.states) == len(answer.requests):
                answer.complete(self.llm.tokenizer)
