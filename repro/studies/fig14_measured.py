"""Fig. 14, 15 and 16 measured on a GPU: saturated throughput with several sequences a request and with a shared prefix.

One engine for all systems, OPT-13B with the 12 GB pool of Table 1; rows come from `python -m repro bench serving` (see
fig12_measured). The queue never empties, so what is compared is what memory allows: the paper compares rates at a
latency, on another card. Samples are drawn at random; beams are searched in full at every step but continue where a
real model's did (repro.simulate.beams), since weights are random. The Orcas copy the tokens that a beam takes over, not
its whole chunk as the authors' do. OPT-13B stands in for Fig. 16's LLaMA-13B: both keep the same K/V a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.bench import kept
from repro.bench.kept import Params
from repro.engine.systems import SYSTEMS
from repro.harness.experiment import Point
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.beams import WIDTHS
from repro.studies.fig12_measured import multiple_of
from repro.studies.fig15_sharing import METHODS, PAPER
from repro.studies.fig16_shared_prefix import PANELS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASIC = 1  # one sequence a request: Alpaca's saturated runs of fig12_measured
LOOKS = {"parallel": ("#0072B2", "o", "parallel sampling"), "beam": ("#D55E00", "s", "beam search")}
RUN = (
    "system",
    "n",
    "prefix_tokens",
    "tokens_per_s",
    "tokens_per_s_low",
    "tokens_per_s_high",
    "mean_batch",
    "saving",
    "host_share",
    "mark",
    "preemptions",
    "model",
    "kv_slots",
    "device",
    "seed",
    "trace_hash",
)


def points(params: Params) -> list[Point]:
    return [Point(measured, kept.runs(params.gpu, "sharing"))]


def measured(path: Path, evidence: str) -> list[dict[str, Any]]:
    """The runs that this study draws. One sequence a request belongs to both ways of decoding."""
    found = []
    for row in kept.read(path, evidence):
        about = {name: row.get(name) for name in RUN} | {"evidence": evidence}
        if row["kind"] == "sharing":
            found.append({"part": "sharing", "method": "beam" if row["beams"] else "parallel", **about})
        elif row["kind"] == "prefix":
            found.append({"part": "prefix", "method": None, **about})
        elif (
            row["kind"] == "saturated"
            and row["workload"] == "alpaca"
            and row["n"] == BASIC
            and row["system"] != "faster-transformer"
        ):
            found += [{"part": "sharing", "method": method, **about} for method in METHODS]
    return found


def gains(rows: pd.DataFrame, method: str) -> dict[int, tuple[float, float]]:
    """sequences a request -> how many times what Orca (Oracle) delivers vLLM does, plus or minus."""
    groups = rows[rows["method"] == method].groupby("n")
    return {int(n): found for n, group in groups if (found := multiple_of(group, "orca-oracle"))}


def paper_gains(method: str) -> dict[int, float]:
    """The same from the rates of Fig. 14 at 0.5 s/token, and of Fig. 12d for one sequence."""
    panels = {BASIC: paper.crossings("fig12", 0.5)["opt-13b/alpaca"]}
    panels |= {n: paper.crossings("fig14", 0.5)[f"{method}/{n}"] for n in WIDTHS}
    return {n: rates["vllm"] / rates["orca-oracle"] for n, rates in panels.items()}


def paper_prefix_gain(prefix: int) -> float:
    """The same from the curves of Fig. 16 at 0.5 s/token (its text says 1.67 and 3.58)."""
    rates = paper.crossings("fig16", 0.5)[PANELS[prefix]]
    return rates["vllm"] / rates["orca-oracle"]


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    sharing, prefix = (rows[rows["part"] == part] for part in ("sharing", "prefix"))
    with plotting.house():
        throughput, axes = plotting.panels(
            [LOOKS[method][2].capitalize() for method in METHODS] + ["vLLM over Orca (Oracle)"], width=3.9, height=3.1
        )
        for axis, method in zip(axes, METHODS):
            chosen = sharing[sharing["method"] == method]
            _whiskers(axis, chosen, plotting)
            plotting.curves(axis, chosen, "n", "tokens_per_s")
            axis.set(xlabel="sequences a request", ylabel="useful output tokens/s", ylim=(0, None))
            axis.yaxis.set_major_formatter("{x:,.0f}")
        _draw_gains(axes[2], sharing)
        for axis in axes:
            axis.set_xticks([BASIC, *WIDTHS])
        plotting.legend(throughput, sharing)
        plotting.footer(
            throughput, sharing, note="Hollow: the paper's ratio of rates at 0.5 s/token. " + _marks(sharing)
        )
        saving, axes = plotting.panels(
            ["Blocks saved by sharing", "A shared prefix: throughput"], width=5.4, height=3.1
        )
        _draw_saving(axes[0], sharing[(sharing["system"] == "vllm") & (sharing["n"] > BASIC)])
        _draw_prefix(axes[1], prefix, plotting)
        plotting.footer(saving, rows, note="Hollow: Fig. 15; in brackets: Fig. 16")
    return {"fig14_measured": throughput, "fig15_measured": saving}


def _marks(rows: pd.DataFrame) -> str:
    """What is not steady, in words."""
    other = rows[rows["mark"] != "steady"]
    named = ", ".join(f"{row['system']} {row['method']} {row['n']:.0f}: {row['mark']}" for _, row in other.iterrows())
    return f"Not steady: {named}" if named else "All runs are steady"


def _whiskers(axis: Axes, rows: pd.DataFrame, plotting: Any) -> None:
    looks = plotting.styles(SYSTEMS)
    for _, row in rows.iterrows():
        axis.plot(
            [row["n"]] * 2,
            [row["tokens_per_s_low"], row["tokens_per_s_high"]],
            color=looks[row["system"]].color,
            linewidth=1,
        )


def _draw_gains(axis: Axes, rows: pd.DataFrame) -> None:
    for shift, method in zip((-0.05, 0.05), METHODS):  # or the whiskers of one hide those of the other
        color, marker, label = LOOKS[method]
        ours, theirs = gains(rows, method), paper_gains(method)
        axis.errorbar(
            [n + shift for n in ours],
            [ratio for ratio, _ in ours.values()],
            [off for _, off in ours.values()],
            color=color,
            marker=marker,
            capsize=2.5,
            label=label,
        )
        axis.plot(
            list(theirs),
            list(theirs.values()),
            color=color,
            marker=marker,
            markerfacecolor="none",
            markersize=8,
            linestyle=(0, (1, 1.6)),
            linewidth=1,
        )
    axis.set(xlabel="sequences a request", ylabel="times Orca (Oracle)", ylim=(1, None))
    axis.legend(fontsize=8.5)


def _draw_saving(axis: Axes, rows: pd.DataFrame) -> None:
    names = []
    for place, method in enumerate(METHODS):
        for index, (n, group) in enumerate(rows[rows["method"] == method].groupby("n")):
            x, value, drawn = 3.6 * place + index, 100 * group["saving"].mean(), PAPER[method, "alpaca"].get(int(n))
            axis.bar(x - 0.2, value, 0.38, color=LOOKS[method][0], edgecolor="black", linewidth=0.8)
            axis.annotate(
                f"{value:.1f}", (x - 0.2, value), (0, 2), textcoords="offset points", ha="center", fontsize=7.5
            )
            if drawn is not None:
                axis.bar(x + 0.2, drawn, 0.38, facecolor="none", edgecolor=LOOKS[method][0], linewidth=1.3)
                axis.annotate(
                    f"{drawn:.1f}",
                    (x + 0.2, drawn),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7.5,
                    color="#666666",
                )
            names.append((x, f"{method}\n{n:.0f}"))
    axis.set_xticks([x for x, _ in names], [name for _, name in names], fontsize=8.5)
    axis.set_ylabel("% of blocks")
    axis.grid(axis="x", visible=False)


def _draw_prefix(axis: Axes, rows: pd.DataFrame, plotting: Any) -> None:
    looks, prefixes = plotting.styles(SYSTEMS), sorted(rows["prefix_tokens"].unique())
    axis.set_ylabel("useful output tokens/s")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.grid(axis="x", visible=False)
    if not prefixes:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color="#888888")
    for place, prefix in enumerate(prefixes):
        here = rows[rows["prefix_tokens"] == prefix]
        for index, (system, group) in enumerate(here.groupby("system", sort=False)):
            mean = group["tokens_per_s"].mean()
            axis.bar(
                place + 0.4 * index - 0.2,
                mean,
                0.38,
                color=looks[system].color,
                edgecolor="black",
                linewidth=0.8,
                label=plotting.label(system) if place == 0 else None,
            )
            axis.errorbar(
                place + 0.4 * index - 0.2,
                mean,
                [[mean - group["tokens_per_s_low"].mean()], [group["tokens_per_s_high"].mean() - mean]],
                color="black",
                linewidth=1,
                capsize=3,
            )
        if found := multiple_of(here, "orca-oracle"):
            axis.annotate(
                f"×{found[0]:.2f} ± {found[1]:.2f} (×{paper_prefix_gain(int(prefix)):.2f})",
                (place, here["tokens_per_s_high"].max()),
                (0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
    axis.margins(y=0.18)
    axis.set_xticks(range(len(prefixes)), [f"{prefix:.0f} tokens" for prefix in prefixes])
    if prefixes:
        axis.legend(fontsize=8.5)


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    # the claims are about rates at a latency on an A100; what a saturated run of another card says stands beside them
    return []
