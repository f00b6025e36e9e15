"""Does the simulator predict the real engine? Its throughput, latency, batch and memory against runs that it has not
seen.

On one machine the durations of steps are measured once, on a grid (`repro.bench.serving.calibrate`). Then the same
scheduler and memory managers run in virtual time with those durations, and every run that was measured there is
predicted: same trace, same window, same counting. Nothing is fitted to a run; docs/fidelity.md names the one choice
that was made after runs had been predicted.

Two machines: the GPU whose rows are kept (see `repro.bench.kept`), as far as its grid is measured, and the CPU at hand
with a small model, measured now. A CPU that other work shares is a poor clock; the interval of each run says how
poor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.bench import kept
from repro.engine.config import DEPLOYMENTS
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement
from repro.simulate.load import Load, predict
from repro.simulate.step_times import StepTimes
from repro.studies.common import check_positive, check_systems
from repro.studies.fig12_measured import METRICS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

#: quantity -> (label, whether it is drawn on logarithmic axes)
QUANTITIES = {
    "tokens_per_s": ("output tokens/s", True),
    "latency_s_per_token": ("normalized latency (s/token)", True),
    "mean_batch": ("batched requests", True),
    "token_states": ("token states / pool", False),
}
#: requests that a latency run must expect, however slow the machine
FEWEST = 6
CPU_WORKLOAD, CPU_KV_SLOTS, CPU_MAX_LEN = "alpaca", 2048, 512


class Params(Parameters):
    """`gpu` as for fig12_measured. `cpu_systems` are measured here, each for `stop_s` seconds, of which `warm_s` are
    warm-up, with the model `cpu_model`; vLLM also at `multiples` of its own saturation. Without the embedded model a
    tiny one takes its place."""

    gpu: str
    cpu_model: str
    cpu_systems: tuple[str, ...]
    multiples: tuple[float, ...]
    warm_s: float
    stop_s: float
    seed: int

    @model_validator(mode="after")
    def _possible(self) -> Params:
        kept.find(self.gpu, kept.SERVING)
        check_systems(self.cpu_systems)
        check_positive("stop_s", self.stop_s)
        for multiple in self.multiples:
            check_positive("multiples", multiple)
        Load("vllm", CPU_WORKLOAD, None, self.warm_s, self.stop_s)
        return self


def points(params: Params) -> list[Point]:
    path, evidence = kept.find(params.gpu, kept.SERVING, needs="step")
    rows = kept.read(path, evidence)
    has_steps = any(row["kind"] == "step" for row in rows)
    on_gpu = [
        Point(predicted, {"path": path, "evidence": evidence, "key": row["key"]})
        for row in rows
        if has_steps and row["kind"] in ("saturated", "latency")
    ]
    here = Point(
        measured_here,
        {
            "model": params.cpu_model,
            "systems": params.cpu_systems,
            "multiples": params.multiples,
            "warm_s": params.warm_s,
            "stop_s": params.stop_s,
            "seed": params.seed,
        },
        weight=100.0,
        alone=True,
    )
    return [*on_gpu, here]


def _both(row: dict[str, Any], found: dict[str, Any], machine: str, evidence: str) -> list[dict[str, Any]]:
    """The measured row and the predicted one, with what this study draws."""
    shared = {
        "machine": machine,
        "system": row["system"],
        "workload": row["workload"],
        "kind": row["kind"],
        "n": row["n"],
        "seed": row["seed"],
        "trace_hash": row["trace_hash"],
        "multiple": row.get("multiple"),
        "device": row["device"],
    }
    return [
        shared | {"world": world, "mark": source["mark"], "evidence": kind, **{name: source[name] for name in METRICS}}
        for world, source, kind in (("real", row, evidence), ("simulated", found, "modelled"))
    ]


def predicted(path: Path, evidence: str, key: str) -> list[dict[str, Any]]:
    """One kept run of a GPU and its prediction from the grid in the same file."""
    rows = kept.read(path, evidence)
    row = next(row for row in rows if row["key"] == key)
    steps = StepTimes.of(row["device"], [step for step in rows if step["kind"] == "step"], padded=True)
    deployment = replace(DEPLOYMENTS["opt-13b"], kv_slots=row["kv_slots"])
    return _both(row, predict(Load.of(row), deployment, steps), row["device"], evidence)


def measured_here(
    model: str, systems: tuple[str, ...], multiples: tuple[float, ...], warm_s: float, stop_s: float, seed: int
) -> list[dict[str, Any]]:
    """Step times, then runs, of a small model on this machine's CPU; each run with its prediction."""
    from repro.bench.serving import calibrate
    from repro.bench.serving.warm_engine import WarmEngine

    warm = WarmEngine(_model(model), CPU_KV_SLOTS, "cpu", "float32", CPU_MAX_LEN)
    machine = f"CPU, {warm.loaded.config.name}"
    steps = StepTimes.of(machine, calibrate.cells(warm), padded=False)
    window = {"warm_s": warm_s, "stop_s": stop_s, "max_model_len": CPU_MAX_LEN}
    loads = [Load(name, CPU_WORKLOAD, None, seed=seed, **window) for name in systems]
    # What is sustained comes from the prediction, over a minute: a busy CPU can stall a short measured window.
    minute = Load("vllm", CPU_WORKLOAD, None, 20.0, 80.0, seed, max_model_len=CPU_MAX_LEN)
    sustained = predict(minute, warm.deployment, steps)["finished_rate"]
    loads += [
        Load("vllm", CPU_WORKLOAD, max(multiple * sustained, FEWEST / stop_s), seed=seed + 1, **window)
        for multiple in multiples
    ]
    rows = []
    for load in loads:
        row = warm.measure(load) | {"multiple": load.rate and load.rate / sustained}
        rows += _both(row, predict(load, warm.deployment, steps), machine, "measured")
    return rows


def _model(name: str) -> Any:
    """The model to measure: the one that is named, or a tiny one if the embedded model was not fetched (or is named
    "tiny")."""
    from repro.engine.errors import UserError
    from repro.llm import models

    if name == models.EMBEDDED:
        try:
            models.embedded_file()
        except UserError:
            name = "tiny"
    if name != "tiny":
        return name
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CPU_MAX_LEN,
    )
    return models.from_config(config, "a tiny LLaMA")


def errors(rows: pd.DataFrame) -> pd.DataFrame:
    """By how much each prediction exceeds its measurement, in %: one row a run, a column for each of QUANTITIES."""
    index = ["machine", "workload", "kind", "system", "n", "multiple"]
    wide = (
        rows.assign(multiple=rows["multiple"].fillna(1.0)).set_index([*index, "world"])[list(QUANTITIES)].astype(float)
    )
    return 100 * (wide.xs("simulated", level="world") / wide.xs("real", level="world") - 1)


def _typical(found: pd.DataFrame) -> dict[str, str]:
    """quantity -> its median error in words. Below saturation arrivals decide the throughput, so saturated runs alone
    say how well it is predicted."""
    full = found[found.index.get_level_values("kind") == "saturated"]
    medians = {name: (full if name == "tokens_per_s" else found)[name].abs().median() for name in QUANTITIES}
    return {
        name: f"median error {value:.1f} %" + (", saturated" if name == "tokens_per_s" else "")
        for name, value in medians.items()
        if value == value
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from matplotlib.ticker import LogLocator, NullLocator

    from repro.report import plotting

    looks = plotting.styles(rows["system"])
    on_gpu = rows[~rows["machine"].str.startswith("CPU")]
    typical = _typical(errors(on_gpu)) if len(on_gpu) else {}
    real, simulated = (rows[rows["world"] == world].reset_index(drop=True) for world in ("real", "simulated"))
    with plotting.house():
        figure, axes = plotting.panels([label for label, _ in QUANTITIES.values()], columns=4, width=3.1, height=2.9)
        for axis, (name, (_, logarithmic)) in zip(axes, QUANTITIES.items()):
            found = real[name].notna() & simulated[name].notna()
            values = [*real.loc[found, name], *simulated.loc[found, name]]
            low, high = (0.7 * min(values), 1.4 * max(values)) if values else (0.1, 1.0)
            line = [low, high]
            axis.fill_between(line, [0.95 * x for x in line], [1.05 * x for x in line], color="#EEEEEE", zorder=0)
            axis.plot(line, line, color="#888888", linewidth=0.8)
            for place in real.index[found]:
                look = looks[real.loc[place, "system"]]
                on_cpu = real.loc[place, "machine"].startswith("CPU")
                if name == "tokens_per_s":
                    axis.plot(
                        real.loc[place, ["tokens_per_s_low", "tokens_per_s_high"]].clip(lower=low),
                        [simulated.loc[place, name]] * 2,
                        color=look.color,
                        linewidth=1,
                    )
                axis.plot(
                    real.loc[place, name],
                    simulated.loc[place, name],
                    look.marker,
                    color=look.color,
                    markersize=7,
                    markerfacecolor="white" if on_cpu else look.color,
                    markeredgewidth=1.4,
                )
            if logarithmic:
                axis.set(xscale="log", yscale="log")
                steps = (1, 2, 5) if high < 80 * low else (1,)
                for side in (axis.xaxis, axis.yaxis):
                    side.set_major_locator(LogLocator(subs=steps))
                    side.set_major_formatter("{x:g}")
                    side.set_minor_locator(NullLocator())
            else:
                line = [0.0, 1.0]
            axis.set(xlim=line, ylim=line, xlabel="measured", ylabel="predicted")
            if name in typical:
                axis.text(0.97, 0.05, typical[name], ha="right", fontsize=8.5, transform=axis.transAxes)
        plotting.legend(figure, real)
        # Without seeds: runs differ in them, but each is a marker of its own and none is a mean.
        plotting.footer(
            figure,
            rows.drop(columns="seed"),
            note="One marker a run; open ones: the CPU at hand. Median errors are the GPU's",
        )
    return {"sim_vs_real": figure}


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    return []  # the paper makes no claim about a simulator
