"""A server without a GPU: schedulers and memory are the real ones, an iteration is slept through, words are made up.

Queueing, batching, preemption, block tables and the prefix cache are those of every other run of this project. How long
an iteration takes comes from a cost model (`repro.simulate.cost_model`). Only the model is missing: the words of an
output follow from the request's seed and mean nothing, and an output that may end by itself has a drawn length."""

import contextlib
import math
import random
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

from repro.checks import whole
from repro.engine.chunked import samples_of
from repro.engine.clock import WallClock
from repro.engine.config import Deployment
from repro.engine.events import Event
from repro.engine.executor import StepResult
from repro.engine.loop import Engine, Observer
from repro.engine.memory.prefix_cache import block_hashes
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, Sequence, SequenceGroup
from repro.engine.systems import System
from repro.errors import UserError
from repro.feed.feed import Feed, Watcher
from repro.feed.handle import Handle, Piece
from repro.feed.stop_texts import begun_in, found_in
from repro.sampling_params import SamplingParams
from repro.server import words
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.serve import SWAP_SPACE_BYTES

#: tokens of an output that may end by itself, on average: ShareGPT's (Fig. 11)
MEAN_OUTPUT = 338


class Output:
    """One sample as it is made. Its length follows from seed, prompt and sample; so do its words, but greedy ones."""

    def __init__(self, sampling: SamplingParams, sample: int, max_tokens: int, prompt: list[int]) -> None:
        self.sample, self.count, self.finish_reason = sample, 0, ""  # until it has ended
        self._sampling, self._max_tokens = sampling, max_tokens
        self._random = random.Random(f"{sampling.seed}/{prompt}/{sample}")
        drawn = 1 + int(self._random.expovariate(1 / MEAN_OUTPUT))
        self._end = math.inf if sampling.ignore_eos else max(drawn, sampling.min_tokens, 1)
        self._text, self._said, self._searched = "", 0, 0

    def token(self) -> Piece:
        """The next token."""
        self.count += 1
        sampling = self._sampling
        if self.count >= self._end:
            token = words.EOS
        elif sampling.is_greedy:
            token = (self.count - 1) % len(words.WORDS)
        else:
            token = self._random.randrange(len(words.WORDS))
        self._text += words.text_of(token) if self._text else words.text_of(token).lstrip()
        may_stop = self.count >= sampling.min_tokens
        stop: int | str | None = None
        end = len(self._text)
        if token == words.EOS or (may_stop and token in sampling.stop_token_ids):
            stop = token
        elif may_stop and (found := found_in(self._text, sampling.stop, self._searched)) is not None:
            end, stop = found
        self._searched = len(self._text)
        if stop is not None or self.count == self._max_tokens:
            self.finish_reason = "length" if stop is None else "stop"
        else:
            end = max(self._said, end - begun_in(self._text, sampling.stop))
        said, self._said = self._text[self._said : end], end
        return Piece(self.sample, token, said, self.finish_reason or None, stop, *self._logprobs(token))

    def _logprobs(self, token: int) -> tuple[float | None, dict[int, float] | None]:
        """All words are equally likely, and that is said."""
        if self._sampling.logprobs is None:
            return None, None
        each = -math.log(len(words.WORDS))
        return each, {**dict.fromkeys(range(self._sampling.logprobs), each), token: each}


class Answer(Handle[None]):
    """What comes of one prompt."""

    def __init__(self, serving: "SimulatedServing", name: str, ids: list[int], sampling: SamplingParams) -> None:
        super().__init__(serving, name)
        self.prompt_ids, self.sampling = ids, sampling
        self.hashes: list[bytes] | None = None
        self.num_ended = 0


class SleepingExecutor(SimulatedExecutor):
    """Takes as long as the cost model says, then calls `on_token` for each sequence, which says whether that ends it.

    What the scheduler itself takes is part of the time: an iteration is due so long after the one before."""

    def __init__(self, cost_model: CostModel, on_token: Callable[[SequenceGroup, Sequence], bool]) -> None:
        super().__init__(cost_model)
        self._on_token = on_token
        self._due_s = 0.0

    def rest(self) -> None:
        """There is nothing to do: the next iteration begins when it comes."""
        self._due_s = 0.0

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return 1  # a request may come at any time

    def execute(self, output: SchedulerOutput) -> StepResult:
        result = super().execute(output)
        self._due_s = (self._due_s or time.perf_counter()) + sum(result.durations_s)
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        for group in (*output.decodes, *(prefill.group for prefill in output.prefills)):
            result.stopped += [(group, seq) for seq in list(group.seqs) if self._on_token(group, seq)]
        return result


class SimulatedServing(Feed):
    """As `repro.llm.serving.Serving`, for a deployment that is not there.

    `seed` is for requests without one (None: drawn). `events` gets what the scheduler decides (None: it is not kept).
    UserError for a request that cannot be run, when it is added."""

    def __init__(
        self,
        deployment: Deployment,
        system: System,
        cost_model: CostModel,
        block_size: int = 16,
        *,
        seed: int | None = None,
        events: list[Event] | None = None,
        observers: tuple[Observer, ...] = (),
        watcher: Watcher | None = None,
        max_waiting: int | None = None,
    ) -> None:
        super().__init__(watcher, max_waiting)
        model = deployment.model
        self.system = system.with_scheduler(max_model_len=model.max_model_len) if system.splits_samples else system
        self.max_model_len, self.events, self._observers = model.max_model_len, events, observers
        self.seed = secrets.randbits(48) if seed is None else seed
        self._count = 0
        block_bytes = block_size * model.kv_bytes_per_token // deployment.num_gpus
        sizes = deployment.num_blocks(block_size), block_size, model.max_model_len, SWAP_SPACE_BYTES // block_bytes
        self.manager = self.system.manager(*sizes, lambda request: self.handles[request.request_id].hashes)
        self.executor = SleepingExecutor(cost_model, self._token)
        self._outputs: dict[int, list[Output]] = {}  # by request
        self._ended: list[Request] = []
        self.start()

    def add_all(
        self, prompts: list[list[int]], sampling: list[SamplingParams], priority: int, arrival_s: float
    ) -> Future[list[Answer]]:
        whole("priority", priority, -(2**63))
        for index, (ids, one) in enumerate(zip(prompts, sampling)):
            self._check(f"prompt {index}", ids, one)
        adding = [lambda args=args: self._add(*args, priority) for args in zip(prompts, sampling)]
        return self.later_all(adding, arrival_s)

    def _check(self, name: str, ids: list[int], sampling: SamplingParams) -> None:
        if not ids:
            raise UserError(f"{name} has no tokens; give at least 1")
        if len(ids) + sampling.max_tokens > self.max_model_len:
            raise UserError(
                f"{name}: {len(ids)} + {sampling.max_tokens} tokens exceed the {self.max_model_len} that the model can "
                "take; shorten the prompt or max_tokens"
            )
        if sampling.use_beam_search:
            raise UserError("use_beam_search: a simulated server has no model that could rank beams; leave it out")
        if sampling.prompt_logprobs is not None or (sampling.logprobs or 0) > len(words.WORDS):
            raise UserError(f"logprobs: a simulated server has those of {len(words.WORDS)} words, and none of prompts")

    # In the engine's thread

    @contextlib.contextmanager
    def open_engine(self) -> Iterator[Engine]:
        scheduler = self.system.decide(self.manager, self.events)
        self.engine = Engine(scheduler, self.executor, WallClock(), self._observers)
        yield self.engine
        self.take_back_all("the serving has ended")

    def submit(self, handle: Answer, request: Request, sample: int) -> None:
        if self.system.prefix_caching:
            handle.hashes = handle.hashes or block_hashes(handle.prompt_ids, self.manager.block_size)
        self.handles[request.request_id] = handle  # before the queue asks for its hashes
        sampling = request.sampling
        self._outputs[request.request_id] = [
            Output(sampling, sample + index, request.output_tokens, handle.prompt_ids) for index in range(sampling.n)
        ]

    def forget(self, request_id: int) -> None:
        self._outputs.pop(request_id, None)

    def _add(self, ids: list[int], sampling: SamplingParams, priority: int) -> Answer:
        if sampling.seed is None:
            drawn = 0 if sampling.is_greedy else random.Random(f"{self.seed}/{self._count}").getrandbits(63)
            sampling = replace(sampling, seed=drawn)
        answer = Answer(self, f"request {self._count}", ids, sampling)
        lengths = len(ids), sampling.max_tokens
        request = Request(self.next_id, self.engine.clock.now, *lengths, sampling, None, priority)
        self.queue(answer, samples_of(request, self.next_id) if self.system.splits_samples else [request])
        self._count += 1
        return answer

    def _token(self, group: SequenceGroup, seq: Sequence) -> bool:
        """A sequence has got a token; whether that ends it before its length limit."""
        request = group.request
        outputs = self._outputs.get(request.request_id, [])
        place = int(seq.seq_id.rpartition(".")[2])
        if not outputs or outputs[place].finish_reason:  # a static batch computes it along
            return False
        output = outputs[place]
        self.handles[request.request_id].deliver(output.token())
        if all(one.finish_reason for one in outputs):
            self._ended.append(request)
        return bool(output.finish_reason) and output.count < request.output_tokens

    def after_step(self) -> None:
        ended, self._ended = self._ended, []
        for request in ended:
            handle = self.handles.get(request.request_id)
            if handle is None:
                continue
            outputs = self._outputs[request.request_id]
            outcome = handle.outcomes[handle.requests.index(request)]
            self.complete(request, outcome, outputs[0].finish_reason)
            handle.num_ended += 1
            if handle.num_ended == len(handle.requests):
                handle.end(None)
        if not self.engine.scheduler.has_work:
            self.executor.rest()
