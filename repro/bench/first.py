"""What `make reproduce` does first on a machine with a GPU: measure on it, within the budget, each part in a process of
its own.

The kernels take about two minutes and are measured once; serving goes on where an earlier call stopped. Whatever fails
is said, and the figures are then drawn from what there is: without a measurement of its own, from the rows that come
with the project."""

from __future__ import annotations

import subprocess
import sys
import time

from repro.bench import kept
from repro.bench.budget import seconds_of
from repro.setup.environment import nvidia_driver

#: a part that finds no usable GPU or not enough memory ends with this code
_REFUSED = 2


def measure_first(budget: str) -> None:
    """Measure kernels and serving on this machine's GPU, if it has one; rows go to results/measured."""
    budget_s, started = seconds_of(budget), time.monotonic()
    if not budget_s or not nvidia_driver():
        return
    kernels = kept.own_folder() / kept.KERNELS
    if not (kernels / "manifest.json").is_file():  # written last
        _run("repro.bench.kernels", "--out", str(kernels))
    left = budget_s - (time.monotonic() - started)
    if left > 1:
        _run("repro.bench.serving", "--out", str(kept.own_folder() / kept.SERVING), "--budget", f"{left:.0f}s")


def _run(module: str, *arguments: str) -> None:
    print(f"measuring on the GPU: python -m {module} {' '.join(arguments)}", file=sys.stderr, flush=True)
    code = subprocess.run([sys.executable, "-m", module, *arguments]).returncode
    if code:
        print(
            f"repro: {module} ended with code {code}"
            + (", see above" if code == _REFUSED else "")
            + "; figures are drawn from the rows that there are",
            file=sys.stderr,
        )
