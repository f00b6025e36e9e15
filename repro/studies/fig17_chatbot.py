"""Fig. 17: four systems serve a chatbot, whose prompts carry up to 1024 tokens of the conversation so far.

A prompt of 1024 tokens makes the buddy allocator round every Orca's chunk up to 2048 slots, whatever it expects of the
output: how many prompts are that long decides the figure. The paper does not say (see repro.workloads.chatbot), so the
crossings are shown against that share, from conversations of two rounds to a single endless one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.config import DEPLOYMENTS
from repro.engine.errors import UserError
from repro.engine.systems import System, system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import crossing, serve
from repro.studies.common import check_positive, check_seeds, check_systems
from repro.workloads.chatbot import PROMPT_LIMIT, chatbot_trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL, PANEL, LEVEL = "opt-13b", "opt-13b/chatbot", 0.5  # s/token
#: Requests hold 1,000 tokens and more, so of Fig. 12's two anchors for this model we take the one of the longer
#: contexts.
ANCHOR = "opt-13b/sharegpt"
#: name -> (probability of a new conversation, mean rounds of a conversation or None: it never ends). The first is the
#: rule as the paper states it.
CONVERSATIONS: dict[str, tuple[float, float | None]] = {
    "as stated": (0.1, None),
    "2 rounds": (0.1, 2.0),
    "4 rounds": (0.1, 4.0),
    "8 rounds": (0.1, 8.0),
    "one endless": (0.0, None),
}
#: name -> (anchor, how Fig. 1's slope is split, prefill efficiency). The first one is the curve.
ASSUMPTIONS: dict[str, tuple[str, str, float | None]] = {
    "as drawn": (ANCHOR, context_splits()[0], None),
    "Alpaca's anchor": ("opt-13b/alpaca", context_splits()[0], None),
    **{f"slope: {split}": (ANCHOR, split, None) for split in context_splits()[1:]},
    "prefill: 0.3": (ANCHOR, context_splits()[0], 0.3),
    "prefill: 1.0": (ANCHOR, context_splits()[0], 1.0),
}
STATED, DRAWN = next(iter(CONVERSATIONS)), next(iter(ASSUMPTIONS))


class Params(Parameters):
    """`band_seeds` run the other conversations and assumptions. `lengths` is a CSV file of rounds in place of
    ShareGPT's."""

    systems: tuple[str, ...]
    max_seconds: float
    seeds: tuple[int, ...]
    band_seeds: tuple[int, ...]
    crossings: bool
    precision: float
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_systems(self.systems)
        check_seeds(self.seeds)
        check_seeds(self.band_seeds)
        check_positive("max_seconds", self.max_seconds)
        check_positive("precision", self.precision)
        if "vllm" not in self.systems or len(self.systems) < 2:
            raise UserError(
                f"systems = {list(self.systems)}: the figure compares vllm with others; name vllm and at least one more"
            )
        return self


def points(params: Params) -> list[Point]:
    result = []
    for name in params.systems:
        drawn = [
            rate for rate, _ in paper.points("fig17", PANEL, name if name in paper.figure("fig17")[PANEL] else "vllm")
        ]
        beyond = [
            round(factor * drawn[-1], 3) for factor in (1.1, 1.2)
        ]  # our curves may turn up later than the paper's
        shared = {"system": system(name), "duration_s": params.max_seconds, "lengths": params.lengths}
        result += [
            Point(latency_at, shared | {"rate": rate, "seed": seed}, weight=rate)
            for rate in drawn + beyond
            for seed in params.seeds
        ]
        runs = [(STATED, DRAWN, seed) for seed in params.seeds]
        runs += [(conversations, DRAWN, seed) for conversations in CONVERSATIONS for seed in params.band_seeds]
        runs += [(STATED, assumption, seed) for assumption in ASSUMPTIONS for seed in params.band_seeds]
        result += [
            Point(
                crossing_of,
                shared
                | {
                    "conversations": conversations,
                    "assumption": assumption,
                    "start": max(drawn),
                    "seed": seed,
                    "precision": params.precision,
                },
                weight=7 * max(drawn),
            )
            for conversations, assumption, seed in dict.fromkeys(runs)
            if params.crossings
        ]
    return result


def _costs(assumption: str) -> CostModel:
    anchor, split, efficiency = ASSUMPTIONS[assumption]
    return cost_model("a100-2023", DEPLOYMENTS[MODEL], anchor=anchor, split=split, prefill_efficiency=efficiency)


def latency_at(system: System, duration_s: float, lengths: str | None, rate: float, seed: int) -> dict[str, Any]:
    """One point of a curve: mean normalized latency (s/token) at `rate` (req/s)."""
    trace = chatbot_trace(rate, duration_s, seed, lengths)
    costs = _costs(DRAWN)
    served = serve(system, DEPLOYMENTS[MODEL], trace, costs)
    return {
        "part": "latency",
        "system": system.name,
        "rate": rate,
        "seed": seed,
        "conversations": STATED,
        "assumption": DRAWN,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace.hash,
        "requests": len(trace),
        "full_prompts": float((trace.prompt_tokens == PROMPT_LIMIT).mean()),
        "latency_s_per_token": served.latency_s_per_token,
    }


def crossing_of(
    system: System,
    duration_s: float,
    lengths: str | None,
    conversations: str,
    assumption: str,
    start: float,
    seed: int,
    precision: float,
) -> dict[str, Any]:
    """The rate (req/s) at which the latency reaches 0.5 s/token, and the share of full prompts in the trace at that
    rate."""
    costs = _costs(assumption)

    def latency(rate: float) -> float:
        trace = chatbot_trace(rate, duration_s, seed, lengths, *CONVERSATIONS[conversations])
        return serve(system, DEPLOYMENTS[MODEL], trace, costs).latency_s_per_token

    rate = crossing(latency, start, LEVEL, precision)
    trace = chatbot_trace(rate, duration_s, seed, lengths, *CONVERSATIONS[conversations])
    return {
        "part": "crossing",
        "system": system.name,
        "seed": seed,
        "conversations": conversations,
        "assumption": assumption,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace.hash,
        "crossing_rate": rate,
        "full_prompts": float((trace.prompt_tokens == PROMPT_LIMIT).mean()),
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    latency, found = rows[rows["part"] == "latency"], rows[rows["part"] == "crossing"]
    titles = ["OPT-13B, chatbot", "Crossing of 0.5 s/token", "vLLM's rate over the Orcas'"]
    drawn = {
        name: paper.points("fig17", PANEL, name) for name in params.systems if name in paper.figure("fig17")[PANEL]
    }
    with plotting.house():
        figure, axes = plotting.panels(titles if params.crossings else titles[:1], width=3.9, height=3.2)
        plotting.curves(axes[0], latency, "rate", "latency_s_per_token", paper=drawn)
        axes[0].set(xlabel="request rate (req/s)", ylabel="normalized latency (s/token)", xlim=(0, None), ylim=(0, 1))
        if params.crossings:
            _draw_shares(axes[1], found, drawn, plotting)
            _draw_ratios(axes[2], found, plotting)
        plotting.legend(figure, latency, with_paper=True)
        plotting.footer(
            figure,
            latency,
            with_paper=True,
            note=f"Calibrated on {ANCHOR} of Fig. 12; "
            f"{latency['full_prompts'].mean():.0%} of the curves' prompts are full",
        )
    return {"fig17_chatbot": figure}


def _draw_shares(axis: Axes, found: pd.DataFrame, drawn: Any, plotting: Any) -> None:
    found = found[found["assumption"] == DRAWN]
    for name, style in plotting.styles(found["system"]).items():
        means = found[found["system"] == name].groupby("conversations")[["full_prompts", "crossing_rate"]].mean()
        means = means.sort_values("full_prompts")
        axis.plot(
            100 * means["full_prompts"],
            means["crossing_rate"],
            color=style.color,
            linestyle=(0, (4, 1.5)),
            linewidth=1.2,
        )
        for conversations, (share, rate) in means.iterrows():
            stated = conversations == STATED
            axis.plot(
                100 * share,
                rate,
                style.marker,
                color=style.color,
                markersize=8 if stated else 5,
                markeredgecolor="black" if stated else style.color,
            )
            if name == "vllm":
                axis.annotate(
                    conversations,
                    (100 * share, rate),
                    (-4, -14) if stated else (2, 5),
                    textcoords="offset points",
                    ha="right" if stated else "left",
                    fontsize=7.5,
                )
        if name in drawn:
            axis.axhline(
                paper.crossings("fig17", LEVEL)[PANEL][name], color=style.color, linestyle=(0, (1, 1.6)), linewidth=1
            )
    axis.set_xticks(range(20, 101, 20))
    axis.set(
        xlabel="prompts of all 1024 tokens (%)",
        ylabel="request rate (req/s)",
        ylim=(0, 1.08 * found["crossing_rate"].max()),
        xlim=(10, 125),
    )


def _draw_ratios(axis: Axes, found: pd.DataFrame, plotting: Any) -> None:
    found = found[found["conversations"] == STATED]
    names = [name for name in dict.fromkeys(found["system"]) if name != "vllm"]
    theirs = paper.crossings("fig17", LEVEL)[PANEL]
    for place, assumption in enumerate(ASSUMPTIONS):
        ours = found[found["assumption"] == assumption].groupby("system")["crossing_rate"].mean()
        for index, name in enumerate(names):
            style = plotting.styles(names)[name]
            y = place + (index - (len(names) - 1) / 2) * 0.2
            axis.plot(ours["vllm"] / ours[name], y, style.marker, color=style.color, markersize=6)
            if name in theirs:
                axis.plot(
                    theirs["vllm"] / theirs[name],
                    y,
                    style.marker,
                    color=style.color,
                    markersize=6,
                    markerfacecolor="none",
                )
    axis.axvline(2, color="#888888", linewidth=0.8)
    axis.annotate("the text: 2", (2, 0.4), (-3, 0), textcoords="offset points", ha="right", fontsize=8)
    axis.set_yticks(range(len(ASSUMPTIONS)), list(ASSUMPTIONS), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="vLLM over Orca at 0.5 s/token", xlim=(1, 2.2))


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    found = rows[(rows["part"] == "crossing") & (rows["assumption"] == DRAWN)]
    if found.empty or params != replace(
        Params(), seeds=params.seeds, band_seeds=params.band_seeds, lengths=params.lengths
    ):
        return []
    orcas = [name for name in params.systems if name != "vllm"]
    shares = found.groupby("conversations")["full_prompts"].mean()
    rates = found.groupby(["conversations", "system"])["crossing_rate"].mean().unstack()
    ratios = {name: rates["vllm"] / rates[name] for name in orcas}
    apart = 100 * (rates[orcas].max(axis=1) / rates[orcas].min(axis=1) - 1)
    by_seed = found[found["conversations"] == STATED].pivot(index="seed", columns="system", values="crossing_rate")
    seeds_apart = 100 * (by_seed[orcas].max(axis=1) / by_seed[orcas].min(axis=1) - 1)
    crossings = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.loc[STATED].items())
    spans = "; ".join(
        f"{100 * shares[name]:.0f} % of the prompts full ({name}): "
        + ", ".join(f"{ratios[orca][name]:.2f}" for orca in orcas)
        for name in shares.sort_values().index
    )
    return [
        Judgement(
            "fig17-chatbot",
            {name: ratios[name][STATED] for name in orcas},
            "modelled",
            {name: [ratios[name].min(), ratios[name].max()] for name in orcas},
            note=f"With conversations as stated, {100 * shares[STATED]:.0f} % of the prompts are full; crossings "
            f"{crossings} req/s. The interval spans the share of full prompts, the deciding unknown: {spans}.",
        ),
        Judgement(
            "fig17-orcas-alike",
            apart[STATED],
            "modelled",
            [seeds_apart.min(), seeds_apart.max()],
            note="By share of full prompts: "
            + ", ".join(f"{100 * shares[name]:.0f} % full: {apart[name]:.1f} %" for name in shares.sort_values().index)
            + ".",
        ),
    ]
