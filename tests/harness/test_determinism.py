"""Every experiment at the smoke scale in two ways, and that a difference is noticed; `make determinism` has three."""

from __future__ import annotations

from pathlib import Path

import determinism
import pytest
from fake_project import FakeProject

WAYS = ("one worker", "two workers, backwards")


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPRO_ROOT", "REPRO_STUDIES", "REPRO_VARIANT", "SCALE", "LENGTHS"):
        monkeypatch.delenv(name, raising=False)


def test_rows_figures_and_verdicts_are_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert determinism.main([], WAYS) == 0
    said = capsys.readouterr().out
    assert "two workers, backwards: " in said and " files, equal bytes" in said
    assert int(said.split(" files, equal bytes")[0].split()[-1]) > 100


def test_what_depends_on_the_hash_seed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = FakeProject(tmp_path / "planted", monkeypatch)
    project.edit_study("return SLOPE * rate + seed", 'return SLOPE * rate + seed + hash("a") % 1000')
    assert determinism.main(["--only", "tiny"], WAYS) == 1
    assert "two workers, backwards: different: " in capsys.readouterr().out


def test_experiments_that_measure_time_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = FakeProject(tmp_path / "timed", monkeypatch)
    project.edit_study("weight=rate)", "weight=rate, alone=True)")
    project.edit_study("return SLOPE * rate + seed", "return SLOPE * rate + time.perf_counter()")
    assert determinism.main(["--only", "tiny"], WAYS) == 0
    assert capsys.readouterr().out == "left out, as they measure time: tiny\n" and project.calls() == []


def test_differences_of_bytes_and_of_values(tmp_path: Path) -> None:
    for name, value, cheap in (("a", 1.0, "true"), ("b", 1.0 + 1e-12, "false")):
        folder = tmp_path / name / "smoke" / "one"
        folder.mkdir(parents=True)
        (folder / "runs.csv").write_text(f"system,latency\nvllm,{value!r}\n")
        (folder / "manifest.json").write_text('{"tables": {"runs": {"keys": ["system"]}}}')
        (folder / "one.json").write_text(f'{{"rows_hash": "1", "cheap": {cheap}}}')
    assert determinism.differences(tmp_path / "a", tmp_path / "b", close=False) == ["smoke/one/runs.csv"]
    assert determinism.differences(tmp_path / "a", tmp_path / "b", close=True) == []
    (tmp_path / "b" / "smoke" / "one" / "runs.csv").write_text("system,latency\nvllm,1.00000001\n")
    (line,) = determinism.differences(tmp_path / "a", tmp_path / "b", close=True)
    assert line.startswith("one, runs: latency: 1 -> 1")
