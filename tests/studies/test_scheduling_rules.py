"""Rules of scheduling on event logs: random runs keep them, a scheduler that breaks one is caught, verdicts follow."""

from __future__ import annotations

from collections import Counter

import pytest
from loads import parameters, rows_of

from repro.engine.events import Event
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams, Status
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report.claims.claim import judge_entry, load
from repro.studies import scheduling_rules as study
from repro.studies.event_rules import COUNTS, Replay

BREACHES = {"later_ahead", "other_victims", "parts_lost", "not_one_pass", "kept_waiting"}
RUNS = 250


def counted(scheduler_type: type[Scheduler] = Scheduler) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in range(RUNS):
        try:
            total.update(study.drawn_run(seed, scheduler_type)[1])
        except RuntimeError:  # nothing can run any more
            total["stuck"] += 1
    return total


class DrivesOutTheFirst(Scheduler):
    """Once: for good, two requests could drive each other out without end."""

    def holders(self):
        first = next(group for group in self.running if group not in self._served)
        return super().holders() if self.num_preemptions else [first]


class LastComeFirstServed(Scheduler):
    def admit(self, output):
        self.waiting.reverse()
        super().admit(output)
        self.waiting.reverse()


class WaitsAnIterationAfterAnEnding(Scheduler):
    ended = -1

    def _finish(self, ended):
        self.ended = self.iteration if ended else self.ended
        return super()._finish(ended)

    def may_start(self, group):
        return self.ended != self.iteration


class ForgetsWhatWasGenerated(Scheduler):
    """Once a request, or it would never end."""

    def preempt(self, requester, output):
        super().preempt(requester, output)
        victim = next(reversed(output.preempted))
        if victim.status is Status.WAITING and victim.num_preemptions == 1:
            victim.generated_before //= 2


class LeavesABlockBehind(Scheduler):
    def record(self, kind, group, **detail):
        if kind == "resume":
            detail["blocks"] -= 1
        super().record(kind, group, **detail)


def test_random_runs_put_every_rule_to_the_test_and_keep_all_but_one():
    total = counted()
    assert not {name: total[name] for name in (*BREACHES, "stuck") if total[name]}
    for _, tested in study.RULES.values():
        assert total[tested] > 5, tested
    assert total["idle"] > 0 and total["padded"] > 0 and total["swapped_percent"] > 100


@pytest.mark.parametrize(
    "scheduler_type, breach",
    [
        (DrivesOutTheFirst, "other_victims"),
        (LastComeFirstServed, "later_ahead"),
        (WaitsAnIterationAfterAnEnding, "kept_waiting"),
        (ForgetsWhatWasGenerated, "not_one_pass"),
        (LeavesABlockBehind, "parts_lost"),
    ],
)
def test_a_scheduler_that_breaks_a_rule_is_caught_by_that_rule(scheduler_type, breach):
    assert counted(scheduler_type)[breach] > 0


def test_a_swapped_request_returns_before_an_earlier_one_that_is_recomputed():
    """The one way in which first come, first served fails; it is written down, and not what a later one does."""
    found = Counter()
    for seed in (16, 439, 616):
        name, counts = study.drawn_run(seed)
        assert name.startswith("vllm")
        found.update(counts)
    assert found["swapped_ahead"] == 11 and found["later_ahead"] == 0


def replayed(events: list[tuple], outputs: list[int], **config: int) -> Counter[str]:
    requests = [Request(number, float(number), 4, output, SamplingParams()) for number, output in enumerate(outputs)]
    log = [Event(iteration, kind, number, detail) for iteration, kind, number, detail in events]
    return Replay(requests, PagedKVCacheManager(4, 4), SchedulerConfig(**config)).run(log)


def test_a_log_written_by_hand_is_counted_as_it_should_be():
    """Two requests run, the later one ends first, and a third could have started in iteration 2 and starts in 3."""
    arrivals = [(0, "arrive", number, {}) for number in range(3)]
    starts = [(0, "admit", number, {"tokens": 4}) for number in range(2)]
    grows = [(1, "append", number, {"blocks": 1}) for number in range(2)]
    late = [(2, "finish", 1, {"tokens": 2}), (3, "admit", 2, {"tokens": 4}), (4, "finish", 2, {"tokens": 1})]
    counts = replayed([*arrivals, *starts, *grows, *late, (4, "finish", 0, {"tokens": 4})], [4, 2, 1])
    assert (counts["kept_waiting"], counts["ended_then_started"], counts["returned_first"]) == (1, 0, 2)
    assert not any(counts[name] for name in BREACHES - {"kept_waiting"}) and set(counts) == set(COUNTS)
    # With room for two sequences only it had to wait for the ending, and then starts at once.
    late[1] = (2, "admit", 2, {"tokens": 4})
    counts = replayed([*arrivals, *starts, *grows, *late, (4, "finish", 0, {"tokens": 4})], [4, 2, 2], max_num_seqs=2)
    assert (counts["kept_waiting"], counts["ended_then_started"]) == (0, 1)


@pytest.fixture(scope="module")
def small():
    run = experiment.open("scheduling_rules", "smoke", {"seconds": 5.0, "lever_seconds": 20.0})
    return run, rows_of(study, run.params)


def test_the_study_runs_draws_and_judges_only_its_own_parameters(small):
    run, rows = small
    assert set(rows["logs"]["system"]) == {*study.SERVED, study.CHUNKED}
    assert rows["logs"]["runs"].sum() == run.params.runs
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []


def test_verdicts_follow_the_rows(small):
    _, rows = small
    known, papers = load(), experiment.open("scheduling_rules")
    logs = rows["logs"]

    def verdicts(logs):
        tables = {"logs": logs, "levers": rows["levers"]}
        judged = papers.judgements(Rows(tables, study.TABLES))
        return {one.claim_id: judge_entry(known[one.claim_id], one.ours)[0] for one in judged}

    found = verdicts(logs.assign(swapped_ahead=0, groups_swapped=1, recomputations=1, swapped_percent=100.0))
    assert len(found) == 11
    levers = {"v1-levers", "v1-budget-for-throughput"}
    assert {name for name, one in found.items() if one != "reproduced"} <= levers
    broken = dict.fromkeys([*BREACHES, "decodes_late", "idle"], 1) | {"swapped_percent": 101, "empty_slots_most": 16}
    assert {one for name, one in verdicts(logs.assign(**broken)).items() if name not in levers} == {"differs"}
    never = dict.fromkeys((tested for _, tested in study.RULES.values()), 0)
    assert verdicts(logs.assign(**never))["latest-arrival-preempted"] == "differs"  # what is never tested does not hold


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"runs": 0}, "runs"),
        ({"rate": 1.5}, "told apart"),
        ({"other_budgets": [512]}, "told apart"),
        ({"budgets": [2048, 32]}, "max_num_seqs"),
        ({"kv_slots": [15728, 100]}, "kv_slots"),
        ({"budgets_for_throughput": []}, "budgets_for_throughput"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("scheduling_rules", **wrong)
