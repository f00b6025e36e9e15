"""What the paper leaves open: both readings come from rows and curves, and the swap case outgrows its pool."""

import pandas as pd
import pytest

from repro.engine.errors import UserError
from repro.engine.loop import Engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.report import paper
from repro.report.claims.claim import EVIDENCE
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.profiles import cost_model
from repro.studies import both_readings
from repro.studies import what_the_paper_does_not_say as study
from repro.studies.common import deployment_of


@pytest.fixture(scope="module")
def rows():
    params = study.Params(rates_sharegpt=(1.5, 2.0), rates_alpaca=(25.0, 30.0), max_seconds=20.0, precision=0.3)
    found = []
    for point in study.points(params):
        made = point.function(**point.arguments)
        found += made if isinstance(made, list) else [made]
    return pd.DataFrame(found)


def test_small_runs_are_drawn_and_not_judged(rows):
    params = study.Params(max_seconds=20.0)
    assert set(study.draw(rows, params)) == set(study.CAPTION)
    assert study.judge(rows, params) == []
    assert {"evidence", "device", "seed", "trace_hash"} <= set(rows)


def test_every_item_has_two_readings_and_ours(rows):
    items = both_readings.readings(rows)
    assert len({where for where, *_ in items}) == len(items) >= 15
    for item in items:
        assert all(text.strip() for text in item)
        assert item.evidence in EVIDENCE
        assert not any(bad in " ".join(item) for bad in ("nan", "None", "{"))
    by_place = {where: texts for where, *texts in items}
    one, other, ours, _ = by_place["Table 1: OPT-66B's slots"]
    assert "21.3" in one and "9,557" in other and "9,700" in ours
    assert "14,648" in by_place["Table 1: GB"][1]
    assert "26 to 117 %" in by_place["§7.3: recomputing never above 20 % of swapping"][0]
    assert "at most 6.6" in by_place["§6.2: 8x over Orca (Max)"][1]


@pytest.mark.parametrize("kind", [Scheduler, study.UntilCompleted])
def test_swapped_blocks_outnumber_the_pool_unless_the_swap_space_forbids_it(kind, monkeypatch):
    """However §4.5's sentence about new requests is read: here all of them had started before."""
    monkeypatch.setattr(study, "Scheduler", kind)
    free = pd.DataFrame(study.swapped_out(**study.SWAP_CASE, num_cpu_blocks=1000))
    bounded = pd.DataFrame(study.swapped_out(**study.SWAP_CASE, num_cpu_blocks=24))
    assert free["swapped"].max() == 40 > study.SWAP_CASE["num_blocks"]
    assert bounded["swapped"].max() <= 24
    for run in (free, bounded):
        assert run["on_gpu"].max() <= 24 and run["swapped"].iloc[-1] == 0


@pytest.mark.parametrize("swapped, verdict", [([20, 24], True), ([20, 25], False)])
def test_the_bound_is_judged_on_every_step(swapped, verdict):
    params = study.Params()
    case = [
        {"part": "swap", "num_cpu_blocks": cpu, "num_blocks": 24, "swapped": blocks}
        for cpu in (24, 1000)
        for blocks in swapped
    ]
    served = [{"part": "swap in service", "rate": 2.01, "num_blocks": 983, "swapped": 300}]
    (judged,) = study.judge(pd.DataFrame(case + served), params)
    assert judged.claim_id == "swap-bounded-by-gpu" and judged.ours is verdict and f"up to {swapped[1]}" in judged.note
    served[0]["swapped"] = 984
    (judged,) = study.judge(pd.DataFrame(case + served), params)
    assert judged.ours is False


def test_to_the_letter_nothing_new_starts_while_a_preempted_request_is_unfinished():
    """As many blocks as make the third request a victim; the fourth must wait until it has finished, and all of them
    end."""
    log = []
    requests = [Request(index, 0.1 * index, 4, 30 if index < 3 else 2, SamplingParams()) for index in range(6)]
    engine = Engine(
        study.UntilCompleted(PagedKVCacheManager(80, 1), SchedulerConfig(), log),
        SimulatedExecutor(cost_model("a100-2023", deployment_of("opt-13b"))),
    )
    assert all(outcome.finish_s > 0 for outcome in engine.run(requests))
    open_victims, seen, admitted = set(), set(), False
    for event in log:
        if event.kind == "preempt":
            open_victims.add(event.request_id)
        elif event.kind == "finish":
            open_victims.discard(event.request_id)
        elif event.kind == "admit":
            assert event.request_id in seen or not open_victims
            admitted |= event.request_id in seen
            seen.add(event.request_id)
    assert admitted and len(seen) == 6  # something was preempted and came back


def test_without_preemption_it_is_the_same_scheduler():
    logs = []
    for kind in (Scheduler, study.UntilCompleted):
        logs.append([])
        scheduler = kind(PagedKVCacheManager(1000, 16), SchedulerConfig(), logs[-1])
        engine = Engine(scheduler, SimulatedExecutor(cost_model("a100-2023", deployment_of("opt-13b"))))
        engine.run([Request(index, 0.01 * index, 20 + index, 15, SamplingParams()) for index in range(20)])
    assert logs[0] == logs[1]


def test_ratios_are_read_at_equal_latency():
    drawn = paper.crossings("fig17", 0.5)["opt-13b/chatbot"]
    assert both_readings.ratio_drawn("fig17", "opt-13b/chatbot", "orca-max", 0.5) == drawn["vllm"] / drawn["orca-max"]
    assert both_readings.ratio_drawn("fig12", "opt-175b/sharegpt", "orca-max", 1.0) is None  # vLLM's curve ends below


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"rates_alpaca": ()}, "rates_alpaca"),
        ({"rates_sharegpt": (-1.0,)}, "rates_sharegpt"),
        ({"max_seconds": 0.0}, "max_seconds"),
        ({"seed": -1}, "seeds"),
        ({"precision": 0.0}, "precision"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        study.Params(**wrong)
