"""What `LLM.generate` returns: samples, results, and what the engine did."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from repro import display
from repro.engine.events import Event
from repro.engine.loop import Outcome
from repro.engine.memory import OpKind
from repro.engine.memory.prefix_cache import Hashes, block_hashes
from repro.engine.sequence import Request
from repro.history.memory_map import MemoryMap
from repro.history.recipe import Recipe, Setup
from repro.history.recorded import Ends, Recorded
from repro.llm.missed import Missed
from repro.llm.recorder import Recorder
from repro.llm.requests import Asked
from repro.llm.state import RequestState
from repro.sampling_params import SamplingParams

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Sample:
    """One output: `logprobs` per token under the model (at temperature 1, before penalties and filters).

    `finish_reason` is "stop", and `stop_reason` the token or text that ended it, or "length". `best_logprobs` has, per
    token, the SamplingParams.logprobs best as token -> log-probability, best first, and the token's own. Beams also
    have a `score`: the sum of their log-probabilities / length ** length_penalty."""

    text: str | None
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    finish_reason: str
    score: float | None = None
    stop_reason: int | str | None = None
    best_logprobs: list[dict[int, float]] | None = field(default=None, repr=False)

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        mean = float(np.mean(self.logprobs)) if self.logprobs else None
        ended = {"finish_reason": self.finish_reason, "stop_reason": self.stop_reason}
        return {"text": self.text, "tokens": len(self.token_ids), "mean_logprob": mean, **ended}


@dataclass(frozen=True)
class RequestResult:
    """A request's samples, beams best first, and when it got its first and last token (seconds from the start).

    `prompt_logprobs` has, per token of the prompt, what `best_logprobs` has of an output's; None for the first one. A
    request that was refused has an `error`, no samples and no outcome. `missed` says what of the prompt was in the
    prefix cache, and why the rest was not; None without such a cache."""

    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)
    samples: list[Sample]
    outcome: Outcome | None = field(default=None, repr=False)
    prompt_logprobs: list[dict[int, float] | None] | None = field(default=None, repr=False)
    error: str | None = None
    missed: Missed | None = field(default=None, repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """As rows of a table: one for each sample, or one that says why there is none."""
        prompt = self.prompt or f"{len(self.prompt_token_ids)} token ids"
        if self.error:
            return [{"prompt": prompt, "error": self.error}]
        times = {name: getattr(self.outcome, name, None) for name in ("first_token_s", "finish_s")}
        return [{"prompt": prompt, **sample.row(), **times} for sample in self.samples]

    def _repr_html_(self) -> str:
        return display.table(f"{len(self.samples)} samples", self.rows())

    @property
    def texts(self) -> list[str | None]:
        return [sample.text for sample in self.samples]

    @property
    def token_ids(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]

    @property
    def seed(self) -> int | None:
        """The seed of its samples, its own or drawn; None if nothing was random."""
        return None if self.outcome is None else self.outcome.request.sampling.seed


@dataclass(frozen=True)
class Statistics:
    """What the engine did, measured. Latencies in s; batch in sequences; pool usage as a share of all blocks, over
    iterations. Means of nothing are NaN.

    `prompt_tokens_computed` counts recomputation too; `prompt_tokens_found` were in the prefix cache."""

    seconds: float
    num_iterations: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    mean_normalized_latency_s: float
    mean_first_token_s: float
    mean_batch: float
    peak_batch: int
    mean_pool_usage: float
    peak_pool_usage: float
    num_preemptions: int
    prompt_tokens_computed: int
    prompt_tokens_found: int
    blocks_copied: int
    blocks_swapped_out: int
    blocks_swapped_in: int


@dataclass(frozen=True, repr=False)
class Generation:
    """Results in the order of the prompts; `events` is what the scheduler decided (see repro.engine.events). `seed`,
    given to `generate` with the same prompts, gives the same samples again."""

    results: list[RequestResult]
    statistics: Statistics
    events: list[Event]
    seed: int
    recorded: Recorded

    @property
    def recipe(self) -> Recipe:
        """What it takes to run it again in the simulator: the same decisions. Its times are numbers of iterations."""
        return self.recorded.recipe()

    def memory_map(self) -> MemoryMap:
        """Who held which block of the memory in each iteration: decided again in the simulator, at the times measured.

        UserError if it comes out otherwise."""
        return self.recorded.memory_map()

    def __repr__(self) -> str:
        """A line; the texts are in `results`, and a notebook shows them as a table."""
        did = self.statistics
        samples = sum(len(one.samples) for one in self)
        said = f"{len(self)} prompts, {samples} samples, {did.output_tokens} tokens in {did.seconds:.1f} s"
        return f"{said} ({did.tokens_per_s:.0f} tokens/s); {did.num_preemptions} preemptions; seed {self.seed}"

    def __getitem__(self, index: int) -> RequestResult:
        return self.results[index]

    def __iter__(self) -> Iterator[RequestResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def rows(self) -> list[dict[str, Any]]:
        """As rows of a table: one for each sample, and one for each prompt that was refused."""
        return [{"number": number, **row} for number, one in enumerate(self) for row in one.rows()]

    def to_frame(self) -> "pd.DataFrame":
        """The same rows for pandas."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def _repr_html_(self) -> str:
        return display.table(repr(self), self.rows())


def result_of(one: Asked, states: list[RequestState], outcomes: list[Outcome], tokenizer: Any) -> RequestResult:
    """Of a prompt all of whose requests have ended; without any it was refused."""
    prompt = one.prompt if isinstance(one.prompt, str) else None
    ids = [] if one.ids is None else one.ids.tolist()
    if not states:
        return RequestResult(prompt, ids, [], error=one.error)
    samples = []
    for row in (row for state in states for row in state.ranked):
        text = tokenizer.decode(row.tokens, skip_special_tokens=True)[: row.text_end] if tokenizer else None
        reason = "stop" if row.stopped else "length"
        best = row.best_logprobs if one.sampling.logprobs is not None else None
        samples.append(Sample(text, row.tokens, row.logprobs, reason, row.score, row.stop_reason, best))
    return RequestResult(prompt, ids, samples, together(outcomes, one.sampling), states[0].prompt_logprobs)


def recorded_of(
    setup: Setup, requests: list[Request], states: list[RequestState], recorder: Recorder, events: list[Event]
) -> Recorded:
    """A run of requests that have all ended, as it can be run again."""
    finished = {event.request_id: event.detail["tokens"] for event in events if event.kind == "finish"}
    ends, held = {}, {}
    for request, state in zip(requests, states):
        number, width = request.request_id, request.sampling.n
        if request.sampling.use_beam_search:
            length = finished[number]
            ends[number] = Ends([length] * width, [length < request.output_tokens] * width)
        else:
            ends[number] = Ends([len(one.tokens) for one in state.sequences], [one.stopped for one in state.sequences])
        held[number] = state.prompt, state.sequences[0].tokens if width == 1 else []

    def hashes(block_size: int) -> Hashes:
        @functools.cache
        def of(number: int) -> list[bytes]:
            prompt, output = held[number]
            return block_hashes([*prompt.tolist(), *output], block_size)

        return lambda request: of(request.request_id)

    setup = replace(setup, hashes=hashes(setup.block_size))
    return Recorded(setup, requests, events, ends, hashes=hashes, times_s=recorder.times_s)


def together(outcomes: list[Outcome], sampling: SamplingParams) -> Outcome:
    """The outcome of a request that ran as several, one a sample: its first token is the first of any."""
    if len(outcomes) == 1:
        return outcomes[0]
    return Outcome(
        replace(outcomes[0].request, sampling=sampling),
        min(one.first_token_s for one in outcomes),
        max(one.finish_s for one in outcomes),
        sum(one.num_preemptions for one in outcomes),
    )


def statistics_of(
    results: list[RequestResult],
    recorder: Recorder,
    seconds: float,
    num_preemptions: int,
    moved: Counter[OpKind],
    found: int,
) -> Statistics:
    """Of the requests that ran: what the recorder saw, blocks `moved`, prompt tokens `found` in a prefix cache."""
    batch, usage = recorder.batch, recorder.usage
    results = [result for result in results if result.outcome is not None]
    outputs = sum(len(ids) for result in results for ids in result.token_ids)
    longest = [max(map(len, result.token_ids)) for result in results]
    outcomes = [result.outcome for result in results]
    latencies = [(o.finish_s - o.request.arrival_s) / tokens for o, tokens in zip(outcomes, longest)]
    return Statistics(
        seconds=seconds,
        num_iterations=len(batch),
        prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        output_tokens=outputs,
        tokens_per_s=outputs / seconds if outputs else 0.0,
        mean_normalized_latency_s=_mean(latencies),
        mean_first_token_s=_mean([o.first_token_s - o.request.arrival_s for o in outcomes]),
        mean_batch=_mean(batch),
        peak_batch=max(batch, default=0),
        mean_pool_usage=_mean(usage),
        peak_pool_usage=max(usage, default=0.0),
        num_preemptions=num_preemptions,
        prompt_tokens_computed=recorder.computed,
        prompt_tokens_found=found,
        blocks_copied=moved[OpKind.COPY],
        blocks_swapped_out=moved[OpKind.SWAP_OUT],
        blocks_swapped_in=moved[OpKind.SWAP_IN],
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
