"""The recording that all benchmarks share: rows, manifest, budget, and what a call says while it measures."""

import csv
from functools import partial
from types import SimpleNamespace

import pytest

from repro.bench import kept, run
from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, read_manifest
from repro.errors import UserError
from repro.harness.progress import Progress


class Squares(Benchmark):
    """Three points, the second of which has two rows and the last of which needs the first."""

    method = "multiplication"
    shown = ("root", "square")

    def __init__(self, options):
        super().__init__(options)
        self.setting, self.calls = {"device": "abacus"}, []

    def start(self, recording):
        return {"ready": True}

    def steps(self, recording):
        yield Step("few/1", 10, lambda: self._rows(1))
        yield Step("more/2", 20, lambda: self._rows(2, -2))
        first = recording.find("few/1")
        yield Step("few/3", 30, (lambda: self._rows(int(first["square"]) + 2)) if first else None)

    def finish(self, recording):
        return {"at_the_end": len(recording.rows)}

    def _rows(self, *roots):
        self.calls.append(roots)
        return ({"kind": "square", "root": root, "square": root * root} for root in roots)


def options(**changes):
    return SimpleNamespace(**{"budget": "1h", "only": ("few", "more"), "also_code": [], "commit": None} | changes)


def measure(folder, code="code", **changes):
    benchmark = Squares(options(**changes))
    run.measure("squares", benchmark, folder, code, partial(Progress, "squares"))
    return benchmark.calls


def test_a_benchmark_is_recorded_with_its_manifest_and_goes_on_where_it_stopped(tmp_path, capsys):
    assert measure(tmp_path, only=("more",)) == [(2, -2)]
    assert measure(tmp_path, commit="abc") == [(1,), (3,)]  # the last one needs the row of the first
    assert measure(tmp_path) == []
    with (tmp_path / "squares.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["key"], row["square"]) for row in rows] == [
        ("more/2", "4"),
        ("more/2", "4"),
        ("few/1", "1"),
        ("few/3", "9"),
    ]
    assert {row["device"] for row in rows} == {"abacus"} and len({row["code"] for row in rows}) == 1
    manifest = read_manifest(tmp_path)
    assert manifest["points_left_out"] == 0 and manifest["method"] == "multiplication" and manifest["ready"]
    assert manifest["device"] == "abacus" and manifest["at_the_end"] == 4
    assert [part.get("commit") for part in manifest["earlier_parts"]][1] == "abc" and len(
        manifest["earlier_parts"]
    ) == 2
    assert all("earlier_parts" not in part for part in manifest["earlier_parts"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "squares.csv"]
    printed = capsys.readouterr().out
    assert "2 points to measure, about 00:40; the budget has" in printed and "4 rows in" in printed
    table = [line.split() for line in printed.splitlines()]
    assert ["key", "root", "square"] in table and ["few/3", "3", "9"] in table
    assert "squares: 2/2 points, 2 computed in" in printed


def test_a_long_recording_is_named_and_not_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "_ROWS_SHOWN", 3)
    measure(tmp_path)
    printed = capsys.readouterr().out
    assert "few/3" not in printed and f"4 rows in {tmp_path}" in printed


def test_other_code_and_another_setting_are_measured_anew_unless_the_code_is_named(tmp_path):
    assert len(measure(tmp_path)) == 3
    assert len(measure(tmp_path, code="other")) == 3
    first = Recording(tmp_path, "squares", "").all[0]["code"]
    assert measure(tmp_path, code="third", also_code=[first]) == []
    assert len(Recording(tmp_path, "squares", "").all) == 8


def test_a_call_that_is_interrupted_leaves_its_rows_and_says_that_it_did_not_end(tmp_path, monkeypatch):
    def interrupted(self, *roots):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Squares, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path)
    assert read_manifest(tmp_path)["points_left_out"] is None
    assert measure(tmp_path) == [] and read_manifest(tmp_path)["points_left_out"] == 0


def test_a_budget_leaves_out_what_would_overrun_it_and_says_so(tmp_path, capsys):
    assert measure(tmp_path, budget="15s") == [(1,)]
    assert read_manifest(tmp_path)["points_left_out"] == 2
    assert "2 points left out, as the budget of 15s would be overrun: call again" in capsys.readouterr().out


def test_rows_of_kernels_are_read_with_text_where_they_have_text(tmp_path):
    """In one recording dtypes differ from row to row: they are no setting there."""
    recording = Recording(tmp_path, "kernels", "one")
    rows = [
        {"context": "64", "dtype": dtype, "batch": 8, "us": "3.6299", "error": ""} for dtype in ("float16", "bfloat16")
    ]
    recording.add("decode/1", rows, {"device": "GPU"})
    Recording(tmp_path, "kernels", "two").add("decode/1", rows[:1], {"device": "GPU"})
    (found,) = kept.read(recording.path, "measured")
    assert found["context"] == "64" and found["batch"] == 8 and found["us"] == 3.6299 and found["error"] is None
    recording.add("decode/2", rows, {"device": "GPU"})
    assert [row["dtype"] for row in kept.read(recording.path, "measured") if row["key"] == "decode/2"] == [
        "float16",
        "bfloat16",
    ]


@pytest.mark.parametrize("kind, number", [("kernels", 572), ("serving", 264)])
def test_all_rows_of_the_recorded_files_are_read(kind, number):
    path, evidence = kept.find("h200", kind)
    assert len(kept.read(path, evidence)) == number
    assert read_manifest(path.parent)["device"] == "NVIDIA H200"


def test_a_budget_that_is_none_is_refused_when_the_benchmark_is_opened():
    with pytest.raises(UserError, match="budget 'soon' is no length of time"):
        Squares(options(budget="soon"))
