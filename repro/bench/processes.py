"""Benchmarks one after the other, each in a process of its own: all of them, and what `make reproduce` measures first.

A failure of one is said and stops no other; whatever needs rows then takes those that there are."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from repro.bench import kept
from repro.bench.benchmark import seconds_of
from repro.bench.rows import read_manifest
from repro.setup import doctor
from repro.setup.environment import ROOT, nvidia_driver

#: what is measured on a GPU, with its options; the budget is that of the recorded serving rows
ON_GPU = {"kernels": (), "end_to_end": (), "serving": ("--budget", "5m")}


def _run(name: str, folder: Path, *options: str) -> int:
    """The exit code of `python -m repro bench name`."""
    command = ["repro", "bench", name, "--out", str(folder), *options]
    print("python -m", *command, file=sys.stderr, flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode


def measure_all(folder: Path) -> int:
    """Measure how fast this project is here, into folders below `folder`, which are emptied first: the simulator, and
    on a GPU the kernels and the real engine. The exit code: that of one that failed, else 0."""
    code = _afresh("simulator", folder)
    return measure_gpu(folder) or code


def measure_gpu(folder: Path) -> int:
    """The same for what needs a GPU; without one only say why not."""
    why_not = doctor.why_no_gpu({"torch": doctor.probe_torch(), "driver": doctor.probe_driver()})
    if why_not:
        print(f"{', '.join(ON_GPU)}: not measured ({why_not}); experiments/recorded holds rows of an H200")
        return 0
    codes = [_afresh(name, folder, *options) for name, options in ON_GPU.items()]
    return next((code for code in codes if code), 0)


def _afresh(name: str, folder: Path, *options: str) -> int:
    shutil.rmtree(folder / name, ignore_errors=True)
    return _run(name, folder / name, *options)


def measure_first(budget: str) -> None:
    """Measure kernels and serving on this machine's GPU within the budget, if it has one; rows go to results/measured.

    The kernels take about two minutes and are measured once; serving goes on where an earlier call stopped."""
    budget_s, started = seconds_of(budget), time.monotonic()
    if not budget_s or not nvidia_driver():
        return
    kernels = kept.own_folder() / kept.KERNELS
    if not (kernels / "manifest.json").is_file() or read_manifest(kernels).get("points_left_out", 0) != 0:
        _measure_part(kept.KERNELS)
    left_s = budget_s - (time.monotonic() - started)
    if left_s > 1:
        _measure_part(kept.SERVING, "--budget", f"{left_s:.0f}s")


def _measure_part(name: str, *options: str) -> None:
    if code := _run(name, kept.own_folder() / name, *options):
        # A benchmark that finds no usable GPU, or not enough memory, says so and ends with 2.
        said = f"repro: bench {name} ended with code {code}" + (", see above" if code == 2 else "")
        print(f"{said}; figures are drawn from the rows that there are", file=sys.stderr)
