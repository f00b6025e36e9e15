"""The notebook-friendly face of the real engine.

    llm = LLM("smollm2")
    result = llm.generate(["The capital of France is"], SamplingParams(n=4, temperature=0.8))
    result[0].texts; result.statistics

Any system of `repro.engine.systems` runs through the same engine: `LLM("smollm2", system="orca-max")`, or today's
`system="vllm-v1"`, whose prefix cache lives as long as the LLM. This module only puts the parts together; it decides
nothing about scheduling, memory or sampling."""

import contextlib
import dataclasses
import functools
import inspect
import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from repro.checks import flag, instance, known_names, lookup, number, several, user_facing, whole
from repro.engine import systems
from repro.engine.chunked import samples_of
from repro.engine.clock import WallClock
from repro.engine.config import check_block_size
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.memory import KVCacheManager
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.history.recipe import Setup
from repro.llm import models
from repro.llm.executor import TorchExecutor
from repro.llm.kv_store import KVStore
from repro.llm.missed import why_missed
from repro.llm.pace import settle
from repro.llm.pool import MOST_GIB, PoolSize, boot_line
from repro.llm.recorder import Recorder
from repro.llm.requests import Asked, Encoder, asked_of, conversations_of
from repro.llm.results import Generation, RequestResult, recorded_of, result_of, statistics_of
from repro.llm.sampler import derived_seed, seed_of
from repro.llm.sequences import Decoding
from repro.llm.serving import Serving
from repro.llm.status import StatusLines
from repro.sampling_params import SamplingParams

MOST_ROWS = 65_536  # of a batch: its buffers are made at once


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

    `model`, `device` (default "cpu"), `dtype`, `hub` as in `repro.llm.models.load`; `system` a name of
    repro.engine.systems; `pool` at most one of PoolSize's ways to size it; `swap_gib` of CPU memory take swapped groups
    (default: as much as the pool, 4 at most); `scheduler` changes settings of the system's SchedulerConfig, such as
    max_num_seqs or preemption; `quiet` prints nothing. UserError for what cannot be, and for a name that is neither."""

    @user_facing
    def __init__(
        self,
        model: str | os.PathLike[str] | models.LoadedModel = models.EMBEDDED,
        *,
        system: str | systems.System = "vllm",
        device: str | None = None,
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
        chosen = system if isinstance(system, systems.System) else systems.system(system)
        own = [name for name in inspect.signature(LLM).parameters if name != "scheduler"]
        known_names("LLM", scheduler, [*own, *(one.name for one in dataclasses.fields(chosen.scheduler))])
        self.system = systems.of_today(chosen).with_scheduler(**scheduler)
        most_rows = whole("max_num_seqs", self.system.scheduler.max_num_seqs, 1, MOST_ROWS)
        self.block_size = block_size = check_block_size(block_size)
        instance("pool", pool, PoolSize, "a PoolSize, such as PoolSize(kv_gib=4) or PoolSize(num_blocks=64)")
        if swap_gib is not None:
            number("swap_gib", swap_gib, 0, MOST_GIB)
        for name, value in {"graphs": graphs, "hub": hub, "quiet": quiet}.items():
            flag(name, value)
        with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():  # readers' own bars
            loaded = _loaded(model, device, dtype, hub)
        if max_model_len is not None:
            longest = whole("max_model_len", max_model_len, 1)
            if longest > loaded.config.max_model_len:
                limit = f"{loaded.config.max_model_len} {loaded.limit}".strip()
                raise UserError(f"max_model_len = {longest}: {loaded.config.name} takes from 1 to {limit}")
            loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, max_model_len=longest))
        self.loaded, self.tokenizer = loaded, loaded.tokenizer
        config = loaded.config
        self.system = self.system.for_length(config.max_model_len)
        self.num_blocks = pool.blocks(config, block_size, loaded.device)
        gib_per_block = block_size * config.kv_bytes_per_token / 2**30
        swap_gib = min(self.num_blocks * gib_per_block, 4.0) if swap_gib is None else swap_gib
        self.num_cpu_blocks = int(swap_gib / gib_per_block)
        self._cache: KVCacheManager | None = None  # the memory manager, where it knows blocks of earlier calls
        self._prompts: deque[np.ndarray] = deque(maxlen=self.num_blocks)  # of earlier calls, which it may know
        store = KVStore(config, self.num_blocks, block_size, self.num_cpu_blocks, loaded.dtype, loaded.device)
        pace = None
        with loaded.turns.take():
            self.executor = TorchExecutor(loaded, self._manager(), store, max_num_seqs=most_rows, graphs=graphs)
            if loaded.device.type == "cpu":
                pace = loaded.turns.pace = settle(self.executor.runner.idle, loaded.turns.pace)
        self.boot_line = boot_line(loaded, self._manager(), self.system.scheduler.longest_prompt, pace)
        if not quiet:
            print(self.boot_line)

    def _manager(self) -> KVCacheManager:
        """A memory manager that has stored nothing yet."""
        return self.system.manager(*self._sizes, lambda request: self.executor.block_hashes(request))

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, self.loaded.config.max_model_len, self.num_cpu_blocks

    def reset_prefix_cache(self) -> None:
        """Forget the prompts of earlier calls."""
        self._cache = None
        self._prompts.clear()

    @user_facing
    @_taking_turns
    def generate(
        self,
        prompts: str | Iterable[str | list[int]],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        arrival_s: Iterable[float] | None = None,
        prefix: str | list[int] | None = None,
        seed: int | None = None,
        errors: str = "raise",
        progress: bool = True,
        priority: Iterable[int] | None = None,
        status_every_s: float | None = None,
        observers: Iterable[Observer] = (),
    ) -> Generation:
        """Complete the prompts, texts or token ids. `sampling` is one for all (default: SamplingParams()) or one each.

        `arrival_s` are the seconds, not decreasing, at which the prompts arrive (default: all at the start). `prefix`
        is computed once, kept in memory and put before every prompt (§4.4, shared prefix). Requests without a seed get
        theirs from `seed`; by default it is drawn, and the Generation has it. `progress=False` shows no bar.
        `priority` has a number for each prompt, for a system whose order of the queue goes by it (0 without).
        `status_every_s` prints a line as an operator reads it, every so many seconds.

        All prompts are checked before anything runs. One that cannot be run is a UserError that names it or, with
        `errors="keep"`, a result with an `error`, and the others run. The LLM stays usable."""
        asked = asked_of(prompts, sampling, arrival_s, priority)
        keeps = lookup("way with errors", {"raise": False, "keep": True}, errors)
        seed = seed_of(seed)
        recorder = Recorder(self.executor, flag("progress", progress))
        watching = [recorder, *several("observers", observers, Observer, "a list of Observers")]
        if status_every_s is not None:
            watching.append(StatusLines(status_every_s, print))
        executor, manager = self.executor, self._begin()
        prefix_ids = self._prepare(asked, prefix, seed)
        refused = [one.error for one in asked if one.error]
        if refused and not keeps:
            more = "; nothing has run: mend it, or run the others with errors='keep'" if len(asked) > 1 else ""
            raise UserError(f"{refused[0]}{more}")
        if len(prefix_ids) and not self.system.prefix_caching:
            executor.store_prefix(_PREFIX, prefix_ids)
        events: list[Event] = []
        scheduler = self.system.decide(manager, events)
        moved, found = executor.store.blocks_moved.copy(), manager.num_hit
        clock, requests = WallClock(), [request for one in asked if not one.error for request in one.requests]
        recorder.total = len(requests)
        with recorder:
            outcomes = iter(Engine(scheduler, executor, clock, watching).run(requests))
            executor.flush()
        self._keep(manager)
        results, ended = [], []
        for one in asked:
            states = [executor.finished.pop(request.request_id) for request in one.requests]
            results.append(result_of(one, states, [next(outcomes) for _ in states], self.tokenizer))
            ended += states
        if self.system.prefix_caching:
            results = self._with_misses(asked, results, manager)
        moved, found = executor.store.blocks_moved - moved, manager.num_hit - found
        statistics = statistics_of(results, recorder, clock.now, scheduler.num_preemptions, moved, found)
        setup = Setup(self.system, *self._sizes, prefix=(_PREFIX, len(prefix_ids)) if len(prefix_ids) else None)
        recorded = recorded_of(setup, requests, ended, recorder, events)
        return Generation(results, statistics, events, seed, recorded)

    @user_facing
    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling: SamplingParams | Iterable[SamplingParams] | None = None,
        **options: object,
    ) -> Generation:
        """The model's answer to a conversation, or to each of several: messages with a `role` and a `content`.

        They become prompts by the model's own chat template; `options` as for `generate`, but no `prefix`."""
        if "prefix" in options:
            raise UserError("chat takes no prefix; put what the conversations share into their messages")
        prompts = self.chat_prompts(messages)
        made = self.generate([ids for _, ids in prompts], sampling, **options)
        results = [dataclasses.replace(result, prompt=text) for result, (text, _) in zip(made, prompts)]
        return dataclasses.replace(made, results=results)

    def chat_prompts(self, messages: list[dict[str, str]] | list[list[dict[str, str]]]) -> list[tuple[str, list[int]]]:
        """A conversation, or each of several, as a prompt by the model's chat template: the text, and its token ids.

        UserError if the model has no template, or its template refuses the messages."""
        conversations = conversations_of(messages)
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(f"{self.loaded.config.name} has no chat template; use generate with prompts of your own")
        try:
            how = {"tokenize": False, "add_generation_prompt": True}
            texts = [self.tokenizer.apply_chat_template(one, **how) for one in conversations]
        except Exception as error:  # a template refuses, for instance, an order of roles in a way of its own
            raise UserError(f"the chat template of {self.loaded.config.name} refuses the messages: {error}") from None
        return [(text, self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]

    @user_facing
    def serving(self, *, seed: int | None = None, status_every_s: float | None = None) -> Serving:
        """An engine that is fed while it runs (see `repro.llm.serving`). It waits for the model's turn, and has it
        until it is closed. `seed` and `status_every_s` as for `generate`."""
        observers = () if status_every_s is None else (StatusLines(status_every_s, print),)
        return Serving(self, seed, observers)

    @user_facing
    @contextlib.contextmanager
    def decoding(self) -> Iterator[Decoding]:
        """Decoding of one's own (§5.2): a block that has the model's turn, and the whole pool, until it ends. How to
        use it is in `repro.llm.sequences`. UserError if the memory is not paged."""
        with self.loaded.turns.take():
            self.reset_prefix_cache()  # its blocks are written over
            most = self.system.scheduler.max_num_seqs
            with Decoding(self.executor, self._manager(), most) as decoding:
                yield decoding

    def _prepare(self, asked: list[Asked], prefix: object, seed: int) -> np.ndarray:
        """Encode the prompts and submit what can be run; the shared tokens of the prefix, int64. Nothing runs yet."""
        encoder, shared = Encoder(self.loaded, prefix), None
        for one in asked:
            with one.trying():
                one.ids = encoder.encode(one.prompt, one.name)
        common = encoder.common(one.ids for one in asked if not one.error)
        trial = self._manager()
        if len(common) and not self.system.prefix_caching:  # which finds it by itself
            trial.store_prefix(_PREFIX, len(common))
            shared = _PREFIX
        queue = self.system.decide(trial)  # refuses now what the engine would refuse in mid-run
        next_id = 0
        for one in asked:
            if one.error:
                continue
            requests = self._requests(one, next_id, seed, shared)
            next_id += len(requests)
            with one.trying():
                for sample, request in enumerate(requests):
                    self.executor.submit(request, one.ids, sample, one.name)
                    queue.add(request)
                one.requests = requests
        return common

    def _requests(self, one: Asked, first_id: int, seed: int, prefix_id: str | None = None) -> list[Request]:
        """A prompt as requests, numbered from `first_id`: one, or in some systems one a sample."""
        sampling = one.sampling
        if sampling.seed is None and not sampling.is_greedy:
            sampling = dataclasses.replace(sampling, seed=derived_seed(seed, one.index))
        lengths = len(one.ids), sampling.max_tokens
        request = Request(first_id, one.arrival_s, *lengths, sampling, prefix_id, one.priority)
        return samples_of(request, first_id) if self.system.splits_samples else [request]

    def _begin(self) -> KVCacheManager:
        """The memory manager of a run, which the executor begins with; it may know blocks of earlier runs."""
        manager = self._cache or self._manager()
        self._cache = None  # until the run has come to its end
        if self.system.prefix_caching:
            manager.begin_run()
        self.executor.reset(manager)
        return manager

    def _keep(self, manager: KVCacheManager) -> None:
        """Keep what a run that has ended leaves in the prefix cache, if there is one."""
        if self.system.prefix_caching:
            self._cache = manager

    def _with_misses(
        self, asked: list[Asked], results: list[RequestResult], manager: PrefixCachingKVCacheManager
    ) -> list[RequestResult]:
        """The results with why their prompts were not found, in the order in which the prompts have started."""
        place = {one.requests[0].request_id: index for index, one in enumerate(asked) if one.requests}
        for request_id, start in manager.starts.items():
            if (index := place.get(request_id)) is not None:  # a prompt's first sample
                ids = asked[index].ids
                missed = why_missed(ids, start, self._prompts, self.block_size)
                results[index] = dataclasses.replace(results[index], missed=missed)
                self._prompts.append(ids)
        return results


_PREFIX = "prefix"  # its name in the memory manager


def _loaded(
    model: str | os.PathLike[str] | models.LoadedModel, device: str | None, dtype: str | None, hub: bool
) -> models.LoadedModel:
    """The model, loaded if it is not yet. UserError for settings that a loaded one does not have."""
    remedy = f"a name such as {models.EMBEDDED!r}, a folder, a GGUF file, or a loaded model"
    instance("model", model, (str, os.PathLike, models.LoadedModel), remedy)
    if device is not None:
        try:
            kind = torch.device(instance("device", device, str, "'cpu' or 'cuda'")).type
        except RuntimeError:
            kind = None
        if kind not in ("cpu", "cuda"):
            raise UserError(f"device = {device!r} is not supported; use 'cpu' or 'cuda'")
    if dtype is not None:
        lookup("dtype", models.DTYPES, dtype)
    if not isinstance(model, models.LoadedModel):
        return models.load(os.fspath(model), device or "cpu", dtype, hub=hub)
    for name, asked, has in (("device", device, model.device.type), ("dtype", dtype, str(model.dtype)[6:])):
        if asked is not None and asked.split(":")[0] != has:
            raise UserError(f"{name} = {asked!r}, but {model.config.name} is loaded in {has}; load it anew")
    return model
