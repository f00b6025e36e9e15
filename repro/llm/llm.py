"""The notebook-friendly face of the real engine.

    llm = LLM("smollm2")
    result = llm.generate(["The capital of France is"], SamplingParams(n=4, temperature=0.8))
    result[0].texts; result.statistics

Any system of `repro.engine.systems` runs through the same engine: `LLM("smollm2", system="orca-max")`. This module only
puts the parts together; it decides nothing about scheduling, memory or sampling."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from repro.engine import systems
from repro.engine.clock import WallClock
from repro.engine.config import check_block_size
from repro.engine.errors import UserError
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import KVCacheManager, OpKind
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.llm import models
from repro.llm.executor import TorchExecutor
from repro.llm.kv_store import KVStore
from repro.llm.pace import settle
from repro.llm.pool import PoolSize, boot_line
from repro.llm.state import RequestState


@dataclass(frozen=True)
class Sample:
    """One output: `logprobs` per token under the model; `finish_reason` "stop" or "length"; beams also have a `score`,
    the mean log-probability of their tokens."""

    text: str | None
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    finish_reason: str
    score: float | None = None


@dataclass(frozen=True)
class RequestResult:
    """A request's samples, beams best first, and when it got its first and last token (seconds from the start)."""

    prompt: str | None
    prompt_token_ids: list[int] = field(repr=False)
    samples: list[Sample]
    outcome: Outcome = field(repr=False)

    @property
    def texts(self) -> list[str | None]:
        return [sample.text for sample in self.samples]

    @property
    def token_ids(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]


@dataclass(frozen=True)
class Statistics:
    """What the engine did, measured. Latencies in s; batch in sequences; pool usage as a share of all blocks, over
    iterations."""

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
    blocks_copied: int
    blocks_swapped_out: int
    blocks_swapped_in: int


@dataclass(frozen=True)
class Generation:
    """Results in the order of the prompts; `events` is what the scheduler decided (see repro.engine.events)."""

    results: list[RequestResult]
    statistics: Statistics
    events: list[Event] = field(repr=False)

    def __getitem__(self, index: int) -> RequestResult:
        return self.results[index]

    def __iter__(self) -> Iterator[RequestResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def _repr_html_(self) -> str:
        import pandas as pd

        samples = [(one.prompt or "token ids", sample) for one in self for sample in one.samples]
        lines = [(prompt, s.text or f"{len(s.token_ids)} tokens", np.mean(s.logprobs)) for prompt, s in samples]
        shown = pd.DataFrame(lines, columns=["prompt", "sample", "mean log-probability"]).style.hide(axis="index")
        return shown.format(escape="html", precision=2).set_properties(**{"text-align": "left"}).to_html()


def _taking_turns(call: Callable) -> Callable:
    """Let calls that share a model, whatever their threads and engines, run one after the other."""

    @functools.wraps(call)
    def one_at_a_time(self: "LLM", *args: object, **options: object) -> object:
        with self.loaded.turns.take():
            return call(self, *args, **options)

    return one_at_a_time


class LLM:
    """A model with its pool. The constructor prints one line that says how large the pool is.

    It may be used from several threads, and one LoadedModel by several LLMs: a call waits until no other runs on the
    model. On a CPU the constructor times an iteration, and leaves torch with one thread where more are slower.

    `model`, `device`, `dtype`, `hub` as in `repro.llm.models.load`; `system` a name of repro.engine.systems; `pool` at
    most one of PoolSize's ways to size it; `swap_gib` of CPU memory take swapped groups (default: as much as the pool,
    4 at most); `scheduler` changes settings of the system's SchedulerConfig, such as max_num_seqs or preemption."""

    def __init__(
        self,
        model: str | Path | models.LoadedModel = models.EMBEDDED,
        *,
        system: str | systems.System = "vllm",
        device: str = "cpu",
        dtype: str | None = None,
        block_size: int = 16,
        pool: PoolSize = PoolSize(),
        swap_gib: float | None = None,
        max_model_len: int | None = None,
        graphs: bool = True,
        hub: bool = False,
        quiet: bool = False,
        **scheduler: object,
    ) -> None:
        chosen = systems.system(system) if isinstance(system, str) else system
        self.system = chosen.with_scheduler(**scheduler)
        self.block_size = check_block_size(block_size)
        loaded = model if isinstance(model, models.LoadedModel) else models.load(model, device, dtype, hub=hub)
        if max_model_len is not None:
            if not 1 <= max_model_len <= loaded.config.max_model_len:
                limit = f"{loaded.config.max_model_len} {loaded.limit}".strip()
                raise UserError(f"max_model_len = {max_model_len}: {loaded.config.name} takes from 1 to {limit}")
            loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, max_model_len=max_model_len))
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        config = loaded.config
        self.num_blocks = pool.blocks(config, block_size, loaded.device)
        gib_per_block = block_size * config.kv_bytes_per_token / 2**30
        swap_gib = min(self.num_blocks * gib_per_block, 4.0) if swap_gib is None else swap_gib
        self.num_cpu_blocks = int(swap_gib / gib_per_block)
        store = KVStore(config, self.num_blocks, block_size, self.num_cpu_blocks, loaded.dtype, loaded.device)
        caps, pace = self.system.scheduler, None
        with loaded.turns.take():
            self.executor = TorchExecutor(loaded, self._manager(), store, max_num_seqs=caps.max_num_seqs, graphs=graphs)
            if loaded.device.type == "cpu":
                pace = loaded.turns.pace = settle(self.executor.runner.idle, loaded.turns.pace)
        self.boot_line = boot_line(loaded, self._manager(), caps.max_num_batched_tokens, pace)
        if not quiet:
            print(self.boot_line)

    def _manager(self) -> KVCacheManager:
        return self.system.manager(
            self.num_blocks, self.block_size, self.loaded.config.max_model_len, self.num_cpu_blocks
        )

    @_taking_turns
    def generate(
        self,
        prompts: str | Iterable[str | list[int]],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        arrival_s: Iterable[float] | None = None,
        prefix: str | list[int] | None = None,
        progress: bool = True,
        observers: Iterable[Observer] = (),
    ) -> Generation:
        """Complete the prompts, texts or token ids. `sampling` is one for all (default: SamplingParams()) or one each.

        `arrival_s` are the seconds, not decreasing, at which the prompts arrive (default: all at the start). `prefix`
        is computed once, kept in memory and put before every prompt (§4.4, shared prefix). UserError if a prompt cannot
        be run; the LLM stays usable."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        one_for_all = isinstance(sampling, SamplingParams | None)
        params = [sampling or SamplingParams()] * len(prompts) if one_for_all else list(sampling)
        arrivals = [0.0] * len(prompts) if arrival_s is None else [float(moment) for moment in arrival_s]
        if len(params) != len(prompts) or len(arrivals) != len(prompts):
            raise UserError(
                f"{len(prompts)} prompts, {len(params)} sampling parameters and {len(arrivals)} arrival times: give as "
                "many of each, or one SamplingParams for all"
            )
        if any(later < earlier for earlier, later in pairwise(arrivals)):
            raise UserError("arrival_s must not decrease; sort the prompts by their arrival")
        executor, manager = self.executor, self._manager()
        executor.reset(manager)
        common = [] if prefix is None else self._tokens(prefix)
        if common:
            executor.store_prefix("prefix", common)
        encoded = [common + self._tokens(prompt) for prompt in prompts]
        requests = [
            Request(index, arrivals[index], len(ids), one.max_tokens, one, "prefix" if common else None)
            for index, (ids, one) in enumerate(zip(encoded, params))
        ]
        for request, ids in zip(requests, encoded):
            executor.submit(request, ids)
        events: list[Event] = []
        scheduler = Scheduler(manager, self.system.scheduler, events)
        recorder = _Recorder(executor, len(requests), progress)
        moved = executor.store.blocks_moved.copy()
        clock = WallClock()
        with recorder:
            outcomes = Engine(scheduler, executor, clock, [recorder, *observers]).run(requests)
            executor.flush()
        moved = executor.store.blocks_moved - moved
        results = [
            self._result(prompt, executor.finished.pop(request.request_id), outcome)
            for prompt, request, outcome in zip(prompts, requests, outcomes)
        ]
        statistics = _statistics(results, recorder, clock.now, scheduler.num_preemptions, moved)
        return Generation(results, statistics, events)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UserError(f"{self.loaded.config.name} has no tokenizer; give lists of token ids")
        return self.tokenizer(prompt)["input_ids"]

    def _result(self, prompt: str | list[int], state: RequestState, outcome: Outcome) -> RequestResult:
        samples = []
        for row in state.ranked:
            text = self.tokenizer.decode(row.tokens, skip_special_tokens=True) if self.tokenizer else None
            score = row.cumulative_logprob / len(row.tokens) if state.beam_scores is not None else None
            samples.append(Sample(text, row.tokens, row.logprobs, "stop" if row.stopped else "length", score))
        return RequestResult(prompt if isinstance(prompt, str) else None, state.prompt.tolist(), samples, outcome)


@dataclass
class _Recorder(Observer):
    """Batch and pool usage of every iteration, and the progress bar."""

    executor: TorchExecutor
    total: int
    progress: bool
    batch: list[int] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)

    def __enter__(self) -> "_Recorder":
        from tqdm import tqdm

        self._bar = tqdm(total=self.total, unit=" requests", disable=not self.progress)
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.update(len(self.executor.finished) - self._bar.n)
        self._bar.close()

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        manager = engine.scheduler.manager
        self.batch.append(output.num_decode_seqs + sum(len(prefill.group.seqs) for prefill in output.prefills))
        self.usage.append(1 - manager.num_free_blocks / manager.num_blocks)
        self._bar.update(len(self.executor.finished) - self._bar.n)


def _statistics(
    results: list[RequestResult], recorder: _Recorder, seconds: float, num_preemptions: int, moved: Counter[OpKind]
) -> Statistics:
    outputs = sum(len(ids) for result in results for ids in result.token_ids)
    longest = [max(map(len, result.token_ids)) for result in results]
    outcomes = [result.outcome for result in results]
    latencies = [(o.finish_s - o.request.arrival_s) / tokens for o, tokens in zip(outcomes, longest)]
    return Statistics(
        seconds=seconds,
        num_iterations=len(recorder.batch),
        prompt_tokens=sum(len(result.prompt_token_ids) for result in results),
        output_tokens=outputs,
        tokens_per_s=outputs / seconds,
        mean_normalized_latency_s=float(np.mean(latencies)),
        mean_first_token_s=float(np.mean([o.first_token_s - o.request.arrival_s for o in outcomes])),
        mean_batch=float(np.mean(recorder.batch)),
        peak_batch=max(recorder.batch),
        mean_pool_usage=float(np.mean(recorder.usage)),
        peak_pool_usage=max(recorder.usage),
        num_preemptions=num_preemptions,
        blocks_copied=moved[OpKind.COPY],
        blocks_swapped_out=moved[OpKind.SWAP_OUT],
        blocks_swapped_in=moved[OpKind.SWAP_IN],
    )
