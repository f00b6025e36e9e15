"""The paper's comparison measured on a GPU: saturated throughput of the five systems, and what their memory held
meanwhile.

Same scheduler, memory managers, kernels and model code for all; OPT-13B with the 12 GB pool of Table 1, whatever the
card, so that the ratios between systems can be laid beside the paper's (Fig. 12's rates at 0.5 s/token). Absolute
numbers belong to the card. Rows come from `python -m repro bench serving`: this machine's own, or those recorded with
the project; nothing is measured here.

The scheduler then replays each run on the same trace, with every step as long as the measured mean: memory and batch
must come out the same (Fig. 2 and 13 of the same runs), since both follow from decisions and not from speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.bench import kept
from repro.bench.kept import Params
from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import SYSTEMS
from repro.harness.experiment import Point
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.load import Load, predict
from repro.simulate.metrics import PIECES
from repro.simulate.step_times import StepTimes

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORKLOADS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
MARKS = {"overloaded": "↑"}
KINDS = ("saturated", "latency", "generate")
METRICS = (
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "finished_rate",
    "mean_batch",
    "latency_s_per_token",
    "preemptions",
    *PIECES,
)


def points(params: Params) -> list[Point]:
    given = kept.runs(params.gpu, *KINDS)
    replays = [
        Point(replayed, given | {"key": row["key"]}, weight=10.0)
        for row in kept.read(**given)
        if row["kind"] == "saturated" and row["n"] in (None, 1)
    ]
    return [Point(measured, given), *replays]


def measured(path: Path, evidence: str) -> list[dict[str, Any]]:
    """The rows of the file that this study draws, with the columns it needs."""
    return [
        {
            "part": row["kind"],
            "system": row["system"],
            "workload": row["workload"],
            "n": row.get("n") or 1,
            "rate": row.get("rate"),
            "multiple": row.get("multiple"),
            "mark": row.get("mark"),
            **{name: row.get(name) for name in METRICS},
            "model": row["model"],
            "kv_slots": row["kv_slots"],
            "evidence": evidence,
            "device": row["device"],
            "seed": row.get("seed"),
            "trace_hash": row["trace_hash"],
        }
        for row in kept.read(path, evidence)
        if row["kind"] in KINDS
    ]


def replayed(path: Path, evidence: str, key: str) -> dict[str, Any]:
    """A saturated run again, with every step as long as the measured mean."""
    row = next(row for row in kept.read(path, evidence) if row["key"] == key)
    step_s = (row["stop_s"] - row["warm_s"]) / row["iterations"]
    steps = StepTimes("replay", False, (1,), (step_s,), 0.0, (0,), (1,), ((step_s,),), step_s)
    deployment = replace(DEPLOYMENTS["opt-13b"], kv_slots=row["kv_slots"])
    found = predict(Load.of(row), deployment, steps)
    return {
        "part": "replayed",
        **{name: found[name] for name in ("system", "workload", "n", "rate", "mark", *METRICS)},
        "multiple": None,
        "model": row["model"],
        "kv_slots": row["kv_slots"],
        "evidence": "replayed",
        "device": None,
        "seed": found["seed"],
        "trace_hash": found["trace_hash"],
    }


def multiple_of(rows: pd.DataFrame, name: str) -> tuple[float, float] | None:
    """How many times a system's throughput vLLM delivers, and by how much that may be off if the intervals of both runs
    are independent; None if one of the two is not there."""
    means = rows.groupby("system")[["tokens_per_s", "tokens_per_s_high"]].mean().reindex(["vllm", name])
    if means.isna().any(axis=None):
        return None
    rates, off = means["tokens_per_s"], means["tokens_per_s_high"] / means["tokens_per_s"] - 1
    ratio = rates["vllm"] / rates[name]
    return float(ratio), float(ratio * np.hypot(*off))


def ratios(rows: pd.DataFrame, workload: str) -> dict[str, tuple[float, float]]:
    """system -> how many times its saturated throughput vLLM delivers, plus or minus."""
    chosen = rows[(rows["part"] == "saturated") & (rows["workload"] == workload) & (rows["n"] == 1)]
    return {name: found for name in SYSTEMS if name != "vllm" and (found := multiple_of(chosen, name))}


def paper_ratios(workload: str) -> dict[str, float]:
    """The same from Fig. 12, at 0.5 s/token, OPT-13B."""
    rates = paper.crossings("fig12", 0.5)[f"opt-13b/{workload}"]
    return {name: rates["vllm"] / rate for name, rate in rates.items() if name != "vllm"}


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    clocked = rows[(rows["part"] == "saturated") & (rows["n"] == 1)]
    with plotting.house():
        throughput, axes = plotting.panels(list(WORKLOADS.values()), width=5.0, height=3.4)
        for axis, workload in zip(axes, WORKLOADS):
            _draw_throughput(axis, rows, workload, plotting)
        axes[0].set_ylabel("useful output tokens/s")
        setting = "{model}, {kv_slots:,.0f} slots".format_map(rows.iloc[0])
        plotting.footer(throughput, clocked, note=f"{setting}; vLLM's multiple under each name: here (the paper)")
        figures = {"fig12_measured": throughput, "fig12_measured_memory": _draw_memory(rows, plotting)}
        if (rows["part"] == "latency").any():
            figures["fig12_measured_latency"] = _draw_latency(rows, plotting)
    return figures


def _draw_throughput(axis: Axes, rows: pd.DataFrame, workload: str, plotting: Any) -> None:
    chosen = rows[(rows["part"] == "saturated") & (rows["workload"] == workload) & (rows["n"] == 1)]
    looks, ours, theirs = plotting.styles(SYSTEMS), ratios(rows, workload), paper_ratios(workload)
    names = []
    for place, name in enumerate(SYSTEMS):
        found = chosen[chosen["system"] == name]
        first, _, second = plotting.label(name).partition(" (")
        here = "×{:.2f}\n± {:.2f}".format(*ours[name]) if name in ours else ""
        names.append(
            f"{first}\n{'(' + second if second else ''}\n{here}\n{f'(×{theirs[name]:.2f})' if name in theirs else ''}"
        )
        if found.empty:
            axis.text(place, 0, "not\nmeasured", ha="center", va="bottom", fontsize=8, color="#888888")
            continue
        mean = found["tokens_per_s"].mean()
        axis.bar(place, mean, 0.62, color=looks[name].color, edgecolor="black", linewidth=0.8)
        axis.errorbar(
            place,
            mean,
            [[mean - found["tokens_per_s_low"].mean()], [found["tokens_per_s_high"].mean() - mean]],
            color="black",
            linewidth=1,
            capsize=3,
        )
        marks = sorted(set(found["mark"].dropna()) - {"steady"})
        axis.annotate(
            "\n".join([*marks, f"{mean:,.0f}"]),
            (place, found["tokens_per_s_high"].max()),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
        )
    axis.set_xticks(range(len(names)), names, fontsize=8.5)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="x", visible=False)


def _draw_memory(rows: pd.DataFrame, plotting: Any) -> Figure:
    figure, axes = plotting.panels(
        [f"{label}: the K/V pool" for label in WORKLOADS.values()]
        + [f"{label}: batched requests" for label in WORKLOADS.values()],
        columns=2,
        width=5.0,
        height=3.0,
    )
    both = rows[rows["part"].isin(["saturated", "replayed"]) & (rows["n"] == 1)]
    for index, workload in enumerate(WORKLOADS):
        chosen = both[both["workload"] == workload]
        real, replay = (chosen[chosen["part"] == part] for part in ("saturated", "replayed"))
        shares = real.assign(**{piece: 100 * real[piece] for piece in PIECES})
        theirs = {row["system"]: {piece: 100 * row[piece] for piece in PIECES} for _, row in replay.iterrows()}
        plotting.memory_bars(axes[index], shares, beside=theirs)
        axes[index].set_ylabel("% of the K/V pool")
        plotting.bars(axes[index + 2], real, "mean_batch", paper=dict(zip(replay["system"], replay["mean_batch"])))
        axes[index + 2].set_ylabel("mean batch")
    plotting.memory_legend(figure)
    plotting.footer(figure, both, note="Hollow: the replay")
    return figure


def _draw_latency(rows: pd.DataFrame, plotting: Any) -> Figure:
    figure, axes = plotting.panels(list(WORKLOADS.values()), width=5.0, height=3.2)
    latency = rows[rows["part"] == "latency"]
    for axis, workload in zip(axes, WORKLOADS):
        chosen = latency[latency["workload"] == workload]
        saturated = rows[
            (rows["part"] == "saturated")
            & (rows["workload"] == workload)
            & (rows["system"] == "vllm")
            & (rows["n"] == 1)
        ]
        if chosen.empty or saturated.empty:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#888888")
            continue
        sustained = saturated["finished_rate"].mean()
        panel = f"opt-13b/{workload}"
        drawn, edge = paper.figure("fig12")[panel], paper.crossings("fig12", 0.5)[panel]["vllm"]
        chosen = chosen.assign(relative=chosen["rate"] / sustained)
        for _, row in chosen[chosen["mark"] != "steady"].dropna(subset=["latency_s_per_token"]).iterrows():
            axis.annotate(
                MARKS.get(row["mark"], "?"),
                (row["relative"], row["latency_s_per_token"]),
                (0, 4),
                textcoords="offset points",
                fontsize=10,
                ha="center",
            )
        plotting.curves(
            axis,
            chosen,
            "relative",
            "latency_s_per_token",
            paper={
                name: [(rate / edge, value) for rate, value in paper.points("fig12", panel, name)]
                for name in SYSTEMS
                if name in drawn
            },
        )
        axis.set(
            xlabel="request rate / what vLLM sustains",
            ylabel="normalized latency (s/token)",
            yscale="log",
            xlim=(0, 1.3),
        )
    plotting.legend(figure, latency, with_paper=True)
    plotting.footer(
        figure, latency, with_paper=True, note="↑ overloaded, a lower bound; ? too short, or the host was the limit"
    )
    return figure


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    papers = DEPLOYMENTS["opt-13b"]
    if {*rows["model"]} != {papers.model.name} or {*rows["kv_slots"]} != {papers.kv_slots}:
        return []  # another model or pool says nothing about the claims
    saturated = rows[(rows["part"] == "saturated") & (rows["workload"] == "sharegpt")]
    rates = saturated.groupby(["system", "n"])["tokens_per_s"].mean()
    generate = rows[rows["part"] == "generate"]
    evidence, device = rows.iloc[0]["evidence"], rows.iloc[0]["device"]
    found = []
    if len(generate) and ("vllm", 1) in rates:
        found.append(
            Judgement(
                "hf-24x",
                rates["vllm", 1] / generate["tokens_per_s"].mean(),
                evidence,
                note=f"OPT-13B on {device}, ShareGPT: vLLM saturated with 12 GB of K/V, over transformers' generate "
                "with "
                "static batches of as many requests as fit the pool at their maximum length.",
            )
        )
    several = sorted(n for system, n in rates.index if n > 1 and system == "vllm")
    if several and ("orca-max", several[0]) in rates:
        n = several[0]
        found.append(
            Judgement(
                "tgi-3.5x",
                rates["vllm", n] / rates["orca-max", n],
                evidence,
                note=f"OPT-13B on {device}, ShareGPT, {n} completions a request: vLLM over Orca (Max), which stands "
                "in for "
                "Text Generation Inference.",
            )
        )
    return found
