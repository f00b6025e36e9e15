"""Policies as functions: they decide what they are asked, see what an engine knows, and are refused in one line."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from test_chunked import EachIteration

import repro
from repro.engine.loop import Engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.policies import Seen
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import SYSTEMS, paged_system, system
from repro.errors import UserError
from repro.harness.keys import identify
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor

COSTS = CostModel("test", 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def request(number: int, prompt: int, output: int, n: int = 1, **more: object) -> Request:
    return Request(number, float(more.pop("arrival", 0.0)), prompt, output, SamplingParams(n=n), **more)


def decided(*requests: Request, blocks: int = 1000, cpu_blocks: int = 0, **config: object) -> tuple[list, Scheduler]:
    """The scheduler's events as (kind, request), of a run to the end."""
    log: list = []
    manager = PagedKVCacheManager(blocks, 4, 0.0, cpu_blocks)
    scheduler = Scheduler(manager, SchedulerConfig(**config), log)
    Engine(scheduler, SimulatedExecutor(COSTS)).run(requests)
    return [(event.kind, event.request_id) for event in log], scheduler


def admitted(*requests: Request, **config: object) -> list[int]:
    events, _ = decided(*requests, max_num_seqs=1, **config)
    return [number for kind, number in events if kind == "admit"]


def test_the_order_of_the_queue() -> None:
    asks = [request(0, 9, 2), request(1, 5, 1, priority=1), request(2, 7, 3, priority=-1), request(3, 5, 2)]
    assert admitted(*asks) == admitted(*asks, order="fcfs") == [0, 1, 2, 3]
    assert admitted(*asks, order="priority") == [2, 0, 3, 1]
    assert admitted(*asks, order="shortest_prompt") == [1, 3, 2, 0]
    assert admitted(*asks, order="shortest_output", oracle=True) == [1, 0, 3, 2]
    assert admitted(*asks, order=lambda group: (-group.prompt_tokens, group.priority)) == [0, 2, 3, 1]


def test_one_that_arrives_later_overtakes_those_that_wait_but_not_those_that_run() -> None:
    asks = [request(0, 4, 9), request(1, 8, 1, arrival=1.0), request(2, 4, 1, arrival=5.0)]
    assert admitted(*asks, order="shortest_prompt") == [0, 2, 1]
    # Waiting on room in the batch, a decision may stand for many iterations, but not beyond an arrival.
    assert admitted(*asks) == [0, 1, 2]


@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest_prompt", "shortest_output"])
def test_iterations_advanced_together_never_pass_an_arrival_that_would_overtake(order: str) -> None:
    rng = random.Random(4)
    asks, arrival = [], 0.0
    for number in range(60):
        arrival += rng.expovariate(0.4)
        lengths = rng.randint(1, 30), rng.randint(1, 30)
        asks.append(request(number, *lengths, arrival=arrival, priority=rng.randint(-3, 3)))
    seen = []
    for observers in ((), (EachIteration(),)):
        config = SchedulerConfig(order=order, oracle=True, max_num_seqs=5)
        engine = Engine(Scheduler(PagedKVCacheManager(25, 4), config), SimulatedExecutor(COSTS), observers=observers)
        seen.append([(one.first_token_s, one.finish_s) for one in engine.run(asks)])
    assert seen[0] == seen[1]


def test_an_engine_takes_back_what_it_has_and_nothing_else() -> None:
    engine = Engine(Scheduler(PagedKVCacheManager(25, 4)), SimulatedExecutor(COSTS))
    outcomes = [engine.add(request(number, 9, 9)) for number in range(3)]
    engine.step()
    engine.abort(1)
    assert engine.scheduler.manager.num_free_blocks == 25 - 2 * 3
    while engine.scheduler.has_work:
        engine.step()
    assert [math.isnan(one.finish_s) for one in outcomes] == [False, True, False]
    for number in (1, 0, 7):
        with pytest.raises(UserError, match=f"request {number} is not here: it was never added, or it has ended"):
            engine.abort(number)


#: two that grow into a pool of 5 blocks of 4, at different times, until one has to go
CROWDED = (request(0, 6, 9), request(1, 7, 8))


def victims(**config: object) -> list[int]:
    events, _ = decided(*CROWDED, blocks=5, **config)
    return [number for kind, number in events if kind == "preempt"]


def test_the_victim_of_a_preemption() -> None:
    assert victims() == victims(victim="last") == victims(victim=lambda groups: groups[-1]) == [1]
    assert victims(victim=lambda groups: groups[0])[0] == 0
    assert victims(victim=lambda groups: max(groups, key=lambda one: one.request_id))[0] == 1
    assert victims(order=lambda group: -group.request_id)[0] == 0  # the last in the queue's order goes


def test_whether_to_swap_or_to_recompute() -> None:
    modes = []
    for swaps in (lambda group: True, lambda group: False, lambda group: group.num_generated > 100):
        _, scheduler = decided(*CROWDED, blocks=5, cpu_blocks=9, preemption=swaps)
        assert scheduler.num_preemptions
        log: list = []
        manager = PagedKVCacheManager(5, 4, 0.0, 9)
        Engine(Scheduler(manager, SchedulerConfig(preemption=swaps), log), SimulatedExecutor(COSTS)).run(CROWDED)
        modes.append({event.detail["mode"] for event in log if event.kind == "preempt"})
    assert modes == [{"swap"}, {"recompute"}, {"recompute"}]


def test_a_policy_sees_what_an_engine_knows() -> None:
    seen: list[Seen] = []
    victims(victim=lambda groups: (seen.extend(groups), groups[-1])[1])
    assert [(one.request_id, one.prompt_tokens, one.num_seqs, one.num_preemptions) for one in seen] == [
        (0, 6, 1, 0),
        (1, 7, 1, 0),
    ]
    assert all(one.num_generated > 0 and not one.use_beam_search for one in seen)
    assert "request 0 of 6 + " in repr(seen[0])
    with pytest.raises(
        UserError, match="asks for output_tokens, which no engine knows; give the scheduler oracle=True"
    ):
        admitted(request(0, 1, 1), order="shortest_output")
    assert not hasattr(seen[0], "request")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"order": lambda group: "first"}, "the order policy <lambda> returned 'first', line "),
        ({"order": lambda group: float("nan")}, "the order policy <lambda> returned nan, line "),
        ({"order": lambda group: group.nothing}, "raised AttributeError: 'Seen' object has no attribute 'nothing'"),
        ({"victim": lambda groups: 0}, "the victim policy <lambda> returned 0, line "),
        ({"victim": lambda groups: groups[9]}, "raised IndexError"),
        ({"preemption": lambda group: 1}, "the preemption policy <lambda> returned 1, line "),
        ({"order": "lifo"}, "unknown order 'lifo'; known: fcfs, priority, shortest_output, shortest_prompt"),
        ({"order": 3}, "order = 3 cannot be used; give a function, or one of fcfs, "),
        ({"victim": "first"}, "unknown victim 'first'; known: last"),
        ({"oracle": 1}, "oracle = 1 cannot be used; give True or False"),
    ],
)
def test_a_policy_that_is_none_is_one_line(config: dict, said: str) -> None:
    with pytest.raises(UserError) as error:
        decided(*CROWDED, blocks=5, **config)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_system_of_ones_own_is_told_apart_by_the_source_of_its_policies() -> None:
    def shorter(group: Seen) -> int:
        return group.prompt_tokens

    mine, usual = paged_system("mine", order=shorter), paged_system("mine")
    assert "order = shorter" in repr(mine) and "victim" not in repr(usual)
    keys = {identify(decided, {"system": one}).key for one in (mine, usual, replace(usual, scheduler=mine.scheduler))}
    assert len(keys) == 2
    assert usual.scheduler == system("vllm").scheduler and usual.scheduler.preemption is PreemptionMode.BY_GROUP
    try:
        repro.register(mine)
        trace = repro.make_trace("alpaca", 40.0, 10.0, seed=0)
        served = repro.serve("mine", "opt-13b", trace)
        assert len(served.outcomes) == len(trace)
        assert repro.serve("vllm", "opt-13b", trace).latency_s_per_token > 0
    finally:
        SYSTEMS.pop("mine", None)
