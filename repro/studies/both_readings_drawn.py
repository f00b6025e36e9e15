"""Six items of `what_the_paper_does_not_say` as pictures.

Drawn from rows alone, the paper's own points hollow or dotted beside ours. This module runs nothing, and the words are
in `both_readings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from repro.report import paper
from repro.studies.both_readings import BATCHED, LEVEL, LEVELS, MODELS, ratio_drawn, swap_shares, swap_shares_drawn

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = dict(zip(MODELS, ("#0072B2", "#D55E00", "#117733")))
_DOTTED = {"linestyle": (0, (1, 1.6)), "markerfacecolor": "none", "markersize": 6, "linewidth": 1.2}


def draw_plots(rows: pd.DataFrame) -> Figure:
    from repro.report import plotting

    titles = [
        "(a) Fig. 2: external & others",
        "(b) Fig. 13b: vLLM, Alpaca",
        "(c) §6.2: vLLM over Orca (Max)",
        "(d) Fig. 12a and 19b: vLLM, ShareGPT",
        "(e) §7.3: recomputing / swapping",
        "(f) §4.5: eight requests, 24 blocks",
    ]
    figure, axes = plotting.panels(titles, width=3.9, height=2.8)
    _draw_external(axes[0], rows)
    _draw_batched(axes[1], rows)
    _draw_ratios(axes[2], rows)
    _draw_same_latency(axes[3], rows)
    _draw_swap_shares(axes[4], rows)
    _draw_swapped(axes[5], rows)
    plotting.footer(figure, rows, with_paper=True)
    return figure


def _draw_external(axis: Axes, rows: pd.DataFrame) -> None:
    from repro.report import plotting

    pool = rows[rows["part"] == "fig02"].set_index("system").drop(index="vllm")
    for place, (name, row) in enumerate(pool.iterrows()):
        _, color, _ = plotting.PIECES["rounding"]
        axis.bar(place - 0.2, row["free"], 0.38, color=color, label="free or lost" if place == 0 else None)
        axis.bar(
            place - 0.2,
            row["rounding"],
            0.38,
            bottom=row["free"],
            color=color,
            hatch="////",
            edgecolor="white",
            linewidth=0.6,
            label="rounding to a power of two" if place == 0 else None,
        )
        axis.bar(
            place + 0.2,
            paper.figure("fig2")[name]["external & others"],
            0.38,
            facecolor="none",
            edgecolor=color,
            linewidth=1.3,
            label="the paper, in one piece" if place == 0 else None,
        )
    axis.set_xticks(range(len(pool)), [plotting.label(name) for name in pool.index])
    axis.set(ylabel="% of the KV cache", ylim=(0, 62))
    axis.legend(fontsize=7.5, loc="upper left")
    axis.grid(axis="x", visible=False)


def _draw_batched(axis: Axes, rows: pd.DataFrame) -> None:
    panel, rate, printed = BATCHED["fig13b"]
    curve = rows[rows["part"] == "fig13b"].sort_values("rate")
    axis.plot(curve["rate"], curve["batched_requests"], "o--", color="#0072B2", markersize=4, label="ours")
    axis.plot(rate, printed, "o", color="#0072B2", markersize=7, markerfacecolor="none", label="Fig. 13b")
    saturated = paper.crossings("fig12")[panel]["vllm"]
    axis.axvline(saturated, color="#888888", linestyle=(0, (1, 1.6)), linewidth=1.2)
    axis.annotate(
        "Fig. 12d saturates",
        (saturated, 0.04),
        (-4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right",
        fontsize=7.5,
    )
    axis.set(xlabel="request rate (req/s)", ylabel="batched requests", ylim=(0, None))
    axis.legend(fontsize=7.5, loc="upper left")


def _draw_ratios(axis: Axes, rows: pd.DataFrame) -> None:
    basic = rows[rows["panel"].notna() & rows["crossing_rate"].notna()].set_index(["panel", "system"])["crossing_rate"]
    for model in MODELS:
        panel = f"{model}/sharegpt"
        found = [(level, ratio) for level in LEVELS if (ratio := ratio_drawn("fig12", panel, "orca-max", level))]
        axis.plot(*zip(*found), color=_COLORS[model], linestyle=(0, (1, 1.6)), linewidth=1.4)
        axis.plot(
            LEVEL,
            basic[panel, "vllm"] / basic[panel, "orca-max"],
            "o",
            color=_COLORS[model],
            markersize=5,
            label=model.upper(),
        )
    axis.axhspan(2.7, 8, color="#EEEEEE", zorder=0)
    axis.annotate("printed: 2.7 to 8", (0.98, 7.75), ha="right", va="top", fontsize=7.5)
    axis.set(xlabel="at this latency (s/token)", ylabel="ratio of rates", ylim=(0, 9), xlim=(0.05, 1.05))
    axis.legend(fontsize=7.5, loc="lower right", ncols=3, handletextpad=0.2, columnspacing=0.8)


def _draw_same_latency(axis: Axes, rows: pd.DataFrame) -> None:
    curve = [point for point in paper.points("fig12", "opt-13b/sharegpt", "vllm") if point[0] >= 1.5]
    axis.plot(*zip(*paper.line("fig12", "opt-13b/sharegpt", "vllm")), "o", color="#0072B2", label="Fig. 12a", **_DOTTED)
    axis.plot(
        2.01,
        dict(paper.points("fig19b", "recompute"))[16],
        "s",
        color="#D55E00",
        markersize=7,
        markerfacecolor="none",
        label="Fig. 19b, block 16",
    )
    ours = rows[(rows["part"] == "latency") & (rows["panel"] == "opt-13b/sharegpt")].iloc[0]
    axis.plot(ours["rate"], ours["latency_s_per_token"], "o", color="#0072B2", markersize=5, label="ours")
    axis.set(
        xlabel="request rate (req/s)",
        ylabel="normalized latency (s/token)",
        xlim=(min(rate for rate, _ in curve) - 0.05, 2.15),
        ylim=(0, 1.2),
    )
    axis.legend(fontsize=7.5, loc="upper left")


def _draw_swap_shares(axis: Axes, rows: pd.DataFrame) -> None:
    sizes = [size for size, _ in paper.points("fig19a", "recompute")]
    axis.plot(sizes, swap_shares(rows), "o--", color="#0072B2", markersize=4, label="ours")
    axis.plot(sizes, swap_shares_drawn(), "o", color="#0072B2", label="Fig. 19a", **_DOTTED)
    for level, text, side in ((20, "20 % of its time", "right"), (120, "20 % above its time", "left")):
        axis.axhline(level, color="#888888", linewidth=0.8)
        axis.annotate(
            text,
            (sizes[-1] if side == "right" else sizes[0], level),
            (0, 3),
            textcoords="offset points",
            ha=side,
            fontsize=7.5,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axis.set(xlabel="block size (tokens)", ylabel="% of swapping's time", ylim=(0, 145))
    axis.legend(fontsize=7.5, loc="center right")


def _draw_swapped(axis: Axes, rows: pd.DataFrame) -> None:
    case = rows[rows["part"] == "swap"]
    case = case[case["num_cpu_blocks"] == case["num_cpu_blocks"].max()].sort_values("step")
    axis.plot(case["step"], case["swapped"], color="#D55E00", label="swapped out")
    axis.plot(case["step"], case["on_gpu"], color="#0072B2", linewidth=1, label="on the GPU")
    axis.axhline(case["num_blocks"].iloc[0], color="#888888", linestyle=(0, (1, 1.6)), label="the pool")
    axis.set(xlabel="iteration", ylabel="blocks", ylim=(0, 52))
    axis.legend(fontsize=7.5, loc="upper right", ncols=3, columnspacing=0.8, handlelength=1.4)
