"""The real engine set up once for many measured runs: one model, one K/V pool, warmed up.

Weights are random (only shapes matter), lengths are forced, beams continue where a real model's did. The pool is that
of Table 1, whatever the memory of the card, so that any GPU answers the paper's question."""

import gc
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from repro.bench.serving.client import TokenTimes, gaps, quantile
from repro.engine.clock import WallClock
from repro.engine.config import DEVICES, Deployment
from repro.engine.loop import Engine, Observer
from repro.engine.memory import KVCacheManager, PagedKVCacheManager
from repro.engine.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request
from repro.engine.systems import System
from repro.llm import models
from repro.llm.attention import detach
from repro.llm.executor import TorchExecutor, within_memory
from repro.llm.parallel import store_for
from repro.llm.pool import PoolSize
from repro.simulate.load import BLOCK_SIZE, GREEDY, PREFIX, SWAP_SHARE, Load, run

#: a host that is busy for more of the time than this, and so hardly ever waits for the GPU, is what limits a run
CLIENT_BOUND = 0.9


class WarmEngine:
    """`model` as for repro.llm.models.load, held to `max_model_len` tokens; a pool of `kv_slots` tokens, `swap` times
    as much on the CPU; on a GPU, if `fast`, with graphs and compiled layers."""

    executor: TorchExecutor | None = None

    def __init__(
        self,
        model: str | models.LoadedModel,
        kv_slots: int,
        device: str = "cuda",
        dtype: str = "float16",
        max_model_len: int = 2048,
        swap: float = SWAP_SHARE,
        fast: bool = True,
    ) -> None:
        started = time.perf_counter()
        self.loaded = models.load(model, device, dtype) if isinstance(model, str) else model
        limit = min(self.loaded.config.max_model_len, max_model_len)
        self.loaded = replace(self.loaded, config=replace(self.loaded.config, max_model_len=limit))
        # Only model and pool matter here; the card that is emulated is that of Table 1.
        self.deployment = Deployment(self.loaded.config, DEVICES["a100-40gb"], self.loaded.num_gpus, kv_slots)
        self.on_gpu = self.loaded.device.type == "cuda"
        self.device_name = device_name(self.on_gpu)
        self._swap, self._fast = swap, fast and self.on_gpu
        self._uuid = str(torch.cuda.get_device_properties().uuid) if self.on_gpu else None
        self._random = np.random.default_rng(0)
        self.use_blocks(BLOCK_SIZE)
        self.boot_s = time.perf_counter() - started

    @classmethod
    def in_memory(cls, loaded: models.LoadedModel, gib: float, fast: bool = True) -> Self:
        """With a pool of so many GiB, 0 for all that is free, nothing to swap to, and requests as long as the model
        takes. UserError if not even one block fits."""
        size = PoolSize(kv_gib=gib) if gib else PoolSize(free_share=0.92)
        slots = BLOCK_SIZE * size.blocks(loaded.config, BLOCK_SIZE, loaded.device, loaded.num_gpus)
        return cls(loaded, slots, max_model_len=loaded.config.max_model_len, swap=0.0, fast=fast)

    def use_blocks(self, block_size: int) -> None:
        """Have the pool in blocks of this size, ready to be timed; another one's memory is given back first."""
        if self.executor is not None and self.executor.manager.block_size == block_size:
            return
        self.give_back()
        self.executor = self._make_executor(block_size, self.deployment.num_blocks(block_size))
        if self.on_gpu:
            try:
                within_memory(self._warm_up, f"for graphs of a pool of blocks of {block_size}")
            except BaseException:
                self.give_back()  # half of its graphs would pass for all of them
                raise

    def give_back(self) -> None:
        """Free the pool's memory and that of its graphs."""
        if self.executor is not None:
            detach(self.loaded.model)
            self.executor = None
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()

    def _make_executor(self, block_size: int, num_blocks: int) -> TorchExecutor:
        loaded, fast, swap_blocks = self.loaded, self._fast, int(self._swap * num_blocks)
        store = store_for(loaded, num_blocks, block_size, swap_blocks)
        manager = PagedKVCacheManager(num_blocks, block_size)
        return TorchExecutor(loaded, manager, store, with_logprobs=False, graphs=fast, compiled=fast)

    def _warm_up(self) -> None:
        """Compile kernels and capture graphs, so that no timed step has to."""
        longest = self.loaded.config.max_model_len
        for prompts in ([10, 50, 100, 300], [700, 1040], [longest - 8]):
            self.serve([Request(index, 0.0, length, 4, GREEDY) for index, length in enumerate(prompts)])
        self.executor.runner.capture_all(longest)

    def _prompt(self, num_tokens: int, prefix: np.ndarray | tuple[()] = ()) -> np.ndarray:
        """A random prompt, which begins with the prefix."""
        prompt = self._random.integers(4, self.loaded.model.config.vocab_size, num_tokens)
        prompt[: len(prefix)] = prefix
        return prompt

    def submit(self, request: Request, prefix: np.ndarray | tuple[()] = ()) -> Request:
        """Hand the executor a random prompt for it, which begins with the prefix."""
        self.executor.submit(request, self._prompt(request.prompt_tokens, prefix))
        return request

    def store_prefix(self, num_tokens: int) -> np.ndarray:
        """A random prefix, stored for the requests that declare it (PREFIX); nothing is stored of 0 tokens."""
        prefix = self._prompt(num_tokens)
        if num_tokens:
            self.executor.store_prefix(PREFIX, prefix)
        return prefix

    def engine(self, *observers: Observer, config: SchedulerConfig = SchedulerConfig()) -> Engine:
        """A fresh vLLM engine on this pool."""
        used = self.executor.manager
        manager = PagedKVCacheManager(used.num_blocks, used.block_size)
        self.executor.reset(manager)
        return Engine(Scheduler(manager, config), self.executor, WallClock(), observers)

    def serve(self, batch: list[Request], *observers: Observer) -> None:
        engine = self.engine(*observers, config=SchedulerConfig(max_num_batched_tokens=1 << 20))
        engine.run([self.submit(request) for request in batch])
        self.executor.flush()

    def prepare(self, load: Load) -> tuple[KVCacheManager, list[Request]]:
        """The load's memory manager on this pool, with the shared prefix if any, and its requests with prompts."""
        self.use_blocks(load.block_size)
        manager = load.manager_on(self.deployment, self._hashes)
        self.executor.reset(manager, load.parents)
        requests, width = load.requests, load.requests_a_prompt
        prefix = self.store_prefix(load.stored_prefix_tokens)
        if len(prefix) < load.prefix_tokens:  # nobody declares it
            prefix = self._prompt(load.prefix_tokens)
        for first in range(0, len(requests), width):
            prompt = self._prompt(requests[first].prompt_tokens, prefix)
            for sample, request in enumerate(requests[first : first + width]):
                self.executor.submit(request, prompt, sample)
        return manager, requests

    def ready(self, chosen: System, requests: list[Request]) -> Scheduler:
        """The system's scheduler over the whole pool, and random prompts for its requests, of one sequence each."""
        longest, used = self.loaded.config.max_model_len, self.executor.manager
        chosen, pool = chosen.for_length(longest), (used.num_blocks, used.block_size, longest)
        manager = chosen.manager(*pool, hashes=self._hashes)
        self.executor.reset(manager)
        for request in requests:
            self.submit(request)
        return chosen.decide(manager)

    def _hashes(self, request: Request) -> list[bytes]:
        return self.executor.block_hashes(request)

    def measure(self, load: Load) -> dict[str, Any]:
        """The load on the real engine; one row, with the device's state and the host's share of the time. Gaps and
        first tokens are those that a client sees."""
        manager, requests = self.prepare(load)
        clock = IdleClock()
        seen = TokenTimes(clock)
        self.executor.on_settled = seen.note
        row = run(load, self.deployment, self.executor, clock, manager, requests)
        host_share = 1 - (self.executor.waited_s + clock.idle_s) / clock.now if self.on_gpu else 0.0
        if host_share > CLIENT_BOUND:
            row["mark"] = "client-bound"
        self.executor.flush()
        row |= _as_seen(load, requests, seen)
        done = [(one, state.request) for state in self.executor.finished.values() for one in state.sequences]
        wrong = sum(len(one.tokens) != request.output_tokens for one, request in done)
        row |= {"host_share": host_share, "wrong_lengths": wrong, "evidence": "measured", "device": self.device_name}
        return row | {"seconds": clock.now, **gpu_state(self._uuid)}

    @contextmanager
    def small_pool(self, block_size: int, num_slots: int) -> Iterator[None]:
        """A small pool of other blocks, in which nothing is captured yet; this one comes back after."""
        kept = self.executor
        detach(self.loaded.model)
        self.executor = self._make_executor(block_size, num_slots // block_size)
        try:
            yield
        finally:
            detach(self.loaded.model)
            self.executor = kept


def _as_seen(load: Load, requests: list[Request], seen: TokenTimes) -> dict[str, float | None]:
    """The columns of `repro.simulate.load.run` that say when tokens come (s), by the client's clock."""
    times = seen.of_requests()
    between = gaps(times.values(), load.warm_s, load.stop_s)
    asked = [one for one in requests if one.arrival_s >= load.warm_s and one.request_id in times]
    first = [times[one.request_id][0] - one.arrival_s for one in asked] if load.rate is not None else []
    quantiles = {"gap_median_s": (between, 0.5), "gap_99_s": (between, 0.99), "first_token_median_s": (first, 0.5)}
    return {name: quantile(values, share) for name, (values, share) in quantiles.items()}


class IdleClock(WallClock):
    """Also knows for how long there was nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_s = 0.0

    def wait_until(self, moment: float) -> None:
        began = self.now
        super().wait_until(moment)
        self.idle_s += self.now - began


class Durations(Observer):
    """Seconds of each iteration, as the host sees them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.outputs: list[tuple[int, ...]] = []  # decoding sequences, their context, prompt tokens, prompts

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self.seconds.append(engine.clock.now - start_s)
        prompts = output.num_prefill_tokens, len(output.prefills)
        self.outputs.append((output.num_decode_seqs, output.context_tokens, *prompts))


def device_name(on_gpu: bool) -> str:
    return torch.cuda.get_device_name() if on_gpu else "CPU"


def gpu_state(uuid: str | None) -> dict[str, float | None]:
    """Clocks (MHz), temperature (C) and power (W) of a GPU now; None without one, or where nvidia-smi does not tell."""
    names = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}
    query = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader,nounits"]
    try:
        if uuid is None:
            raise OSError("no GPU in this run")
        command = [*query, f"--id=GPU-{uuid}"]
        values = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
        return {name: float(value) for name, value in zip(names, values)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return dict.fromkeys(names)
