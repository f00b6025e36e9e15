"""Solve the anchors of the a100-2023 profile again: `python -m repro calibrate`.

For each panel of Fig. 12 and each way to split Fig. 1's slope, the anchor is the time added to every iteration that
makes vLLM's simulated latency at the lowest rate drawn for it equal the printed one. It is one number from the paper
for each panel, so that the latency there is no test of the model; where the curves turn up still is."""

from __future__ import annotations

from joblib import Parallel, delayed

from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import SYSTEMS
from repro.report import paper
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import serve, trace_seconds
from repro.workloads import make_trace

SEEDS = (0, 1, 2)


def solve_anchor(panel: str, split: str, seeds: tuple[int, ...] = SEEDS, precision_ms: float = 0.005) -> float:
    """Milliseconds to add to the fixed cost, by the secant method on the mean latency over the seeds."""
    model, workload = panel.split("/")
    deployment = DEPLOYMENTS[model]
    rate, printed = paper.points("fig12", panel, "vllm")[0]
    traces = [make_trace(workload, rate, trace_seconds(model), seed) for seed in seeds]

    def excess(anchor_ms: float) -> float:
        costs = cost_model("a100-2023", deployment, split=split, anchor_ms=anchor_ms)
        latencies = [serve(SYSTEMS["vllm"], deployment, trace, costs).latency_s_per_token for trace in traces]
        return sum(latencies) / len(latencies) - printed

    before, here = 0.0, 5.0
    excess_before, excess_here = excess(before), excess(here)
    while abs(here - before) > precision_ms:
        step = excess_here * (here - before) / (excess_here - excess_before)
        before, excess_before = here, excess_here
        here -= step
        excess_here = excess(here)
    return here


def main() -> int:
    """Print the anchors as the profile's file holds them."""
    jobs = [(panel, split) for panel in paper.figure("fig12") for split in context_splits()]
    solved = dict(zip(jobs, Parallel(n_jobs=-1)(delayed(solve_anchor)(*job) for job in jobs)))
    print("anchors_ms:")
    for panel in paper.figure("fig12"):
        values = ", ".join(f"{split}: {solved[panel, split]:.2f}" for split in context_splits())
        print(f"  {panel}: {{{values}}}")
    return 0
