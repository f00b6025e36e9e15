"""The engine in virtual and in real time; iterations advanced together against single ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from event_log import check_log
from hypothesis import given, settings
from loads import Load, contiguous, loads, paged

from repro.engine import clock as clock_module
from repro.engine.clock import VirtualClock, WallClock
from repro.engine.events import Event
from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine, Observer
from repro.engine.memory import CacheOp, KVCacheManager, PagedKVCacheManager, reserve_pow2
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import OF_THE_PAPER, SYSTEMS
from repro.errors import UserError
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import BatchAverage, UsageSamples

# Awkward numbers, so that sums in another order would differ in their last bits.
COSTS = {
    "per sequence": CostModel(
        "test",
        fixed_s=0.0262,
        per_seq_s=0.00041,
        per_group_s=0.0,
        per_context_token_s=0.0,
        per_prefill_token_s=0.00017,
        weight_read_s=0.0,
        copy_per_block_s=0.0003,
        swap_per_block_s=0.0011,
    ),
    "per context token": CostModel(
        "test",
        fixed_s=0.0262,
        per_seq_s=0.00019,
        per_group_s=0.00022,
        per_context_token_s=1.3e-6,
        per_prefill_token_s=0.00017,
        weight_read_s=0.011,
        copy_per_block_s=0.0003,
        swap_per_block_s=0.0011,
    ),
}


class Recorder(SimulatedExecutor):
    """Keeps the copies and swaps, and what each output decided, iteration by iteration."""

    def __init__(self, cost_model: CostModel, together: bool) -> None:
        super().__init__(cost_model)
        self.together = together
        self.num_outputs = 0
        self.ops: list[CacheOp] = []
        self.iterations: list[tuple] = []

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return super().lookahead(output, now_s, until_s) if self.together else 1

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.num_outputs += 1
        self.ops += output.cache_ops
        running = [group.request.request_id for group in output.decodes]
        for step in range(output.num_iterations):
            self.iterations.append(
                (
                    output.iteration + step,
                    running,
                    len(output.prefills),
                    output.num_prefill_tokens,
                    output.context_tokens + step * output.num_decode_seqs,
                )
            )
        return super().execute(output)


@dataclass
class Run:
    """Everything that two runs of the same requests can be compared by."""

    times: list[tuple[float, float, int]]
    log: list[Event]
    ops: list[CacheOp]
    iterations: list[tuple]
    tables: list[tuple[int, list[list[int]]]] = field(default_factory=list)  # of each group when it was freed


def simulate(
    requests: list[Request],
    manager: KVCacheManager,
    config: SchedulerConfig,
    cost: CostModel,
    together: bool,
    observers: tuple[Observer, ...] = (),
) -> tuple[Run, int]:
    tables: list[tuple[int, list[list[int]]]] = []
    free = manager.free

    def recorded(group: SequenceGroup) -> None:
        tables.append((group.request.request_id, [list(manager.block_table(seq)) for seq in group.seqs]))
        free(group)

    manager.free = recorded
    log: list[Event] = []
    executor = Recorder(cost, together)
    outcomes = Engine(Scheduler(manager, config, log), executor, VirtualClock(), observers).run(requests)
    assert [outcome.request for outcome in outcomes] == requests
    times = [(outcome.first_token_s, outcome.finish_s, outcome.num_preemptions) for outcome in outcomes]
    return Run(times, log, executor.ops, executor.iterations, tables), executor.num_outputs


def without_arrivals(run: Run) -> Run:
    """An arrival that cannot change anything is told only when the iterations advanced together are over."""
    return replace(run, log=[event for event in run.log if event.kind != "arrive"])


def poisson(rate: float, count: int, seed: int, longest: int = 120, n: int = 1) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [
        Request(
            number,
            float(arrivals[number]),
            int(rng.integers(1, 100)),
            int(rng.integers(1, longest)),
            SamplingParams(n=n),
        )
        for number in range(count)
    ]


VARIANTS = {name: (SYSTEMS[name], 1) for name in OF_THE_PAPER} | {
    "vllm, always swap": (SYSTEMS["vllm"].with_scheduler(preemption=PreemptionMode.SWAP), 1),
    "vllm, 3 samples": (SYSTEMS["vllm"], 3),
    "vllm, narrow": (SYSTEMS["vllm"].with_scheduler(max_num_seqs=7, max_num_batched_tokens=150), 1),
    "orca-pow2, 2 samples": (SYSTEMS["orca-pow2"], 2),
    "faster-transformer, 4": (SYSTEMS["faster-transformer"].with_scheduler(max_num_seqs=4), 1),
}


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rate", (0.2, 1.5, 12.0))
def test_advancing_together_decides_exactly_as_single_steps(variant: str, rate: float, cost: str) -> None:
    """Same events, blocks, copies and, to the last bit, times: from nearly idle to hopelessly overloaded."""
    system, n = VARIANTS[variant]
    requests = poisson(rate, 40, seed=3, n=n)
    runs = []
    for together in (True, False):
        observers = (UsageSamples(0.0, math.inf, 0.37), BatchAverage(1.0, 20.0))
        manager = system.manager(83, 16, 256, num_cpu_blocks=60)
        run, num_outputs = simulate(requests, manager, system.scheduler, COSTS[cost], together, observers)
        unobserved, fewer = simulate(
            requests, system.manager(83, 16, 256, num_cpu_blocks=60), system.scheduler, COSTS[cost], together
        )
        assert without_arrivals(unobserved) == without_arrivals(run) and fewer <= num_outputs
        runs.append(
            (without_arrivals(run), observers[0].samples, pytest.approx(observers[1].mean, rel=1e-12), num_outputs)
        )
        check_log(run.log, requests, system.scheduler)
    together, single = runs
    assert together[:2] == single[:2]
    assert together[2].expected == single[2]
    assert together[3] < single[3] == len(single[0].iterations)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_advancing_together_under_scarcity(mode: PreemptionMode) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60)
    @given(loads("mixed"))
    def check(load: Load) -> None:
        for build in (paged, contiguous(reserve_pow2)):
            batching = Batching.REQUEST if build is not paged and load.seed % 2 else Batching.ITERATION
            config = load.config(mode, batching)
            requests = [replace_beams(request, keep=load.seed % 3 == 0) for request in load.requests]
            runs = [
                simulate(requests, load.scheduler(build, config).manager, config, COSTS["per context token"], together)
                for together in (True, False)
            ]
            (together, fewer), (single, more) = runs
            assert without_arrivals(together) == without_arrivals(single)
            seen.update(event.kind for event in single.log)
            seen["saved"] += more - fewer

    check()
    assert seen["preempt"] and seen["saved"] > 1000
    assert bool(seen["resume"]) == (mode is not PreemptionMode.RECOMPUTE)


def replace_beams(request: Request, keep: bool) -> Request:
    """Beams are never advanced together, so most runs do without; arrivals come several a second."""
    sampling = request.sampling if keep else SamplingParams(n=request.sampling.n)
    return Request(request.request_id, request.arrival_s / 8, request.prompt_tokens, request.output_tokens, sampling)


def test_a_run_twice_gives_identical_events() -> None:
    requests = poisson(6.0, 60, seed=5)
    runs = [
        simulate(
            requests,
            PagedKVCacheManager(40, 16, num_cpu_blocks=40),
            SchedulerConfig(),
            COSTS["per context token"],
            together=True,
        )[0]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert {"arrive", "admit", "append", "preempt", "finish"} == {event.kind for event in runs[0].log}


# Time


FLAT = CostModel(
    "test",
    fixed_s=1.0,
    per_seq_s=0.25,
    per_group_s=0.0,
    per_context_token_s=0.0,
    per_prefill_token_s=0.5,
    weight_read_s=0.0,
    copy_per_block_s=0.0,
    swap_per_block_s=0.0,
)


def run_flat(*requests: Request) -> list:
    return Engine(Scheduler(PagedKVCacheManager(100)), SimulatedExecutor(FLAT)).run(requests)


def test_one_request_takes_its_prompt_and_its_steps() -> None:
    (outcome,) = run_flat(Request(0, 2.0, 4, 5, SamplingParams()))
    assert outcome.first_token_s == 2.0 + 1.25 + 2.0  # the engine waited for the arrival
    assert outcome.finish_s == outcome.first_token_s + 4 * 1.25
    assert outcome.normalized_latency_s == (outcome.finish_s - 2.0) / 5


def test_an_arrival_joins_the_next_iteration() -> None:
    first, second = run_flat(Request(0, 0.0, 2, 9, SamplingParams()), Request(1, 4.0, 2, 1, SamplingParams()))
    # 0 starts at 0 and decodes at 2.25 and 3.5; 1 arrives at 4 and joins at 4.75, in 1 + 0.5 + 1 s.
    assert second.first_token_s == second.finish_s == 4.75 + 2.5
    assert first.finish_s == 2.25 + 7 * 1.25 + 2.5


def test_an_arrival_at_the_very_end_of_an_iteration_is_in_time() -> None:
    _, second = run_flat(Request(0, 0.0, 2, 9, SamplingParams()), Request(1, 4.75, 2, 1, SamplingParams()))
    assert second.finish_s == 4.75 + 2.5


def test_the_first_token_is_the_first_one_even_if_it_is_computed_again() -> None:
    requests = [Request(0, 0.0, 8, 6, SamplingParams()), Request(1, 0.0, 8, 3, SamplingParams())]
    outcomes = Engine(Scheduler(PagedKVCacheManager(4, 4, watermark=0)), SimulatedExecutor(FLAT)).run(requests)
    assert [outcome.num_preemptions for outcome in outcomes] == [0, 1]
    assert outcomes[0].first_token_s == outcomes[1].first_token_s == 1.5 + 8
    assert outcomes[1].finish_s > outcomes[0].finish_s


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(UserError, match="request 1 .*does not fit"):
        Engine(Scheduler(PagedKVCacheManager(10)), SimulatedExecutor(FLAT)).run(
            [Request(0, 0.0, 10, 10, SamplingParams()), Request(1, 0.5, 1000, 10, SamplingParams())]
        )


class Never(Scheduler):
    def may_start(self, group: SequenceGroup) -> bool:
        return False


def test_a_rule_that_lets_nothing_run_is_an_error_and_no_endless_loop() -> None:
    engine = Engine(Never(PagedKVCacheManager(8)), SimulatedExecutor(next(iter(COSTS.values()))))
    with pytest.raises(RuntimeError, match=r"nothing can run, now or later: \[SequenceGroup\(0, waiting"):
        engine.run([Request(number, float(number), 4, 4, SamplingParams()) for number in range(2)])


class Scripted(Executor):
    """Re-parents beams onto the first one, stops the request's sequences one by one, and takes its time."""

    def __init__(self, sleep: object = None) -> None:
        self.sleep = sleep
        self.steps = 0

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.steps += 1
        assert output.num_iterations == 1  # what cannot be known in advance is not advanced together
        if self.sleep:
            self.sleep(0.125)
        groups = output.decodes + [prefill.group for prefill in output.prefills]
        parents = {group: [0] * len(group.seqs) for group in groups if group.is_beam}
        stopped = [(group, group.seqs[-1]) for group in groups if self.steps % 2 == 0]
        return StepResult([100.0], parents, stopped)


def test_parents_and_stops_reach_the_scheduler() -> None:
    log: list[Event] = []
    request = Request(0, 0.0, 5, 50, SamplingParams(n=3, use_beam_search=True))
    (outcome,) = Engine(Scheduler(PagedKVCacheManager(100), log=log), Scripted()).run([request])
    assert outcome.finish_s == 600.0  # a sequence every second step
    assert [event.kind for event in log].count("fork") == 6
    assert log[-1] == Event(6, "finish", 0, {"tokens": 6})


class FakeTime(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(now=1000.0, slept=[])

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


def test_the_wall_clock_is_read_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTime()
    monkeypatch.setattr(clock_module, "time", fake)
    requests = [Request(0, 0.5, 4, 2, SamplingParams(n=1)), Request(1, 2.0, 4, 40, SamplingParams(n=1))]
    outcomes = Engine(Scheduler(PagedKVCacheManager(100)), Scripted(fake.sleep), WallClock()).run(requests)
    # 0 arrives at 0.5 and takes two steps; then nothing happens until 2.0; 1 stops at its second step.
    assert [(outcome.first_token_s, outcome.finish_s) for outcome in outcomes] == [(0.625, 0.75), (2.125, 2.25)]
    assert fake.slept == [0.5, 0.125, 0.125, 1.25, 0.125, 0.125]
    clock = WallClock()
    clock.spend([5.0])
    clock.wait_until(-1.0)
    assert clock.now == 0.0


def test_the_wall_clock_really_runs() -> None:
    clock = WallClock()
    clock.wait_until(0.01)
    assert 0.01 <= clock.now < 5.0
