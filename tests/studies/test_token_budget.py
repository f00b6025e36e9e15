"""The token budget: the observers against what they must notice, the quiz, the refusals, and the study's checks."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise

import pytest
from loads import parameters, rows_of

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.loop import Engine, Observer
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Prefill
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report.claims.claim import judge_entry, load
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.studies import token_budget as study

COSTS = CostModel("test", 1.0, 0.1, 0.0, 0.01, 0.5, 2.0, 0.0, 0.0)
REQUESTS = [
    Request(number, 0.7 * number, 5 + 7 * number % 31, 3 + 5 * number % 23, SamplingParams()) for number in range(40)
]


def scheduler_of(
    kind: type[ChunkedPrefillScheduler] = ChunkedPrefillScheduler, budget: int = 16
) -> ChunkedPrefillScheduler:
    return kind(
        PagedKVCacheManager(30, 4, watermark=0.0), ChunkedPrefillConfig(max_num_seqs=8, max_num_batched_tokens=budget)
    )


def run(scheduler: ChunkedPrefillScheduler, *observers: Observer) -> None:
    Engine(scheduler, SimulatedExecutor(COSTS), observers=observers).run(REQUESTS)


class SkipsADecode(ChunkedPrefillScheduler):
    def schedule(self):
        output = super().schedule()
        if output.num_prefill_tokens and len(output.decodes) > 1:
            output.decodes = output.decodes[1:]
        return output


class DecodesWhatHasEnded(ChunkedPrefillScheduler):
    ended = None

    def schedule(self):
        output = super().schedule()
        output.decodes = output.decodes + ([self.ended] if self.ended else [])
        return output

    def update(self, output, parents=None, stopped=None):
        ended = super().update(output, parents, stopped)
        self.ended = ended[0] if ended else None
        return ended


class CutsTooEarly(ChunkedPrefillScheduler):
    def _compute(self, output, group, start, end):
        super()._compute(output, group, start, max(start + 1, end - 1))


class AdmitsAfterPreempting(ChunkedPrefillScheduler):
    def schedule(self):
        output = super().schedule()
        if output.preempted:
            output.num_prefill_tokens += 1
            output.prefills.append(Prefill(next(iter(output.preempted)), 1, 0))
        return output


def test_the_rule_holds_under_preemption_with_iterations_together_or_not():
    for extra in ((), (study.Iterations(),)):
        scheduler, rule = scheduler_of(), study.DecodesFirst(16)
        run(scheduler, rule, *extra)
        assert rule.holds and rule.num_cut and scheduler.num_preemptions


@pytest.mark.parametrize("kind", [SkipsADecode, DecodesWhatHasEnded, CutsTooEarly, AdmitsAfterPreempting])
def test_a_scheduler_that_breaks_the_rule_is_noticed(kind):
    rule = study.DecodesFirst(16)
    run(scheduler_of(kind), rule)
    assert not rule.holds


def test_a_budget_that_is_exceeded_is_noticed():
    rule = study.DecodesFirst(15)
    run(scheduler_of(budget=16), rule)
    assert not rule.holds


class TokenTimes(Observer):
    """The moment of each token of each request, iteration by iteration."""

    next_s = 0.0

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = defaultdict(list)

    def observe(self, engine, output, start_s):
        for group in [*output.decodes, *(prefill.group for prefill in output.prefills)]:
            self.times[group.request.request_id].append(engine.clock.now)


def test_gaps_between_tokens_are_those_of_the_tokens_own_times():
    gaps, times, scheduler = study.TokenGaps(), TokenTimes(), scheduler_of()
    run(scheduler, gaps, times)
    assert scheduler.num_preemptions
    expected = sorted(after - before for moments in times.times.values() for before, after in pairwise(moments))
    assert all(len(times.times[request.request_id]) == request.output_tokens for request in REQUESTS)
    assert sum(gaps.counts) == len(expected) and gaps.mean == pytest.approx(sum(expected) / len(expected))
    for share in (0.5, 0.9, 0.999):
        assert gaps.quantile(share) == pytest.approx(expected[math.ceil(share * len(expected)) - 1])
    together = study.TokenGaps()
    run(scheduler_of(), together)
    assert sum(together.counts) == len(expected) and together.mean == pytest.approx(gaps.mean)


def test_the_quiz_needs_no_preemption_in_its_pool_but_would_in_a_smaller_one(monkeypatch):
    found = study.quiz_run(*study.SHOWN)
    (row,), steps = found["quiz"], found["steps"]
    assert row["preemptions"] == 0 and row["decodes_first"] and row["prompts_cut"] and row["most_blocks"] <= 4835
    assert sum(step["prompt_tokens"] for step in steps) == 100 * 256 + 5 * 8000
    assert sum(step["decodes"] for step in steps) == 105 * 99  # the first token comes with the prompt
    assert all(step["decodes"] + step["prompt_tokens"] <= study.SHOWN[1] for step in steps)
    monkeypatch.setattr(study, "QUIZ_BLOCKS", 4000)
    assert study.quiz_run("short first", 8192)["quiz"][0]["preemptions"] > 0


def test_only_budgets_up_to_the_maximum_length_are_refused_and_in_words_that_help():
    rows = {row["budget"]: row for row in study.refusals()}
    assert {budget: row["refused"] for budget, row in rows.items()} == {
        1024: True,
        2048: True,
        2049: False,
        4096: False,
    }
    assert all(
        word in rows[2048]["message"]
        for word in ("max_num_batched_tokens = 2048", "max_model_len", "enable_chunked_prefill")
    )


@pytest.fixture(scope="module")
def small_run():
    small = {"rates_sharegpt": [1.0], "rates_chatbot": [0.4, 0.8], "budgets": [64, 2048], "duration_s": 60.0}
    run = experiment.open("token_budget", overrides={**small, "seeds": [0]})
    return run, rows_of(study, run.params)


def test_the_study_runs_draws_and_judges_only_its_own_parameters(small_run):
    run, rows = small_run
    assert len(rows["served"]) == 6 and rows["served"]["decodes_first"].all()
    assert set(study.draw(rows, run.params)) == set(run.file.captions)
    assert run.judgements(rows) == []


def test_verdicts_follow_the_rows(small_run):
    _, rows = small_run
    claims, run = load(), experiment.open("token_budget")

    def verdicts(changed: Rows) -> dict[str, str]:
        return {one.claim_id: judge_entry(claims[one.claim_id], one.ours)[0] for one in run.judgements(changed)}

    assert set(verdicts(rows).values()) == {"reproduced"} and len(verdicts(rows)) == 5
    served = rows["served"]
    late = served["first_mean_ms"].where(served["budget"] != 2048, 1e6)
    broken = {
        "refusals": rows["refusals"].assign(refused=False),
        "served": served.assign(decodes_first=False, first_mean_ms=late),
        "quiz": rows["quiz"].assign(preemptions=1, empty_slots_most=16),
        "steps": rows["steps"],
    }
    assert set(verdicts(Rows(broken, study.TABLES)).values()) == {"differs"}


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"budgets": (2048, 64)}, "smallest to the largest"),
        ({"budgets": (32,)}, "max_num_seqs"),
        ({"budgets": ()}, "budgets"),
        ({"rates_chatbot": (0.0,)}, "rates_chatbot"),
        ({"seeds": (-1,)}, "seeds"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters("token_budget", **wrong)
