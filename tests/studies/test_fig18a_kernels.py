"""Fig. 18a: recorded rows are read as they are, the pairs, and the study's checks."""

import csv
import json

import pandas as pd
import pytest
from loads import parameters, rows_of

from repro import paths
from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import paper
from repro.report.claims import judge_entry, load
from repro.studies import fig18a_kernels as study

USUAL = dict(
    benchmark="decode",
    contender="ours",
    heads="40 x 128",
    dtype="float16",
    batch="8",
    context="64",
    block_size="16",
    blocks="permuted",
    launch="graph",
    us="10.0",
    fraction_of_copy="0.5",
)
CONTIGUOUS = dict(block_size="", blocks="contiguous K and V")


def line(**changes):
    return USUAL | changes


def record(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    path, manifest = folder / "kernels.csv", folder / "manifest.json"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, USUAL)
        writer.writeheader()
        writer.writerows(lines)
    manifest.write_text(json.dumps({"device": "GPU of the manifest"}))
    return path, manifest


@pytest.fixture(scope="module")
def committed():
    return rows_of(study, parameters("fig18a_kernels"))


def test_rows_are_those_of_the_decode_kernel_with_a_time_and_the_manifests_device(tmp_path):
    lines = [
        line(),
        line(**CONTIGUOUS, contender="SDPA flash", us="20.5"),
        line(us=""),
        line(benchmark="prefill"),
        line(benchmark="fig18a", blocks="in order"),
    ]
    tables = study.recorded(*record(tmp_path, lines), "recorded")
    rows = [(name, row) for name in ("decode", "fig18a", "block_sizes") for row in tables[name]]
    assert [(name, row["kernel"], row["microseconds"], row["block_size"]) for name, row in rows] == [
        ("decode", study.PERMUTED, 10.0, 16),
        ("decode", study.FLASH, 20.5, None),
        ("fig18a", study.IN_ORDER, 10.0, 16),
    ]
    assert {(row["evidence"], row["device"]) for _, row in rows} == {("recorded", "GPU of the manifest")}


def test_the_committed_record_covers_the_papers_shapes_and_both_head_layouts(committed):
    times = study.paper_scale(committed["fig18a"])
    assert set(times.index) == {(batch, context) for batch in study.BATCHES for context in study.CONTEXTS}
    assert set(study.LOOKS) <= set(times.columns)
    assert times[list(study.LOOKS)].notna().all(axis=None)
    decode = committed["decode"]
    ours = decode["kernel"].isin((study.PERMUTED, study.IN_ORDER))
    cost = study.paging_cost(decode[(decode["dtype"] == "float16") & ours])
    assert cost.groupby("heads").size().to_dict() == dict.fromkeys(study.HEADS, 21)
    sizes = committed["block_sizes"].groupby(["heads", "batch", "context"])["block_size"]
    assert set(sizes.agg(lambda found: tuple(sorted(found)))) == {(1, 2, 4, 8, 16, 32, 64, 128, 256)}


def test_the_papers_points_give_the_overheads_that_the_claim_states():
    assert [round(value) for value in study.paper_overhead(8).values()] == [44, 25, 35]
    assert [round(value) for value in study.paper_overhead(32).values()] == [26, 19, 21]
    assert study.paper_times("vllm", 8) == dict(paper.points("fig18a", "vllm/batch-8"))


def test_paging_cost_pairs_a_shape_with_itself():
    rows = pd.DataFrame(
        [
            dict(heads="40 x 128", batch=batch, context=context, kernel=kernel, microseconds=us)
            for batch, context, permuted in ((8, "64", 11.0), (64, "ragged", 30.0))
            for kernel, us in ((study.PERMUTED, permuted), (study.IN_ORDER, 10.0))
        ]
    )
    cost = study.paging_cost(rows).set_index("context")
    assert cost["percent"].to_dict() == pytest.approx({"64": 10.0, "ragged": 200.0})


def test_the_claim_is_judged_by_graph_times_of_the_papers_shapes_only(tmp_path):
    def shape(batch, context, permuted, launch="graph"):
        common = dict(benchmark="fig18a", batch=str(batch), context=str(context), launch=launch)
        return [
            line(**common, us=str(permuted)),
            line(**common, us="100", blocks="in order"),
            line(**common, **CONTIGUOUS, us="200", contender=study.CUDNN),
            line(**common, **CONTIGUOUS, us="400", contender=study.FLASH),
        ]

    lines = [line(us="999"), line(us="1", blocks="in order")]
    for batch in study.BATCHES:
        for context in study.CONTEXTS:
            lines += shape(batch, context, 100 + batch + context / 32) + shape(batch, context, 900, "eager")
    rows = Rows.collect([study.recorded(*record(tmp_path, lines), "recorded")], study.TABLES)
    judged, by_batch = experiment.open("fig18a_kernels").judgements(rows)
    assert (
        by_batch.claim_id == "overhead-at-small-batches" and by_batch.device == judged.device == "GPU of the manifest"
    )
    assert by_batch.ours == pytest.approx({"8": 12.67, "32": 36.67}, rel=1e-3)
    assert judge_entry(load()[by_batch.claim_id], by_batch.ours)[0] == "differs"
    assert judged.claim_id == "fig18a-kernel-overhead"
    assert judged.evidence == "recorded"
    assert judged.ours == pytest.approx([10, 40])
    assert "GPU of the manifest" in judged.note
    assert "25 to 44 % at batch 8, 19 to 26 % at batch 32" in judged.note
    assert "30 to 45 % less" in judged.note
    assert experiment.open("fig18a_kernels", overrides={"gpu": "h200"}).judgements(rows) == []  # named, not "auto"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_figure_is_drawn_and_has_a_caption(committed, dtype):
    run = experiment.open("fig18a_kernels", overrides={"dtype": dtype})
    figures = study.draw(committed, run.params)
    assert set(figures) == set(run.file.captions)
    decode = committed["decode"]
    drawn = decode[(decode["dtype"] == dtype) & (decode["kernel"] != study.IN_ORDER)]
    lines = [line for axis in figures["fig18a_bandwidth"].axes for line in axis.lines]
    points = sum(len(line.get_xdata()) for line in lines if line.get_marker() != "None")
    assert points == len(drawn)


@pytest.mark.parametrize("missing", ["kernels.csv", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, monkeypatch, missing):
    params = parameters("fig18a_kernels")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    folder = paths.folders().experiments / "recorded" / "h200" / "kernels"
    record(folder, [line()])
    assert len(study.points(params)) == 1
    (folder / missing).unlink()
    with pytest.raises(UserError, match=f"{folder / missing} is missing"):
        study.points(params)


def test_another_type_of_numbers_is_refused():
    with pytest.raises(UserError, match="'dtype' must be one of 'float16', 'bfloat16', not 'float32'"):
        parameters("fig18a_kernels", dtype="float32")
