"""Fig. 12: normalized latency against request rate, for three models, two workloads and five systems.

Every system runs through the same scheduler and cost model, in virtual time. Where a curve turns up says how much the
system can serve; each crossing of 0.5 s/token is bisected on our own curve. One latency in each panel calibrates the
model (vLLM's at the lowest drawn rate, see repro/simulate/a100-2023.toml); the crossings are predictions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.config import Deployment
from repro.engine.errors import UserError
from repro.engine.systems import System, system_for
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import crossing, serve, trace_seconds
from repro.studies.common import (
    check_positive,
    check_seeds,
    check_serving,
    check_some,
    check_systems,
    deployment_of,
    trace_of,
)
from repro.workloads import WORKLOADS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVEL = 0.5  # s/token
#: assumptions of the cost model: name -> (how Fig. 1's slope is split, prefill efficiency). The first one is the curve.
ASSUMPTIONS: dict[str, tuple[str, float | None]] = {
    **{f"slope:{split}": (split, None) for split in context_splits()},
    "prefill:0.3": (context_splits()[0], 0.3),
    "prefill:1.0": (context_splits()[0], 1.0),
}
MAIN = next(iter(ASSUMPTIONS))


class Params(Parameters):
    """`max_seconds` caps the traces, which otherwise last an hour (15 minutes for OPT-175B). `band_seeds` run under
    every other assumption of the cost model, for the band. `lengths` is a CSV file of pairs in place of ShareGPT's."""

    models: tuple[str, ...]
    workloads: tuple[str, ...]
    systems: tuple[str, ...]
    max_seconds: float
    seeds: tuple[int, ...]
    band_seeds: tuple[int, ...]
    crossings: bool
    precision: float
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_some("models", self.models)
        check_some("workloads", self.workloads)
        for workload in self.workloads:
            if workload not in WORKLOADS:
                raise UserError(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
        check_systems(self.systems)
        check_seeds(self.seeds)
        check_seeds(self.band_seeds)
        check_positive("max_seconds", self.max_seconds)
        check_positive("precision", self.precision)
        for model in self.models:
            check_serving(model, "a100-2023", 16, None)
            if f"{model}/{self.workloads[0]}" not in paper.figure("fig12"):
                raise UserError(f"model {model!r} is not in Fig. 12; it has {', '.join(Params.models)}")
        return self

    @property
    def panels(self) -> list[str]:
        return [f"{model}/{workload}" for workload in self.workloads for model in self.models]


def points(params: Params) -> list[Point]:
    result = []
    for panel in params.panels:
        model, workload = panel.split("/")
        for name in params.systems:
            shared = {
                "panel": panel,
                "system": system_for(name, deployment_of(model), workload),
                "lengths": params.lengths,
            }
            drawn = (
                [rate for rate, _ in paper.points("fig12", panel, name)]
                if name in paper.figure("fig12")[panel]
                else sorted(
                    {rate for other in paper.figure("fig12")[panel] for rate, _ in paper.points("fig12", panel, other)}
                )
            )
            runs = [(seed, MAIN) for seed in params.seeds]
            runs += [
                (seed, assumption)
                for assumption in ASSUMPTIONS
                for seed in params.band_seeds
                if assumption != MAIN and (assumption.startswith("slope:") or name == "vllm")
            ]
            result += [
                Point(
                    latency_at,
                    shared | {"rate": rate, "duration_s": seconds, "seed": seed, "assumption": assumption},
                    weight=rate * seconds,
                )
                for rate in dict.fromkeys(drawn)
                for seed, assumption in runs
                if (seconds := _seconds(params, model, rate))
            ]
            if params.crossings:
                seconds = _seconds(params, model, max(drawn))
                result += [
                    Point(
                        crossing_of,
                        shared
                        | {"start": max(drawn), "duration_s": seconds, "seed": seed, "precision": params.precision},
                        weight=7 * max(drawn) * seconds,
                    )
                    for seed in params.seeds
                ]
    return result


def _seconds(params: Params, model: str, rate: float) -> float:
    """How long a trace is: the paper's length, or for a quick look less, but never so short that few requests come."""
    return min(trace_seconds(model), max(params.max_seconds, 20 / rate))


def _setting(panel: str, assumption: str) -> tuple[Deployment, CostModel]:
    split, efficiency = ASSUMPTIONS[assumption]
    deployment = deployment_of(panel.split("/")[0])
    return deployment, cost_model("a100-2023", deployment, anchor=panel, split=split, prefill_efficiency=efficiency)


def latency_at(
    panel: str, system: System, duration_s: float, lengths: str | None, rate: float, seed: int, assumption: str
) -> dict[str, Any]:
    """One point of a curve: mean normalized latency (s/token) of a trace at `rate` (req/s)."""
    deployment, costs = _setting(panel, assumption)
    trace = trace_of(panel.split("/")[1], rate, duration_s, seed, lengths)
    served = serve(system, deployment, trace, costs)
    return {
        "part": "latency",
        "panel": panel,
        "system": system.name,
        "rate": rate,
        "seed": seed,
        "assumption": assumption,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace.hash,
        "requests": len(trace),
        "latency_s_per_token": served.latency_s_per_token,
        "preemptions": served.engine.scheduler.num_preemptions,
    }


def crossing_of(
    panel: str, system: System, duration_s: float, lengths: str | None, start: float, seed: int, precision: float
) -> dict[str, Any]:
    """The rate (req/s) at which the system's latency reaches 0.5 s/token, on traces of one seed."""
    deployment, costs = _setting(panel, MAIN)

    def latency(rate: float) -> float:
        trace = trace_of(panel.split("/")[1], rate, duration_s, seed, lengths)
        return serve(system, deployment, trace, costs).latency_s_per_token

    return {
        "part": "crossing",
        "panel": panel,
        "system": system.name,
        "seed": seed,
        "assumption": MAIN,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": None,
        "crossing_rate": crossing(latency, start, LEVEL, precision),
    }


def grid_reading(rows: pd.DataFrame, panel: str, system: str) -> float | None:
    """The crossing as the paper's curve can be read: linearly between our mean latencies at the drawn rates."""
    curve = rows[
        (rows["part"] == "latency")
        & (rows["assumption"] == MAIN)
        & (rows["panel"] == panel)
        & (rows["system"] == system)
    ]
    means = curve.groupby("rate")["latency_s_per_token"].mean()
    return paper.crossing(list(means.items()), LEVEL)


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    titles = [_title(panel) for panel in params.panels]
    latency = rows[rows["part"] == "latency"]
    main = latency[latency["assumption"] == MAIN]
    with plotting.house():
        curves, axes = plotting.panels(titles, columns=len(params.models), width=3.6, height=2.6)
        for axis, panel in zip(axes, params.panels):
            drawn = {
                name: paper.points("fig12", panel, name)
                for name in params.systems
                if name in paper.figure("fig12")[panel]
            }
            here = latency[latency["panel"] == panel]
            _band(axis, here[here["assumption"].str.startswith("slope:")], plotting.styles(params.systems))
            plotting.curves(axis, main[main["panel"] == panel], "rate", "latency_s_per_token", paper=drawn)
            axis.set_ylim(0, 1.0)
            axis.set_xlim(left=0)
            axis.set_xlabel("request rate (req/s)")
            axis.set_ylabel("normalized latency (s/token)")
        plotting.legend(curves, main, with_paper=True)
        plotting.footer(
            curves,
            main,
            with_paper=True,
            note="Pale: the other ways to split Fig. 1's slope. Calibrated on vLLM's lowest rate in each panel",
        )
        figures = {"fig12_basic_sampling": curves}
        if params.crossings:
            figures["fig12_crossings"] = _draw_crossings(rows, params, plotting)
    return figures


def _band(axis: Axes, rows: pd.DataFrame, looks: dict[str, Any]) -> None:
    for name, group in rows.groupby("system", sort=False):
        spread = group.groupby("rate")["latency_s_per_token"].agg(["min", "max"])
        axis.fill_between(spread.index, spread["min"], spread["max"], color=looks[name].color, alpha=0.10, linewidth=0)


def _draw_crossings(rows: pd.DataFrame, params: Params, plotting: Any) -> Figure:
    found = rows[rows["part"] == "crossing"]
    names = [name for name in params.systems if name in paper.figure("fig12")[params.panels[0]]]
    looks = plotting.styles(params.systems)
    figure, (axis,) = plotting.panels(
        ["Crossing of 0.5 s/token: deviation from the paper's curve"], width=9.0, height=3.4
    )
    axis.axhspan(-15, 15, color="#EEEEEE", zorder=0)
    axis.axhline(0, color="#888888", linewidth=0.8)
    for place, panel in enumerate(params.panels):
        for index, name in enumerate(names):
            drawn = paper.crossings("fig12", LEVEL)[panel][name]
            rates = found[(found["panel"] == panel) & (found["system"] == name)]["crossing_rate"]
            deviation = 100 * (rates / drawn - 1)
            x = place + (index - (len(names) - 1) / 2) * 0.15
            look = dict(color=looks[name].color, marker=looks[name].marker)
            axis.errorbar(
                x,
                deviation.mean(),
                [[deviation.mean() - deviation.min()], [deviation.max() - deviation.mean()]],
                capsize=2.5,
                markersize=5.5,
                linewidth=1.1,
                **look,
            )
            if (read := grid_reading(rows, panel, name)) is not None:
                axis.plot(x + 0.05, 100 * (read / drawn - 1), markerfacecolor="none", markersize=5, **look)
    axis.set_xticks(range(len(params.panels)), [_title(panel).replace(", ", "\n") for panel in params.panels])
    axis.set_ylabel("ours over the paper's (%)")
    axis.grid(axis="x", visible=False)
    plotting.legend(figure, found[found["system"].isin(names)])
    plotting.footer(figure, found, note="Hollow: read off our curve on the paper's grid of rates")
    return figure


def _title(panel: str) -> str:
    model, workload = panel.split("/")
    return f"{model.upper()}, {'ShareGPT' if workload == 'sharegpt' else 'Alpaca'}"


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    found = rows[rows["part"] == "crossing"]
    if found.empty or params != replace(
        Params(), seeds=params.seeds, band_seeds=params.band_seeds, lengths=params.lengths
    ):
        return []  # short traces saturate later, and a part of the panels is no figure
    rates = found.groupby(["panel", "system"])["crossing_rate"]
    mean, low, high = (dict(getattr(rates, statistic)()) for statistic in ("mean", "min", "max"))
    orcas_and_vllm = [
        name
        for name in params.systems
        if name in paper.figure("fig12")[params.panels[0]] and name != "faster-transformer"
    ]

    def table(value: Callable[[tuple[str, str]], Any]) -> dict[str, Any]:
        return {
            "crossings": {panel: {name: value((panel, name)) for name in orcas_and_vllm} for panel in params.panels},
            "faster-transformer": {panel: value((panel, "faster-transformer")) for panel in params.panels},
        }

    def ratio(panel: str, other: str) -> float:
        return mean[panel, "vllm"] / mean[panel, other]

    def by_model(other: str) -> dict[str, float]:
        return {model: ratio(f"{model}/sharegpt", other) for model in params.models}

    read = "; ".join(
        f"{panel} {name} {reading:.3g}"
        for panel in params.panels
        for name in orcas_and_vllm
        if (reading := grid_reading(rows, panel, name)) is not None
    )
    return [
        Judgement(
            "fig12-curves",
            table(mean.get),
            "modelled",
            table(lambda key: [low[key], high[key]]),
            note=f"Bisected on our own curve to {params.precision:.0%}. Read on the paper's coarse grid instead, where "
            f"its last rate lies above the crossing: {read}.",
        ),
        Judgement("rate-vs-oracle-sharegpt", by_model("orca-oracle"), "modelled"),
        Judgement("rate-vs-max-sharegpt", by_model("orca-max"), "modelled"),
        Judgement(
            "rate-vs-fastertransformer",
            max(ratio(panel, "faster-transformer") for panel in params.panels),
            "modelled",
            note="With a batch limit of 5 (ShareGPT) or 14 (Alpaca) for OPT-13B, scaled with the K/V slots for the "
            "others.",
        ),
        Judgement(
            "opt175b-alpaca-compute-bound",
            {name: ratio("opt-175b/alpaca", name) for name in ("orca-oracle", "orca-pow2")},
            "modelled",
        ),
        Judgement(
            "throughput-2-to-4x",
            [min(by_model("orca-oracle").values()), max(by_model("orca-max").values())],
            "modelled",
            note="Least ratio to Orca (Oracle) and greatest to Orca (Max) on ShareGPT, at 0.5 s/token.",
        ),
        Judgement(
            "larger-gains-elsewhere",
            {
                "longer-sequences": ratio("opt-13b/sharegpt", "orca-oracle") > ratio("opt-13b/alpaca", "orca-oracle"),
                "larger-models": ratio("opt-175b/sharegpt", "orca-oracle") > ratio("opt-13b/sharegpt", "orca-oracle"),
            },
            "modelled",
        ),
    ]
