"""The anchors of the a100-2023 profile, solved again: `python -m repro calibrate`.

For each panel of Fig. 12 and each way to split Fig. 1's slope, the anchor is the time added to every iteration that
makes vLLM's simulated latency at the lowest rate drawn for it equal the printed one. It is one number from the paper
for each panel, so that the latency there is no test of the model; where the curves turn up still is."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from joblib import Parallel, delayed

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import SYSTEMS
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import serve, trace_seconds
from repro.workloads import make_trace


def solve_anchor(
    panel: str, split: str, rate: float, printed: float, seeds: tuple[int, ...] = (0, 1, 2), precision_ms: float = 0.005
) -> float:
    """Milliseconds to add to the fixed cost, so that the mean latency over the seeds at `rate` (req/s) is the `printed`
    one (s/token), by the secant method."""
    model, workload = panel.split("/")
    deployment = DEPLOYMENTS[model]
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


def _solve(panel: str, rate: float, printed: float) -> list[Row]:
    """One row a split."""
    solved = Parallel(n_jobs=-1)(delayed(solve_anchor)(panel, split, rate, printed) for split in context_splits())
    about = {"panel": panel, "rate": rate, "printed_s_per_token": printed}
    return [{**about, "split": split, "anchor_ms": anchor} for split, anchor in zip(context_splits(), solved)]


class Anchors(Benchmark):
    """`options.printed`: panel -> lowest rate (req/s) drawn for vLLM in Fig. 12 and its latency (s/token)."""

    measures = (solve_anchor,)
    method = "Secant method on the mean latency over the seeds 0, 1, 2, to 0.005 ms."
    shown = ("panel", "split", "anchor_ms")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.printed: dict[str, tuple[float, float]] = options.printed
        self.setting = {"profile": "a100-2023"}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for panel, point in self.printed.items():
            yield Step(panel, 20.0, partial(_solve, panel, *point))

    def finish(self, recording: Recording) -> dict[str, Any]:
        """Print the anchors as the profile's file holds them."""
        print("anchors_ms:")
        for panel in self.printed:
            values = [f"{row['split']}: {float(row['anchor_ms']):.2f}" for row in recording.of(panel)]
            print(f"  {panel}: {{{', '.join(values)}}}")
        return {}
