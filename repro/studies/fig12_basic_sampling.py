"""Fig. 12: normalized latency against request rate, for three models, two workloads and five systems.

Every system runs through the same scheduler and cost model, in virtual time. Where a curve turns up says how much the
system can serve; each crossing of 0.5 s/token is bisected on our own curve. One latency in each panel calibrates the
model (vLLM's at the lowest drawn rate, see repro/simulate/a100-2023.toml); the crossings are predictions."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from repro.simulate.panels import system_for
from repro.simulate.profiles import a100_2023, context_splits, cost_model, faster_transformer_costs
from repro.simulate.serve import trace_seconds
from repro.studies import authors, sweep
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Point, Rows, house, paper, plotting, where
from repro.studies.common import WORKLOAD_LABEL, Lengths, Seeds, Some, Systems, Workloads, deployment_of, trace_of

TABLES = {
    "latency": ("panel", "system", "rate", "seed", "assumption"),
    "crossing": ("panel", "system", "seed", "assumption"),
    "authors": ("panel", "system", "rate", "seed"),
}
#: assumptions: name -> arguments of the cost model. The first one is the curve.
ASSUMPTIONS = {f"slope:{split}": {"split": split} for split in context_splits()[:1]}
ASSUMPTIONS |= {name.replace(": ", ":"): choice for name, choice in sweep.OPEN.items()}
MAIN = next(iter(ASSUMPTIONS))
SLOW_PREFILL = "prefill:0.3"
FASTER_TRANSFORMER = "faster-transformer"
#: FasterTransformer's own step under the other assumption: its extra solved on the embedded lengths
EMBEDDED_EXTRA = "extra:embedded lengths"


class Params(sweep.SweepParameters):
    models: Annotated[tuple[Literal["opt-13b", "opt-66b", "opt-175b"], ...], Some]
    workloads: Workloads
    systems: Systems
    band_seeds: Seeds
    lengths: Lengths
    free: ClassVar = ("seeds", "band_seeds", "lengths")

    @property
    def panels(self) -> dict[str, str]:
        """Panel -> its title."""
        pairs = [(model, workload) for workload in self.workloads for model in self.models]
        return {f"{model}/{workload}": f"{model.upper()}, {WORKLOAD_LABEL[workload]}" for model, workload in pairs}


def setup_of(
    panel: str,
    name: str,
    duration_s: float,
    lengths: str | None,
    seed: int,
    assumption: str = MAIN,
    arrivals: str = "poisson",
) -> sweep.Setup:
    """One system in one panel, under one assumption of the cost model."""
    model, workload = panel.split("/")
    deployment = deployment_of(model)
    if name == FASTER_TRANSFORMER:
        extras = a100_2023()["faster_transformer_extra_ms"]
        costs = faster_transformer_costs(
            deployment, extras["embedded" if assumption == EMBEDDED_EXTRA else "authors"][model]
        )
    else:
        costs = cost_model("a100-2023", deployment, anchor=panel, **ASSUMPTIONS[assumption])
    return sweep.Setup(
        {"panel": panel, "assumption": assumption},
        system_for(name, deployment, workload),
        deployment,
        costs,
        partial(trace_of, workload, lengths=lengths, arrivals=arrivals),
        duration_s,
        seed,
    )


def points(params: Params) -> list[Point]:
    result = [authors.kept(authors="latency")] if not params.another_run else []
    for panel in params.panels:
        for name in params.systems:
            others = [choice for choice in ASSUMPTIONS if choice.startswith("slope:") or name == "vllm"][1:]
            if name == FASTER_TRANSFORMER:
                others = [EMBEDDED_EXTRA]
            runs = [(seed, MAIN) for seed in params.seeds]
            runs += [(seed, assumption) for assumption in others for seed in params.band_seeds]
            for rate in sweep.rates("fig12", panel, name):
                seconds = seconds_of(panel, name, rate, params.max_seconds)
                result += sweep.points([setup_of(panel, name, seconds, params.lengths, *run) for run in runs], [rate])
            if params.crossings:
                result += crossings(panel, name, **params.pick("max_seconds", "lengths", "seeds", "precision"))
    return result


def crossings(
    panel: str, name: str, max_seconds: float, lengths: str | None, seeds: Iterable[int], precision: float
) -> list[Point]:
    """The crossings of one system in one panel, searched for from the paper's: few runs find the bracket, and none is
    far beyond what a system can serve."""
    highest = max(sweep.rates("fig12", panel, name))
    start = paper.crossings("fig12", sweep.LEVEL)[panel].get(name, highest)
    seconds = seconds_of(panel, name, highest, max_seconds)
    choices = [MAIN, EMBEDDED_EXTRA] if name == FASTER_TRANSFORMER else [MAIN]
    setups = [setup_of(panel, name, seconds, lengths, seed, choice) for choice in choices for seed in seeds]
    return sweep.crossings(setups, start, precision)


def seconds_of(panel: str, name: str, rate: float, max_seconds: float) -> float:
    """How long a trace is: the paper's length, or for a quick look less, but never so short that few requests come."""
    return min(trace_seconds(panel.split("/")[0], name), max(max_seconds, 20 / rate))


def grid_readings(latency: DataFrame) -> dict[tuple[str, str], float]:
    """(panel, system) -> the crossing (req/s) as the paper's curve can be read: linearly between our mean latencies at
    the drawn rates. Without those whose last rate lies below it."""
    curves = where(latency, assumption=MAIN).groupby(["panel", "system"], sort=False)
    means = {key: curve.groupby("rate")["latency_s_per_token"].mean() for key, curve in curves}
    read = {key: paper.crossing(list(mean.items()), sweep.LEVEL) for key, mean in means.items()}
    return {key: rate for key, rate in read.items() if rate is not None}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    latency = rows["latency"]
    is_slope = latency["assumption"].str.startswith("slope:")
    is_prefill = latency["assumption"].isin([MAIN, SLOW_PREFILL]) & (latency["system"] == "vllm")
    bands = {
        "/////": ("other readings of Fig. 1's slope", latency[is_slope]),
        ".....": ("vLLM's prompts at 0.3 to 0.5 of the matrix rate", latency[is_prefill]),
    }
    looks = plotting.styles(params.systems)

    def look(hatch: str, color: str) -> dict[str, Any]:
        return {"facecolor": "none", "edgecolor": color, "linewidth": 0, "hatch": hatch, "alpha": 0.5}

    def band(axis: Axes, panel: str) -> None:
        for hatch, (_, rows) in bands.items():
            for name, here in where(rows[rows["seed"].isin(params.band_seeds)], panel=panel).groupby("system"):
                ends = here.groupby("rate")["latency_s_per_token"].agg(["min", "max"])
                axis.fill_between(ends.index, ends["min"], ends["max"], **look(hatch, looks[name].color))

    note = "One latency a panel is calibrated: vLLM's at its lowest rate. Thin line: the 0.5 s/token of the crossings"
    main, with_paper = where(latency, assumption=MAIN), not params.another_run
    more = [plotting.swatch(text, **look(hatch, plotting.GREY)) for hatch, (text, rows) in bands.items() if len(rows)]
    curves = sweep.draw_panels(main, "fig12", params.panels, len(params.models), note, with_paper, band, more)
    figures = {"fig12_basic_sampling": curves}
    if params.crossings and with_paper:
        read, crosses = grid_readings(latency), "our curve read on the paper's grid of rates"
        found, theirs = where(rows["crossing"], assumption=MAIN), authors.crossings(rows["authors"], sweep.LEVEL)
        note = "Black: ours on the authors' own trace, read on the rates that the paper draws"
        drawing = sweep.draw(found, "fig12", params.panels, 15, 0.15, note, crosses, read, traced=theirs)
        figures["fig12_crossings"] = drawing
    return figures


def judge(rows: Rows, params: Params) -> list[Judgement]:
    mean, ends = sweep.spread(where(rows["crossing"], assumption=MAIN), "panel", "system")
    orcas_and_vllm = [name for name in params.systems if name != FASTER_TRANSFORMER]

    def table(values: dict[Any, Any]) -> dict[str, Any]:
        return {
            "crossings": {panel: {name: values[panel, name] for name in orcas_and_vllm} for panel in params.panels},
            FASTER_TRANSFORMER: {panel: values[panel, FASTER_TRANSFORMER] for panel in params.panels},
        }

    by_seed = where(rows["crossing"], assumption=MAIN).pivot(
        index=["panel", "seed"], columns="system", values="crossing_rate"
    )

    def ratio(panel: str, other: str) -> float:
        return mean[panel, "vllm"] / mean[panel, other]

    def span(panel: str, other: str) -> list[float]:
        found = (by_seed["vllm"] / by_seed[other]).loc[panel]
        return [found.min(), found.max()]

    (over_oracle, oracle_ends), (over_max, max_ends) = (
        [{model: of(f"{model}/sharegpt", other) for model in params.models} for of in (ratio, span)]
        for other in ("orca-oracle", "orca-max")
    )
    readings = grid_readings(rows["latency"]).items()
    read = "; ".join(f"{panel} {name} {rate:.3g}" for (panel, name), rate in readings if name in orcas_and_vllm)
    alpaca, alpaca_ends = (
        {name: of("opt-175b/alpaca", name) for name in ("orca-oracle", "orca-pow2")} for of in (ratio, span)
    )
    larger = {
        "longer-sequences": 100 * (over_oracle["opt-13b"] / ratio("opt-13b/alpaca", "orca-oracle") - 1),
        "larger-models": 100 * (over_oracle["opt-175b"] / over_oracle["opt-13b"] - 1),
    }
    other, _ = sweep.spread(where(rows["crossing"], assumption=EMBEDDED_EXTRA), "panel")
    drawn = paper.crossings("fig12", sweep.LEVEL)
    beside = {panel: 100 * (rate / drawn[panel][FASTER_TRANSFORMER] - 1) for panel, rate in other.items()}
    facts = {"precision": params.precision, "read": read}
    facts["embedded"] = ", ".join(f"{panel} {off:+.0f} %" for panel, off in beside.items())
    faster = {panel: ratio(panel, FASTER_TRANSFORMER) for panel in params.panels}
    fastest = {"most": max(faster.values()), "least": min(faster.values())}
    off = {
        name.removeprefix("orca-"): 100 * (mean["opt-175b/sharegpt", name] / drawn["opt-175b/sharegpt"][name] - 1)
        for name in ("vllm", "orca-oracle")
    }
    return [
        Judgement("fig12-curves", table(mean), "modelled", table(ends), facts=facts),
        Judgement("rate-vs-oracle-sharegpt", over_oracle, "modelled", oracle_ends, facts=off),
        Judgement("rate-vs-max-sharegpt", over_max, "modelled", max_ends),
        Judgement("rate-vs-fastertransformer", faster, "modelled", facts=fastest),
        Judgement("opt175b-alpaca-compute-bound", alpaca, "modelled", alpaca_ends),
        Judgement("throughput-2-to-4x", [min(over_oracle.values()), max(over_max.values())], "modelled"),
        Judgement("larger-gains-elsewhere", larger, "modelled"),
    ]
