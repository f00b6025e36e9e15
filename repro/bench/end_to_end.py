"""End-to-end throughput of the real engine on a GPU, and where its time goes.

    python -m repro.bench.end_to_end --out DIR

The load: 256 requests, all there at the start, with the lengths of experiments/offline_256_lengths.csv (log-normal,
sigma 1, clipped to [4, 1024], clipped means 161 and 338 tokens, one draw with seed 0: 45,797 prompt and 80,156 output
tokens). Lengths are forced and decoding is greedy; weights are random, since only shapes matter. One row per K/V pool.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from repro.engine.clock import WallClock
from repro.engine.errors import UserError
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import System, system
from repro.llm import models
from repro.llm.attention import detach
from repro.llm.executor import TorchExecutor
from repro.llm.kv_store import KVStore
from repro.llm.pool import PoolSize, boot_line
from repro.setup.machine import machine

BLOCK_SIZE = 16
PROFILED = (150, 210)  # iterations, well after the prompts
KINDS = {
    "attention": ("_decode", "_prefill", "_write_kernel"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitk", "cublas"),
}

SHOWN = (
    "output_tokens_per_s",
    "seconds",
    "iterations",
    "decoding_iteration_ms",
    "prompts_s",
    "mean_batch",
    "preemptions",
    "waiting_for_gpu_s",
)


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


class _Iterations(Observer):
    """Counts, and what iterations with prompts take beyond decoding alone.

    A step is waited for while the next one is queued, so the iteration after one with prompts is counted to it.
    """

    def __init__(self) -> None:
        self.count = self.sequences = self.with_prompts = 0
        self._decoding: list[float] = []
        self._total_s = 0.0
        self._prompts_before = True

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        seconds = engine.clock.now - start_s
        self.count += 1
        self.sequences += output.num_decode_seqs + len(output.prefills)
        self.with_prompts += bool(output.prefills)
        self._total_s += seconds
        if not output.prefills and not self._prompts_before:
            self._decoding.append(seconds)
        self._prompts_before = bool(output.prefills)

    @property
    def decoding_ms(self) -> float:
        return 1e3 * float(np.mean(self._decoding))

    @property
    def prompts_s(self) -> float:
        return self._total_s - 1e-3 * self.decoding_ms * self.count


def requests(lengths: Path, vocabulary: int) -> list[tuple[Request, np.ndarray]]:
    """The load, with random prompts."""
    if not lengths.is_file():
        raise UserError(
            f"{lengths} is not there; run from the project's folder, or name a CSV file of prompt_tokens,output_tokens "
            "with --lengths"
        )
    rng = np.random.default_rng(0)
    with lengths.open() as file:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [
        (
            Request(index, 0.0, prompt, output, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)),
            rng.integers(4, vocabulary, prompt),
        )
        for index, (prompt, output) in enumerate(pairs)
    ]


def run(
    executor: TorchExecutor,
    chosen: System,
    num_blocks: int,
    load: list[tuple[Request, np.ndarray]],
    *observers: Observer,
) -> tuple[float, Scheduler]:
    """Seconds from the first request to the last token."""
    manager = chosen.manager(num_blocks, BLOCK_SIZE, executor.loaded.config.max_model_len)
    executor.reset(manager)
    for request, prompt in load:
        executor.submit(request, prompt)
    scheduler = Scheduler(manager, chosen.scheduler)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with contextlib.suppress(_Enough):
        Engine(scheduler, executor, WallClock(), observers).run([request for request, _ in load])
    executor.flush()
    torch.cuda.synchronize()
    return time.perf_counter() - start, scheduler


def _warm_up(executor: TorchExecutor, chosen: System, num_blocks: int, longest: int) -> None:
    """Compile kernels and capture graphs, so that no timed step has to."""
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [np.arange(length) for length in (1040, 700, 300, 100, 50, 10)]
    run(executor, chosen, num_blocks, [(Request(i, 0.0, len(ids), 4, greedy), ids) for i, ids in enumerate(prompts)])
    executor.runner.capture_all(longest)


def measure(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row per pool, system and pass."""
    loaded = models.load(options.model, "cuda", options.dtype)
    load = requests(options.lengths, loaded.model.config.vocab_size)[: options.requests]
    longest = max(request.prompt_tokens + request.output_tokens for request, _ in load)
    output_tokens = sum(request.output_tokens for request, _ in load)
    for gib, runs in itertools.groupby(options.runs, key=lambda run: run[0]):
        pool = PoolSize(kv_gib=gib) if gib else PoolSize(free_share=0.92)
        num_blocks = pool.blocks(loaded.config, BLOCK_SIZE, loaded.device)
        print(boot_line(loaded.config, loaded.device, loaded.dtype, num_blocks, BLOCK_SIZE))
        started = time.perf_counter()
        store = KVStore(loaded.config, num_blocks, BLOCK_SIZE, 0, loaded.dtype, loaded.device)
        manager = system("vllm").manager(num_blocks, BLOCK_SIZE, loaded.config.max_model_len)
        fast = not options.plain
        executor = TorchExecutor(loaded, manager, store, with_logprobs=False, compiled=fast, graphs=fast)
        _warm_up(executor, system("vllm"), num_blocks, longest)
        boot_s = time.perf_counter() - started
        print(f"compiled and captured in {boot_s:.1f} s")
        for _, name in runs:
            chosen = system(name).with_scheduler(max_num_seqs=256, **_token_budget(name, options))
            for attempt in range(options.passes if name == "vllm" else 1):
                iterations = _Iterations()
                seconds, scheduler = run(executor, chosen, num_blocks, load, iterations)
                row: dict[str, object] = dict(  # noqa: C408 (as keywords they fit a screen)
                    system=name,
                    pool_tokens=num_blocks * BLOCK_SIZE,
                    pool_gib=round(store.num_bytes / 2**30, 2),
                    attempt=attempt,
                    output_tokens=output_tokens,
                    seconds=seconds,
                    output_tokens_per_s=output_tokens / seconds,
                    iterations=iterations.count,
                    iterations_with_prompts=iterations.with_prompts,
                    decoding_iteration_ms=iterations.decoding_ms,
                    prompts_s=iterations.prompts_s,
                    mean_batch=iterations.sequences / iterations.count,
                    preemptions=scheduler.num_preemptions,
                    waiting_for_gpu_s=executor.waited_s,
                    boot_s=boot_s,
                    model=options.model,
                    dtype=options.dtype,
                    graphs=fast,
                    compiled=fast,
                    seed=0,
                    evidence="measured",
                    device=torch.cuda.get_device_name(),
                )
                print(f"{name}: " + ", ".join(f"{key} {row[key]:.4g}" for key in SHOWN))
                if name == "vllm" and attempt == options.passes - 1:
                    profile = _Profile()
                    run(executor, chosen, num_blocks, load, profile)
                    row |= {f"{kind.replace(' ', '_')}_ms": 1e3 * value for kind, value in profile.shares.items()}
                    print({kind: f"{1e3 * value:.2f} ms" for kind, value in profile.shares.items()})
                yield row
        detach(loaded.model)
        del store, executor, manager
        torch.cuda.empty_cache()


def _token_budget(name: str, options: argparse.Namespace) -> dict[str, int]:
    """Only vLLM bounds the tokens of an iteration (see repro.engine.systems)."""
    return {"max_num_batched_tokens": options.batched_tokens} if name == "vllm" else {}


def _run_name(text: str) -> tuple[float, str]:
    gib, _, name = text.partition(":")
    return float(gib), name


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m repro.bench.end_to_end", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for end_to_end.csv and manifest.json")
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--runs",
        type=_run_name,
        nargs="+",
        default=[(0.0, "vllm"), (12.0, "vllm")],
        metavar="GIB:SYSTEM",
        help="pool and system, such as 12:orca-max; 0: all memory that is free",
    )
    parser.add_argument("--passes", type=int, default=2, help="timed runs per pool of vllm")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--batched-tokens", type=int, default=2560)
    parser.add_argument("--lengths", type=Path, default=Path("experiments/offline_256_lengths.csv"))
    parser.add_argument("--plain", action="store_true", help="neither CUDA graphs nor torch.compile")
    parser.add_argument("--commit", help="the code's commit, where git cannot tell it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError(
            "no CUDA GPU here, and throughput is measured on one; rows recorded on an H200 are in "
            "experiments/recorded/h200/end_to_end"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    manifest = {**machine(), "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "method": __doc__}
    if options.commit:
        manifest["commit"] = options.commit
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    rows = []
    for row in measure(options):
        rows.append(row)
        with (options.out / "end_to_end.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
