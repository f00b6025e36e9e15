"""Fig. 12: which runs it asks for, what it refuses, and what its verdicts rest on."""

from dataclasses import replace

import pandas as pd
import pytest

from repro.engine.errors import UserError
from repro.report import paper
from repro.studies import fig12_basic_sampling as study

SMALL = replace(study.Params(), models=("opt-13b",), workloads=("sharegpt",), max_seconds=60.0, seeds=(0,))


@pytest.mark.parametrize(
    "changes, named",
    [
        (dict(models=("opt-30b",)), "opt-30b"),
        (dict(models=()), "models"),
        (dict(workloads=("wmt",)), "unknown workload 'wmt'; known: .*alpaca"),
        (dict(systems=("orca",)), "unknown system 'orca'"),
        (dict(max_seconds=0.0), "max_seconds = 0.0"),
        (dict(precision=-0.1), "precision"),
        (dict(seeds=(-1,)), "seeds"),
    ],
)
def test_bad_parameters_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=named):
        replace(study.Params(), **changes)


def test_every_rate_that_the_paper_plots_is_run_for_every_seed():
    points = study.points(study.Params())
    main = [p.arguments for p in points if p.function is study.latency_at and p.arguments["assumption"] == study.MAIN]
    for panel, systems in paper.figure("fig12").items():
        for name in systems:
            rates = {a["rate"] for a in main if a["panel"] == panel and a["system"].name == name}
            assert rates == {rate for rate, _ in paper.points("fig12", panel, name)}
    assert {a["seed"] for a in main} == {0, 1, 2}
    crossings = [p.arguments for p in points if p.function is study.crossing_of]
    assert len(crossings) == 6 * 5 * 3
    assert {a["duration_s"] for a in crossings if "175b" in a["panel"]} == {900.0}


def test_faster_transformers_batch_limit_is_the_stated_one():
    limits = {
        panel: {
            a["system"].scheduler.max_num_seqs
            for p in study.points(study.Params())
            if (a := p.arguments)["panel"] == panel and a["system"].name == "faster-transformer"
        }
        for panel in paper.figure("fig12")
    }
    assert limits["opt-13b/sharegpt"] == {5} and limits["opt-13b/alpaca"] == {14}
    assert all(len(values) == 1 for values in limits.values())


def test_rows_figures_and_the_grid_reading():
    rows = pd.DataFrame([point.function(**point.arguments) for point in study.points(replace(SMALL, crossings=False))])
    assert (rows["latency_s_per_token"] > 0.0262).all() and set(rows["evidence"]) == {"modelled"}
    figures = study.draw(rows, replace(SMALL, crossings=False))
    assert set(figures) == {"fig12_basic_sampling"} <= set(study.CAPTION)
    assert study.judge(rows, SMALL) == []  # a minute of one panel is no figure
    curve = pd.DataFrame(
        [
            dict(part="latency", assumption=study.MAIN, panel="p", system="s", rate=rate, latency_s_per_token=latency)
            for rate, latency in ((1.0, 0.1), (2.0, 0.3), (2.0, 0.5), (3.0, 0.7), (3.0, 0.9))
        ]
    )
    assert study.grid_reading(curve, "p", "s") == pytest.approx(2.25)  # half way up is between means 0.4 and 0.8


def test_one_panel_agrees_with_the_paper():
    """OPT-175B on ShareGPT has the shortest traces: its crossings lie within 15 % of the paper's."""
    params = replace(study.Params(), models=("opt-175b",), workloads=("sharegpt",), seeds=(0,))
    for point in study.points(params):
        if point.function is study.crossing_of and point.arguments["system"].name != "faster-transformer":
            row = point.function(**point.arguments)
            printed = paper.crossings("fig12", study.LEVEL)["opt-175b/sharegpt"][row["system"]]
            assert row["crossing_rate"] == pytest.approx(printed, rel=0.15)
