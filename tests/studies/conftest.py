"""The rows of the smoke-scale reproduction, which tests of studies need not compute again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loads import rows_of

from repro.harness.experiment import Run
from repro.harness.tables import Rows


@pytest.fixture
def smoke_rows(shared_folder: Path) -> Callable[[Run], Rows]:
    """A function: the rows of a run at the smoke scale. They are those of tests/harness/test_smoke.py, which is begun
    first, where it has ended; else they are computed here."""

    def rows(run: Run) -> Rows:
        folder = shared_folder / "reproduced" / "smoke" / run.stem
        if not folder.is_dir():
            return rows_of(run.study, run.params)
        return Rows.read({path.stem: path for path in folder.glob("*.csv")}, run.study.TABLES)

    return rows
