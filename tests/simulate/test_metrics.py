"""Metrics against brute force over every single iteration."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import (
    ContiguousKVCacheManager,
    KVCacheManager,
    MemoryUsage,
    PagedKVCacheManager,
    reserve_max,
    reserve_oracle,
)
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import BatchAverage, UsageSamples, normalized_latency_s

COST = CostModel(
    "test",
    fixed_s=0.0262,
    per_seq_s=0.00019,
    per_group_s=0.00022,
    per_context_token_s=1.3e-6,
    per_prefill_token_s=0.00017,
    weight_read_s=0.0,
    copy_per_block_s=0.0003,
    swap_per_block_s=0.0011,
)


def run(requests: list[Request], manager: KVCacheManager, *observers: Observer) -> list[Outcome]:
    return Engine(Scheduler(manager), SimulatedExecutor(COST), observers=observers).run(requests)


class Everything(Observer):
    """One row per iteration: its start and end, who ran, and the memory at its end. Single steps."""

    next_s = -1.0

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, int, MemoryUsage]] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        assert output.num_iterations == 1
        usage = engine.scheduler.manager.usage(engine.scheduler.stored_lengths(output.iteration))
        self.rows.append((start_s, engine.clock.now, len(engine.scheduler.running), usage))


@pytest.mark.parametrize("window", ((0.0, 1e9, 1.0), (3.1, 21.7, 0.5), (5.0, 5.4, 0.1)))
@pytest.mark.parametrize(
    "build",
    (
        lambda: PagedKVCacheManager(60),
        lambda: ContiguousKVCacheManager(83, reservation=reserve_oracle, max_model_len=72),
        lambda: ContiguousKVCacheManager(83, reservation=reserve_max, max_model_len=72),
    ),
    ids=("paged", "oracle", "max"),
)
def test_batch_average_and_usage_samples_against_brute_force(
    build: Callable[[], KVCacheManager], window: tuple[float, float, float]
) -> None:
    start, stop, interval = window
    rng = np.random.default_rng(1)
    requests = []
    for number in range(60):
        prompt, output = int(rng.integers(1, 36)), int(rng.integers(1, 36))
        requests.append(Request(number, number // 3, prompt, output, SamplingParams(n=1 + number % 2)))
    everything = Everything()
    run(requests, build(), everything)
    average, samples = BatchAverage(start, stop), UsageSamples(start, stop, interval)
    run(requests, build(), average, samples)

    seconds = [max(0.0, min(end, stop) - max(begin, start)) for begin, end, _, _ in everything.rows]
    expected = sum(s * row[2] for s, row in zip(seconds, everything.rows)) / sum(seconds)
    assert average.mean == pytest.approx(expected, rel=1e-9) and average.mean > 1

    usages, moment = [], start
    for _, end, _, usage in everything.rows:
        if end >= moment and moment < stop:
            usages.append(usage)
            while moment <= end:  # an iteration longer than the interval passes several moments
                moment += interval
    assert samples.samples == usages and len(usages) > 2
    shares = [usage.token_states / usage.total for usage in usages]
    assert samples.mean("token_states") == pytest.approx(np.mean(shares))
    assert samples.saving == pytest.approx(
        np.mean([1 - usage.physical_blocks / usage.logical_blocks for usage in usages])
    )
    parts = ("token_states", "reserved", "internal", "rounding", "free")
    assert sum(samples.mean(part) for part in parts) == pytest.approx(1)


def test_normalized_latency_is_the_mean_over_requests() -> None:
    requests = [Request(0, 0.0, 4, 2, SamplingParams()), Request(1, 0.1, 4, 40, SamplingParams())]
    first, second = run(requests, PagedKVCacheManager(100))
    expected = (first.finish_s / 2 + (second.finish_s - 0.1) / 40) / 2
    assert normalized_latency_s([first, second]) == pytest.approx(expected)


def test_a_window_in_which_nothing_ran_has_no_average() -> None:
    average = BatchAverage(1e6, 2e6)
    run([Request(0, 0.0, 4, 2, SamplingParams())], PagedKVCacheManager(100), average)
    assert math.isnan(average.mean)
