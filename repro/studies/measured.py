"""What the studies of recorded or measured rows share: whose rows they are, how they are read, and how drawn.

Rows come from `python -m repro bench serving` and `python -m repro bench kernels`: this machine's own, or those
recorded with the project (see `repro.bench.kept`). Nothing is measured here."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator

from repro.bench import kept
from repro.engine.config import DEPLOYMENTS
from repro.studies.base import Axes, DataFrame, Judgement, Parameters, plotting

#: useful output tokens/s of a run: the mean, and the ends of its 95 % interval
INTERVAL = ("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high")


def _recorded(gpu: str) -> str:
    kept.find(gpu, kept.SERVING)
    return gpu


def _recorded_or_none(gpu: str) -> str:
    return gpu if gpu == kept.NONE else _recorded(gpu)


#: "auto" for this machine's own rows if there are any, else the recorded ones; or a folder of experiments/recorded
Gpu = Annotated[str, AfterValidator(_recorded)]
#: the same, or "none" to leave recorded rows out
GpuOrNone = Annotated[str, AfterValidator(_recorded_or_none)]


class Measured(Parameters):
    """Parameters of a study that draws measured runs; another GPU's are judged, too."""

    gpu: Gpu
    free: ClassVar = ("gpu",)


def runs(path: Path, evidence: str, kinds: Iterable[str]) -> list[dict[str, Any]]:
    """The serving runs of these kinds. UserError if the file is missing or damaged."""
    return [row for row in kept.read(path, evidence) if row["kind"] in kinds]


def run_of(path: Path, evidence: str, key: str) -> dict[str, Any]:
    """The serving run with this key."""
    return next(row for row in kept.read(path, evidence) if row["key"] == key)


def columns(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Some columns of a row; those that its file does not have are None."""
    return {name: row.get(name) for name in names}


def kernel_rows(path: Path, evidence: str, *benchmarks: str) -> list[dict[str, Any]]:
    """The rows of these benchmarks in a recording of kernel times."""
    return [row for row in kept.read(path, evidence) if row["benchmark"] in benchmarks]


def on_gpu(rows: DataFrame, judged: Mapping[str, Any]) -> list[Judgement]:
    """Second verdicts: what these rows say of claims (claim -> ours, or ours and its interval; None is left out).

    None if another model or pool was measured, which says nothing about the claims."""
    papers = DEPLOYMENTS["opt-13b"]
    if {*rows["model"]} != {papers.model.name} or {*rows["kv_slots"]} != {papers.kv_slots}:
        return []
    evidence, device = rows.iloc[0][["evidence", "device"]]
    values = {claim: ours if isinstance(ours, tuple) else (ours, None) for claim, ours in judged.items()}
    return [
        Judgement(claim, ours, evidence, interval, device=device)
        for claim, (ours, interval) in values.items()
        if ours is not None
    ]


def with_interval(found: Mapping[Any, tuple[float, float]]) -> tuple[dict[Any, float], dict[Any, list[float]]]:
    """Ratios as a judgement has them, from key -> (ratio, plus or minus)."""
    return (
        {key: ratio for key, (ratio, _) in found.items()},
        {key: [ratio - off, ratio + off] for key, (ratio, off) in found.items()},
    )


def multiple_of(rows: DataFrame, name: str) -> tuple[float, float] | None:
    """How many times a system's throughput vLLM delivers, and by how much that may be off if the intervals of both runs
    are independent; None if one of the two is not there."""
    means = rows.groupby("system")[["tokens_per_s", "tokens_per_s_high"]].mean().reindex(["vllm", name])
    if means.isna().any(axis=None):
        return None
    rates, off = means["tokens_per_s"], means["tokens_per_s_high"] / means["tokens_per_s"] - 1
    ratio = rates["vllm"] / rates[name]
    return float(ratio), float(ratio * np.hypot(*off))


def together(*tables: DataFrame) -> DataFrame:
    """The rows of several tables, of which some may be empty."""
    import pandas as pd

    return pd.concat([table for table in tables if len(table)])


def steadiness(rows: DataFrame, named: str) -> str:
    """Which runs are not steady, in words; `named` is how a run is named."""
    other = [named.format_map(row) for _, row in rows[rows["mark"] != "steady"].iterrows()]
    return f"Not steady: {', '.join(other)}" if other else "All runs are steady"


def throughput_bar(axis: Axes, rows: DataFrame, x: float, width: float, **look: Any) -> float:
    """A bar for one system's runs, with its interval; returns their mean."""
    mean, low, high = (rows[name].mean() for name in INTERVAL)
    axis.bar(x, mean, width, **look, **plotting.BAR[rows["evidence"].iloc[0]])
    axis.errorbar(x, mean, [[mean - low], [high - mean]], color="black", linewidth=1, capsize=3)
    return mean


def not_measured(axis: Axes) -> None:
    """Say in an empty panel why it is empty."""
    axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color=plotting.GREY)


def label_rates(axis: Axes) -> None:
    """The axis of throughputs."""
    axis.set_ylabel("useful output tokens/s")
    axis.yaxis.set_major_formatter("{x:,.0f}")
