"""How long the steps of the real engine take on this machine: the grid under `repro.simulate.step_times.StepTimes`.

A cell is a number of decoding sequences with short or long contexts, or with prompts joining in every second iteration.
On a GPU the cells are the sizes that steps are padded to. A step is waited for there while the next one is queued, so
single durations mean little and means over many steps everything. The grid is as large as the pool allows. Beside it,
prompts that follow stored tokens (a chunk's context) are measured, as they are where prompts are cut or found.

Also here: recomputing 256 tokens of one sequence, at each block size, the other half of Fig. 19a."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from repro.bench.kernels.timing import eager_time_us
from repro.bench.rows import Row
from repro.bench.serving.warm_engine import Durations, WarmEngine
from repro.engine.loop import Engine
from repro.engine.scheduler import SchedulerConfig
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.llm.model_runner import BATCH_BUCKETS, SIZES
from repro.simulate.load import BLOCK_SIZE, GREEDY, PREFIX

SHORT_CONTEXT = 8
#: tokens of a prompt at most; more are several prompts
PROMPT = 512
#: how prompts cost: sequences that decode beside them, tokens of prompts in a step, and tokens of short ones
PREFILL_SEQS, SHORT_PROMPTS = (0, 32, 128), (32, 128)
PREFILL_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560)
RECOMPUTED_TOKENS = 256
#: all prompts that are there start at once, whatever decodes beside them
WHOLE = SchedulerConfig(max_num_batched_tokens=1 << 20)
_SETTLE = 3  # steps that pass before a duration counts


@dataclass(frozen=True)
class Grid:
    """Numbers of sequences that decode alone, `steps` each; of those that decode beside prompts, and of the prompts'
    tokens, `cycles` each (`together`: of both's tokens). `chunks` are tokens of a prompt that follow as many as
    `stored`, whole blocks. What the pool cannot hold is left out."""

    seqs: tuple[int, ...]
    mixed_seqs: tuple[int, ...]
    mixed_prompt: tuple[int, ...]
    steps: int
    cycles: int
    chunks: tuple[int, ...] = (128, 512)
    stored: tuple[int, ...] = (0, 512, 1024, 1408)
    together: bool = False


# The largest batch leaves room for the prompts' own rows.
GPU_GRID = Grid(BATCH_BUCKETS, (8, 128, 240), SIZES, steps=24, cycles=6, together=True)
CPU_GRID = Grid((1, 4, 16, 40), (0, 4, 32), (8, 64, 256), steps=8, cycles=2, chunks=(8, 64), stored=(0, 64, 128))
#: sequences that decode beside a chunk
CHUNK_SEQS = 8


def cells(warm: WarmEngine) -> Iterator[Row]:
    """One row per cell."""
    warm.use_blocks(BLOCK_SIZE)
    grid = GPU_GRID if warm.on_gpu else CPU_GRID
    slots = warm.deployment.num_blocks(BLOCK_SIZE) * BLOCK_SIZE
    for count in grid.seqs:
        longest = min(warm.loaded.config.max_model_len, int(0.9 * slots) // count) - grid.steps - _SETTLE - BLOCK_SIZE
        for context in (SHORT_CONTEXT, longest):
            if longest > SHORT_CONTEXT:
                yield _decode(warm, count, context, grid.steps)
    # Every number of sequences with every prompt, or the table has holes: prompts that fit, then sequences that fit
    # beside the longest. Where both are counted together, a step has room for a prompt beside its sequences.
    room, taken = 0.95 * slots, BLOCK_SIZE * -(-(SHORT_CONTEXT + _output(grid.cycles)) // BLOCK_SIZE)
    longest = min(room / 2, room - grid.mixed_seqs[0] * taken)
    limit = warm.loaded.config.max_model_len
    prompts = [prompt for prompt in grid.mixed_prompt if prompt <= longest and min(prompt, PROMPT) < limit]
    for count in grid.mixed_seqs if prompts else ():
        if count * taken + prompts[-1] <= room:
            for prompt in prompts:
                if not grid.together:
                    yield _mixed(warm, count, prompt, grid.cycles)
                elif prompt > count:
                    yield _mixed(warm, count, prompt - count, grid.cycles) | {"step_tokens": prompt}


def chunks(warm: WarmEngine) -> Iterator[Row]:
    """One row per length of a chunk and number of stored tokens that it follows: a step of a few sequences with it.

    UserError if no chunk fits."""
    warm.use_blocks(BLOCK_SIZE)
    grid = GPU_GRID if warm.on_gpu else CPU_GRID
    room = int(0.9 * warm.deployment.num_blocks(BLOCK_SIZE) * BLOCK_SIZE) - CHUNK_SEQS * 4 * BLOCK_SIZE
    longest = min(warm.loaded.config.max_model_len - 1, room)
    if min(grid.chunks) + grid.stored[1] > longest:
        raise UserError(
            f"model and pool hold prompts of {longest} tokens, and a chunk of {min(grid.chunks)} over "
            f"{grid.stored[1]} needs more; use a larger pool, or a model that takes longer prompts"
        )
    for tokens in grid.chunks:
        fitting = [stored for stored in grid.stored if stored + tokens <= longest]
        for stored in fitting if len(fitting) > 1 else ():
            yield _mixed(warm, CHUNK_SEQS, tokens, grid.cycles, stored=stored) | {"kind": "chunk", "stored": stored}


def _output(cycles: int) -> int:
    """Tokens of a sequence that decodes beside `cycles` prompts, and does not end before."""
    return _SETTLE + 3 * cycles + 2


def _row(seqs: int, prompt: int, context: float, seconds: float) -> Row:
    row = {"kind": "step", "seqs": seqs, "prompt_tokens": prompt, "context_tokens": context, "seconds": seconds}
    return row | {"evidence": "measured"}


def _decode(warm: WarmEngine, count: int, context: int, steps: int) -> Row:
    """A step of `count` sequences, each with about `context` tokens."""
    durations = Durations()
    length = steps + _SETTLE + 1
    warm.serve([Request(index, 0.0, context, length, GREEDY) for index in range(count)], durations)
    found = zip(durations.seconds, durations.outputs)
    alone = [(seconds, tokens) for seconds, (seqs, tokens, prompt, _) in found if seqs == count and not prompt]
    seconds, contexts = zip(*alone[_SETTLE:])
    return _row(count, 0, float(np.mean(contexts)), float(np.median(seconds)))


def prefill(warm: WarmEngine) -> Iterator[Row]:
    """One row per number of prompt tokens, length of a prompt (the longest: all in one) and sequences that decode
    beside: the seconds of such a step, and the share of the matrix rate (of a large product) at which its prompts are
    computed."""
    warm.use_blocks(BLOCK_SIZE)
    tflops, longest = matrix_tflops(warm.loaded.dtype), warm.loaded.config.max_model_len - 1
    for count, tokens, part in product(PREFILL_SEQS, PREFILL_TOKENS, (longest, *SHORT_PROMPTS)):
        if tokens > part or part == longest:
            row = _mixed(warm, count, tokens, GPU_GRID.cycles, part)
            share = 2 * warm.loaded.config.num_parameters * tokens / row["seconds"] / 1e12 / tflops
            yield row | {"kind": "prefill", "prompt": min(part, tokens), "matrix_tflops": tflops, "share": share}


def matrix_tflops(dtype: torch.dtype, size: int = 8192) -> float:
    """Rate of a large square matrix product of random numbers, in 10^12 operations a second."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return 2 * size**3 / eager_time_us([lambda: a @ b] * 4) / 1e6


def _mixed(warm: WarmEngine, count: int, prompt: int, cycles: int, part: int = PROMPT, stored: int = 0) -> Row:
    """A step of `count` short sequences (0: none) that prompts of up to `part` tokens join, `prompt` tokens in all;
    each follows `stored` tokens, a prefix that is there already."""
    durations = Durations()
    engine = warm.engine(durations, config=WHOLE)
    prefix = warm.store_prefix(stored)
    for index in range(count):
        engine.add(warm.submit(Request(index, 0.0, SHORT_CONTEXT, _output(cycles), GREEDY)))
    for _ in range(_SETTLE + 1 if count else 0):
        engine.step()
    plain_s = _seconds(warm, engine, cycles) if count else 0.0
    first, parts = len(durations.seconds), -(-prompt // part)

    def join(cycle: int) -> None:
        for index in range(parts):
            tokens = prompt * (index + 1) // parts - prompt * index // parts
            request = Request(1000 + cycle * parts + index, 0.0, stored + tokens, 1, GREEDY, PREFIX if stored else None)
            engine.add(warm.submit(request, prefix))

    seconds = _seconds(warm, engine, cycles, 2 if count else 1, join)
    context = float(np.mean([context for _, context, *_ in durations.outputs[first:]]))
    return _row(count, prompt, context, seconds - plain_s)


def _seconds(
    warm: WarmEngine, engine: Engine, cycles: int, steps: int = 1, before: Callable[[int], None] = lambda _: None
) -> float:
    """Mean seconds of a cycle of `steps` iterations, from an idle device to an idle device."""
    warm.executor.flush()
    started = time.perf_counter()
    for cycle in range(cycles):
        before(cycle)
        for _ in range(steps):
            engine.step()
    warm.executor.flush()
    return (time.perf_counter() - started) / cycles


def recompute_row(warm: WarmEngine, block_size: int) -> Row:
    """Median seconds of a pass over 256 tokens, from the request to its token on the host, with nothing else to do."""
    with warm.small_pool(block_size, 4 * RECOMPUTED_TOKENS):
        engine = warm.engine()
        seconds = []
        for index in range(12):
            started = time.perf_counter()
            engine.add(warm.submit(Request(index, 0.0, RECOMPUTED_TOKENS, 1, GREEDY)))
            engine.step()
            warm.executor.flush()
            seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds[3:]))
    row = {"kind": "recompute", "block_size": block_size, "tokens": RECOMPUTED_TOKENS, "seconds": median}
    return row | {"evidence": "measured", "device": warm.device_name}
