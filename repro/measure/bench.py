"""The real engine set up once for many measured runs: one model, one K/V pool, warmed up.

Weights are random (only shapes matter), lengths are forced, decoding is greedy. The pool is that of Table 1, whatever the
memory of the card, so that any GPU answers the paper's question.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from repro.config import DEVICES, Deployment
from repro.engine import Engine, Observer, WallClock
from repro.executor.torch import models
from repro.executor.torch.attention import detach
from repro.executor.torch.executor import TorchExecutor
from repro.executor.torch.kv_store import KVStore
from repro.measure.load import BLOCK_SIZE, GREEDY, Load, run
from repro.memory import KVCacheManager
from repro.memory.paged import PagedKVCacheManager
from repro.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from repro.sequence import Request

#: a host that is busy for more of the time than this, and so hardly ever waits for the GPU, is what limits a run
CLIENT_BOUND = 0.9


class Bench:
    """`model` as for repro.executor.torch.models.load, held to `max_model_len` tokens; a pool of `kv_slots` tokens; on a GPU with
    graphs and compiled layers."""

    def __init__(self, model: str | models.LoadedModel, kv_slots: int, device: str = "cuda", dtype: str = "float16",
                 max_model_len: int = 2048) -> None:
        started = time.perf_counter()
        self.loaded = models.load(model, device, dtype) if isinstance(model, str) else model
        limit = min(self.loaded.config.max_model_len, max_model_len)
        self.loaded = replace(self.loaded, config=replace(self.loaded.config, max_model_len=limit))
        # Only model and pool matter here; the card that is emulated is that of Table 1.
        self.deployment = deployment = Deployment(self.loaded.config, DEVICES["a100-40gb"], 1, kv_slots)
        self.on_gpu = self.loaded.device.type == "cuda"
        self.device_name = device_name(self.on_gpu)
        self.num_blocks = deployment.num_blocks(BLOCK_SIZE)
        self.store = KVStore(self.loaded.config, self.num_blocks, BLOCK_SIZE, 0, self.loaded.dtype, self.loaded.device)
        self.executor = self.make_executor(self.paged(), self.store)
        self._random = np.random.default_rng(0)
        if self.on_gpu:
            self._warm_up(limit)
        self.boot_s = time.perf_counter() - started

    def paged(self, block_size: int = BLOCK_SIZE, num_blocks: int | None = None) -> PagedKVCacheManager:
        return PagedKVCacheManager(num_blocks or self.num_blocks, block_size)

    def make_executor(self, manager: KVCacheManager, store: KVStore) -> TorchExecutor:
        return TorchExecutor(self.loaded, manager, store, with_logprobs=False, graphs=self.on_gpu, compiled=self.on_gpu)

    def _warm_up(self, longest: int) -> None:
        """Compile kernels and capture graphs, so that no timed step has to."""
        for prompts in ([10, 50, 100, 300], [700, 1040], [longest - 8]):
            self.serve([Request(index, 0.0, length, 4, GREEDY) for index, length in enumerate(prompts)])
        self.executor.runner.capture_all(longest)

    def submit(self, request: Request) -> Request:
        """Hand the executor a random prompt for it."""
        vocabulary = self.loaded.model.config.vocab_size
        self.executor.submit(request, self._random.integers(4, vocabulary, request.prompt_tokens))
        return request

    def engine(self, *observers: Observer, config: SchedulerConfig = SchedulerConfig()) -> Engine:
        """A fresh vLLM engine on this pool."""
        manager = self.paged()
        self.executor.reset(manager)
        return Engine(Scheduler(manager, config), self.executor, WallClock(), observers)

    def serve(self, batch: list[Request], *observers: Observer) -> None:
        engine = self.engine(*observers, config=SchedulerConfig(max_num_batched_tokens=1 << 20))
        engine.run([self.submit(request) for request in batch])
        self.executor.flush()

    def measure(self, load: Load) -> dict[str, Any]:
        """The load on the real engine; one row, with the device's state and the host's share of the time."""
        manager = load.manager_on(self.deployment)
        self.executor.reset(manager)
        batch = [self.submit(request) for request in load.requests]
        clock = IdleClock()
        row = run(load, self.deployment, self.executor, clock, manager, batch)
        host_share = 1 - (self.executor.waited_s + clock.idle_s) / clock.now if self.on_gpu else 0.0
        if host_share > CLIENT_BOUND:
            row["mark"] = "client-bound"
        self.executor.flush()
        wrong = sum(len(one.tokens) != state.request.output_tokens
                    for state in self.executor.finished.values() for one in state.sequences)
        return row | {"host_share": host_share, "wrong_lengths": wrong, "evidence": "measured", "device": self.device_name,
                      "seconds": clock.now, **gpu_state(self.on_gpu)}

    @contextmanager
    def other_blocks(self, block_size: int, num_slots: int) -> Iterator[tuple[TorchExecutor, KVStore]]:
        """An executor of the same model over a small pool of other blocks; this one's comes back after."""
        store = KVStore(self.loaded.config, num_slots // block_size, block_size, num_slots // block_size, self.loaded.dtype,
                        self.loaded.device)
        kept = self.executor
        detach(self.loaded.model)
        self.executor = self.make_executor(self.paged(block_size, num_slots // block_size), store)
        try:
            yield self.executor, store
        finally:
            detach(self.loaded.model)
            self.executor = kept


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
        self.outputs: list[tuple[int, int, int]] = []  # decoding sequences, their context, prompt tokens

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self.seconds.append(engine.clock.now - start_s)
        self.outputs.append((output.num_decode_seqs, output.context_tokens, output.num_prefill_tokens))


def device_name(on_gpu: bool) -> str:
    return torch.cuda.get_device_name() if on_gpu else "CPU"


def gpu_state(on_gpu: bool) -> dict[str, float | None]:
    """Clocks (MHz), temperature (C) and power (W) now; None where nvidia-smi does not tell."""
    names = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "celsius": "temperature.gpu", "watts": "power.draw"}
    try:
        if not on_gpu:
            raise OSError("no GPU in this run")
        query = ["nvidia-smi", f"--query-gpu={','.join(names.values())}", "--format=csv,noheader,nounits", "--id=0"]
        values = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split(",")
        return {name: float(value) for name, value in zip(names, values)}
    except (OSError, ValueError, subprocess.SubprocessError):
        return dict.fromkeys(names)
