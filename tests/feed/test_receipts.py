"""Receipts: by hand where a run is small, against an audit of every iteration where it is random."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from audit import Audited, audited, requests_of
from fuzz import draw
from hypothesis import given
from hypothesis import strategies as st

import repro
from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.loop import Engine, Outcome
from repro.engine.memory import ContiguousKVCacheManager, PagedKVCacheManager, reserve_oracle
from repro.engine.scheduler import Batching, Prefill, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.feed.receipt import CAUSES, Receipt
from repro.feed.receipts import Receipts
from repro.feed.standstills import KEPT, Standstills
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor

#: an iteration takes 1 s, 0.25 s for each sequence that gets a token, and 0.5 s for each token of a prompt
FLAT = CostModel("test", 1.0, 0.25, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0)


class Single(SimulatedExecutor):
    """Advances no iterations together."""

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return 1


def run(scheduler: Scheduler, *asked: tuple[float, int, int]) -> list[Receipt]:
    """The receipts of requests that arrive (s) with a prompt and an output of so many tokens."""
    receipts = Receipts()
    requests = [Request(number, *one, SamplingParams()) for number, one in enumerate(asked)]
    outcomes = Engine(scheduler, SimulatedExecutor(FLAT), observers=(receipts,)).run(requests)
    found = [receipts.of(request.request_id) for request in requests]
    for receipt, outcome in zip(found, outcomes):
        check(receipt, outcome.finish_s - outcome.request.arrival_s)
    return found


def check(receipt: Receipt, latency_s: float) -> None:
    """It adds up, no part is negative, and culprits have no more than their cause."""
    assert list(receipt.causes) == list(CAUSES) and min(receipt.causes.values()) >= 0
    assert sum(receipt.causes.values()) == pytest.approx(latency_s, rel=0, abs=1e-9)
    assert receipt.latency_s == pytest.approx(latency_s, rel=0, abs=1e-9)
    for cause, found in receipt.culprits.items():
        assert min(found.values()) > 0 and sum(found.values()) <= receipt.causes[cause] + 1e-9


def causes(receipt: Receipt) -> dict[str, float]:
    return {cause: seconds for cause, seconds in receipt.causes.items() if seconds}


def test_a_request_waits_behind_another():
    """1 arrives while the prompt of 0 runs, until 3.25; then 0 keeps it waiting to its end at 3.25 + 4 x 1.25."""
    first, second = run(Scheduler(PagedKVCacheManager(100), SchedulerConfig(max_num_seqs=1)), (0, 4, 5), (1, 2, 2))
    assert causes(first) == {"prompt": 3.25, "own_steps": 5.0}
    assert causes(second) == {"queued": 7.25, "prompt": 2.25, "own_steps": 1.25}
    assert second.culprits == {"queued": {0: 5.0}} and first.culprits == {}
    assert str(second) == (
        "request 1 took 10.8 s: queued 7.25 s (behind request 0 5 s, the rest 2.25 s), prompt 2.25 s, own steps 1.25 s"
    )


TWO = (0, 8, 6), (0, 8, 3)


def test_a_request_is_driven_out_and_computed_again():
    """Both prompts run until 9.5. 0 needs a third of the four blocks, so 1 goes until 0 ends at 9.5 + 5 x 1.25; then
    its 8 tokens, and the newest, are computed in 1.25 + 9 x 0.5 s."""
    first, second = run(Scheduler(PagedKVCacheManager(4, 4, watermark=0)), *TWO)
    assert causes(first) == {"prompt": 9.5, "own_steps": 6.25}
    assert causes(second) == {"prompt": 9.5, "preempted": 6.25, "recomputed": 5.75, "own_steps": 1.25}
    assert second.culprits == {"preempted": {0: 6.25}}
    assert (second.num_preemptions, second.recomputed_tokens) == (1, 8)
    said = "preempted 6.25 s (by request 0 6.25 s), recomputed 5.75 s; preemptions 1; tokens computed again 8"
    assert str(second).endswith(said)


def test_who_returns_first_lets_the_queue_move_too():
    """The same two, and a third that waits from 9.5 on: until 0 ends, and 1 returns, then until 1 ends at 22.75."""
    *_, third = run(Scheduler(PagedKVCacheManager(4, 4, watermark=0)), *TWO, (1, 8, 1))
    assert causes(third) == {"queued": 21.75, "prompt": 5.25}
    assert third.culprits == {"queued": {0: 6.25, 1: 7.0}}


def test_a_request_is_swapped():
    manager = PagedKVCacheManager(4, 4, watermark=0, num_cpu_blocks=4)
    _, second = run(Scheduler(manager, SchedulerConfig(preemption="swap"), []), *TWO)
    assert causes(second) == {"prompt": 9.5, "swapped": 6.25, "own_steps": 2.5}
    assert second.culprits == {"swapped": {0: 6.25}} and second.recomputed_tokens == 0


def test_a_prompt_among_decodes():
    """It joins at 4.75; of that iteration's 2.5 s the other one takes 1.25, as in those before."""
    first, second = run(Scheduler(PagedKVCacheManager(100)), (0, 2, 9), (4, 2, 1))
    assert causes(first) == {"prompt": 2.25, "own_steps": 10.0, "others_prompts": 1.25}
    assert causes(second) == {"queued": 0.75, "prompt": 2.5} and second.culprits == {}


def test_time_between_two_iterations_is_nobodys():
    """As in real time: half a second before each iteration but the first, which changes no other part."""
    receipts, requests = Receipts(), [Request(number, 0.0, 2, 4, SamplingParams()) for number in range(2)]
    engine = Engine(Scheduler(PagedKVCacheManager(100)), Single(FLAT), observers=(receipts,))
    engine.add(requests[0])
    for step in range(5):
        if step == 3:
            engine.add(requests[1])
        engine.step()
        engine.clock.now += 0.5
    first = receipts.of(0)
    check(first, 2.25 + 2 * 1.75 + 3.0)
    assert causes(first) == {"prompt": 2.25, "own_steps": 3 * 1.25, "others_prompts": 1.25, "stalled": 1.5}
    second = receipts.end(requests[1], engine.clock.now)
    check(second, engine.clock.now)
    assert causes(second) == {"queued": 6.25, "prompt": 2.5, "own_steps": 1.25, "stalled": 1.0}


def test_a_prompt_in_parts():
    """A budget of 4: with one that decodes three tokens of a prompt fit, in
    2.75 s. Its last one leaves room for the third request's prompt."""
    config = ChunkedPrefillConfig(max_num_batched_tokens=4, max_num_seqs=4)
    first, second, third = run(
        ChunkedPrefillScheduler(PagedKVCacheManager(100), config), (0, 1, 7), (2, 10, 1), (4, 1, 1)
    )
    assert causes(first) == {"prompt": 1.75, "own_steps": 7.5, "others_prompts": 4 * 1.5}
    assert causes(second) == {"queued": 1.0, "prompt": 3 * 2.75 + 2.75}
    assert causes(third) == {"queued": 7.25, "prompt": 2.75} and third.culprits == {"queued": {1: 5.5}}


def test_a_prompt_is_driven_out_when_a_part_of_it_is_stored():
    """0's prompt and two tokens of 1's run until 3.25, a decode and three more until 6; then 0 needs the last of the
    eight blocks, and 1 waits until it ends at 6 + 4 x 1.25. Four tokens are computed again in 3 s; of the next two, in
    2.25 s, one."""
    config = ChunkedPrefillConfig(max_num_batched_tokens=4, max_num_seqs=4)
    manager = PagedKVCacheManager(8, 1, watermark=0)
    first, second = run(ChunkedPrefillScheduler(manager, config, []), (0, 2, 6), (0, 6, 1))
    assert causes(first) == {"prompt": 3.25, "own_steps": 2.75 + 5.0}  # none had decoded alone before
    assert causes(second) == {"prompt": 6.0 + 1.125, "preempted": 5.0, "recomputed": 3.0 + 1.125}
    assert second.culprits == {"preempted": {0: 5.0}} and second.recomputed_tokens == 5


def test_a_static_batch_returns_together():
    manager = ContiguousKVCacheManager(100, 1, reservation=reserve_oracle, max_model_len=20)
    config = SchedulerConfig(Batching.REQUEST)
    short, long, late = run(Scheduler(manager, config), (0, 2, 2), (0, 2, 5), (4, 2, 1))
    assert causes(short) == {"prompt": 3.5, "own_steps": 1.5, "stalled": 4.5}
    assert short.culprits == {"stalled": {1: 4.5}} and long.culprits == {}
    assert causes(long) == {"prompt": 3.5, "own_steps": 6.0}
    assert causes(late) == {"queued": 5.5, "prompt": 2.25} and late.culprits == {"queued": {1: 5.5}}


RUNS = range(1200)


def test_random_runs_are_those_of_an_audit():
    """All systems, both ways of preempting, samples, beams, small budgets, static batches, outputs that stop early, and
    requests taken back in every state."""
    seen: Counter[str] = Counter()
    for seed in RUNS:
        case = draw(seed)
        requests = list(requests_of(case))
        engine, log, outcomes = audited(case, requests)
        groups = {group.request.request_id: group for group in engine.audit.causes}
        requesters: dict[int, set[int]] = {}
        for event in log:
            if event.kind == "preempt":
                requesters.setdefault(event.request_id, set()).add(event.detail["requester"])
        for outcome in outcomes:
            number, arrival_s = outcome.request.request_id, outcome.request.arrival_s
            if number in engine.aborted:
                receipt, end_s = engine.aborted[number]
            else:
                receipt, end_s = engine.receipts.of(number), outcome.finish_s
            check(receipt, end_s - arrival_s)
            audit = engine.audit.causes[groups[number]]
            assert receipt.causes == pytest.approx(audit, rel=0, abs=1e-9), (seed, number)
            assert receipt.recomputed_tokens == engine.audit.again[groups[number]]
            assert receipt.num_preemptions == outcome.num_preemptions
            out = {culprit for cause in ("preempted", "swapped") for culprit in receipt.culprits.get(cause, {})}
            assert out == requesters.get(number, set())
            seen.update(causes(receipt).keys())
            seen.update({f"culprits of {cause}" for cause in receipt.culprits})
        assert len(engine.receipts) + len(engine.aborted) == len(outcomes) and not engine.receipts._lives
        seen += engine.seen + engine.audit.seen
    aborts = [f"abort {state}" for state in ("queued", "running", "stalled", "preempted", "swapped")]
    for what in (*CAUSES, *aborts, "held", *(f"culprits of {one}" for one in ("queued", "stalled"))):
        assert seen[what] >= 5, f"hardly any {what}: {seen}"


def test_iterations_advanced_together_give_the_same_receipts_to_the_last_bit():
    fewer = 0
    for seed in RUNS:
        case = draw(seed)
        requests, found = list(requests_of(case)), []
        for together in (True, False):
            engine = Audited(case, [], together, audit=False)
            engine.run(requests)
            found.append({one.request_id: one for one in engine.receipts})
        assert found[0] == found[1]
        fewer += any(one.causes["others_prompts"] or one.culprits for one in found[0].values())
    assert fewer > 100


@pytest.mark.parametrize("system", ["vllm", "vllm-v1", "orca-max", "faster-transformer"])
def test_a_run_of_the_simulator(system):
    receipts = Receipts()
    served = repro.serve(system, "opt-13b", repro.make_trace("sharegpt", 4.0, 60.0, seed=0), observers=(receipts,))
    assert len(receipts) == len(served.outcomes)
    for outcome in served.outcomes:
        check(receipts.of(outcome.request.request_id), outcome.finish_s - outcome.request.arrival_s)
    rows = receipts.rows()
    assert sum(row["queued_s"] for row in rows) > 0 and rows[0]["request_id"] in range(len(rows))
    last = max(receipts, key=lambda one: one.causes["queued"])
    assert last.culprit("queued") is not None and json.loads(json.dumps(last.to_dict()))["causes"] == last.causes


def test_what_cannot_be_is_said():
    receipts = Receipts()
    with pytest.raises(UserError, match="there is no receipt of request 3: it has not run, or has not ended"):
        receipts.of(3)

    def again() -> list[Outcome]:
        engine = Engine(Scheduler(PagedKVCacheManager(100)), SimulatedExecutor(FLAT), observers=(receipts,))
        return engine.run([Request(0, 0.0, 3, 2, SamplingParams())])

    again()
    with pytest.raises(UserError, match="Receipts: it has watched another run; give each run one of its own"):
        again()
    engine = Engine(Scheduler(PagedKVCacheManager(100)), SimulatedExecutor(FLAT))
    engine.run([Request(0, 0.0, 3, 2, SamplingParams())])
    engine.observers = (Receipts(),)
    with pytest.raises(UserError, match="this engine has run before"):
        engine.run([Request(1, 9.0, 3, 2, SamplingParams())])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=40), st.integers(0, 60))
def test_the_longest_standstills_since_any_moment(lengths, since):
    queue, now, stretches = Standstills(), 0.0, []
    for number, (gap, seconds) in enumerate(lengths):
        queue.note(True, False, now + gap)
        queue.let_move(number)
        now += gap + seconds
        queue.move(now, [])
        stretches.append((now - seconds, now, number))
    waits = [(min(end - since, end - start), number) for start, end, number in stretches if end > since]
    longest = sorted(waits, reverse=True)[:KEPT]
    assert sorted(queue.behind(since).values(), reverse=True) == [seconds for seconds, _ in longest]
    assert set(queue.behind(since).items()) <= {(number, seconds) for seconds, number in waits}
    queue.note(False, True, now)
    assert queue.behind(0.0) == {}


def test_who_has_gone_before_the_queue_stood_still_has_not_let_it_move():
    queue, prompt = Standstills(), Prefill(SequenceGroup(Request(2, 0.0, 9, 1, SamplingParams())), 9, 0)
    queue.let_move(1)
    queue.note(True, False, 10.0)
    queue.move(12.0, [prompt])
    assert queue.behind(0.0) == {2: 2.0} and queue.behind(11.0) == {2: 1.0} and queue.behind(12.0) == {}
