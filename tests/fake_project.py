"""A checkout with one tiny experiment, for the tests of what runs experiments."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from repro.harness import experiment, workers

STUDY = '''
import os, signal, time

from pydantic import model_validator

from repro import paths  # only `draw` uses it
from repro.errors import UserError
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters

SLOPE = 0.1
TABLES = {"runs": ("rate", "seed")}


class Params(Parameters):
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    fault: str | None
    sleep: float
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self):
        if min(self.rates, default=1) <= 0:
            raise UserError(f"rates must be positive, not {min(self.rates)}")
        return self


def latency(rate, seed):
    """A helper."""
    return SLOPE * rate + seed


def one(rate, seed, fault, sleep, lengths):
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{rate} {seed}\\n")
    time.sleep(sleep)
    if rate == 2.0 and fault == "user":
        raise UserError("this rate cannot be")
    if rate == 2.0 and fault == "bug":
        raise ZeroDivisionError("by nought")
    if rate == 2.0 and fault in ("killed", "kernel killed"):
        os.kill(os.getpid() if fault == "killed" else os.getppid(), signal.SIGKILL)
    return {"evidence": "exact", "device": "none", "seed": seed, "trace_hash": None, "rate": rate,
            "latency": float("nan") if rate == 2.0 and fault == "nan" else latency(rate, seed)}


def points(params):
    others = dict(fault=params.fault, sleep=params.sleep, lengths=params.lengths)
    return [Point(one, dict(rate=rate, seed=seed, **others), "runs", weight=rate)
            for rate in params.rates for seed in params.seeds]


def draw(rows, params):
    from matplotlib.figure import Figure

    assert paths.root().is_dir()
    figure = Figure()
    axes = figure.add_subplot()
    runs = rows["runs"]
    axes.plot(runs["rate"], runs["latency"], "o", label="<é & ü>")
    axes.legend()
    return {"tiny": figure}


def judge(rows, params):
    return []
'''
PARAMETERS = """\
title: A tiny thing
params:
  rates: [3, 1, 2]   # req/s
  seeds: [0, 1]      # one trace each
  fault: null        # what goes wrong
  sleep: 0.0         # seconds that each point takes
  lengths: null      # a file
smoke:
  seeds: [0]
"""
CELLS = (
    'scale = "paper"\noverrides = {}',
    "from repro.harness import experiment\n\n"
    'run = experiment.open("tiny", scale=scale, overrides=overrides)\nrows = run.rows()',
    "figures = run.draw(rows)",
    "run.judge(rows)",
)
_names, _times = itertools.count(), itertools.count(10**9)


class Here:
    """Stands in for a pool of worker processes: what is submitted is computed at once, in this process."""

    def submit(self, function: Callable[..., Any], *arguments: object) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


@contextmanager
def no_processes(workers: int, env: Mapping[str, str]) -> Iterator[Here]:
    """In place of `repro.harness.workers.fresh_processes`."""
    yield Here()


class FakeProject:
    """Writes the project below a folder and points the environment variables there.

    With `processes` the test's own runs compute in worker processes, as a user's do: for tests of those. The others do
    without, as a worker takes a second to start. (Notebooks and commands have workers always.)"""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, processes: bool = False) -> None:
        if not processes:
            monkeypatch.setattr(workers, "fresh_processes", no_processes)
        self.folder, self._package = folder, f"fake_studies_{next(_names)}"
        for name in ("experiments", "notebooks", self._package):
            (folder / name).mkdir(parents=True)
        (folder / self._package / "__init__.py").touch()
        self.parameter_file = folder / "experiments" / "tiny.yaml"
        self.parameter_file.write_text(PARAMETERS)
        self.write_study(STUDY)
        self.write_notebook(*CELLS)
        self._log = folder / "log"
        self.environment = {
            "REPRO_ROOT": str(folder),
            "REPRO_STUDIES": self._package,
            "FAKE_LOG": str(self._log),
            "JOBS": "1",
        }
        for name in ("REPRO_RESULTS_DIR", "REPRO_FIGURES_DIR", "REPRO_VARIANT", "REPRO_COMMAND", "SCALE", "LENGTHS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.syspath_prepend(str(folder))
        # Kernels and command lines started by a test find the study there too.
        search = os.pathsep.join([str(folder), str(Path(experiment.__file__).parent.parent.parent)])
        monkeypatch.setenv("PYTHONPATH", search)

    def write_study(self, text: str) -> None:
        path = self.folder / self._package / "tiny.py"
        path.write_text(text)
        os.utime(path, (next(_times),) * 2)  # Python takes a file of equal size and time, to the second, for unchanged
        sys.modules.pop(f"{self._package}.tiny", None)

    def edit_study(self, old: str, new: str) -> None:
        text = (self.folder / self._package / "tiny.py").read_text()
        assert text.count(old) == 1
        self.write_study(text.replace(old, new))

    def add_experiment(self, stem: str, fault: str = "null") -> None:
        """Another experiment with the same study, drawn under the same name."""
        (self.folder / self._package / f"{stem}.py").write_text(f"from {self._package}.tiny import *\n")
        (self.folder / "experiments" / f"{stem}.yaml").write_text(PARAMETERS.replace("fault: null", f"fault: {fault}"))
        self.write_notebook(*(cell.replace('"tiny"', f'"{stem}"') for cell in CELLS), stem=stem)

    def write_notebook(self, *cells: str, stem: str = "tiny", tags: tuple[str, ...] = ("parameters",)) -> Path:
        path = self.folder / "notebooks" / f"{stem}.ipynb"
        path.write_text(
            json.dumps(
                {
                    "cells": [
                        {
                            "cell_type": "code",
                            "execution_count": None,
                            "id": f"cell-{index}",
                            "outputs": [],
                            "metadata": {"tags": list(tags)} if index == 0 else {},
                            "source": source,
                        }
                        for index, source in enumerate(cells)
                    ],
                    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
                    "nbformat": 4,
                    "nbformat_minor": 5,
                }
            )
        )
        return path

    def open(self, scale: str = "paper", **overrides: object) -> experiment.Run:
        return experiment.open("tiny", scale, overrides)

    def calls(self) -> list[str]:
        """The points computed since the last time this was asked, as "rate seed"."""
        calls = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return sorted(calls)

    def study(self) -> ModuleType:
        return self.open().study
