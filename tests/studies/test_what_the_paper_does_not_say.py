"""What the paper leaves open: both readings come from rows and curves, and the swap case outgrows its pool."""

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.engine.loop import Engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import paper
from repro.report.claims.claim import EVIDENCE, Judgement
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.profiles import cost_model
from repro.studies import both_readings
from repro.studies import what_the_paper_does_not_say as study
from repro.studies.common import deployment_of

STEM = "what_the_paper_does_not_say"
SMALL = {"rates_sharegpt": [1.5, 2.0], "rates_alpaca": [25.0, 30.0], "max_seconds": 20.0, "precision": 0.3}
RUN = experiment.open(STEM, overrides=SMALL)


@pytest.fixture(scope="module")
def rows():
    return rows_of(study, RUN.params)


def test_small_runs_are_drawn_and_not_judged(rows):
    assert {*study.draw(rows, RUN.params), *RUN.tables(rows)} == set(RUN.file.captions)
    assert RUN.judgements(rows) == []
    assert all({"evidence", "device", "seed", "trace_hash"} <= set(table) for table in rows.values())


def test_every_item_has_two_readings_and_ours(rows):
    items = RUN.tables(rows)[STEM]
    assert list(items) == ["where", "one reading", "another reading", "ours", "evidence"]
    assert items["where"].nunique() == len(items) >= 15
    for item in items.itertuples(index=False):
        assert all(text.strip() for text in item)
        assert item.evidence in EVIDENCE
        assert not any(bad in " ".join(item) for bad in ("nan", "None", "{"))
    by_place = items.set_index("where")
    one, other, ours, _ = by_place.loc["Table 1: OPT-66B's slots"]
    assert "21.3" in one and "9,557" in other and "9,700" in ours
    assert "14,648" in by_place.at["Table 1: GB", "another reading"]
    assert "26 to 117 %" in by_place.at["§7.3: recomputing never above 20 % of swapping", "one reading"]
    assert "at most 6.6" in by_place.at["§6.2: 8x over Orca (Max)", "another reading"]


def test_the_table_is_saved_whole_as_a_fragment_of_html(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("REPRO_RESULTS_DIR", str(tmp_path))
    run = experiment.open(STEM, overrides=SMALL)
    run.draw(rows)
    text = (run.folders.figures / f"{STEM}.html").read_text(encoding="utf-8")
    assert text.startswith(f"<!-- experiment {STEM}, rows {rows.hash()} -->") and text.rstrip().endswith("</table>")
    assert text.count("<tr") == len(RUN.tables(rows)[STEM]) + 1
    assert "only so do the printed digits come out</td>" in text  # nothing is cut short
    assert "Fig. 2: external &amp; others, Pow2 and Oracle" in text


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
    run = experiment.open(STEM)
    case = [{"num_cpu_blocks": cpu, "num_blocks": 24, "swapped": blocks} for cpu in (24, 1000) for blocks in swapped]
    served = {"rate": 2.01, "num_blocks": 983, "swapped": 300}
    letter = pd.DataFrame([{"system": "vllm", "token_states": 67.0}])

    def judged() -> Judgement:
        tables = {"swap": pd.DataFrame(case), "served_swapping": pd.DataFrame([served]), "until_completed": letter}
        one, until = run.judgements(Rows(tables, study.TABLES))
        assert (until.claim_id, until.ours) == ("stop-until-completed", 67)
        return one

    one = judged()
    assert one.claim_id == "swap-bounded-by-gpu" and (one.ours <= 100) is verdict and f"up to {swapped[1]}" in one.note
    served["swapped"] = 984
    assert judged().ours > 100


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
        ({"seed": -1}, "seed"),
        ({"precision": 0.0}, "precision"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters(STEM, **wrong)
