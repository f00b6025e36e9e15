"""How fast the simulator is here: simulated hours a second, and how that changes with rate, batch and trace length.

Times are this machine's; nothing else depends on them."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import OF_THE_PAPER, SYSTEMS
from repro.setup.machine import machine
from repro.simulate.metrics import BatchAverage
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.workloads import make_trace

# (what is varied, system, workload, rate in req/s, hours, K/V slots over Table 1's)
CASES = (
    *(("rate", "vllm", "sharegpt", rate, 1.0, 1) for rate in (0.5, 1.0, 2.0, 4.0)),
    *(("rate", "vllm", "alpaca", rate, 1.0, 1) for rate in (7.0, 14.0, 28.0)),
    *(("system", name, "sharegpt", 1.0, 1.0, 1) for name in OF_THE_PAPER if name != "vllm"),
    *(("batch", "vllm", "sharegpt", 4.0, 1.0, pool) for pool in (1, 2, 4)),
    *(("trace-length", "vllm", "sharegpt", 1.5, hours, 1) for hours in (0.25, 1.0, 4.0)),
)


def served(varied: str, name: str, workload: str, rate: float, hours: float, pool: int) -> list[Row]:
    """Seconds of this machine's time for one run of OPT-13B (least of three), without making the trace."""
    deployment = DEPLOYMENTS["opt-13b"]
    deployment = replace(deployment, kv_slots=pool * deployment.kv_slots)
    trace = make_trace(workload, rate, 3600 * hours, seed=0)
    costs = cost_model("a100-2023", deployment, anchor=f"opt-13b/{workload}")
    seconds = []
    for _ in range(3):
        batch = BatchAverage(0.0, 3600 * hours)
        start = time.perf_counter()
        run = serve(SYSTEMS[name], deployment, trace, costs, observers=[batch])
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    row = {"varied": varied, "system": name, "workload": workload, "rate": rate, "hours": hours, "pool": pool}
    row |= {"requests": len(trace), "iterations": run.engine.scheduler.iteration}
    row |= {"batched_requests": round(batch.mean, 1), "seconds": round(best, 3)}
    row |= {"simulated_hours_per_second": round(run.engine.clock.now / 3600 / best, 2)}
    return [row | {"microseconds_per_request": round(1e6 * best / len(trace), 1)}]


class Simulator(Benchmark):
    measures = (served,)
    method = "Seconds of one run of OPT-13B in virtual time, the least of three, without making the trace."
    shown = ("batched_requests", "seconds", "simulated_hours_per_second", "microseconds_per_request")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.setting = {"cpu": machine().get("cpu")}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for case in CASES:
            varied, name, workload, rate, hours, pool = case
            key = f"{varied}/{name}/{workload}/{rate:g} per s/{hours:g} h/{pool}x"
            yield Step(key, 0.5 + hours * rate, partial(served, *case))
