"""The smoke-scale reproduction, whole and as a user runs it: each experiment, figure and verdict, the page. What it
computed is computed again in another way and must be the same bytes; `make determinism` does so in three ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import determinism
import pytest
from committed import TOURS, committed

from repro.harness import experiment
from repro.report.claims.claim import load
from repro.setup.environment import ROOT

pytestmark = pytest.mark.heavy(500)

# One reproduction for both tests, as it takes minutes. The other way differs from it in worker processes, hash seed,
# locale, time zone and the order of experiments and of points, and it has no notebooks.
FIRST, OTHER = "one worker", "two workers, backwards"


@dataclass
class Reproduction:
    done: subprocess.CompletedProcess[str]
    results: Path
    touched: set[Path]  # files of the committed figures that were written or removed meanwhile


def figures_of_the_checkout() -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in (ROOT / "figures").glob("**/*")}


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Reproduction:
    results, before = tmp_path_factory.mktemp("smoke"), figures_of_the_checkout()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("REPRO_", "LC_", "LANG"))}
    # The other tests ask for Triton's interpreter; a user does not.
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "repro", "reproduce", "--scale", "smoke"],
        env=environ | determinism.WAYS[FIRST] | {"REPRO_RESULTS_DIR": str(results)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,  # seconds: other tests and other work may keep all cores busy
        check=False,
    )
    if done.returncode == 0:  # for tests/studies
        (shared_folder / "reproduced").symlink_to(results)
    return Reproduction(done, results, {path for path, _ in before ^ figures_of_the_checkout()})


def test_the_smoke_reproduction_runs_from_nothing_and_leaves_the_committed_figures_alone(
    reproduced: Reproduction,
) -> None:
    done = reproduced.done
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    stems = sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml"))
    assert stems
    assert set(stems) >= {path.stem for path in (committed() / "notebooks").glob("*.ipynb")} - TOURS

    figures = reproduced.results / "smoke" / "figures"
    page = (figures / "index.html").read_text(encoding="utf-8")
    for stem in stems:
        assert list((reproduced.results / "smoke" / stem).glob("*.ipynb")), stem
        assert stem in page
    drawn = sorted(path.stem for path in figures.glob("*.png"))
    assert drawn == sorted(path.stem for path in figures.glob("*.svg"))
    assert len(drawn) >= len(stems)
    claims = json.loads((figures / "claims.json").read_text(encoding="utf-8"))
    ran = {claim["experiment"] for claim in claims if claim["verdict"] != "not run"}
    assert ran <= set(stems)
    assert len(claims) == len(load()) > 100
    assert reproduced.touched == set()


def test_computed_another_way_rows_figures_and_verdicts_are_the_same_bytes(
    reproduced: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("REPRO_ROOT", "REPRO_STUDIES", "REPRO_VARIANT", "SCALE", "LENGTHS"):
        monkeypatch.delenv(name, raising=False)
    stems = [path.stem for path in (ROOT / "experiments").glob("*.yaml")]
    timed = {stem for stem in stems if experiment.open(stem, "smoke").measures_time}
    determinism.run_way(OTHER, tmp_path, sorted(set(stems) - timed), "smoke")
    assert determinism.differences(reproduced.results, tmp_path, close=False, without=timed) == []
    assert len(determinism.files(tmp_path)) > 100
