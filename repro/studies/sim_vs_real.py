"""Does the simulator predict the real engine? Its throughput, latency, batch and memory against runs it has not seen.

On one machine the durations of steps are measured once, on a grid (`repro.bench.serving.calibrate`). Then the same
scheduler and memory managers run in virtual time with those durations, and every run that was measured there is
predicted: same trace, same window, same counting. Nothing is fitted to a run; docs/fidelity.md names the one choice
that was made after runs had been predicted."""

from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from repro.bench import kept
from repro.harness.tables import ABOUT
from repro.simulate.load import Load, predict
from repro.simulate.step_times import StepTimes
from repro.studies import measured
from repro.studies.base import (
    Axes,
    DataFrame,
    Figure,
    Judgement,
    Parameters,
    Point,
    Rows,
    Series,
    house,
    plotting,
    where,
)
from repro.studies.common import Positive, Seed, Systems, deployment_of
from repro.studies.fig12_measured import METRICS
from repro.studies.measured import INTERVAL, Gpu

TABLES = {"runs": ("machine", "workload", "kind", "system", "n", "multiple", "budget", "world")}
#: runs that are predicted, and the rows of step times that they are predicted from
KINDS, STEPS = ("saturated", "latency", "v1"), ("step", "chunk")
#: quantity -> (label, whether it is drawn on logarithmic axes)
QUANTITIES = {
    "tokens_per_s": ("output tokens/s", True),
    "latency_s_per_token": ("normalized latency (s/token)", True),
    "mean_batch": ("batched requests", True),
    "token_states": ("token states / pool", False),
    "first_token_median_s": ("median time to first token (s)", True),
    "gap_median_s": ("median gap between tokens (s)", True),
}
#: requests that a latency run must expect, however slow the machine
FEWEST = 6
CPU_WORKLOAD, CPU_KV_SLOTS, CPU_MAX_LEN = "alpaca", 2048, 512


class Params(Parameters):
    gpu: Gpu
    cpu_model: str
    cpu_systems: Systems
    multiples: tuple[Positive, ...]
    warm_s: float
    stop_s: Positive
    seed: Seed

    @model_validator(mode="after")
    def _window(self) -> Self:
        Load("vllm", CPU_WORKLOAD, None, self.warm_s, self.stop_s)
        return self


def points(params: Params) -> list[Point]:
    on_gpu = [
        Point(predicted, {"path": path, "evidence": evidence, "key": row["key"]}, "runs")
        for path, evidence in kept.recordings(params.gpu, kept.SERVING, needs="step")
        if measured.runs(path, evidence, ("step",))
        for row in measured.runs(path, evidence, KINDS)
    ]
    return [*on_gpu, Point(measured_here, params.model_dump(exclude={"gpu"}), "runs", weight=100.0, alone=True)]


def _both(row: dict[str, Any], found: dict[str, Any], machine: str, evidence: str) -> list[dict[str, Any]]:
    """The measured row and the predicted one, with what this study draws."""
    run = measured.columns(row, ("system", "workload", "kind", "n", "multiple", "budget", *ABOUT))
    run |= {"machine": machine, "kind": Load.of(row).kind}
    columns = ("mark", *dict.fromkeys((*METRICS, *QUANTITIES)))
    return [
        run | {"world": world, "evidence": kind, **measured.columns(source, columns)}
        for world, source, kind in (("real", row, evidence), ("simulated", found, "modelled"))
    ]


def predicted(path: Path, evidence: str, key: str) -> list[dict[str, Any]]:
    """One kept run of a GPU and its prediction from the grid in the same file."""
    row = measured.run_of(path, evidence, key)
    steps = StepTimes.of(row["device"], measured.runs(path, evidence, STEPS), padded=True)
    found = predict(Load.of(row), deployment_of("opt-13b", row["kv_slots"]), steps)
    return _both(row, found, row["device"], evidence)


def measured_here(
    cpu_model: str, cpu_systems: tuple[str, ...], multiples: tuple[float, ...], warm_s: float, stop_s: float, seed: int
) -> list[dict[str, Any]]:
    """Step times, then runs, of a small model on this machine's CPU; each run with its prediction."""
    from repro.bench.serving import calibrate
    from repro.bench.serving.warm_engine import WarmEngine

    bench = WarmEngine(_model(cpu_model), CPU_KV_SLOTS, "cpu", "float32", CPU_MAX_LEN)
    machine = f"CPU, {bench.loaded.config.name}"
    steps = StepTimes.of(machine, calibrate.cells(bench), padded=False)
    window = {"warm_s": warm_s, "stop_s": stop_s, "max_model_len": CPU_MAX_LEN}
    # What is sustained comes from the prediction, over a minute: a busy CPU can stall a short measured window.
    minute = Load("vllm", CPU_WORKLOAD, None, 20.0, 80.0, seed, max_model_len=CPU_MAX_LEN)
    sustained = predict(minute, bench.deployment, steps)["finished_rate"]
    # The few requests of a slow machine can make one rate of two multiples.
    rates = dict.fromkeys(max(multiple * sustained, FEWEST / stop_s) for multiple in multiples)
    loads = [Load(name, CPU_WORKLOAD, None, seed=seed, **window) for name in cpu_systems]
    loads += [Load("vllm", CPU_WORKLOAD, rate, seed=seed + 1, **window) for rate in rates]
    rows = []
    for load in loads:
        row = bench.measure(load) | {"multiple": load.rate and load.rate / sustained}
        rows += _both(row, predict(load, bench.deployment, steps), machine, "measured")
    return rows


def _model(name: str) -> Any:
    """The model to measure: the one that is named, or a tiny one if the embedded model was not fetched (or is named
    "tiny")."""
    from repro.errors import UserError
    from repro.llm import models

    if name == models.EMBEDDED:
        try:
            models.embedded_file()
        except UserError:
            name = "tiny"
    if name != "tiny":
        return name
    from transformers import LlamaConfig

    sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=256, max_position_embeddings=CPU_MAX_LEN)
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return models.from_config(config, "a tiny LLaMA")


def errors(runs: DataFrame) -> DataFrame:
    """By how much each prediction exceeds its measurement, in %: one row a run, a column for each quantity."""
    budget = runs["budget"].fillna(0) if "budget" in runs else 0  # 0: the system's own
    runs = runs.assign(multiple=runs["multiple"].fillna(1.0), budget=budget)
    runs = runs.set_index([*TABLES["runs"]])[_quantities(runs)]
    real, simulated = (runs.astype(float).xs(world, level="world") for world in ("real", "simulated"))
    return 100 * (simulated / real - 1)


def _quantities(runs: DataFrame) -> list[str]:
    """Those that were measured: rows of before they were have no such column, or an empty one."""
    return [name for name in QUANTITIES if name in runs and runs.loc[runs["world"] == "real", name].notna().any()]


def _typical(found: DataFrame) -> dict[str, str]:
    """quantity -> its median error in words. Below saturation arrivals decide the throughput, so saturated runs alone
    say how well it is predicted."""
    full = found[found.index.get_level_values("kind") == "saturated"]
    medians = {name: (full if name == "tokens_per_s" else found)[name].abs().median() for name in found}
    return {
        name: f"median error {value:.1f} %" + (", saturated" if name == "tokens_per_s" else "")
        for name, value in medians.items()
        if value == value
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    runs, looks = rows["runs"], plotting.styles(rows["runs"]["system"])
    on_gpu = runs[~runs["machine"].str.startswith("CPU")]
    typical = _typical(errors(on_gpu)) if len(on_gpu) else {}
    real, simulated = (where(runs, world=world).reset_index(drop=True) for world in ("real", "simulated"))
    drawn = {name: QUANTITIES[name] for name in _quantities(runs)}
    figure, axes = plotting.panels([label for label, _ in drawn.values()], columns=2, width=4.2, height=3.5)
    for axis, (name, (_, logarithmic)) in zip(axes, drawn.items()):
        found = real[name].notna() & simulated[name].notna()
        _draw_quantity(axis, real[found], simulated.loc[found, name], looks, logarithmic)
        if name in typical:
            axis.text(0.98, 0.03, typical[name], ha="right", transform=axis.transAxes)
    handles = [
        plotting.key(plotting.label(name), look.color, marker=look.marker, linestyle="") for name, look in looks.items()
    ]
    plotting.place_legend(figure, [*handles, plotting.key("measured on the CPU at hand", marker="+", **_CPU)])
    # Without seeds: runs differ in them, but each is a marker of its own and none is a mean.
    note = "One marker a run. Lines across: 95 % interval of the measurement. Median errors are the GPU's"
    plotting.footer(figure, runs.drop(columns="seed"), note=note)
    return {"sim_vs_real": figure}


_CPU = {"linestyle": "", "markersize": 12, "markeredgewidth": 2.2}


def _draw_quantity(axis: Axes, real: DataFrame, predicted: Series, looks: dict[str, Any], logarithmic: bool) -> None:
    """One marker a run, measured across and predicted up, over the line on which the two are equal."""
    name = predicted.name
    values = [*real[name], *predicted]
    low, high = (0.7 * min(values), 1.4 * max(values)) if values else (0.1, 1.0)
    line = [low, high] if logarithmic else [0.0, 1.0]
    axis.fill_between(line, [0.95 * x for x in line], [1.05 * x for x in line], color="#E2E2E2", zorder=0)
    axis.plot(line, line, color=plotting.GREY, linewidth=0.8)
    axis.annotate("line: equal, grey: within 5 %", (0.03, 0.93), xycoords="axes fraction", color=plotting.GREY)
    for place, run in real.iterrows():
        look = looks[run["system"]]
        if name == "tokens_per_s":
            ends = run[[*INTERVAL[1:]]].clip(lower=low)
            axis.plot(ends, [predicted[place]] * 2, color=look.color, linewidth=1)
        if run["machine"].startswith("CPU"):
            axis.plot(run[name], predicted[place], "+", color=look.color, zorder=4, **_CPU)
        else:
            axis.plot(run[name], predicted[place], look.marker, color=look.color, markersize=6.5, alpha=0.9)
    axis.set(xlim=line, ylim=line, xlabel="measured", ylabel="predicted")
    if logarithmic:
        axis.set(xscale="log", yscale="log")
        plotting.log(axis, "xy")


def judge(rows: Rows, params: Params) -> list[Judgement]:
    return []  # the paper makes no claim about a simulator
