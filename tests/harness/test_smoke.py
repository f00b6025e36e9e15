"""The smoke-scale reproduction, whole and as a user runs it: each experiment, figure and verdict, the page."""

import json
import os
import subprocess
import sys
from pathlib import Path

from committed import TOURS, committed

from repro.report.claims.claim import load
from repro.setup.environment import ROOT


def test_the_smoke_reproduction_runs_from_nothing_and_leaves_the_committed_figures_alone(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "figures").glob("**/*")}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("REPRO_")}
    # The other tests ask for Triton's interpreter; a user does not.
    environ.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "repro", "reproduce", "--scale", "smoke"],
        env=environ | {"REPRO_RESULTS_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    stems = sorted(path.stem for path in (ROOT / "experiments").glob("*.yaml"))
    assert stems
    assert set(stems) >= {path.stem for path in (committed() / "notebooks").glob("*.ipynb")} - TOURS

    figures = tmp_path / "smoke" / "figures"
    page = (figures / "index.html").read_text(encoding="utf-8")
    for stem in stems:
        assert list((tmp_path / "smoke" / stem).glob("*.ipynb")), stem
        assert stem in page
    drawn = sorted(path.stem for path in figures.glob("*.png"))
    assert drawn == sorted(path.stem for path in figures.glob("*.svg"))
    assert len(drawn) >= len(stems)
    claims = json.loads((figures / "claims.json").read_text(encoding="utf-8"))
    ran = {claim["experiment"] for claim in claims if claim["verdict"] != "not run"}
    assert ran <= set(stems)
    assert len(claims) == len(load()) > 100
    assert before == {path: path.stat().st_mtime_ns for path in (ROOT / "figures").glob("**/*")}
