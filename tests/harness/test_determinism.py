"""A difference between two ways of computing the same is noticed; test_smoke.py looks for one in every experiment."""

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


def test_what_belongs_to_an_experiment_is_left_out_with_its_figures_and_nothing_else(tmp_path: Path) -> None:
    figures = tmp_path / "smoke" / "figures"
    for stem, figure in (("one", "curve"), ("one_more", "one_more")):
        for folder in (figures, tmp_path / "smoke" / stem):
            folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "smoke" / stem / "runs.csv").write_text("rows")
        (figures / f"{stem}.runs.csv").write_text("rows")
        (figures / f"{figure}.svg").write_text("drawn")
        (figures / f"{figure}.json").write_text(f'{{"experiment": "{stem}"}}')
    for name in ("claims.json", "index.html", "machines.json"):
        (figures / name).write_text("[]")
    kept = {"smoke/one_more/runs.csv", *(f"smoke/figures/one_more.{ending}" for ending in ("runs.csv", "svg", "json"))}
    assert set(determinism.files(tmp_path, without={"one"})) == {*kept, "smoke/figures/claims.json"}
    assert len(determinism.files(tmp_path)) == 9
