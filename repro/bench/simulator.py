"""How fast this project is here: the simulator, and on a GPU the kernels and the real engine.

The simulator: simulated hours per second, and how that changes with rate, batch and trace length, kept as
results/bench.csv. On a GPU: what experiments/recorded holds, measured anew into results/bench, each by the program that
measures it, in a process of its own. Times are this machine's; nothing else depends on them."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from repro import paths
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import system
from repro.setup import doctor, machine
from repro.setup.environment import ROOT
from repro.simulate.metrics import BatchAverage
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.workloads import make_trace

# (what is varied, system, workload, rate in req/s, hours, K/V slots over Table 1's)
CASES = (
    *(("rate", "vllm", "sharegpt", rate, 1.0, 1) for rate in (0.5, 1.0, 2.0, 4.0)),
    *(("rate", "vllm", "alpaca", rate, 1.0, 1) for rate in (7.0, 14.0, 28.0)),
    *(
        ("system", name, "sharegpt", 1.0, 1.0, 1)
        for name in ("orca-max", "orca-pow2", "orca-oracle", "faster-transformer")
    ),
    *(("batch", "vllm", "sharegpt", 4.0, 1.0, pool) for pool in (1, 2, 4)),
    *(("trace length", "vllm", "sharegpt", 1.5, hours, 1) for hours in (0.25, 1.0, 4.0)),
)
#: what is measured on a GPU -> the module that does, and its arguments; the budget is that of the recorded serving rows
ON_GPU = {
    "kernels": ("repro.bench.kernels",),
    "end_to_end": ("repro.bench.end_to_end",),
    "serving": ("repro.bench.serving", "--budget", "5m"),
}


def measure(name: str, workload: str, rate: float, hours: float, pool: int) -> dict[str, float]:
    """Seconds of this machine's time for one run of OPT-13B (least of three), without making the trace."""
    deployment = DEPLOYMENTS["opt-13b"]
    deployment = replace(deployment, kv_slots=pool * deployment.kv_slots)
    trace = make_trace(workload, rate, 3600 * hours, seed=0)
    costs = cost_model("a100-2023", deployment, anchor=f"opt-13b/{workload}")
    seconds = []
    for _ in range(3):
        batch = BatchAverage(0.0, 3600 * hours)
        start = time.perf_counter()
        served = serve(system(name), deployment, trace, costs, observers=[batch])
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    simulated_hours = served.engine.clock.now / 3600
    return {
        "requests": len(trace),
        "iterations": served.engine.scheduler.iteration,
        "batched_requests": round(batch.mean, 1),
        "seconds": round(best, 3),
        "simulated_hours_per_second": round(simulated_hours / best, 2),
        "microseconds_per_request": round(1e6 * best / len(trace), 1),
    }


def measure_gpu(folder: Path) -> int:
    """Measure kernels, end to end and serving into folders below `folder`, which are emptied first; without a GPU only
    say why not.

    The exit status: that of the first of them that failed, and 0 if none did."""
    why_not = doctor.why_no_gpu({"torch": doctor.probe_torch(), "driver": doctor.probe_driver()})
    if why_not:
        print(f"{', '.join(ON_GPU)}: not measured ({why_not}); experiments/recorded holds rows of an H200")
        return 0
    failed = 0
    for name, (module, *arguments) in ON_GPU.items():
        print(f"{name}:", flush=True)
        shutil.rmtree(folder / name, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-m", module, "--out", str(folder / name), *arguments], cwd=ROOT, check=False
        )
        failed = failed or done.returncode
    return failed


def main() -> int:
    print(
        f"{'varied':13s} {'system':19s} {'workload':9s} {'req/s':>6s} {'hours':>6s} {'pool':>5s} {'batch':>7s} "
        f"{'seconds':>8s} {'hours/s':>8s} {'us/request':>10s}",
        flush=True,
    )
    rows = []
    for varied, name, workload, rate, hours, pool in CASES:
        result = measure(name, workload, rate, hours, pool)
        rows.append(
            {"varied": varied, "system": name, "workload": workload, "rate": rate, "hours": hours, "pool": pool}
            | result
            | {"cpu": machine.machine().get("cpu")}
        )
        print(
            f"{varied:13s} {name:19s} {workload:9s} {rate:6g} {hours:6g} {pool:4d}x {result['batched_requests']:7.1f} "
            f"{result['seconds']:8.2f} {result['simulated_hours_per_second']:8.2f} "
            f"{result['microseconds_per_request']:10.1f}",
            flush=True,
        )
    path = paths.folders().results / "bench.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"kept in {path}")
    return measure_gpu(path.with_suffix(""))
