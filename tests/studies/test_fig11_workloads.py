"""The study of the workloads: its rows against the traces they describe, its verdicts, its figures."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import claims
from repro.report.claims import Verdict, judge_entry
from repro.studies import fig11_workloads as study
from repro.workloads import make_trace
from repro.workloads.fig11 import fig11_data

STEM = "fig11_workloads"
SMALL = parameters(STEM, rate=22.0, duration_s=300.0, seeds=[0, 1])


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of(study, SMALL)


def test_a_processor_without_vector_units_gives_the_same_rows(rows: Rows) -> None:
    """Its sums have another order. So do those of another library for matrices."""
    program = (
        "from loads import parameters, rows_of\nfrom repro.studies import fig11_workloads as study\n"
        f"print(rows_of(study, parameters({STEM!r}, rate=22.0, duration_s=300.0, seeds=[0, 1])).hash())"
    )
    units = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    plain = {"NPY_DISABLE_CPU_FEATURES": " ".join(units), "OPENBLAS_CORETYPE": "NEHALEM"}
    search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=os.environ | plain | search, capture_output=True, text=True, check=True)
    assert said.stdout.split() == [rows.hash()]


@pytest.mark.parametrize("workload", ["sharegpt", "alpaca"])
@pytest.mark.parametrize("length", ["prompt", "output"])
def test_bins_count_the_trace(rows: Rows, workload: str, length: str) -> None:
    trace = make_trace(workload, SMALL.rate, SMALL.duration_s, seed=1)
    tokens = getattr(trace, f"{length}_tokens")
    chosen = rows["bins"][(rows["bins"]["workload"] == workload) & (rows["bins"]["length"] == length)]
    bins = chosen[chosen["seed"] == 1].reset_index(drop=True)
    assert set(bins["trace_hash"]) == {trace.hash} and len(bins) == 128
    spec = fig11_data()[workload][length]
    width = (spec["max_tokens"] - spec["min_tokens"]) / 128
    for number in (0, 3, 40, 127):
        left = spec["min_tokens"] + number * width
        inside = (tokens >= left) & ((tokens < left + width) | (number == 127))
        assert bins["density"][number] * width == pytest.approx(inside.mean())
    assert np.allclose(np.cumsum(bins["density"] * width), bins["cumulative"])
    assert bins["cumulative"].iloc[-1] == 1


def test_rows_carry_the_card(rows: Rows) -> None:
    cards = rows["cards"].set_index(["workload", "seed"])
    assert len(cards) == 4 and rows.distinct("evidence") == ["replayed"]
    for (workload, seed), row in cards.iterrows():
        card = make_trace(workload, SMALL.rate, SMALL.duration_s, seed).card
        assert row["card"] == str(card) and row["trace_hash"] == card.hash and not row["equals_paper_trace"]
        assert row["recipe"] == card.source.recipe and row["filter"] == card.source.filter
        assert row["requests"] == card.num_requests and row["rank_correlation"] == pytest.approx(card.rank_correlation)
        assert (row["prompt_p10"], row["output_p99"]) == pytest.approx(
            (card.prompt_quantiles[0], card.output_quantiles[-1])
        )
        ranges = rows["prompt_ranges"][rows["prompt_ranges"]["trace_hash"] == card.hash]
        assert ranges["requests"].sum() == card.num_requests


def test_lengths_outside_the_papers_bins_are_not_drawn_but_counted(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n2040,2\n1,2020\n10,20\n30,40\n")
    point = study.points(parameters(STEM, rate=40.0, duration_s=100.0, lengths=str(path)))[0]
    bins = pd.DataFrame(point.function(**point.arguments)["bins"]).query("length == 'prompt'")
    assert bins["density"].sum() * 2027 / 128 == pytest.approx(0.75, abs=0.01)
    assert bins["cumulative"].iloc[-1] == pytest.approx(0.75, abs=0.01)


def test_verdicts_follow_the_rows(rows: Rows) -> None:
    known = claims.load()
    judged = {judgement.claim_id: judgement for judgement in study.judge(rows, SMALL)}
    assert set(judged) == {"fig11-means", "fig11-ratios"}
    means = rows["cards"].groupby("workload")["mean_output_tokens"].mean()
    ours = judged["fig11-means"].ours
    assert ours["alpaca"][1] == pytest.approx(means["alpaca"], rel=1e-5)
    ratio = judged["fig11-ratios"].ours["output"]
    assert ratio == pytest.approx(means["sharegpt"] / means["alpaca"], rel=0.01)
    for name in ("sharegpt", "alpaca"):
        for value, (low, high) in zip(ours[name], judged["fig11-means"].interval[name]):
            assert low <= value <= high
    cards = rows["cards"].assign(mean_prompt_tokens=2 * rows["cards"]["mean_prompt_tokens"])
    doubled = Rows({**rows, "cards": cards}, study.TABLES)
    verdicts = {
        judgement.claim_id: judge_entry(known[judgement.claim_id], judgement.ours)[0]
        for judgement in study.judge(doubled, SMALL)
    }
    assert verdicts["fig11-means"] is Verdict.DIFFERS
    assert "rebuilt" in judged["fig11-means"].note


def test_an_hour_of_the_default_reproduces_both_claims() -> None:
    run, known = experiment.open(STEM), claims.load()
    for judgement in run.judgements(rows_of(study, run.params)):
        assert judge_entry(known[judgement.claim_id], judgement.ours)[0] is Verdict.REPRODUCED


@pytest.mark.parametrize("seeds", [(0, 1), (0,)])
def test_figures_are_drawn_and_have_captions(rows: Rows, seeds: tuple[int, ...]) -> None:
    chosen = {name: table[table["seed"].isin(seeds)] for name, table in rows.items()}
    figures = study.draw(Rows(chosen, study.TABLES), SMALL)
    assert set(figures) == set(experiment.parameter_file(STEM).captions)
    for figure in figures.values():
        figure.savefig(io.BytesIO(), format="svg")
        shown = [text.get_text() for axis in figure.axes for text in axis.texts]
        assert all("nan" not in text for text in shown)
    means = " ".join(text.get_text() for axis in figures["fig11_workloads"].axes for text in axis.texts)
    assert all(number in means for number in ("161.31", "337.99", "19.31", "58.45"))


def test_a_file_of_one_request_can_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("prompt_tokens,output_tokens\n10,20\n")
    params = parameters(STEM, rate=2.0, duration_s=60.0, seeds=[0], lengths=str(path))
    assert params.as_in_paper
    figures = study.draw(rows := rows_of(study, params), params)
    figures["fig11_dependence"].savefig(io.BytesIO(), format="svg")
    assert "are not those of the paper's trace" in study.judge(rows, params)[0].note


def test_the_real_pairs_are_the_papers_trace(reference_dir: Path) -> None:
    lengths = str(reference_dir / "data" / "sharegpt_lengths.csv")
    params = parameters(STEM, lengths=lengths)
    rows = rows_of(study, params)
    cards = rows["cards"].set_index("workload")
    equal = cards["equals_paper_trace"].groupby("workload").all()
    assert equal.to_dict() == {"alpaca": False, "sharegpt": True}
    real = cards.loc["sharegpt"]
    assert set(real["source_mean_prompt_tokens"].round(2)) == {161.31}
    assert set(real["source_mean_output_tokens"].round(2)) == {337.99}
    # the pairs are those of the histogram: its bins come out to the digits that were read off
    bins = rows["bins"][(rows["bins"]["workload"] == "sharegpt") & (rows["bins"]["seed"] == 0)]
    for length in ("prompt", "output"):
        ours = bins[bins["length"] == length]["density"].to_numpy()
        assert np.abs(ours - fig11_data()["sharegpt"][length]["density"]).max() < 1e-4
    assert "are those of the paper's trace" in study.judge(rows, params)[0].note


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rate": 0.0}, "rate"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"seeds": ()}, "seeds"),
        ({"rate": 1e9}, "lower the rate"),
    ],
)
def test_bad_parameters_are_refused_before_any_work(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parameters(STEM, **changes)
