"""End-to-end throughput of the real engine on a GPU, and where its time goes.

The load: 256 requests, all there at the start, with the lengths of experiments/offline_256_lengths.csv (log-normal,
sigma 1, clipped to [4, 1024], clipped means 161 and 338 tokens, one draw with seed 0: 45,797 prompt and 80,156 output
tokens). Lengths are forced and decoding is greedy; weights are random, since only shapes matter. One row per K/V pool,
system and pass; GPU time by kind of kernel comes from another run, under torch.profiler."""

import contextlib
import csv
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro import paths
from repro.bench.benchmark import Benchmark, Step, require_gpu
from repro.bench.rows import Recording, Row
from repro.bench.serving.warm_engine import Durations, WarmEngine
from repro.engine.clock import WallClock
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request
from repro.engine.systems import System, of_today, system
from repro.errors import UserError
from repro.hashing import sha256_file
from repro.llm import models
from repro.llm.pool import PoolSize
from repro.simulate.load import BLOCK_SIZE, GREEDY

PROFILED = (150, 210)  # iterations, well after the prompts
KINDS = {
    "attention": ("_decode", "_prefill", "_write_kernel"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk", "cublas"),
}


class _Enough(Exception):
    """Ends a run that is only profiled."""


class _Profile(Observer):
    """GPU time by kind of kernel, in seconds per iteration, over the iterations PROFILED."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        if output.iteration == PROFILED[0]:
            torch.cuda.synchronize()
            self._profiler.start()
            self._start = time.perf_counter()
        if output.iteration == PROFILED[1]:
            torch.cuda.synchronize()
            wall = time.perf_counter() - self._start
            self._profiler.stop()
            count = PROFILED[1] - PROFILED[0]
            for event in self._profiler.key_averages():
                seconds = event.self_device_time_total * 1e-6 / count
                kinds = (kind for kind, parts in KINDS.items() if any(part in event.key for part in parts))
                kind = next(kinds, "the rest")
                self.shares[kind] = self.shares.get(kind, 0.0) + seconds
                if seconds > 5e-5:
                    print(f"  {1e6 * seconds:8.0f} us, {event.count / count:6.1f} launches: {event.key[:80]}")
            self.shares["gaps"] = wall / count - sum(self.shares.values())
            raise _Enough


def _iterations(durations: Durations) -> Row:
    """Counts, and what iterations with prompts take beyond decoding alone.

    A step is waited for while the next one is queued, so the iteration after one with prompts is counted to it."""
    seconds, prompts = np.array(durations.seconds), np.array([tokens > 0 for _, _, tokens, _ in durations.outputs])
    alone = seconds[1:][~prompts[1:] & ~prompts[:-1]].mean()
    return {
        "iterations": len(seconds),
        "iterations_with_prompts": int(prompts.sum()),
        "decoding_iteration_ms": 1e3 * float(alone),
        "prompts_s": float(seconds.sum() - alone * len(seconds)),
        "mean_batch": sum(decoding + joining for decoding, _, _, joining in durations.outputs) / len(seconds),
    }


def requests(lengths: Path, most: int | None = None) -> list[Request]:
    """The first requests of the load. UserError if the file is not there."""
    if not lengths.is_file():
        raise UserError(f"{lengths} is not there; name a CSV file of prompt_tokens,output_tokens with --lengths")
    with lengths.open() as file:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [Request(index, 0.0, prompt, output, GREEDY) for index, (prompt, output) in enumerate(pairs[:most])]


def run(warm: WarmEngine, chosen: System, load: list[Request], *observers: Observer) -> tuple[float, Scheduler]:
    """Seconds from the first request to the last token."""
    longest = warm.loaded.config.max_model_len
    if chosen.splits_samples:
        chosen = chosen.with_scheduler(max_model_len=longest)
    manager = chosen.manager(warm.executor.manager.num_blocks, BLOCK_SIZE, longest)
    warm.executor.reset(manager)
    for request in load:
        warm.submit(request)
    scheduler = chosen.decide(manager)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with contextlib.suppress(_Enough):
        Engine(scheduler, warm.executor, WallClock(), observers).run(load)
    warm.executor.flush()
    torch.cuda.synchronize()
    return time.perf_counter() - start, scheduler


class EndToEnd(Benchmark):
    measures = (run,)
    method = __doc__
    shown = ("output_tokens_per_s", "seconds", "iterations", "decoding_iteration_ms", "prompts_s", "mean_batch")
    shown += ("preemptions", "waiting_for_gpu_s")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        for _, name in options.runs:
            system(name)
        lengths = options.lengths or paths.folders().experiments / "offline_256_lengths.csv"
        self.load = requests(lengths, options.requests)
        require_gpu("end_to_end")
        self.fast = not options.plain
        self.setting = {"model": options.model, "dtype": options.dtype, "graphs": self.fast, "compiled": self.fast}
        self.setting |= {"requests": len(self.load), "lengths_sha256": sha256_file(lengths)}
        self.setting |= {"max_num_batched_tokens": options.batched_tokens, "device": torch.cuda.get_device_name()}
        self._pools: dict[float, WarmEngine] = {}  # one at a time

    def start(self, recording: Recording) -> dict[str, Any]:
        self.loaded = models.load(self.options.model, "cuda", self.options.dtype)
        return {"cuda": torch.version.cuda}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for gib, name in self.options.runs:
            passes = self.options.passes if name == "vllm" else 1
            for attempt in range(passes):
                profiled = name == "vllm" and attempt == passes - 1
                yield Step(f"{name}/{gib:g} GiB/{attempt}", 45, partial(self._rows, gib, name, attempt, profiled))

    def _warm(self, gib: float) -> WarmEngine:
        """The engine with a pool of so much memory, 0 for all that is free; another one's is given back first."""
        if gib not in self._pools:
            for warm in self._pools.values():
                warm.give_back()
            self._pools.clear()
            pool, config = PoolSize(kv_gib=gib) if gib else PoolSize(free_share=0.92), self.loaded.config
            slots = BLOCK_SIZE * pool.blocks(config, BLOCK_SIZE, self.loaded.device)
            longest = config.max_model_len
            self._pools[gib] = WarmEngine(self.loaded, slots, max_model_len=longest, swap=0.0, fast=self.fast)
        return self._pools[gib]

    def _rows(self, gib: float, name: str, attempt: int, profiled: bool) -> list[Row]:
        warm, chosen = self._warm(gib), of_today(system(name))
        if chosen.scheduler.max_num_batched_tokens is not None:  # a static batch has no such budget
            chosen = chosen.with_scheduler(max_num_batched_tokens=self.options.batched_tokens)
        durations = Durations()
        seconds, scheduler = run(warm, chosen, self.load, durations)
        tokens, store = sum(request.output_tokens for request in self.load), warm.executor.store
        row = {"system": name, "pool_tokens": warm.deployment.kv_slots, "pool_gib": round(store.num_bytes / 2**30, 2)}
        row |= {"attempt": attempt, "output_tokens": tokens, "seconds": seconds}
        row |= {"output_tokens_per_s": tokens / seconds, **_iterations(durations)}
        row |= {"preemptions": scheduler.num_preemptions, "waiting_for_gpu_s": warm.executor.waited_s}
        row |= {"boot_s": warm.boot_s, "seed": 0, "evidence": "measured"}
        if profiled:
            profile = _Profile()
            run(warm, chosen, self.load, profile)
            row |= {f"{kind.replace(' ', '_')}_ms": 1e3 * value for kind, value in profile.shares.items()}
        return [row]
