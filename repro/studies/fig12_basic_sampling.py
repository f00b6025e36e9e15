"""Fig. 12: normalized latency against request rate, for three models, two workloads and five systems.

Every system runs through the same scheduler and cost model, in virtual time. Where a curve turns up says how much the
system can serve; each crossing of 0.5 s/token is bisected on our own curve. One latency in each panel calibrates the
model (vLLM's at the lowest drawn rate, see repro/simulate/a100-2023.yaml); the crossings are predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from repro.engine.systems import system_for
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import trace_seconds
from repro.studies import sweep
from repro.studies.common import Positive, Seeds, Some, Systems, Workloads, deployment_of, trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from repro.harness.tables import Rows

TABLES = {
    "latency": ("panel", "system", "rate", "seed", "assumption"),
    "crossing": ("panel", "system", "seed", "assumption"),
}
#: assumptions of the cost model: name -> (how Fig. 1's slope is split, prefill efficiency). The first one is the curve.
ASSUMPTIONS: dict[str, tuple[str, float | None]] = {
    **{f"slope:{split}": (split, None) for split in context_splits()},
    "prefill:0.3": (context_splits()[0], 0.3),
    "prefill:1.0": (context_splits()[0], 1.0),
}
MAIN = next(iter(ASSUMPTIONS))


class Params(Parameters):
    models: Annotated[tuple[Literal["opt-13b", "opt-66b", "opt-175b"], ...], Some]
    workloads: Workloads
    systems: Systems
    max_seconds: Positive
    seeds: Seeds
    band_seeds: Seeds
    crossings: bool
    precision: Positive
    lengths: str | None
    free: ClassVar = ("seeds", "band_seeds", "lengths")

    @property
    def panels(self) -> dict[str, str]:
        """Panel -> its title."""
        named = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
        return {
            f"{model}/{load}": f"{model.upper()}, {named[load]}" for load in self.workloads for model in self.models
        }


def setup(
    panel: str, name: str, duration_s: float, seed: int, lengths: str | None = None, assumption: str = MAIN
) -> sweep.Setup:
    """One system in one panel, under one assumption of the cost model."""
    model, workload = panel.split("/")
    deployment, (split, efficiency) = deployment_of(model), ASSUMPTIONS[assumption]
    return sweep.Setup(
        {"panel": panel, "assumption": assumption},
        system_for(name, deployment, workload),
        deployment,
        cost_model("a100-2023", deployment, anchor=panel, split=split, prefill_efficiency=efficiency),
        partial(trace_of, workload, lengths=lengths),
        duration_s,
        seed,
    )


def points(params: Params) -> list[Point]:
    result = []
    for panel in params.panels:
        for name in params.systems:
            runs = [(seed, MAIN) for seed in params.seeds]
            runs += [
                (seed, assumption)
                for assumption in ASSUMPTIONS
                for seed in params.band_seeds
                if assumption != MAIN and (assumption.startswith("slope:") or name == "vllm")
            ]
            rates = sweep.rates("fig12", panel, name)
            for rate in rates:
                seconds = _seconds(params, panel, rate)
                setups = [setup(panel, name, seconds, seed, params.lengths, assumption) for seed, assumption in runs]
                result += sweep.points(setups, [rate])
            if params.crossings:
                seconds = _seconds(params, panel, max(rates))
                setups = [setup(panel, name, seconds, seed, params.lengths) for seed in params.seeds]
                result += sweep.crossings(setups, max(rates), params.precision)
    return result


def _seconds(params: Params, panel: str, rate: float) -> float:
    """How long a trace is: the paper's length, or for a quick look less, but never so short that few requests come."""
    return min(trace_seconds(panel.split("/")[0]), max(params.max_seconds, 20 / rate))


def grid_readings(latency: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(panel, system) -> the crossing (req/s) as the paper's curve can be read: linearly between our mean latencies at
    the drawn rates. Without those whose last rate lies below it."""
    curves = latency[latency["assumption"] == MAIN].groupby(["panel", "system"], sort=False)
    means = {key: curve.groupby("rate")["latency_s_per_token"].mean() for key, curve in curves}
    read = {key: paper.crossing(list(mean.items()), sweep.LEVEL) for key, mean in means.items()}
    return {key: rate for key, rate in read.items() if rate is not None}


def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    latency = rows["latency"]
    main = latency[latency["assumption"] == MAIN]
    slopes = latency[latency["assumption"].str.startswith("slope:")]
    with plotting.house():
        curves, axes = plotting.panels(list(params.panels.values()), columns=len(params.models), width=3.6, height=2.6)
        for axis, panel in zip(axes, params.panels):
            _band(axis, slopes[slopes["panel"] == panel], plotting.styles(params.systems))
            sweep.draw_curves(axis, main[main["panel"] == panel], sweep.drawn("fig12", panel, params.systems))
        plotting.legend(curves, main, with_paper=True)
        plotting.footer(
            curves,
            main,
            with_paper=True,
            note="Pale: the other ways to split Fig. 1's slope. Calibrated on vLLM's lowest rate in each panel",
        )
        figures = {"fig12_basic_sampling": curves}
        if params.crossings:
            note = "Hollow: read off our curve on the paper's grid of rates"
            figures["fig12_crossings"] = sweep.draw(
                rows["crossing"], "fig12", params.panels, 15, 0.15, note, grid_readings(latency)
            )
    return figures


def _band(axis: Axes, rows: pd.DataFrame, looks: dict[str, Any]) -> None:
    for name, group in rows.groupby("system", sort=False):
        spread = group.groupby("rate")["latency_s_per_token"].agg(["min", "max"])
        axis.fill_between(spread.index, spread["min"], spread["max"], color=looks[name].color, alpha=0.10, linewidth=0)


def judge(rows: Rows, params: Params) -> list[Judgement]:
    mean, ends = sweep.spread(rows["crossing"], "panel", "system")
    orcas_and_vllm = [name for name in params.systems if name != "faster-transformer"]

    def table(value: Callable[[tuple[str, str]], Any]) -> dict[str, Any]:
        return {
            "crossings": {panel: {name: value((panel, name)) for name in orcas_and_vllm} for panel in params.panels},
            "faster-transformer": {panel: value((panel, "faster-transformer")) for panel in params.panels},
        }

    def ratio(panel: str, other: str) -> float:
        return mean[panel, "vllm"] / mean[panel, other]

    def by_model(other: str) -> dict[str, float]:
        return {model: ratio(f"{model}/sharegpt", other) for model in params.models}

    over_oracle, over_max = by_model("orca-oracle"), by_model("orca-max")
    read = "; ".join(
        f"{panel} {name} {rate:.3g}"
        for (panel, name), rate in grid_readings(rows["latency"]).items()
        if name in orcas_and_vllm
    )
    alpaca = {name: ratio("opt-175b/alpaca", name) for name in ("orca-oracle", "orca-pow2")}
    larger = {
        "longer-sequences": over_oracle["opt-13b"] > ratio("opt-13b/alpaca", "orca-oracle"),
        "larger-models": over_oracle["opt-175b"] > over_oracle["opt-13b"],
    }
    fastest = max(ratio(panel, "faster-transformer") for panel in params.panels)
    facts = {"precision": params.precision, "read": read}
    return [
        Judgement("fig12-curves", table(mean.get), "modelled", table(ends.get), facts=facts),
        Judgement("rate-vs-oracle-sharegpt", over_oracle, "modelled"),
        Judgement("rate-vs-max-sharegpt", over_max, "modelled"),
        Judgement("rate-vs-fastertransformer", fastest, "modelled"),
        Judgement("opt175b-alpaca-compute-bound", alpaca, "modelled"),
        Judgement("throughput-2-to-4x", [min(over_oracle.values()), max(over_max.values())], "modelled"),
        Judgement("larger-gains-elsewhere", larger, "modelled"),
    ]
