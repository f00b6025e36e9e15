"""How long the steps of the real engine take on this machine: the grid under `repro.executor.step_times.StepTimes`.

A cell is a number of decoding sequences with short or long contexts, or with prompts of one length joining in every second
iteration. On a GPU a step is waited for while the next one is queued, so single durations mean little and means over many
steps everything. The grid is bounded by the pool: it is what the runs to be predicted can reach.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.executor.torch.runner import BATCH_BUCKETS
from repro.measure.bench import Bench, Durations
from repro.measure.load import BLOCK_SIZE, GREEDY
from repro.sequence import Request

SHORT_CONTEXT = 8
_SETTLE = 3  # steps that pass before a duration counts


@dataclass(frozen=True)
class Grid:
    """Numbers of sequences that decode alone, `steps` each; of those that decode beside prompts, and of the prompts' tokens,
    `cycles` each. What the pool cannot hold is left out."""

    seqs: tuple[int, ...]
    mixed_seqs: tuple[int, ...]
    mixed_prompt: tuple[int, ...]
    steps: int
    cycles: int


GPU_GRID = Grid(BATCH_BUCKETS, (0, 8, 32, 96, 192), (16, 64, 256, 1024, 2000), steps=24, cycles=8)
CPU_GRID = Grid((1, 4, 16, 40), (0, 4, 32), (8, 64, 256), steps=8, cycles=2)


def cells(bench: Bench) -> Iterator[dict[str, Any]]:
    """One row per cell."""
    grid = GPU_GRID if bench.on_gpu else CPU_GRID
    slots = bench.num_blocks * BLOCK_SIZE
    for count in grid.seqs:
        longest = min(bench.loaded.config.max_model_len, int(0.9 * slots) // count) - grid.steps - _SETTLE - BLOCK_SIZE
        for context in (SHORT_CONTEXT, longest):
            if longest >= 2 * SHORT_CONTEXT:
                yield _decode(bench, count, context, grid.steps)
    room = int(0.9 * slots)
    for count in grid.mixed_seqs:
        if count * (SHORT_CONTEXT + 4 * grid.cycles + BLOCK_SIZE) <= room // 2:
            for prompt in grid.mixed_prompt:
                if prompt <= min(room // 4, bench.loaded.config.max_model_len - 1):
                    yield _mixed(bench, count, prompt, grid.cycles)


def _row(seqs: int, prompt: int, context: float, seconds: float) -> dict[str, Any]:
    return {"kind": "step", "seqs": seqs, "prompt_tokens": prompt, "context_tokens": context, "seconds": seconds,
            "evidence": "measured"}


def _decode(bench: Bench, count: int, context: int, steps: int) -> dict[str, Any]:
    """A step of `count` sequences, each with about `context` tokens."""
    durations = Durations()
    length = steps + _SETTLE + 1
    bench.serve([Request(index, 0.0, context, length, GREEDY) for index in range(count)], durations)
    alone = [(seconds, shape) for seconds, shape in zip(durations.seconds, durations.outputs) if shape[:1] == (count,) and not shape[2]]
    alone = alone[_SETTLE:]
    return _row(count, 0, float(np.mean([shape[1] for _, shape in alone])), float(np.median([seconds for seconds, _ in alone])))


def _mixed(bench: Bench, count: int, prompt: int, cycles: int) -> dict[str, Any]:
    """A step of `count` short sequences that a prompt joins; without sequences, of prompts alone."""
    durations = Durations()
    engine = bench.engine(durations)
    for index in range(count):
        engine.add(bench.submit(Request(index, 0.0, SHORT_CONTEXT, 2 * cycles + 2 * _SETTLE + 8, GREEDY)))
    for _ in range(2 * _SETTLE if count else 0):
        engine.step()
    plain_s = float(np.median(durations.seconds[_SETTLE:])) if count else 0.0
    bench.executor.flush()
    first, started = len(durations.seconds), time.perf_counter()
    for cycle in range(cycles):
        engine.add(bench.submit(Request(1000 + cycle, 0.0, prompt, 1, GREEDY)))
        for _ in range(2 if count else 1):
            engine.step()
    bench.executor.flush()
    seconds = (time.perf_counter() - started) / cycles - plain_s
    return _row(count, prompt, float(np.mean([context for _, context, _ in durations.outputs[first:]])), seconds)
