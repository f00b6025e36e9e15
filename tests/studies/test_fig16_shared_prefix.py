"""The study of a shared prefix: what sharing spares, its rows, verdicts and figure."""

import pytest
from loads import parameters, rows_of

from repro.engine.config import DEPLOYMENTS
from repro.engine.events import Event
from repro.engine.systems import system
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import claims
from repro.report.claims import judge_entry
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies import fig16_shared_prefix as study
from repro.workloads.translation import translation_trace

STEM = "fig16_shared_prefix"
SHORT = parameters(STEM, max_seconds=12.0, sensitivity_seconds=6.0, seeds=[0], precision=0.1)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(study, SHORT)


@pytest.fixture(scope="module")
def at_papers_scale(rows: Rows) -> Rows:
    """The short runs, dressed as the long ones: `judge` speaks only of the paper's parameters."""
    crossing = rows["crossing"]
    long = crossing.assign(duration_s=crossing["duration_s"].replace({12.0: 3600.0, 6.0: 300.0}))
    return Rows({**rows, "crossing": long}, study.TABLES)


def test_vllm_computes_only_what_follows_the_prefixs_full_blocks() -> None:
    deployment, trace = DEPLOYMENTS["llama-13b"], translation_trace(341, 5.0, 20.0, 1)
    costs = cost_model("a100-2023", deployment)
    for name, stored in (("vllm", 336), ("orca-oracle", 0)):
        log: list[Event] = []
        served = serve(system(name), deployment, trace, costs, log=log, shared_prefix_tokens=341)
        admitted = {event.request_id: event.detail["tokens"] for event in log if event.kind == "admit"}
        assert [admitted[index] for index in range(len(trace))] == (trace.prompt_tokens - stored).tolist()
        free = served.engine.scheduler.manager.num_free_blocks
        assert deployment.num_blocks(16) - free == stored // 16  # the prefix stays, and nothing else does


def test_sharing_nothing_changes_nothing() -> None:
    deployment, trace = DEPLOYMENTS["llama-13b"], translation_trace(80, 30.0, 20.0, 1)
    costs = cost_model("a100-2023", deployment)
    plain, named = (
        serve(system("orca-oracle"), deployment, trace, costs, shared_prefix_tokens=tokens) for tokens in (0, 80)
    )
    assert plain.latency_s_per_token == named.latency_s_per_token
    shared = serve(system("vllm"), deployment, trace, costs, shared_prefix_tokens=80)
    assert shared.latency_s_per_token < serve(system("vllm"), deployment, trace, costs).latency_s_per_token


def test_vllm_crosses_later_and_gains_more_from_the_longer_prefix(rows: Rows) -> None:
    ratios = study.ratios(rows["crossing"], SHORT.max_seconds)
    assert len(ratios) == 1 and (ratios[80] > 1).all() and (ratios[80] < ratios[341]).all()
    assert set(study.ratios(rows["crossing"], SHORT.sensitivity_seconds).index.get_level_values("assumption")) == set(
        study.ASSUMPTIONS
    )
    found = rows["crossing"]
    assert len(found) == 4 * (1 + len(study.ASSUMPTIONS)) and set(found["evidence"]) == {"modelled"}
    # Prompts computed at a third of the speed hurt the system that computes the prefix again and again.
    by_assumption = study.ratios(rows["crossing"], SHORT.sensitivity_seconds)[341].groupby(level="assumption").mean()
    assert by_assumption["prefill: 0.3"] > by_assumption["as drawn"] > by_assumption["prefill: 1.0"]


def test_verdicts_are_given_for_the_papers_parameters_only(rows: Rows, at_papers_scale: Rows) -> None:
    assert not SHORT.as_in_paper
    known = claims.load()
    judged = {one.claim_id: one for one in experiment.open(STEM).judgements(at_papers_scale)}
    assert set(judged) == {"shared-system-prompt", "fig16-shared-prefix"}
    assert (
        judge_entry(known["shared-system-prompt"], judged["shared-system-prompt"].ours)[0] is claims.Verdict.REPRODUCED
    )
    ours = judged["fig16-shared-prefix"]
    judge_entry(known["fig16-shared-prefix"], ours.ours)  # raises for a key that the claim does not have
    for key, (low, high) in ours.interval.items():
        assert low <= high and ours.ours[key] > 0


def test_the_figure_can_be_drawn(rows: Rows) -> None:
    assert len(study.draw(rows, SHORT)["fig16_shared_prefix"].axes) == 3
    assert set(study.draw(rows, SHORT)) == set(experiment.parameter_file(STEM).captions)


def test_another_prefix_has_no_points_of_the_paper() -> None:
    params = parameters(STEM, prefixes=[200], max_seconds=4.0, seeds=[0, 1], crossings=False)
    figure = study.draw(rows_of(study, params), params)["fig16_shared_prefix"]
    assert [axis.get_title() for axis in figure.axes] == ["LLaMA-13B, 200 shared tokens"]
    assert len([line for line in figure.axes[0].lines if line.get_marker() != "None"]) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prefixes": ()}, "at least one"),
        ({"prefixes": (0,)}, "at least 1"),
        ({"prefixes": (1025,)}, "at most 1024"),
        ({"seeds": ()}, "at least one"),
        ({"sensitivity_seconds": 0.0}, "above 0"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parameters(STEM, **changes)
