"""End-to-end throughput of the real engine on a GPU, and where its time goes.

    python -m repro.executor.torch.bench --out DIR

The load: 256 requests, all there at the start, with the lengths of experiments/offline_256_lengths.csv
(log-normal, sigma 1, clipped to [4, 1024], clipped means 161 and 338 tokens, one draw with seed 0: 45,797
prompt and 80,156 output tokens). Lengths are forced and decoding is greedy; weights are random, since only
shapes matter. One row per K/V pool.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from repro.engine import Engine, Observer, WallClock
from repro.errors import UserError
from repro.executor.torch import models
from repro.executor.torch.attention import detach
from repro.executor.torch.executor import TorchExecutor
from repro.executor.torch.kv_store import KVStore
from repro.executor.torch.pool import PoolSize, boot_line
from repro.provenance import machine
from repro.scheduler import Scheduler, SchedulerOutput
from repro.sequence import Request, SamplingParams
from repro.systems import System, system

BLOCK_SIZE = 16
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


class _Batch(Observer):
    def __init__(self) -> None:
        self.sequences = self.iterations = self.prefills = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self.iterations += 1
        self.sequences += output.num_decode_seqs + len(output.prefills)
        self.prefills += bool(output.prefills)


def requests(lengths: Path, vocabulary: int) -> list[tuple[Request, np.ndarray]]:
    """The load, with random prompts."""
    if not lengths.is_file():
        raise UserError(
            f"{lengths} is not there; run from the project's folder, or name a CSV file of "
            f"prompt_tokens,output_tokens with --lengths"
        )
    rng = np.random.default_rng(0)
    with lengths.open() as file:
        pairs = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)]
    return [
        (
            Request(
                index, 0.0, prompt, output, SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            ),
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
    try:
        Engine(scheduler, executor, WallClock(), observers).run([request for request, _ in load])
    except _Enough:
        pass
    executor.flush()
    torch.cuda.synchronize()
    return time.perf_counter() - start, scheduler


def measure(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    started = time.perf_counter()
    loaded = models.load(options.model, "cuda", options.dtype)
    load = requests(options.lengths, loaded.model.config.vocab_size)[: options.requests]
    print(f"loaded in {time.perf_counter() - started:.1f} s")
    output_tokens = sum(request.output_tokens for request, _ in load)
    chosen = system(options.system).with_scheduler(
        max_num_seqs=256, max_num_batched_tokens=options.batched_tokens
    )
    for gib in options.pools:
        pool = PoolSize(kv_gib=gib) if gib else PoolSize(free_share=0.92)
        num_blocks = pool.blocks(loaded.config, BLOCK_SIZE, loaded.device)
        print(boot_line(loaded.config, loaded.device, loaded.dtype, num_blocks, BLOCK_SIZE))
        started = time.perf_counter()
        store = KVStore(loaded.config, num_blocks, BLOCK_SIZE, 0, loaded.dtype, loaded.device)
        manager = chosen.manager(num_blocks, BLOCK_SIZE, loaded.config.max_model_len)
        executor = TorchExecutor(
            loaded,
            manager,
            store,
            with_logprobs=False,
            compiled=not options.no_compile,
            graphs=not options.no_graphs,
        )
        run(
            executor,
            chosen,
            num_blocks,
            [
                (
                    Request(i, 0.0, 40 + i, 4, SamplingParams(temperature=0, ignore_eos=True)),
                    np.arange(40 + i),
                )
                for i in range(3)
            ],
        )
        executor.runner.capture_all(max(request.prompt_tokens + request.output_tokens for request, _ in load))
        boot_s = time.perf_counter() - started
        print(f"compiled and captured in {boot_s:.1f} s")
        for attempt in range(options.passes):
            batch = _Batch()
            seconds, scheduler = run(executor, chosen, num_blocks, load, batch)
            row = {
                "model": options.model,
                "dtype": options.dtype,
                "system": options.system,
                "pool_tokens": num_blocks * BLOCK_SIZE,
                "pool_gib": round(store.num_bytes / 2**30, 2),
                "attempt": attempt,
                "output_tokens": output_tokens,
                "seconds": seconds,
                "output_tokens_per_s": output_tokens / seconds,
                "iterations": batch.iterations,
                "iterations_with_prompts": batch.prefills,
                "mean_batch": batch.sequences / batch.iterations,
                "preemptions": scheduler.num_preemptions,
                "waiting_for_gpu_s": executor.waited_s,
                "boot_s": boot_s,
                "graphs": not options.no_graphs,
                "compiled": not options.no_compile,
                "seed": 0,
                "evidence": "measured",
                "device": torch.cuda.get_device_name(),
            }
            print(
                f"{row['output_tokens_per_s']:.0f} tokens/s, {seconds:.2f} s, {batch.iterations} iterations, "
                f"{scheduler.num_preemptions} preemptions, host waited {executor.waited_s:.2f} s"
            )
            if attempt == options.passes - 1 and not options.no_profile:
                profile = _Profile()
                run(executor, chosen, num_blocks, load, profile)
                row |= {f"{kind.replace(' ', '_')}_ms": 1e3 * value for kind, value in profile.shares.items()}
                print({kind: f"{1e3 * value:.2f} ms" for kind, value in profile.shares.items()})
            yield row
        detach(loaded.model)
        del store, executor, manager
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m repro.executor.torch.bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for end_to_end.csv and manifest.json")
    parser.add_argument("--model", default="llama-13b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--system", default="vllm")
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[0, 12], metavar="GIB", help="0: all memory that is free"
    )
    parser.add_argument("--passes", type=int, default=2, help="timed runs per pool")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--batched-tokens", type=int, default=2560)
    parser.add_argument("--lengths", type=Path, default=Path("experiments/offline_256_lengths.csv"))
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--commit", help="the code's commit, where git cannot tell it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError(
            "no CUDA GPU here, and throughput is measured on one; rows recorded on an H200 are in "
            "experiments/recorded/h200/end_to_end"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in measure(options):
        rows.append(row)
        with (options.out / "end_to_end.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    manifest = {
        **machine(),
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "method": __doc__,
    }
    if options.commit:
        manifest["commit"] = options.commit
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
