"""`repro diff`: rows of two runs are matched, what moved is named, and the seeds' spread is the yardstick."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.cli import main
from repro.errors import UserError
from repro.harness.diff import Difference, first_difference
from repro.harness.diff import compare as compare_by
from repro.harness.runs import kept_runs
from repro.harness.tables import Rows, csv_of, read_table

KEYS = ("system", "rate", "seed")


def compare(a: pd.DataFrame, b: pd.DataFrame) -> Difference:
    return compare_by(a, b, KEYS)


def table(**changes: object) -> pd.DataFrame:
    rows = [
        {"system": system, "rate": rate, "seed": seed, "evidence": "modelled", "trace_hash": f"{rate} {seed}",
         "latency": rate * (1 + 0.1 * seed) + len(system), "preemptions": seed}
        for system in ("vllm", "orca-max") for rate in (1.0, 2.0, 4.0) for seed in (0, 1, 2)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**changes)


def test_equal_runs_do_not_differ_in_whatever_order() -> None:
    found = compare(table(), table().sample(frac=1, random_state=1))
    assert not found and found.matched == 18
    assert not compare(table(), table(latency=table()["latency"] * (1 + 1e-12)))  # another type of processor


def test_what_moved_is_measured_by_the_seeds() -> None:
    other = table()
    other.loc[(other["system"] == "vllm") & (other["rate"] == 4.0), "latency"] += 0.5
    other.loc[(other["system"] == "orca-max") & (other["rate"] == 1.0), "latency"] += 0.5
    within, beyond = sorted(compare(table(), other).moved, key=lambda moved: moved.beyond)
    assert (within.column, within.where) == ("latency", "system=vllm, rate=4.0") and not within.beyond
    assert beyond.where == "system=orca-max, rate=1.0" and beyond.beyond
    assert within.spread == pytest.approx(0.8) and beyond.spread == pytest.approx(0.2)
    assert beyond.after - beyond.before == pytest.approx(0.5)
    assert "9.1 -> 9.6 (+0.5, +5.49 %; seeds differ by 0.2)" in str(beyond)
    (alone,) = compare(table().query("seed == 0"), other.query("seed == 0 and (system == 'vllm' or rate > 1)")).moved
    assert alone.spread is None and alone.beyond and "one seed" in str(alone)


def test_rows_and_columns_without_counterpart_are_named() -> None:
    found = compare(table(), table().query("rate < 4").assign(extra=1).drop(columns="preemptions"))
    assert found.matched == 12 and not found.moved
    assert found.unmatched == [
        "column preemptions is only in A",
        "column extra is only in B",
        "6 rows only in A, the first with system=orca-max, rate=4.0, seed=0",
    ]


def test_texts_that_change_are_named_and_do_not_tear_rows_apart() -> None:
    (line,) = compare(table(), table(evidence="measured")).unmatched
    assert line.startswith("evidence differs in 18 rows, the first 'modelled' -> 'measured'")
    assert compare(table(), table(trace_hash="x")).matched == 18
    flipped = table(ok=[True] * 18), table(ok=[False] + [True] * 16 + [False])
    assert compare(*flipped).unmatched[0].startswith("ok differs in 2 rows")


def test_a_value_that_appears_has_moved() -> None:
    gone = table()
    gone.loc[0, "latency"] = None
    (moved,) = compare(table(), gone).moved
    assert moved.column == "latency" and moved.beyond


@given(st.permutations(range(18)), st.sets(st.integers(0, 17)), st.floats(0.01, 1e6))
def test_whatever_is_changed_is_found_and_nothing_else(order: list[int], rows: set[int], change: float) -> None:
    other = table()
    other.loc[sorted(rows), "latency"] += change
    found = compare(table(), other.iloc[order])
    expected = {f"system={other['system'][row]}, rate={other['rate'][row]}" for row in rows}
    assert {moved.where for moved in found.moved} == expected and not found.unmatched


def test_the_first_difference_is_named() -> None:
    other = table()
    other.loc[3, "latency"] = 7.0
    assert first_difference(table(), other) == "latency of row 4 is 6.0 kept and 7.0 now"
    assert first_difference(table(), table()[:5]) == "there are 18 rows kept and 5 now"
    assert first_difference(table(), table().rename(columns={"seed": "s"})).startswith("the columns are")


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = table(text=["nan", "NA", "", "1e3", "é"] + ["x"] * 13, none=None)
    (tmp_path / "x.csv").write_bytes(csv_of(rows))
    assert csv_of(read_table(tmp_path / "x.csv")) == csv_of(rows)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results, figures of the same rows, and a commit with others."""

    def keep(folder: Path, stem: str, rows: pd.DataFrame, about: dict[str, object], manifest: str, prefix: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables = Rows({"runs": rows}, {"runs": KEYS})
        files = tables.write(folder, prefix)
        described = {name: {**entry, "file": files[name]} for name, entry in tables.described().items()}
        (folder / manifest).write_text(json.dumps({"experiment": stem, "tables": described, **about}))

    for stem in ("one", "two"):
        about = {"parameters": {"seeds": [0]}, "code_hash": "1"}
        keep(tmp_path / "results" / stem, stem, table(), about, "manifest.json", "")
        for name in (f"{stem}_a", f"{stem}_b"):
            about = {"parameters": {"seeds": [0, 1]}, "code_hash": "2"}
            keep(tmp_path / "figures", stem, table(latency=1.0), about, f"{name}.json", f"{stem}.")
    gone = {"experiment": "gone", "tables": {"runs": {"file": "gone.runs.csv", "keys": list(KEYS)}}}
    (tmp_path / "figures" / "gone.json").write_text(json.dumps(gone))
    (tmp_path / "figures" / "claims.json").write_text("[]")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "figures"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    keep(tmp_path / "figures", "two", table(), about, "two_a.json", "two.")
    keep(tmp_path / "figures", "two", table(), about, "two_b.json", "two.")
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    monkeypatch.delenv("REPRO_FIGURES_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_files_folders_and_commits(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(kept_runs("results")) == set(kept_runs("figures")) == set(kept_runs("HEAD")) == {"one", "two"}
    assert set(kept_runs("results/one")) == set(kept_runs("results/one/runs.csv")) == {"one"}
    assert main(["diff", "results", "results"]) == 0
    assert capsys.readouterr().out == "2 of 2 experiments are the same to 1e-09\n"
    assert main(["diff", "HEAD", "figures", "--lines", "2"]) == 1
    output = capsys.readouterr().out
    assert "two, runs: 18 rows matched by system, rate, seed; 6 numbers moved, 6 of them by more" in output
    assert "    and 4 more" in output and "1 of 2 experiments are the same" in output
    assert "parameter" not in output
    assert main(["diff", "results", "figures"]) == 1
    assert "  parameter seeds: [0] -> [0, 1]\n  computed by other code\n" in capsys.readouterr().out
    assert main(["diff", "figures/one.runs.csv", "results/two/runs.csv"]) == 1
    assert main(["diff", "results", "results/one"]) == 1
    assert "two: only in results\n" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b'a,b\n1,2,3\n"'])
def test_a_file_that_holds_no_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    about = {"experiment": "x", "tables": {"runs": {"keys": ["a"]}}}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    (tmp_path / "runs.csv").write_bytes(content)
    for named in (tmp_path, tmp_path / "runs.csv"):
        with pytest.raises(UserError, match="runs.csv cannot be read as rows") as caught:
            kept_runs(str(named))
        assert "\n" not in str(caught.value)
