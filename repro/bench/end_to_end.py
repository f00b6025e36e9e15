"""End-to-end throughput of the real engine on a GPU, and where its time goes.

The load: 256 requests, all there at the start, with the lengths of experiments/offline_256_lengths.csv (log-normal,
sigma 1, clipped to [4, 1024], clipped means 161 and 338 tokens, one draw with seed 0: 45,797 prompt and 80,156 output
tokens). Or the first requests of a trace of the paper's workloads, for OPT-13B in Table 1's pool. Lengths are forced
and decoding is greedy; weights are random, since only shapes matter. One row per K/V pool, system and pass; the systems
of a pool take turns. GPU time by kind of kernel comes from another run, under torch.profiler."""

import contextlib
import csv
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
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
from repro.hashing import canonical_json, sha256_file, sha256_text
from repro.llm import workers
from repro.simulate.load import GREEDY
from repro.workloads import make_trace

#: pools (GiB, 0: all memory that is free) and systems of the load in the file, and of a workload: Table 1's for OPT-13B
RUNS, TRACE_RUNS = ((0.0, "vllm"), (12.0, "vllm")), ((12.0, "vllm"), (12.0, "vllm-v1"))
#: workload -> requests that are there at the start, and the seed of its trace
REQUESTS, SEED = {"alpaca": 1500, "sharegpt": 256}, 0
#: timed in every pass and profiled after the last; others run once
REPEATED = ("vllm", "vllm-v1")
PROFILED = (150, 210)  # iterations, well after the prompts
KINDS = {
    "attention": ("_decode", "_prefill", "_write_kernel"),
    "sums over GPUs": ("AllReduce",),
    "broadcasts": ("Broadcast",),
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


def pairs_of(lengths: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the requests in a file. UserError if it is not there."""
    if not lengths.is_file():
        raise UserError(f"{lengths} is not there; name a CSV file of prompt_tokens,output_tokens with --lengths")
    with lengths.open() as file:
        return [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]


def pairs_of_trace(workload: str) -> list[tuple[int, int]]:
    """Those of the first requests of a workload's trace."""
    most = REQUESTS[workload]
    trace = make_trace(workload, most, 2.0, SEED)
    return list(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist()))[:most]


def run(warm: WarmEngine, chosen: System, load: list[Request], *observers: Observer) -> tuple[float, Scheduler]:
    """Seconds from the first request to the last token."""
    scheduler = warm.ready(chosen, load)
    if warm.on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with contextlib.suppress(_Enough):
        Engine(scheduler, warm.executor, WallClock(), observers).run(load)
    warm.executor.flush()  # the last step has ended
    return time.perf_counter() - start, scheduler


class EndToEnd(Benchmark):
    measures = (run,)
    method = __doc__
    shown = ("output_tokens_per_s", "seconds", "iterations", "decoding_iteration_ms", "prompts_s", "mean_batch")
    shown += ("preemptions", "waiting_for_gpu_s")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        workload = options.workload
        if workload and options.lengths:
            raise UserError(f"--workload {workload} and --lengths {options.lengths} are two loads; give one of them")
        self.runs = options.runs or (TRACE_RUNS if workload else RUNS)
        for _, name in self.runs:
            system(name)
        lengths = options.lengths or paths.folders().experiments / "offline_256_lengths.csv"
        pairs = (pairs_of_trace(workload) if workload else pairs_of(lengths))[: options.requests]
        self.load = [Request(index, 0.0, prompt, output, GREEDY) for index, (prompt, output) in enumerate(pairs)]
        require_gpu("end_to_end")
        self.fast = not options.plain
        self.setting = {
            "model": options.model or ("opt-13b" if workload else "llama-13b"),
            "dtype": options.dtype or ("float16" if workload else "bfloat16"),
            **{"graphs": self.fast, "compiled": self.fast, "workload": workload, "requests": len(self.load)},
            "lengths_sha256": sha256_text(canonical_json(pairs)) if workload else sha256_file(lengths),
            "batched_tokens": options.batched_tokens,
            "watermark": options.watermark,
            "device": torch.cuda.get_device_name(),
        }
        if options.num_gpus > 1:
            self.setting["num_gpus"] = options.num_gpus
        self._pools: dict[float, WarmEngine] = {}  # one at a time

    def start(self, recording: Recording) -> dict[str, Any]:
        model, dtype = self.setting["model"], self.setting["dtype"]
        self.loaded = workers.load(model, "cuda", dtype, num_gpus=self.options.num_gpus)
        return {"cuda": torch.version.cuda}

    def steps(self, recording: Recording) -> Iterator[Step]:
        passes = range(self.options.passes)
        for pool in dict.fromkeys(gib for gib, _ in self.runs):  # one after the other: a pool takes its time to set up
            for attempt, (gib, name) in product(passes, dict.fromkeys(self.runs)):
                if gib == pool and (name in REPEATED or not attempt):
                    profiled = name in REPEATED and attempt == passes[-1]
                    yield Step(f"{name}/{gib:g} GiB/{attempt}", 45, partial(self._rows, gib, name, attempt, profiled))

    def finish(self, recording: Recording) -> dict[str, Any]:
        """Least and median seconds of the passes of each run."""
        found: dict[str, list[float]] = {}
        for row in recording.rows:
            found.setdefault(row["key"].rpartition("/")[0], []).append(float(row["seconds"]))
        summary = {run: {"least_s": min(own), "median_s": median(own)} for run, own in found.items()}
        for run, of in summary.items():
            print(f"{run}: {len(found[run])} passes, least {of['least_s']:.2f} s, median {of['median_s']:.2f} s")
        return {"passes": summary}

    def _warm(self, gib: float) -> WarmEngine:
        """The engine with a pool of so much memory, 0 for all that is free; another one's is given back first."""
        if gib not in self._pools:
            for warm in self._pools.values():
                warm.give_back()
            self._pools.clear()
            self._pools[gib] = WarmEngine.in_memory(self.loaded, gib, fast=self.fast)
        return self._pools[gib]

    def _rows(self, gib: float, name: str, attempt: int, profiled: bool) -> list[Row]:
        warm, chosen = self._warm(gib), of_today(system(name))
        own = chosen.scheduler.max_num_batched_tokens
        if self.options.batched_tokens and own is not None:  # a static batch has no such budget
            chosen = chosen.with_scheduler(max_num_batched_tokens=self.options.batched_tokens)
        if self.options.watermark is not None:
            chosen = replace(chosen, watermark=self.options.watermark)
        durations = Durations()
        seconds, scheduler = run(warm, chosen, self.load, durations)
        tokens, store = sum(request.output_tokens for request in self.load), warm.executor.store
        row = {
            "system": name,
            "pool_tokens": warm.deployment.kv_slots,
            "pool_gib": round(warm.loaded.num_gpus * store.num_bytes / 2**30, 2),
        }
        row |= {"max_num_batched_tokens": chosen.scheduler.max_num_batched_tokens}
        row |= {"attempt": attempt, "output_tokens": tokens, "seconds": seconds}
        row |= {"output_tokens_per_s": tokens / seconds, **_iterations(durations)}
        row |= {"preemptions": scheduler.num_preemptions, "waiting_for_gpu_s": warm.executor.waited_s}
        row |= {"boot_s": warm.boot_s, "seed": SEED, "evidence": "measured"}
        if profiled:
            profile = _Profile()
            run(warm, chosen, self.load, profile)
            row |= {f"{kind.replace(' ', '_')}_ms": 1e3 * value for kind, value in profile.shares.items()}
        return [row]
