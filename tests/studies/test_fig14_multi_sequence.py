"""Fig. 14: the study's runs at a small size, its figures and its checks."""

from dataclasses import replace

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import system
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report.claims import judge_entry, load
from repro.simulate.beams import FORMAT, Turnover
from repro.simulate.profiles import a100_2023
from repro.simulate.serve import serve
from repro.studies import fig14_multi_sequence as study
from repro.studies.common import deployment_of, trace_of

STEM = "fig14_multi_sequence"


@pytest.fixture(scope="module")
def beams(tmp_path_factory):
    """A recording in which beams take turns."""
    path = tmp_path_factory.mktemp("beams") / "parents.json"
    path.write_text(
        f'{{"format": "{FORMAT}", "manifest": {{}}, "parents": {{"instruction": {{"2": ["00110101", "01001101"]}}}}}}'
    )
    return str(path)


def costs(panel):
    return study.setup_of(panel, "vllm", 10.0, 0).costs


def system_of(panel, name):
    return study.setup_of(panel, name, 10.0, 0).system


def of_crossings(rows):
    return Rows({"crossing": pd.DataFrame(rows), "latency": pd.DataFrame()}, study.TABLES)


def test_small_runs_of_both_methods_are_drawn_and_not_judged(beams):
    small = {"widths": [2], "systems": ["orca-oracle", "vllm"], "max_seconds": 20.0, "beam_seconds": 5.0}
    run = experiment.open(STEM, overrides=small | {"precision": 0.2, "beams": beams})
    rows = rows_of(study, run.params)
    assert set(rows["latency"]["panel"]) == {"parallel/2", "beam/2"}
    assert set(rows["crossing"]["panel"]) == {"parallel/2", "beam/2", study.BASIC}
    crossing = rows["crossing"].set_index(["panel", "system", "copies"])["crossing_rate"]
    assert crossing[study.BASIC, "vllm", True] > crossing["parallel/2", "vllm", True]
    assert crossing["beam/2", "orca-oracle", False] >= crossing["beam/2", "orca-oracle", True] / 1.2
    # Deviations from the paper are drawn of its own runs only.
    assert set(study.draw(rows, run.params)) == set(run.file.captions) - {"fig14_crossings"}
    assert run.judgements(rows) == []


def test_an_orca_copies_whole_chunks_of_beams():
    manager = system_of("beam/2", "orca-oracle").manager(64, 16, 2048)
    group = SequenceGroup(Request(0, 0.0, 20, 100, SamplingParams(n=2, use_beam_search=True)))
    manager.allocate(group, 20)
    assert len(manager.fork(group, [1, 1], 21)) == len(manager.block_table(group.seqs[0])) == 8
    assert system_of("parallel/2", "orca-oracle") == system("orca-oracle")
    assert system_of("beam/2", "vllm") == system("vllm")


@pytest.mark.parametrize("oracle, rises", [((1.6, 1.5, 1.4, 1.3), True), ((1.6, 1.5, 1.5, 1.3), False)])
def test_the_papers_parameters_are_judged(oracle, rises):
    run = experiment.open(STEM)
    params = run.params
    slower = dict(zip([study.BASIC, "beam/2", "beam/4", "beam/6"], oracle))
    rows = [
        {
            "panel": panel,
            "system": name,
            "seed": 0,
            "copies": copies,
            "crossing_rate": 2.0 if name == "vllm" else slower.get(panel, 1.0) if copies else 1.8,
        }
        for panel in [*params.panels, study.BASIC]
        for name in params.systems
        for copies in ([True, False] if panel.startswith("beam") and name != "vllm" else [True])
    ]
    judged = {judgement.claim_id: judgement for judgement in run.judgements(of_crossings(rows))}
    assert judged["gain-grows-with-sharing"].ours == {
        "basic": 1.25,
        "beam-6": pytest.approx(2 / 1.3, rel=1e-5),
        "rising": {
            step: pytest.approx(2 / rate, rel=1e-5) for step, rate in zip(("one", "beam-2", "beam-4", "beam-6"), oracle)
        },
    }
    verdicts = judge_entry(load()["gain-grows-with-sharing"], judged["gain-grows-with-sharing"].ours)[1]
    assert set(verdicts["rising"].values()) == {"reproduced" if rises else "differs"}
    assert "took no time: 1.11" in judged["gain-grows-with-sharing"].note
    assert set(judged["fig14-curves"].ours) == set(params.panels)
    assert judged["larger-gains-elsewhere"].ours["more-complex-decoding"] > 0


def test_more_complex_decoding_must_gain_with_samples_and_with_beams():
    run = experiment.open(STEM)
    params = run.params
    rows = of_crossings(
        [
            {
                "panel": panel,
                "system": name,
                "seed": 0,
                "copies": copies,
                "crossing_rate": (1.6 if panel == "parallel/6" else 2.0) if name == "vllm" else 1.2,
            }
            for panel in [*params.panels, study.BASIC]
            for name in params.systems
            for copies in (True, False)
        ]
    )
    judged = {judgement.claim_id: judgement for judgement in run.judgements(rows)}
    assert judged["larger-gains-elsewhere"].ours["more-complex-decoding"] < 0
    assert "parallel/6 1.33, beam/6 1.67" in judged["larger-gains-elsewhere"].note


def test_a_simulated_beam_search_must_be_told_which_beams_survive():
    trace = trace_of("alpaca", 1.0, 10.0, 0, None)
    sampling = SamplingParams(n=2, use_beam_search=True)
    with pytest.raises(UserError, match="which beams survive"):
        serve(system("vllm"), deployment_of("opt-13b"), trace, costs("parallel/2"), sampling=sampling)


def test_replayed_beams_share_more_the_more_of_them_are_replaced():
    """Every beam but one replaced at each step: one past for all. None replaced: like parallel samples."""
    trace = trace_of("alpaca", 5.0, 30.0, 0, None)
    events = {}
    for share in (0.0, 1.0):
        log = []
        serve(
            system("vllm"),
            deployment_of("opt-13b"),
            trace,
            costs("beam/2"),
            beams=Turnover(share),
            log=log,
            sampling=SamplingParams(n=4, use_beam_search=True),
        )
        events[share] = [event for event in log if event.kind == "fork"]
    assert not events[0.0]
    # A request of o tokens decodes o - 1 times; after the last one nothing is forked.
    assert len(events[1.0]) == sum(max(0, output - 2) for output in trace.output_tokens)
    assert {event.detail["parents"] for event in events[1.0]} == {(0, 0, 0, 0)}


def test_without_the_request_share_of_the_cost_one_sequence_costs_the_same():
    from repro.simulate.profiles import cost_model

    apart, together = (costs("parallel/2"), cost_model("a100-2023", deployment_of("opt-13b"), anchor="opt-13b/alpaca"))
    assert apart.per_seq_s + apart.per_group_s == pytest.approx(together.per_seq_s)
    with pytest.raises(UserError, match="per_request_ms"):
        cost_model("a100-2023", deployment_of("opt-13b"), per_request_ms=1.0)


@pytest.mark.parametrize(
    "wrong, match",
    [
        ({"methods": ("greedy",)}, "one of 'parallel', 'beam', not .*greedy"),
        ({"widths": ()}, "widths"),
        ({"systems": ("orca",)}, "unknown system"),
        ({"max_seconds": -1.0}, "max_seconds"),
        ({"methods": ("beam",), "beams": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_what_cannot_be_is_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        parameters(STEM, **wrong)


def test_a_beam_step_costs_its_constant_and_samples_do_not():
    with_beams, without = costs("beam/4"), costs("parallel/4")
    assert with_beams.fixed_s - without.fixed_s == pytest.approx(a100_2023()["beam_step_ms"] / 1e3)
    assert replace(with_beams, fixed_s=without.fixed_s) == without
