"""A queue that never empties, replayed on one way to manage K/V memory: the requests, the pool, and its steps.

All requests are there from the beginning, more than a run can serve, so that memory alone decides how many sequences
run. A step gives each of them a token; a prompt takes no step of its own. What a step takes in seconds is not known
here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, reserve_oracle
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.studies.first_fit import FirstFitAllocator


@dataclass(frozen=True)
class Setup:
    """`memory` is contiguous (reserves what was declared), oracle (the true output, no rounding) or paged. `spread` of
    the outputs in % of their mean; `prefix` shares the system prompt."""

    memory: str
    declared: int = 2048
    spread: int = 100
    block_size: int = 16
    prefix: bool = False


@dataclass(frozen=True)
class Load:
    """The queue and the pool, the same for all setups. Lengths in tokens; `warmup_steps` are not counted."""

    kv_slots: int = 405_239
    max_num_seqs: int = 128
    max_model_len: int = 40_960
    shortest_prompt: int = 1000
    longest_prompt: int = 7000
    mean_output: int = 256
    system_prompt: int = 1000
    warmup_steps: int = 512
    steps: int = 2000


def lengths(count: int, load: Load, spread: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts and outputs of `count` requests. The prompts are the same for every spread of the outputs."""
    prompts, outputs = (np.random.default_rng([seed, stream]) for stream in range(2))
    half = min(load.mean_output * spread // 100, load.mean_output - 1)
    return (
        prompts.integers(load.shortest_prompt, load.longest_prompt, count, endpoint=True),
        outputs.integers(load.mean_output - half, load.mean_output + half, count, endpoint=True),
    )


def requests(setup: Setup, load: Load, seed: int) -> tuple[list[Request], str]:
    """About twice as many requests as a run can serve, all there from the beginning, and the hash of their lengths."""
    count = load.max_num_seqs * (2 + 2 * (load.warmup_steps + load.steps) // load.mean_output)
    prompts, outputs = lengths(count, load, setup.spread, seed)
    outputs = np.minimum(outputs, setup.declared)
    prefix_id = "system" if setup.prefix else None
    content = np.stack([prompts, outputs]).astype("<i8").tobytes()
    return [
        Request(number, 0.0, prompt, output, SamplingParams(max_tokens=output), prefix_id)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist()))
    ], hashlib.sha256(content).hexdigest()


def memory(setup: Setup, load: Load) -> KVCacheManager:
    if setup.memory == "paged":
        paged = PagedKVCacheManager(load.kv_slots // setup.block_size, setup.block_size, watermark=0.0)
        if setup.prefix:
            paged.store_prefix("system", load.system_prompt)
        return paged
    oracle = setup.memory == "oracle"
    return ContiguousKVCacheManager(
        load.kv_slots,
        1,
        reservation=reserve_oracle if oracle else lambda request, _: setup.declared,
        max_model_len=load.max_model_len,
        allocator=FirstFitAllocator(load.kv_slots, round_up=not oracle),
    )


def steps(setup: Setup, load: Load, queue: list[Request]) -> Iterator[tuple[Scheduler, SchedulerOutput]]:
    """Each counted step as it stands once it is decided. AssertionError if the queue is not saturated."""
    config = SchedulerConfig(
        preemption=PreemptionMode.RECOMPUTE, max_num_seqs=load.max_num_seqs, max_num_batched_tokens=None
    )
    scheduler = Scheduler(memory(setup, load), config)
    for request in queue:
        scheduler.add(request)
    for step in range(load.warmup_steps + load.steps):
        output = scheduler.schedule()
        if not scheduler.waiting:
            raise AssertionError("the queue has run dry")
        if step >= load.warmup_steps:
            yield scheduler, output
        scheduler.update(output)


def head(scheduler: Scheduler) -> tuple[int, int, int]:
    """Slots that the next request needs in one piece, slots that are free, and the largest free piece (contiguous
    memory)."""
    manager, group = scheduler.manager, scheduler.waiting[0]
    needed = manager.chunk_blocks(group) * len(group.seqs)
    return needed, manager.num_free_blocks, manager.allocator.largest_run
