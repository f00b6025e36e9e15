"""Both readings of what `what_the_paper_does_not_say` lists: the table of all items, and six of them drawn.

The words are in open_questions.yaml; here are the numbers for them, from rows and from the paper's own curves
(repro.report.paper). This module runs nothing and judges
nothing."""

from collections.abc import Iterable
from importlib import resources
from typing import Any

import numpy as np

from repro.engine.config import DEPLOYMENTS, GB, GIB
from repro.harness.parameters import parse_yaml
from repro.studies.base import Axes, DataFrame, Figure, Rows, paper, plotting, where
from repro.studies.fig18a_kernels import paper_overhead
from repro.studies.measured import together

MODELS = ("opt-13b", "opt-66b", "opt-175b")
LEVEL, LEVELS = 0.5, tuple(level / 20 for level in range(2, 21))  # s/token
#: Fig. 13 prints its bars: workload -> (rate in req/s, vLLM's requests)
BATCHED = {"sharegpt": (2.0, 30.42), "alpaca": (30.0, 132.44)}
_VLLM, _GREY = "#0072B2", "#9FABC0"  # as in every figure: the system, and what Fig. 2 calls external & others


def items(rows: Rows) -> DataFrame:
    """Every item in words: where it stands, two readings, ours, and what our number is."""
    import pandas as pd

    text = resources.files(__package__).joinpath("open_questions.yaml").read_text(encoding="utf-8")
    facts = _memory(rows) | _serving(rows) | _preemption(rows)
    stated = parse_yaml(text, "open_questions.yaml")
    return pd.DataFrame([{name: words.format(**facts) for name, words in item.items()} for item in stated])


def _memory(rows: Rows) -> dict[str, Any]:
    pool, fig2, table1 = rows["pool"].set_index("system"), paper.figure("fig2"), paper.figure("table1")
    pool = pool.assign(
        outside=pool["rounding"] + pool["free"],
        inside=pool["internal"] + pool["rounding"],
        wasted=100 - pool["token_states"],
        last_blocks=pool["reserved"] + pool["internal"],
    )
    shared, width = rows["saving"].iloc[0], rows["saving"]["width"].iloc[0]
    small, large = (DEPLOYMENTS[name].model.kv_bytes_per_token for name in MODELS[:2])
    kv, kv_66b = (table1[name]["kv_gb"] for name in MODELS[:2])
    return {
        "table1": table1,
        "fig2": fig2,
        "pool": pool.to_dict("index"),
        "slots": {"gib": kv * GIB // small, "gb": kv * GB // small},
        "opt_66b": {
            "gib_needed": 9700 * large / GIB,
            "slots_held": kv_66b * GIB // large,
            "slots_in_runs": DEPLOYMENTS["opt-66b"].kv_slots,
        },
        "weights": {name: DEPLOYMENTS[name].model.num_parameters * 2 / GB for name in MODELS},
        "vllm_wasted": 100 - fig2["vllm"]["token states"],
        "until_completed": rows["until_completed"]["token_states"].mean(),
        # n sequences that share s save (n - 1) s
        "prompts": {"blocks": shared["saving"] * width / (width - 1), "tokens": shared["prompt_share"]},
    }


def _serving(rows: Rows) -> dict[str, Any]:
    panels = [f"{model}/sharegpt" for model in MODELS]
    over_max, over_oracle = (
        {
            "drawn": [ratio_drawn("fig12", panel, other, LEVEL) for panel in panels],
            "ours": [ratio(rows, panel, other) for panel in panels],
        }
        for other in ("orca-max", "orca-oracle")
    )
    found = [ratio_drawn("fig12", panel, "orca-max", level) for panel in panels for level in LEVELS]
    by_length = rows["latency"].sort_values("duration_s").groupby("panel")["latency_s_per_token"]
    chat = [ratio_drawn("fig17", "opt-13b/chatbot", name, LEVEL) for name in ("orca-max", "orca-pow2", "orca-oracle")]
    return {
        "level": LEVEL,
        "batched": {workload: _batched(rows, workload) for workload in BATCHED},
        "over_max": {name: _span(ratios) for name, ratios in over_max.items()}
        | {"anywhere": max(filter(None, found)), "from": LEVELS[0]},
        "over_oracle": {name: ", ".join(f"{one:.2f}" for one in ratios) for name, ratios in over_oracle.items()},
        "chatbot": {"drawn": _span(chat), "ours": _chatbot(rows["chatbot"])},
        "same_run": {
            "fig19b": dict(paper.points("fig19b", "recompute"))[16],
            "fig12a": dict(paper.line("fig12", panels[0], "vllm"))[2.0],
            "fig18b": dict(paper.points("fig18b", "alpaca"))[16],
            "end": paper.line("fig12", "opt-13b/alpaca", "vllm")[-1],
        },
        "latency": {"short": by_length.first(), "long": by_length.last()},
    }


def _curve(rows: Rows, workload: str) -> DataFrame:
    return where(rows["batches"], workload=workload).sort_values("rate")


def _batched(rows: Rows, workload: str) -> dict[str, Any]:
    """Fig. 13's bar of vLLM beside ours, and where ours comes to it."""
    rate, printed = BATCHED[workload]
    rates, batch = _curve(rows, workload)[["rate", "batched_requests"]].to_numpy().T
    reached = f"at {np.interp(printed, batch, rates):.1f} req/s" if batch[0] <= printed <= batch[-1] else "elsewhere"
    saturated = paper.crossings("fig12", LEVEL)[f"opt-13b/{workload}"]["vllm"]
    ours = np.interp(rate, rates, batch)
    return {"rate": rate, "printed": printed, "ours": ours, "reached": reached, "saturated": saturated}


def _chatbot(found: DataFrame) -> str:
    texts = []
    for name, here in found.groupby("conversations", sort=False):
        rates, full = here.set_index("system")["crossing_rate"], 100 * here["full_prompts"].mean()
        texts.append(f"{_span(rates['vllm'] / rates.drop('vllm'))} with {full:.0f} % of the prompts full ({name})")
    return "; ".join(texts)


def _preemption(rows: Rows) -> dict[str, Any]:
    peaks, served = rows["swap"].groupby("num_cpu_blocks")["swapped"].max(), rows["served_swapping"]
    ours_ms = where(rows["alone"], way="recompute")["milliseconds"].iloc[0]
    drawn_ms = dict(paper.points("fig19a", "recompute"))[16]
    return {
        "swap": {
            "most": peaks.iloc[-1],
            "bounded": peaks.iloc[0],
            "pool": rows["swap"]["num_blocks"].iloc[0],
            "served": served["swapped"].max(),
            "served_pool": served["num_blocks"].iloc[0],
        },
        "overhead": {f"batch_{batch}": _span(paper_overhead(batch).values(), 0) for batch in (8, 32)},
        "recomputing": {
            "drawn": _span(swap_shares_drawn(), 0),
            "ours": _span(swap_shares(rows), 0),
            "drawn_ms": drawn_ms,
            "unscaled_ms": drawn_ms / 0.9,
            "ours_ms": ours_ms,
        },
    }


def _span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def ratio(rows: Rows, panel: str, other: str) -> float:
    """vLLM's rate over another system's where ours reach 0.5 s/token."""
    rates = rows["crossing"].set_index(["panel", "system"])["crossing_rate"]
    return rates[panel, "vllm"] / rates[panel, other]


def ratio_drawn(figure: str, panel: str, other: str, level: float) -> float | None:
    """vLLM's rate over another system's where the paper's curves reach a latency (s/token); None if one does not."""
    rates = paper.crossings(figure, level)[panel]
    return rates["vllm"] / rates[other] if rates["vllm"] and rates[other] else None


def swap_shares(rows: Rows) -> list[float]:
    """Recomputing, in % of swapping out and in, for each block size of Fig. 19a."""
    ms = rows["alone"].pivot(index="block_size", columns="way", values="milliseconds")
    return (100 * ms["recompute"] / ms["swap-in+out"]).tolist()


def swap_shares_drawn() -> list[float]:
    pairs = zip(paper.points("fig19a", "recompute"), paper.points("fig19a", "swap-in+out"))
    return [100 * again / swap for (_, again), (_, swap) in pairs]


def draw_plots(rows: Rows, with_paper: bool) -> Figure:
    panels = {
        "(a) Fig. 2: external & others": _draw_external,
        "(b) Fig. 13b: vLLM, Alpaca": _draw_batched,
        "(c) §6.2: vLLM over Orca (Max)": _draw_ratios,
        "(d) Fig. 12a, 19b: vLLM, ShareGPT": _draw_same_latency,
        "(e) §7.3: recomputing / swapping": _draw_swap_shares,
        "(f) §4.5: eight requests, 24 blocks": _draw_swapped,
    }
    figure, axes = plotting.panels(list(panels), columns=2, width=4.4, height=2.8)
    for axis, draw in zip(axes, panels.values()):
        draw(axis, rows, with_paper)
    everything = together(*(part[["evidence", "device", "seed"]] for part in rows.values()))
    hatched = {"hatch": plotting.PIECES["rounding"][2], "edgecolor": "white"}
    handles = [plotting.key("ours", marker="o", linestyle="")]
    handles += [plotting.key("the paper", marker="o", **plotting.PAPER)] * with_paper
    handles += [plotting.swatch("(a) free or lost", _GREY), plotting.swatch("(a) rounded up", _GREY, **hatched)]
    plotting.place_legend(figure, handles)
    plotting.footer(figure, everything, with_paper=with_paper)
    return figure


def _draw_external(axis: Axes, rows: Rows, with_paper: bool) -> None:
    pool = rows["pool"].set_index("system").drop(index="vllm")
    for place, (name, found) in enumerate(pool.iterrows()):
        axis.bar(place - 0.2, found["free"], 0.38, color=_GREY)
        hatched = {"color": _GREY, "hatch": plotting.PIECES["rounding"][2], "edgecolor": "white"}
        axis.bar(place - 0.2, found["rounding"], 0.38, bottom=found["free"], **hatched)
        if with_paper:
            theirs = paper.figure("fig2")[name]["external & others"]
            axis.bar(place + 0.2, theirs, 0.38, edgecolor=_GREY, **plotting.PAPER_BAR)
    axis.set_xticks(range(len(pool)), [plotting.label(name) for name in pool.index])
    axis.set(ylabel="% of the KV cache")
    axis.grid(axis="x", visible=False)


def _draw_batched(axis: Axes, rows: Rows, with_paper: bool) -> None:
    curve, saturated = _curve(rows, "alpaca"), _batched(rows, "alpaca")["saturated"]
    axis.plot(curve["rate"], curve["batched_requests"], "o", color=_VLLM, **plotting.LINE["replayed"])
    if with_paper:
        axis.plot(*BATCHED["alpaca"], "o", color=_VLLM, **plotting.PAPER)
        axis.axvline(saturated, color=plotting.GREY, linewidth=1)
        at = {"xy": (saturated, 0.04), "xytext": (-4, 0), "xycoords": ("data", "axes fraction")}
        axis.annotate("Fig. 12d\nsaturates here", ha="right", textcoords="offset points", **at)
    axis.set(xlabel="request rate (req/s)", ylabel="batched requests", ylim=(0, None))


def _draw_ratios(axis: Axes, rows: Rows, with_paper: bool) -> None:
    for number, model in enumerate(MODELS):
        panel, style = f"{model}/sharegpt", plotting.other(number)
        found = [(level, drawn) for level in LEVELS if (drawn := ratio_drawn("fig12", panel, "orca-max", level))]
        if with_paper:
            axis.plot(*zip(*found), color=style.color, **plotting.PAPER | {"linewidth": 1.6})
        ours = ratio(rows, panel, "orca-max")
        axis.plot(LEVEL, ours, style.marker, color=style.color, markersize=7)
        axis.annotate(model.upper(), found[-4], (0, 4), textcoords="offset points", ha="center", color=style.color)
    plotting.band(axis, 2.7, 8, "")
    axis.annotate("the text: 2.7 to 8", (1.03, 7.85), ha="right", va="top", color=plotting.GREY)
    axis.set(xlabel="at this latency (s/token)", ylabel="ratio of rates", ylim=(0, 9), xlim=(0.05, 1.05))


def _draw_same_latency(axis: Axes, rows: Rows, with_paper: bool) -> None:
    ours = where(rows["latency"], panel="opt-13b/sharegpt")
    axis.plot(ours["rate"], ours["latency_s_per_token"], "o", color=_VLLM, markersize=6)
    for rate, seconds, latency in ours[["rate", "duration_s", "latency_s_per_token"]].itertuples(index=False):
        axis.annotate(f"ours, {seconds:g} s", (rate, latency), (7, -3), textcoords="offset points")
    if with_paper:
        axis.plot(*zip(*paper.line("fig12", "opt-13b/sharegpt", "vllm")), "o", color=_VLLM, **plotting.PAPER)
        axis.annotate("Fig. 12a", (1.93, 0.5), (-6, 0), textcoords="offset points", ha="right")
        theirs = dict(paper.points("fig19b", "recompute"))[16]
        axis.plot(2.01, theirs, "o", color=_VLLM, **plotting.PAPER)
        axis.annotate("Fig. 19b,\nblocks of 16", (2.01, theirs), (-7, -2), textcoords="offset points", ha="right")
    axis.set(xlabel="request rate (req/s)", ylabel="latency (s/token)", xlim=(1.45, 2.25), ylim=(0, 1.2))


def _draw_swap_shares(axis: Axes, rows: Rows, with_paper: bool) -> None:
    sizes = [size for size, _ in paper.points("fig19a", "recompute")]
    look = {"color": plotting.WAYS["recompute"].color, "marker": plotting.WAYS["recompute"].marker}
    axis.plot(sizes, swap_shares(rows), **look, **plotting.LINE["modelled"])
    if with_paper:
        axis.plot(sizes, swap_shares_drawn(), **look, **plotting.PAPER)
    levels = ((20, "20 % of swapping's time", sizes[-1], "right"), (120, "20 % above it", sizes[0], "left"))
    for level, text, place, side in levels:
        axis.axhline(level, color=plotting.GREY, linewidth=0.8)
        axis.annotate(text, (place, level), (0, 3), textcoords="offset points", ha=side)
    plotting.powers_of_two(axis, sizes)
    axis.set(ylabel="% of swapping's time", ylim=(0, 145))


def _draw_swapped(axis: Axes, rows: Rows, with_paper: bool) -> None:
    case = where(rows["swap"], num_cpu_blocks=rows["swap"]["num_cpu_blocks"].max()).sort_values("step")
    pool, peak, last = case["num_blocks"].iloc[0], case.loc[case["swapped"].idxmax()], case.iloc[-1]
    places = {"swapped": (peak["step"] + 12, peak["swapped"] - 1), "on_gpu": (last["step"] + 1, last["on_gpu"] - 5)}
    looks = zip(places.items(), ("swapped out", "on the GPU"), (plotting.WAYS["swap"].color, "#333333"))
    for (column, at), text, color in looks:
        axis.plot(case["step"], case[column], color=color, linewidth=1.4)
        axis.annotate(text, at, color=color)
    axis.axhline(pool, color=plotting.GREY, linewidth=0.8)
    axis.annotate("the pool", (1.3 * last["step"], pool), (0, 3), textcoords="offset points", ha="right")
    axis.set(xlabel="iteration", ylabel="blocks", ylim=(0, None), xlim=(-2, 1.31 * last["step"]))
