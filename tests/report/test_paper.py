"""The paper's own data: complete, unchanged, and read the way a curve is read."""

import json

import pytest

from repro.report import paper

#: Fig. 12's and others' names in the reference file -> our ids
IDS = {
    "vLLM": "vllm",
    "Orca (Max)": "orca-max",
    "Orca (Pow2)": "orca-pow2",
    "Orca (Oracle)": "orca-oracle",
    "FasterTransformer": "faster-transformer",
    "Existing systems": "existing",
}


def test_every_number_is_the_reference_file_s(reference_dir):
    reference = json.loads((reference_dir / "paper" / "figures.json").read_text())
    for name in ("fig12", "fig14", "fig16", "fig17"):
        renamed = {
            panel: {IDS[system]: curve for system, curve in systems.items()}
            for panel, systems in reference[name].items()
        }
        assert paper.figure(name) == renamed
    for name in ("fig18a", "fig18b", "fig19a", "fig19b"):
        assert sorted(map(str, paper.figure(name).values())) == sorted(map(str, reference[name].values()))
    assert paper.figure("fig2") == reference["fig2"]
    assert paper.figure("fig1")["throughput_tok_s"] == reference["fig1"]["throughput_tok_s"]["Throughput"]
    memory = {IDS[system]: curve for system, curve in reference["fig1"]["memory_gb"].items()}
    assert paper.figure("fig1")["memory_gb"] == memory


def test_places_where_a_line_leaves_the_plot_are_no_points():
    vertices = paper.line("fig12", "opt-13b/sharegpt", "vllm")
    assert len(vertices) == 9
    assert paper.points("fig12", "opt-13b/sharegpt", "vllm") == vertices[:7]


def test_a_changed_copy_leaves_the_data_alone():
    paper.figure("fig2")["vllm"]["token states"] = 0
    assert paper.figure("fig2")["vllm"]["token states"] == 96.27


def test_crossing_interpolates_the_first_rise():
    line = [(0.0, 0.0), (1.0, 0.2), (2.0, 0.6), (3.0, 0.1), (4.0, 0.9)]
    assert paper.crossing(line, 0.5) == pytest.approx(1.75)
    assert paper.crossing(line, 0.6) == 2.0
    assert paper.crossing(line, 1.0) is None
    assert paper.crossing([(1.0, 0.7), (2.0, 0.8)], 0.5) is None


def test_crossings_give_the_ratios_of_the_paper_s_curves():
    rates = paper.crossings("fig12", 0.5)
    ratios = [
        round(rates[f"{model}/sharegpt"]["vllm"] / rates[f"{model}/sharegpt"]["orca-oracle"], 2)
        for model in ("opt-13b", "opt-66b", "opt-175b")
    ]
    assert ratios == [1.75, 2.33, 1.47]
    assert round(rates["opt-13b/alpaca"]["vllm"], 2) == 28.06


def test_an_unknown_figure_is_a_key_error():
    with pytest.raises(KeyError):
        paper.figure("fig99")
