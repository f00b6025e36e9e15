"""Sweeps: what a set-up serves, which rates are asked for, and that no kept result depends on how it is drawn."""

import pandas as pd
import pytest
from loads import parameters

from repro.harness import keys
from repro.harness.sources import Sources
from repro.report import paper, plotting
from repro.simulate.serve import serve
from repro.studies import (
    ablation_ladder,
    authors,
    fig12_basic_sampling,
    fig14_multi_sequence,
    fig15_sharing,
    fig16_shared_prefix,
    fig17_chatbot,
    sweep,
)

PANEL = "opt-13b/sharegpt"


@pytest.fixture
def setup():
    return fig12_basic_sampling.setup_of(PANEL, "vllm", 60.0, None, 0)


def test_a_row_says_which_set_up_it_is_and_what_was_served(setup):
    row, trace = sweep.latency_at(setup, 1.0), setup.trace_at(1.0)
    served = serve(setup.system, setup.deployment, trace, setup.costs)
    assert row["latency_s_per_token"] == served.latency_s_per_token and row["requests"] == len(trace)
    assert row["trace_hash"] == trace.hash and row["rate"] == 1.0
    told = {
        "panel": PANEL,
        "assumption": fig12_basic_sampling.MAIN,
        "system": "vllm",
        "seed": 0,
        "evidence": "modelled",
    }
    assert row | told == row


def test_a_crossing_lies_where_the_latency_reaches_the_level(setup):
    row = sweep.crossing_of(setup, 2.0, 0.02)
    below, above = (sweep.latency_at(setup, row["crossing_rate"] * factor) for factor in (0.98, 1.02))
    assert below["latency_s_per_token"] < sweep.LEVEL < above["latency_s_per_token"]
    assert row["trace_hash"] is None  # no single trace: the rate was searched for


@pytest.mark.parametrize("figure, panel", [("fig12", PANEL), ("fig14", "beam/2"), ("fig17", "opt-13b/chatbot")])
def test_a_system_of_the_users_runs_at_all_rates_of_the_panel(figure, panel):
    union = {rate for name in paper.figure(figure)[panel] for rate in sweep.rates(figure, panel, name)}
    assert sweep.rates(figure, panel, "mine") == sorted(union)
    assert sweep.drawn(figure, panel, ["mine"]) == {}
    assert sweep.rates(figure, "a panel of the user's", "vllm", instead=panel) == sorted(union)


@pytest.mark.parametrize(
    "study",
    [fig12_basic_sampling, fig14_multi_sequence, fig15_sharing, fig16_shared_prefix, fig17_chatbot, ablation_ladder],
)
def test_a_kept_result_does_not_depend_on_how_it_is_drawn(study):
    sources, reached = Sources(), set()
    sources.digest = lambda roots: reached.update(module for module, _ in sources.reached(roots)) or ""
    params = parameters(study.__name__.rpartition(".")[2])
    computing = [point for point in study.points(params) if point.function.__module__ != authors.__name__]  # not read
    for point in {point.function: point for point in computing}.values():
        keys.identify(point.function, point.arguments, sources)
    assert "repro.simulate.serve" in reached and "repro.studies.sweep" in reached
    assert not any(module.startswith(("repro.report", "repro.harness")) for module in reached)


def test_deviations_are_drawn_for_what_the_paper_draws_only():
    found = pd.DataFrame(
        [
            {"panel": panel, "system": name, "seed": 0, "evidence": "modelled", "device": "d", "crossing_rate": rate}
            for panel in (PANEL, "a panel of the user's")
            for name, rate in (("vllm", 2.0), ("mine", 1.0))
        ]
    )
    titles = {panel: panel for panel in found["panel"]}
    with plotting.house():
        figure = sweep.draw(found, "fig12", titles, 15, 0.15, "", readings={(PANEL, "vllm"): 1.9})
    axis = figure.axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == [PANEL]
    theirs = paper.crossings("fig12", sweep.LEVEL)[PANEL]["vllm"]
    heights = [line.get_ydata()[0] for line in axis.lines if line.get_marker() in ("o", "x")]
    assert heights == pytest.approx([100 * (2.0 / theirs - 1), 100 * (1.9 / theirs - 1)])
