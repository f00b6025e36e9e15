"""A queue that never empties, replayed on one way to manage K/V memory: the requests, the pool, and its steps.

All requests are there from the beginning, more than a run can serve, so that memory alone decides how many sequences
run. A step gives each of them a token; a prompt takes no step of its own. What a step takes in seconds is not known
here."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, reserve_oracle
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.simulate.metrics import PIECES
from repro.studies.common import about
from repro.studies.first_fit import FirstFitAllocator

SLOT_KIB = 144  # K and V of one token: 36 layers, 8 KV heads of 128, 2 bytes
SAMPLE_EVERY = 10  # steps between two looks at where the slots are


@dataclass(frozen=True)
class Setup:
    """`memory` is contiguous (reserves what was declared), oracle (the true output, no rounding) or paged. `spread` of
    the outputs in % of their mean; `prefix` shares the system prompt."""

    memory: str
    declared: int = 2048
    spread: int = 100
    block_size: int = 16
    prefix: bool = False


SETUPS: dict[str, Setup] = {
    "contiguous (2048)": Setup("contiguous"),
    "contiguous (16384)": Setup("contiguous", declared=16384),
    "contiguous (256)": Setup("contiguous", declared=256),
    "oracle": Setup("oracle"),
    "oracle (equal outputs)": Setup("oracle", spread=0),
    "paged": Setup("paged"),
    "paged (16384)": Setup("paged", declared=16384),
    "paged (equal outputs)": Setup("paged", spread=0),
    "paged (block 256)": Setup("paged", block_size=256),
    "paged (shared)": Setup("paged", prefix=True),
    "paged (256, shared)": Setup("paged", block_size=256, prefix=True),
}


@dataclass(frozen=True)
class Load:
    """The queue and the pool, the same for all setups. Lengths in tokens; `warmup_steps` are not counted."""

    kv_slots: int
    max_num_seqs: int
    max_model_len: int
    shortest_prompt: int
    longest_prompt: int
    mean_output: int
    system_prompt: int
    warmup_steps: int
    steps: int


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


def replay(name: str, setup: Setup, load: Load, seed: int) -> dict[str, Any]:
    """One setup: tokens a step, where the slots are (% of the pool), what preemption cost, how often fragmentation
    blocks the queue.

    `empty_slots_most` is the largest number of slots without a token at the end of one sequence; `empty_mib` what all
    of them held."""
    queue, trace_hash = requests(setup, load, seed)
    tokens = preemptions = discarded = blocked = most = 0
    pieces: dict[str, list[float]] = {piece: [] for piece in PIECES}
    for scheduler, output in steps(setup, load, queue):
        tokens += scheduler.running.num_seqs
        preemptions += len(output.preempted)
        discarded += sum(victim.generated_before for victim in output.preempted)
        stored = list(scheduler.stored_lengths(output.iteration))
        if setup.memory == "paged":
            tables = ((len(scheduler.manager.block_table(group.seqs[0])), length) for group, length in stored)
            most = max(most, *(blocks * setup.block_size - length for blocks, length in tables))
        elif scheduler.running.num_seqs < load.max_num_seqs:
            needed, free, largest = head(scheduler)
            blocked += largest < needed <= free
        if output.iteration % SAMPLE_EVERY == 0:
            usage = scheduler.manager.usage(stored)
            for piece, values in pieces.items():
                values.append(100 * getattr(usage, piece) / load.kv_slots)
    shares = {piece: float(np.mean(values)) for piece, values in pieces.items()}
    return {
        "setup": name,
        "memory": setup.memory,
        "block_size": setup.block_size,
        **about("replayed", seed=seed),
        "trace_hash": trace_hash,
        "tokens_per_step": tokens / load.steps,
        "delivered_tokens": tokens,
        "preemptions": preemptions,
        "discarded_tokens": discarded,
        "blocked_pct": 100 * blocked / load.steps,
        "empty_slots_most": most,
        "empty_mib": (shares["reserved"] + shares["internal"]) / 100 * load.kv_slots * SLOT_KIB / 1024,
        **shares,
    }


def head_of_queue(load: Load, seed: int) -> list[dict[str, Any]]:
    """The oracle's next request, its free slots and their largest piece at each of the first 300 counted steps."""
    setup = SETUPS["oracle"]
    queue, trace_hash = requests(setup, load, seed)  # the whole queue, as the other runs have it
    origin = {"setup": "oracle", **about("replayed", seed=seed), "trace_hash": trace_hash}
    return [
        {**origin, "step": output.iteration, **dict(zip(("needed", "free_slots", "largest_run"), head(scheduler)))}
        for scheduler, output in steps(setup, replace(load, steps=min(load.steps, 300)), queue)
    ]
