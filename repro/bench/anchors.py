"""The anchors of the a100-2023 profile, solved again: `python -m repro calibrate`.

For each panel of Fig. 12 and each way to split Fig. 1's slope, the anchor is the time added to every iteration that
makes vLLM's simulated latency at the lowest rate drawn for it equal the printed one. It is one number from the paper
for each panel, so that the latency there is no test of the model; where the curves turn up still is.
FasterTransformer's extra is solved likewise, for each model on its lowest point on ShareGPT."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from joblib import Parallel, delayed

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import SYSTEMS
from repro.simulate.panels import system_for
from repro.simulate.profiles import context_splits, cost_model, faster_transformer_costs
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

    def latency(anchor_ms: float) -> float:
        costs = cost_model("a100-2023", deployment, split=split, anchor_ms=anchor_ms)
        latencies = [serve(SYSTEMS["vllm"], deployment, trace, costs).latency_s_per_token for trace in traces]
        return sum(latencies) / len(latencies)

    return _solved(latency, printed, precision_ms)


def solve_extra(
    model: str, rate: float, printed: float, lengths: str | None, seeds: tuple[int, ...], precision_ms: float = 0.005
) -> float:
    """Milliseconds that a step of FasterTransformer takes beyond its reading, so that its mean latency on ShareGPT at
    `rate` (req/s) over an hour is the `printed` one (s/token): with `lengths`, the authors' file, on their trace, else
    on the embedded lengths."""
    deployment, arrivals = DEPLOYMENTS[model], "poisson" if lengths is None else "authors"
    batched = system_for("faster-transformer", deployment, "sharegpt")
    traces = [make_trace("sharegpt", rate, 3600.0, seed, lengths, arrivals=arrivals) for seed in seeds]

    def latency(extra_ms: float) -> float:
        costs = faster_transformer_costs(deployment, extra_ms)
        return sum(serve(batched, deployment, trace, costs).latency_s_per_token for trace in traces) / len(traces)

    return _solved(latency, printed, precision_ms)


def _solved(latency: Callable[[float], float], printed: float, precision_ms: float) -> float:
    """The milliseconds at which `latency` is the printed one, by the secant method."""
    before, here = 0.0, 5.0
    excess_before, excess_here = latency(before) - printed, latency(here) - printed
    while abs(here - before) > precision_ms:
        step = excess_here * (here - before) / (excess_here - excess_before)
        before, excess_before = here, excess_here
        here -= step
        excess_here = latency(here) - printed
    return here


def _solve(panel: str, rate: float, printed: float) -> list[Row]:
    """One row a split."""
    solved = Parallel(n_jobs=-1)(delayed(solve_anchor)(panel, split, rate, printed) for split in context_splits())
    about = {"panel": panel, "rate": rate, "printed_s_per_token": printed}
    return [{**about, "split": split, "anchor_ms": anchor} for split, anchor in zip(context_splits(), solved)]


def _solve_extra(model: str, rate: float, printed: float, lengths: str | None) -> list[Row]:
    """On the embedded lengths, and on the authors' if their file is there."""
    kinds = {"embedded": (None, (0, 1, 2))} | ({"authors": (lengths, (0,))} if lengths else {})
    about = {"panel": f"{model}/sharegpt", "rate": rate, "printed_s_per_token": printed}
    return [
        {**about, "split": kind, "anchor_ms": solve_extra(model, rate, printed, *where)}
        for kind, where in kinds.items()
    ]


class Anchors(Benchmark):
    """`options.printed`: panel -> lowest rate (req/s) drawn for vLLM in Fig. 12 and its latency (s/token);
    `options.printed_extra`: model -> the same of FasterTransformer on ShareGPT."""

    measures = (solve_anchor, solve_extra)
    method = "Secant method on the mean latency over the seeds 0, 1, 2, to 0.005 ms."
    shown = ("panel", "split", "anchor_ms")

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.printed: dict[str, tuple[float, float]] = options.printed
        self.printed_extra: dict[str, tuple[float, float]] = options.printed_extra
        self.lengths = None if options.lengths is None else str(options.lengths)
        self.setting = {"profile": "a100-2023"}

    def steps(self, recording: Recording) -> Iterator[Step]:
        for panel, point in self.printed.items():
            yield Step(panel, 20.0, partial(_solve, panel, *point))
        for model, point in self.printed_extra.items():
            yield Step(f"{model}/extra", 5.0, partial(_solve_extra, model, *point, self.lengths))

    def finish(self, recording: Recording) -> dict[str, Any]:
        """Print the anchors and the extras, nearly as the profile's file holds them."""
        print("anchors_ms and faster_transformer_extra_ms:")
        for panel in (*self.printed, *(f"{model}/extra" for model in self.printed_extra)):
            values = [f"{row['split']}: {float(row['anchor_ms']):.2f}" for row in recording.of(panel)]
            print(f"  {panel}: {{{', '.join(values)}}}")
        return {}
