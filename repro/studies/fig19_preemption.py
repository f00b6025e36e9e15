"""Fig. 19: what swapping and recomputing a preempted request cost, alone and end to end.

Alone (a): 256 tokens of one sequence of OPT-13B. Swapping moves 256/B blocks out and in again; each costs its bytes at
the link's rate and a fixed amount. Both numbers are read off this figure (repro/simulate/a100-2023.toml: calibrations),
so the swap curves only show how well two numbers describe them. Recomputing is one pass over the tokens, whatever the
block size. Beside them is drawn what was recorded on a newer GPU (experiments/recorded): swaps with a copy a block and
layer, as was done in 2023, and with one launch for all, and recomputation by the whole engine.

End to end (b): vLLM serves ShareGPT and drives requests out when blocks run short, always one way or always the other.
The model knows last-block waste and the cost of transfers, not how efficient the attention kernel is at each block size
(see Fig. 18b)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.bench import kept
from repro.engine.config import GB, check_block_size
from repro.engine.scheduler import PreemptionMode
from repro.engine.systems import system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.profiles import a100_2023, cost_model
from repro.simulate.serve import serve
from repro.studies.common import check_positive, check_seeds, check_serving, check_some, deployment_of, trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKENS = 256
BLOCK_SIZES = tuple(2**power for power in range(9))
MODES = {"recompute": PreemptionMode.RECOMPUTE, "swap": PreemptionMode.SWAP}
RECOMPUTE, SWAP_2023, SWAP_BATCHED = "recompute", "2023 way: a copy a block and layer", "ours, one launch"
#: recorded ways -> label, marker, colour
RECORDED = {
    RECOMPUTE: ("recompute", "h", "#56B4E9"),
    SWAP_2023: ("swap, a copy a block", "X", "#4D4D4D"),
    SWAP_BATCHED: ("swap, one launch", "P", "#117733"),
}
#: largest over smallest time of a curve that counts as flat
FLAT = 1.1
#: §7.3 compares the two ways at these sizes.
MIDDLE = (16, 32, 64)
COLORS = {
    "recompute": "#0072B2",
    "swap": "#D55E00",
    "swap-in": "#E69F00",
    "swap-out": "#CC79A7",
    "swap-in+out": "#D55E00",
}
MARKERS = {"recompute": "o", "swap": "s", "swap-in": "^", "swap-out": "v", "swap-in+out": "s"}


class Params(Parameters):
    """`rates` in req/s: the first one is the paper's. `block_sizes` of the runs end to end. `gpu` names a folder of
    experiments/recorded; without its rows nothing recorded is drawn."""

    rates: tuple[float, ...]
    block_sizes: tuple[int, ...]
    duration_s: float
    seeds: tuple[int, ...]
    gpu: str
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_some("rates", self.rates)
        check_some("block_sizes", self.block_sizes)
        check_seeds(self.seeds)
        for rate in self.rates:
            check_positive("rates", rate)
        check_positive("duration_s", self.duration_s)
        for size in self.block_sizes:
            check_serving("opt-13b", "a100-2023", check_block_size(size), None)
        return self


def points(params: Params) -> list[Point]:
    sources = ((recorded_swaps, kept.KERNELS, None), (recorded_recomputations, kept.SERVING, RECOMPUTE))
    recorded = [
        Point(read, given, weight=0.1 * params.duration_s)
        for read, kind, needs in sources
        if (given := kept.given(params.gpu, kind, needs))
    ]
    return [Point(alone, {}, weight=0.1 * params.duration_s), *recorded] + [
        Point(
            end_to_end,
            {
                "mode": mode,
                "rate": rate,
                "block_size": size,
                "duration_s": params.duration_s,
                "seed": seed,
                "lengths": params.lengths,
            },
            weight=rate * params.duration_s,
        )
        for rate in params.rates
        for size in params.block_sizes
        for mode in MODES
        for seed in params.seeds
    ]


def alone() -> list[dict[str, Any]]:
    """Milliseconds to swap or recompute 256 tokens of OPT-13B, for each block size of the figure."""
    deployment, data = deployment_of("opt-13b"), a100_2023()
    costs = cost_model("a100-2023", deployment)
    bytes_ms = 1e3 * TOKENS * deployment.model.kv_bytes_per_token / (data["link_gb_per_s"] * GB)
    # A pass over all tokens by itself: its arithmetic, or reading the weights if that takes longer.
    pass_ms = 1e3 * max(costs.per_prefill_token_s * TOKENS, costs.weight_read_s)
    rows = []
    for size in BLOCK_SIZES:
        blocks = TOKENS // size
        found = {
            way: bytes_ms + blocks * data["swap_ms_per_block"][way.removeprefix("swap-")]
            for way in ("swap-in", "swap-out")
        }
        found |= {"swap-in+out": sum(found.values()), "recompute": pass_ms}
        rows += [
            {
                "part": "alone",
                "way": way,
                "block_size": size,
                "milliseconds": value,
                "evidence": "modelled",
                "device": costs.name,
                "seed": None,
                "trace_hash": None,
            }
            for way, value in found.items()
        ]
    return rows


def recorded_swaps(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Recorded milliseconds to swap 256 tokens of OPT-13B's shape out and in again."""
    found: dict[tuple[str, int], float] = {}
    rows = [row for row in kept.read(path, evidence) if row["benchmark"] == "swap" and row["tokens"] == TOKENS]
    for row in rows:
        key = row["contender"], int(float(row["block_size"]))
        found[key] = found.get(key, 0.0) + float(row["us"]) / 1e3
    return [
        _recorded_row(way, size, value, evidence, rows[0]["device"]) for (way, size), value in sorted(found.items())
    ]


def recorded_recomputations(path: Path, evidence: str) -> list[dict[str, Any]]:
    """Recorded milliseconds of the engine's pass over 256 tokens of OPT-13B, from the request to its token on the
    host."""
    rows = [row for row in kept.read(path, evidence) if row["kind"] == RECOMPUTE and row["tokens"] == TOKENS]
    return [_recorded_row(RECOMPUTE, row["block_size"], 1e3 * row["seconds"], evidence, row["device"]) for row in rows]


def _recorded_row(way: str, block_size: int, milliseconds: float, evidence: str, device: str) -> dict[str, Any]:
    return {
        "part": "recorded",
        "way": way,
        "block_size": block_size,
        "milliseconds": milliseconds,
        "evidence": evidence,
        "device": device,
        "seed": None,
        "trace_hash": None,
    }


def end_to_end(
    mode: str, rate: float, block_size: int, duration_s: float, seed: int, lengths: str | None
) -> dict[str, Any]:
    """Mean normalized latency (s/token) of vLLM with one way of preemption."""
    deployment = deployment_of("opt-13b")
    trace = trace_of("sharegpt", rate, duration_s, seed, lengths)
    costs = cost_model("a100-2023", deployment, block_size, anchor="opt-13b/sharegpt")
    served = serve(system("vllm").with_scheduler(preemption=MODES[mode]), deployment, trace, costs, block_size)
    return {
        "part": "end to end",
        "way": mode,
        "rate": rate,
        "block_size": block_size,
        "seed": seed,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace.hash,
        "latency_s_per_token": served.latency_s_per_token,
        "preemptions": served.engine.scheduler.num_preemptions,
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    serving = rows[rows["part"] == "end to end"]
    titles = ["(a) 256 tokens alone", *(f"(b) ShareGPT, {rate:g} req/s" for rate in params.rates)]
    with plotting.house():
        figure, axes = plotting.panels(titles, width=4.0, height=3.2)
        _draw_curves(axes[0], rows[rows["part"] == "alone"], "milliseconds", "fig19a")
        for way, group in rows[rows["part"] == "recorded"].groupby("way"):
            label, marker, color = RECORDED[way]
            axes[0].plot(
                group["block_size"],
                group["milliseconds"],
                marker,
                color=color,
                linestyle="-",
                markeredgecolor="black",
                markersize=5,
                label=f"{group['evidence'].iloc[0]}: {label}",
            )
        axes[0].set(ylabel="ms", yscale="log", ylim=(3, 10000))
        axes[0].legend(fontsize=7, ncols=2, loc="upper center", handlelength=1.8, columnspacing=1.0)
        for axis, rate in zip(axes[1:], params.rates):
            # The paper has one rate only; its points are laid over that panel.
            _draw_curves(
                axis,
                serving[serving["rate"] == rate],
                "latency_s_per_token",
                "fig19b" if rate == Params.rates[0] else None,
            )
            axis.set_ylabel("normalized latency (s/token)")
            axis.set_yscale("log")
        plotting.footer(
            figure,
            rows[rows["part"] != "alone"],
            with_paper=True,
            note="(a): swapping is calibrated on these very points",
        )
    return {"fig19_preemption": figure}


def _draw_curves(axis: Axes, rows: pd.DataFrame, y: str, drawn: str | None) -> None:
    for way, group in rows.groupby("way", sort=False):
        spread = group.groupby("block_size")[y].agg(["mean", "min", "max"])
        look = dict(color=COLORS[way], marker=MARKERS[way])
        axis.fill_between(spread.index, spread["min"], spread["max"], color=COLORS[way], alpha=0.18, linewidth=0)
        axis.plot(spread.index, spread["mean"], linestyle=(0, (4, 1.5)), markersize=4, label=way, **look)
        if drawn:
            axis.plot(
                *zip(*paper.points(drawn, way)),
                linestyle=(0, (1, 1.6)),
                linewidth=1.0,
                markersize=7,
                markerfacecolor="none",
                **look,
            )
    axis.set_xscale("log", base=2)
    sizes = sorted(set(rows["block_size"]) | {size for size in BLOCK_SIZES if drawn})
    axis.set_xticks(sizes, list(map(str, sizes)))
    axis.set_xlabel("block size (tokens)")
    axis.legend(fontsize=8)


def differences(rows: pd.DataFrame, rate: float) -> dict[int, float]:
    """block size -> by how much the slower way's mean latency exceeds the other's, in %."""
    serving = rows[(rows["part"] == "end to end") & (rows["rate"] == rate)]
    means = serving.groupby(["block_size", "way"])["latency_s_per_token"].mean().unstack()
    return {size: 100 * (row.max() / row.min() - 1) for size, row in means.iterrows()}


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params != replace(Params(), seeds=params.seeds, lengths=params.lengths):
        return []  # other parameters than the paper's say nothing about its claims
    alone_ms = rows[rows["part"] == "alone"].pivot(index="block_size", columns="way", values="milliseconds")
    share = 100 * alone_ms["recompute"] / alone_ms["swap-in+out"]
    theirs = [
        100 * ours[1] / swap[1]
        for ours, swap in zip(paper.points("fig19a", "recompute"), paper.points("fig19a", "swap-in+out"))
    ]
    apart = {rate: {size: differences(rows, rate)[size] for size in MIDDLE} for rate in params.rates}
    lower = params.rates[1]
    return [
        *_judge_shapes(rows[rows["part"] == "recorded"]),
        Judgement(
            "fig19a-20-percent",
            share.max(),
            "modelled",
            [share.min(), share.max()],
            note=f"Ours from {share.min():.0f} to {share.max():.0f} % over the block sizes, the paper's own points "
            f"from {min(theirs):.0f} "
            f"to {max(theirs):.0f} %. Swapping is calibrated on Fig. 19a; one pass over 256 tokens is "
            f"{alone_ms['recompute'].iloc[0]:.1f} "
            "ms here and 38.6 ms there, which the authors' script multiplied by 0.9.",
        ),
        Judgement(
            "fig19b-comparable",
            max(apart[params.rates[0]].values()),
            "modelled",
            [min(apart[params.rates[0]].values()), max(apart[params.rates[0]].values())],
            note=f"At {params.rates[0]:g} req/s, beyond saturation in the paper's own Fig. 12a (1.93 req/s), where "
            "small costs pile up in the "
            f"queue; at {lower:g} req/s, where our latency is about the 0.06 to 0.07 s/token that the paper draws, "
            "at most "
            f"{max(apart[lower].values()):.0f} %. The model charges all of a transfer; "
            "overlapping it with computation would bring the two closer.",
        ),
    ]


def _judge_shapes(rows: pd.DataFrame) -> list[Judgement]:
    """The shapes of the curves alone, as recorded; the modelled ones are flat and falling by construction."""
    times = rows.pivot(index="block_size", columns="way", values="milliseconds").reindex(
        BLOCK_SIZES, columns=list(RECORDED)
    )
    if times.isna().any(axis=None):
        return []  # not recorded, or not at every block size
    recompute, swap, batched = (times[way] for way in (RECOMPUTE, SWAP_2023, SWAP_BATCHED))
    apart = times.max() / times.min()
    return [
        Judgement(
            "fig19a-recompute-flat",
            bool(apart[RECOMPUTE] <= FLAT < apart[SWAP_2023] and swap.is_monotonic_decreasing),
            rows["evidence"].max(),  # recorded, if only a part was measured here
            note=f"{', '.join(rows['device'].unique())}, 256 tokens, blocks of 1 to 256. Recomputing takes "
            f"{recompute.min():.1f} to {recompute.max():.1f} ms, the "
            f"most {apart[RECOMPUTE]:.2f} times the least (flat: up to {FLAT}). Swapping out and in by a copy a "
            "block and layer takes from "
            f"{swap.iloc[0]:.0f} ms (blocks of 1) to {swap.iloc[-1]:.1f} (256); by one launch {batched.min():.1f} to "
            f"{batched.max():.1f} ms, the "
            f"most {apart[SWAP_BATCHED]:.2f} times the least: what block sizes change is the number of calls.",
        )
    ]
