"""What a serving run is and how it is counted, in virtual time: windows, marks, latencies, predictions."""

from dataclasses import replace

import numpy as np
import pytest

from repro.engine.clock import VirtualClock
from repro.engine.config import DEVICES, MODELS, Deployment
from repro.engine.loop import Engine
from repro.engine.memory import ContiguousKVCacheManager, reserve_oracle
from repro.engine.scheduler import Batching, Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.engine.systems import SYSTEMS
from repro.errors import UserError
from repro.simulate import load
from repro.simulate.clock import QueuedClock
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.load import GREEDY, NUM_PARTS, FirstTokens, Load, Window, predict, run
from repro.simulate.metrics import PIECES
from repro.simulate.step_times import StepTimes

MAX_LEN = 512
DEPLOYMENT = Deployment(MODELS["opt-125m"], DEVICES["a100-40gb"], 1, 2048)
WINDOW = dict(warm_s=2.0, stop_s=12.0, max_model_len=MAX_LEN)


def constant(step_s, per_context_s=0.0):
    return StepTimes("constant", False, (1,), (step_s,), per_context_s, (0,), (1,), ((step_s,),), step_s)


class OneByOne(SimulatedExecutor):
    """Advances no iterations together."""

    def lookahead(self, output, now_s, until_s):
        return 1


# Windows


def watched(scheduler, requests, window, steps, executor=SimulatedExecutor):
    engine = Engine(scheduler, executor(steps), VirtualClock(), [window])
    engine.run(requests)
    return engine


def request_level(requests, window, step_s=1.0):
    config = SchedulerConfig(batching=Batching.REQUEST, max_num_seqs=4, max_num_batched_tokens=None)
    manager = ContiguousKVCacheManager(64, 16, reservation=reserve_oracle, max_model_len=MAX_LEN)
    return watched(Scheduler(manager, config), requests, window, constant(step_s))


def requests(*lengths, n=1):
    sampling = GREEDY if n == 1 else SamplingParams(n=n, ignore_eos=True)
    return [Request(index, 0.0, 10, length, sampling) for index, length in enumerate(lengths)]


def test_members_of_a_static_batch_that_have_finished_give_no_useful_tokens():
    """Outputs of 2 and 5 tokens, a second a step: the prompts' step gives two tokens, one step gives two, three steps
    give one."""
    window = Window(0.0, 5.0)
    request_level(requests(2, 5), window)
    assert window.tokens.tolist() == [2, 2, 1, 1, 1]
    assert window.iterations == 5 and window.prompt_tokens == 20


def test_each_sample_of_a_request_counts():
    window = Window(0.0, 5.0)
    request_level(requests(2, 5, n=2), window)
    assert window.tokens.tolist() == [4, 4, 2, 2, 2]


def test_an_iteration_over_an_edge_counts_by_the_share_of_its_time():
    window = Window(0.5, 3.0)  # parts of half a second; steps of a second with 2, 2 and 1 useful tokens
    request_level(requests(2, 5), window)
    assert window.tokens == pytest.approx([1, 1, 1, 0.5, 0.5])
    assert window.iterations == pytest.approx(2.5) and window.prompt_tokens == pytest.approx(10)
    assert window.rates == pytest.approx([2, 2, 2, 1, 1])
    longer = Window(0.25, 1.5)
    request_level(requests(3), longer, step_s=2.0)  # one iteration is longer than the window
    assert longer.tokens == pytest.approx([0.125] * NUM_PARTS) and longer.iterations == pytest.approx(0.625)


def test_steps_that_grow_are_told_apart_by_the_windows_edges():
    """One request whose steps become ten times as long: those before, between and after the edges are not averaged."""
    config, growing, found = SchedulerConfig(), constant(0.01, 3e-4), []
    for executor in (SimulatedExecutor, OneByOne):
        window = Window(2.0, 8.0)
        manager = Load("vllm", "alpaca", None, 0.0, 1.0).manager_on(DEPLOYMENT)
        watched(Scheduler(manager, config), requests(350), window, growing, executor)
        found.append(window)
    assert found[0].tokens == pytest.approx(found[1].tokens, rel=0.01)
    assert found[1].tokens[0] > 1.5 * found[1].tokens[-1] > 0


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_window_around_everything_counts_each_token_of_the_trace_once(name, n):
    """Preempted requests compute their tokens again, static batches compute more than was asked for: neither counts
    twice."""
    asked = Load(name, "alpaca", None, 0.0, 0.5, n=n, max_model_len=MAX_LEN)
    window = Window(0.0, 1e6)
    engine = watched(
        asked.system_on(DEPLOYMENT).decide(asked.manager_on(DEPLOYMENT)),
        asked.requests,
        window,
        constant(0.1),
        OneByOne,
    )
    assert window.tokens.sum() == pytest.approx(n * asked.trace.output_tokens.sum())
    assert window.prompt_tokens >= asked.trace.prompt_tokens.sum() * (1 - 1e-9)
    assert window.iterations == pytest.approx(engine.scheduler.iteration)
    assert (engine.scheduler.num_preemptions > 0) is name.startswith("vllm")


def test_the_parts_add_up_to_the_window():
    asked = Load("vllm", "alpaca", None, 2.0, 12.0, max_model_len=MAX_LEN)
    counted = {}
    for start, stop in ((2.0, 12.0), *zip(np.arange(2.0, 12.0, 2.0), np.arange(4.0, 14.0, 2.0))):
        window = counted[start, stop] = Window(start, stop)
        watched(
            asked.system_on(DEPLOYMENT).decide(asked.manager_on(DEPLOYMENT)),
            asked.requests[:400],
            window,
            constant(0.037),
            OneByOne,
        )
    whole = counted.pop((2.0, 12.0))
    assert whole.tokens == pytest.approx([window.tokens.sum() for window in counted.values()])
    assert whole.iterations == pytest.approx(sum(window.iterations for window in counted.values()))


# Runs


def both(asked, steps):
    """The same run with iterations advanced together and one by one."""
    return [
        run(asked, DEPLOYMENT, executor(steps), VirtualClock(), asked.manager_on(DEPLOYMENT), asked.requests)
        for executor in (SimulatedExecutor, OneByOne)
    ]


def assert_close(one, other, rel):
    assert one.keys() == other.keys()
    for name, value in one.items():
        close = (
            value == other[name]
            if isinstance(value, str | None)
            else value == pytest.approx(other[name], rel=rel, abs=1e-9)
        )
        assert close, f"{name}: {value} and {other[name]}"


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("rate", [None, 3.0, 30.0])
def test_iterations_advanced_together_give_the_numbers_of_single_ones(name, rate):
    asked = Load(name, "alpaca", rate, **WINDOW)
    together, single = both(asked, constant(0.03))
    assert_close(together, single, rel=1e-9)
    # Where steps grow, a part of the window takes its share of iterations as if those advanced together took equally
    # long, and so do gaps.
    together, single = both(asked, constant(0.03, 1e-5))
    parts = {"tokens_per_s_low", "tokens_per_s_high", "gap_median_s", "gap_99_s"}
    assert_close({**together, **dict.fromkeys(parts)}, {**single, **dict.fromkeys(parts)}, rel=1e-3)
    for part in parts:
        assert together[part] == pytest.approx(single[part], rel=0.02)


def test_a_prediction_is_a_run_in_virtual_time_and_says_what_it_is():
    asked = Load("vllm", "alpaca", None, **WINDOW)
    found = predict(asked, DEPLOYMENT, constant(0.03))
    assert found["evidence"] == "modelled" and found["device"] == "constant"
    assert both(asked, constant(0.03))[0].items() <= found.items()
    assert sum(found[piece] for piece in PIECES) == pytest.approx(1)
    assert found["tokens_per_s_low"] <= found["tokens_per_s"] <= found["tokens_per_s_high"]
    assert found["finished_rate"] * asked.trace.output_tokens.mean() == pytest.approx(found["tokens_per_s"])
    assert (
        found["trace_hash"] == asked.trace.hash
        and found["kind"] == "saturated"
        and found["latency_s_per_token"] is None
    )


def test_saturated_requests_are_all_there_at_the_start_and_are_exactly_as_long_as_the_trace_says():
    asked = Load("vllm", "alpaca", None, n=2, **WINDOW)
    assert not asked.trace.arrival_s.any() and len(asked.trace) > 2000
    for request, prompt, output in zip(asked.requests, asked.trace.prompt_tokens, asked.trace.output_tokens):
        assert (request.prompt_tokens, request.output_tokens, request.arrival_s) == (prompt, output, 0.0)
        assert request.sampling == SamplingParams(n=2, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize(
    "rate, step_s, mark",
    [
        (None, 0.03, "steady"),
        (None, 2e-3, "queue ran empty"),
        (8.0, 0.005, "steady"),
        (100.0, 0.03, "overloaded"),
        (2.0, 0.005, "too short"),
    ],
)
def test_marks(rate, step_s, mark):
    pool = replace(DEPLOYMENT, kv_slots=2048 if mark != "queue ran empty" else 200_000)
    found = predict(Load("vllm", "alpaca", rate, **WINDOW), pool, constant(step_s))
    assert found["mark"] == mark
    assert (found["num_unfinished"] > 0) is (mark == "overloaded")


def test_the_latency_of_an_overloaded_run_is_a_lower_bound(monkeypatch):
    asked = Load("vllm", "alpaca", 100.0, **WINDOW)
    bound = predict(asked, DEPLOYMENT, constant(0.03))
    monkeypatch.setattr(load, "END", 1000)
    whole = predict(asked, DEPLOYMENT, constant(0.03))
    assert bound["num_unfinished"] > 0 == whole["num_unfinished"]
    assert bound["latency_s_per_token"] < whole["latency_s_per_token"]
    assert bound["mark"] == whole["mark"] == "overloaded"
    same = ("tokens_per_s", "mean_batch", "token_states", "num_finished", "preemptions")
    assert [bound[name] for name in same] == pytest.approx(
        [whole[name] for name in same]
    )  # the window has passed by then


def test_only_requests_that_arrive_in_the_window_have_a_latency():
    """Ten of 12 s are warm-up: the mean is that of the others alone."""
    asked = Load("vllm", "alpaca", 5.0, 10.0, 12.0, max_model_len=MAX_LEN)
    engine = Engine(
        Scheduler(asked.manager_on(DEPLOYMENT), asked.system_on(DEPLOYMENT).scheduler),
        SimulatedExecutor(constant(0.03)),
    )
    late = [outcome.normalized_latency_s for outcome in engine.run(asked.requests) if outcome.request.arrival_s >= 10.0]
    assert 5 < len(late) < 20
    assert predict(asked, DEPLOYMENT, constant(0.03))["latency_s_per_token"] == pytest.approx(np.mean(late))


def test_a_window_in_which_nothing_happens_has_no_numbers_that_are_none():
    asked = Load("vllm", "alpaca", 1.0, 11.99, 12.0, max_model_len=MAX_LEN)
    found = predict(asked, DEPLOYMENT, constant(1e-3))
    assert not (asked.trace.arrival_s >= 11.99).any()
    assert found["latency_s_per_token"] is None and found["mark"] == "too short"
    assert found["mean_batch"] is None and found["token_states"] is None and found["tokens_per_s"] == 0


@pytest.mark.parametrize(
    "bad, named",
    [
        (dict(warm_s=-1.0), "window"),
        (dict(warm_s=3.0), "window"),
        (dict(stop_s=float("inf")), "window"),
        (dict(warm_s=float("nan")), "window"),
        (dict(workload="wmt"), "unknown workload 'wmt'; known: alpaca, sharegpt"),
        (dict(prefix_tokens=80), "prefix_tokens = 80: prompts of alpaca share none"),
        (dict(block_size=24), "block_size = 24"),
        (dict(preemption="never"), "unknown preemption 'never'; known: recompute, swap"),
        (dict(beams=True, n=3), "no recording of 3 beams"),
        (dict(beams=True, n=2, workload="translation"), "unknown workload of recorded beams 'translation'"),
    ],
)
def test_a_load_that_cannot_be_is_refused(bad, named):
    with pytest.raises(UserError, match=named):
        Load(**(dict(system="vllm", workload="alpaca", rate=None, warm_s=1.0, stop_s=3.0) | bad))


# An engine that queues a step ahead


def test_a_queued_clock_decides_an_iteration_while_the_one_before_it_runs():
    clock = QueuedClock()
    clock.spend([2.0])
    assert clock.now == pytest.approx(0.0, abs=1e-6) and clock.known_s == 2.0
    clock.spend([3.0])
    assert (clock.now, clock.known_s) == (2.0, 5.0)
    clock.spend([1.0, 1.0, 1.0])  # three together: the last of them runs
    assert (clock.now, clock.known_s) == (7.0, 8.0)
    clock.wait_until(20.0)
    clock.spend([4.0])
    assert clock.now == pytest.approx(20.0) and clock.known_s == 24.0


def test_a_request_waits_for_the_iterations_that_are_queued_already():
    """Steps of a second: one that arrives half-way through a step joins the second step after it."""
    firsts = []
    for clock in (VirtualClock(), QueuedClock()):
        seen = FirstTokens(0.0)
        scheduler = Scheduler(Load("vllm", "alpaca", None, 0.0, 1.0).manager_on(DEPLOYMENT), SchedulerConfig())
        late = Request(1, 4.5, 10, 3, GREEDY)
        Engine(scheduler, SimulatedExecutor(constant(1.0)), clock, [seen]).run([Request(0, 0.0, 10, 20, GREEDY), late])
        firsts.append(seen.times[late])
    assert firsts == [6.0, 7.0]


def test_iterations_advanced_together_are_decided_as_single_ones_also_when_queued():
    asked = Load("vllm-v1", "alpaca", 20.0, **WINDOW)
    rows = [
        run(asked, DEPLOYMENT, executor(constant(0.03)), QueuedClock(), asked.manager_on(DEPLOYMENT), asked.requests)
        for executor in (SimulatedExecutor, OneByOne)
    ]
    assert rows[0]["first_token_median_s"] == pytest.approx(rows[1]["first_token_median_s"])
    assert rows[0]["preemptions"] == rows[1]["preemptions"]
