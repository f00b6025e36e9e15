"""The authors' own trace: the kept rows are what the study computes, and what they are judged by."""

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro import paths
from repro.engine.systems import system
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import paper
from repro.report.claims import judge_entry, load
from repro.studies import authors, sweep
from repro.studies import authors_trace as study
from repro.studies import fig02_memory_waste as fig02
from repro.studies import fig12_basic_sampling as fig12

STEM = "authors_trace"


@pytest.fixture(scope="module")
def kept():
    run = experiment.open(STEM)
    return run, rows_of(study, run.params)


def test_the_kept_rows_say_what_they_are_and_whose_lengths_they_have(kept):
    run, rows = kept
    for table in rows.values():
        assert table["evidence"].str.endswith(authors.ON_AUTHORS_LENGTHS).all()
        assert table["lengths_sha256"].nunique() == 1 and table["trace_hash"].notna().all()
    latency = rows["latency"]
    for panel in study.PANELS:
        for name in ("faster-transformer", *study.ORCAS, "vllm"):
            rates = set(latency[(latency["panel"] == panel) & (latency["system"] == name)]["rate"])
            assert rates > {rate for rate, _ in paper.points("fig12", panel, name)}
    assert set(study.draw(rows, run.params)) == set(run.file.captions)


def test_the_kept_rows_are_judged_and_only_the_speed_of_vllm_differs(kept):
    run, rows = kept
    judged = {one.claim_id: one for one in run.judgements(rows)}
    verdicts = {claim: judge_entry(load()[claim], one.ours)[0] for claim, one in judged.items()}
    assert set(verdicts) == {f"{figure}-authors-trace" for figure in ("fig2", "fig12", "fig13", "fig19b")}
    assert verdicts.pop("fig13-authors-trace") == "differs"  # vLLM's bar, at the edge of saturation
    assert set(verdicts.values()) == {"reproduced"}
    off = judge_entry(load()["fig13-authors-trace"], judged["fig13-authors-trace"].ours)[1]
    assert [name for name, verdict in off.items() if verdict == "differs"] == ["vllm"]


def test_a_piece_that_is_a_point_off_flips_the_verdict(kept):
    run, rows = kept
    off = rows["pool"].assign(token_states=rows["pool"]["token_states"] + 1)
    judged = {one.claim_id: one for one in run.judgements(Rows({**rows, "pool": off}, study.TABLES))}
    assert judge_entry(load()["fig2-authors-trace"], judged["fig2-authors-trace"].ours)[0] == "differs"


def test_rows_of_another_file_are_computed_and_not_judged(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{20 + n},{300 - n}\n" for n in range(50)))
    small = {"lengths": str(path), "usage_window_s": [5.0, 20.0], "batch_window_s": [5.0, 20.0], "max_seconds": 20.0}
    params = parameters(STEM, **small, preemption_seconds=20.0, block_sizes=[16])
    some = [point for point in study.points(params) if point.table in ("pool", "end_to_end")]
    found = [point.function(**point.arguments) for point in some]
    assert {row["evidence"] for row in found} == {"replayed", "modelled"}
    rows = Rows({"pool": pd.DataFrame(found)}, study.TABLES)
    assert study.judge(rows, params) == []


def test_a_missing_file_of_kept_rows_is_named_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="pool.csv is missing; restore it, or compute it: .* --lengths"):
        authors.read({"pool": tmp_path / "pool.csv"})


def test_a_crossing_is_read_along_the_line_between_two_rates():
    rates, latencies = (0.2, 0.1, 0.3), (0.4, 0.1, 0.8)
    rows = pd.DataFrame({"panel": "p", "system": "s", "rate": rates, "latency_s_per_token": latencies})
    assert authors.crossings(rows, 0.5) == {("p", "s"): pytest.approx(0.225)}
    assert authors.crossings(rows, 0.9) == {}


def test_with_the_authors_file_fig_2_comes_out_as_kept_and_as_drawn(kept, reference_dir):
    """The Orcas' twelve pieces within 0.5 points of the paper's, in three runs of 900 s; and the kept values."""
    lengths, drawn = str(reference_dir / "data" / "sharegpt_lengths.csv"), paper.figure("fig2")
    pool = kept[1]["pool"].set_index("system")
    run = {"model": "opt-13b", "profile": "a100-2023", "block_size": 16, "kv_slots": None, "workload": "sharegpt"}
    run |= {"rate": 4.0, "window_s": (300.0, 900.0), "seed": 0, "lengths": lengths, "arrivals": "authors"}
    for name in study.ORCAS:
        row = study.on_lengths(fig02.saturated_run, {"system": system(name), **run}, lengths)
        assert row["evidence"] == pool.at[name, "evidence"] and row["trace_hash"] == pool.at[name, "trace_hash"]
        ours = [sum(row[column] for column in columns) for columns in study.PIECES.values()]
        assert ours == pytest.approx([pool.loc[name, columns].sum() for columns in study.PIECES.values()])
        assert ours == pytest.approx(list(drawn[name].values()), abs=0.5)


def test_with_the_authors_file_faster_transformers_crossings_are_the_papers(kept, reference_dir):
    """ShareGPT's three crossings, read on the drawn rates, within 6 %; and the kept latencies."""
    lengths = str(reference_dir / "data" / "sharegpt_lengths.csv")
    for panel in study.PANELS:
        latency = kept[1]["latency"].query("panel == @panel and system == 'faster-transformer'")
        found = []
        for rate in latency["rate"]:
            setup = fig12.setup_of(panel, "faster-transformer", 3600.0, lengths, 0, arrivals="authors")
            found.append(sweep.latency_at(setup, rate))
        again = pd.DataFrame(found)
        assert again["latency_s_per_token"].tolist() == pytest.approx(latency["latency_s_per_token"].tolist())
        (ours,) = authors.crossings(again, sweep.LEVEL).values()
        drawn = paper.crossings("fig12", sweep.LEVEL)[panel]["faster-transformer"]
        assert ours == pytest.approx(drawn, rel=0.06)


def test_the_folder_of_kept_rows_is_no_gpu():
    assert not (paths.folders().experiments / "recorded" / "authors_trace").exists()
