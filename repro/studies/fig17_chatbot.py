"""Fig. 17: four systems serve a chatbot, whose prompts carry up to 1024 tokens of the conversation so far.

A prompt of 1024 tokens makes the buddy allocator round every Orca's chunk up to 2048 slots, whatever it expects of the
output: how many prompts are that long decides the figure. The paper does not say (see repro.workloads.chatbot), so the
curves have conversations of ShareGPT's mean length, which end as in the authors' script, and the crossings are shown
against that share, from conversations of two rounds to a single endless one."""

from functools import partial
from typing import Any, ClassVar, Self

from pydantic import model_validator

from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import system
from repro.errors import UserError
from repro.simulate.profiles import cost_model
from repro.studies import sweep
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Point, Rows, Series, house, paper, plotting
from repro.studies.common import Lengths, Seeds, Systems
from repro.workloads import Trace
from repro.workloads.chatbot import PROMPT_LIMIT, SHAREGPT_ROUNDS, chatbot_trace

TABLES = {"latency": ("system", "rate", "seed"), "crossing": ("system", "seed", "conversations", "assumption")}
MODEL, PANEL = "opt-13b", "opt-13b/chatbot"
#: Requests hold 1,000 tokens and more, so of Fig. 12's two anchors for this model we take the one of the longer
#: contexts.
ANCHOR = "opt-13b/sharegpt"
#: name -> (probability of a new conversation, mean rounds of a conversation or None: it never ends). The first is that
#: of the curves.
CONVERSATIONS: dict[str, tuple[float, float | None]] = {
    f"{SHAREGPT_ROUNDS} rounds": (0.1, SHAREGPT_ROUNDS),
    **{f"{rounds} rounds": (0.1, float(rounds)) for rounds in (2, 8, 16)},
    "none ends": (0.1, None),
    "one endless": (0.0, None),
}
#: assumptions: name -> arguments of the cost model. The first one is the curve.
ASSUMPTIONS = {"as drawn": {}, "Alpaca's anchor": {"anchor": "opt-13b/alpaca"}, **sweep.OPEN}
CURVES, DRAWN = next(iter(CONVERSATIONS)), next(iter(ASSUMPTIONS))


class Params(sweep.SweepParameters):
    systems: Systems
    band_seeds: Seeds
    lengths: Lengths
    free: ClassVar = ("seeds", "band_seeds", "lengths")

    @model_validator(mode="after")
    def _compares(self) -> Self:
        if "vllm" not in self.systems or len(self.systems) < 2:
            raise UserError(
                f"systems = {list(self.systems)}: the figure compares vllm with others; name vllm and at least one more"
            )
        return self


def setup_of(
    name: str, duration_s: float, lengths: str | None, seed: int, conversations: str = CURVES, assumption: str = DRAWN
) -> sweep.Setup:
    """One system with one kind of conversations, under one assumption of the cost model."""
    new_probability, mean_rounds = CONVERSATIONS[conversations]
    return sweep.Setup(
        {"conversations": conversations, "assumption": assumption},
        system(name),
        DEPLOYMENTS[MODEL],
        cost_model("a100-2023", DEPLOYMENTS[MODEL], **{"anchor": ANCHOR} | ASSUMPTIONS[assumption]),
        partial(chatbot_trace, lengths=lengths, new_probability=new_probability, mean_rounds=mean_rounds),
        duration_s,
        seed,
        facts=full_prompts,
    )


def points(params: Params) -> list[Point]:
    result = []
    for name in params.systems:
        known = sweep.drawn("fig17", PANEL, [name, "vllm"])
        rates = [rate for rate, _ in known.get(name, known["vllm"])]
        beyond = [round(factor * rates[-1], 3) for factor in (1.1, 1.2)]  # ours may turn up later than the paper's
        served = partial(setup_of, name, params.max_seconds, params.lengths)
        runs = [(seed, CURVES, DRAWN) for seed in params.seeds]
        result += sweep.points([served(*run) for run in runs], rates + beyond)
        if params.crossings:
            runs += [(seed, conversations, DRAWN) for conversations in CONVERSATIONS for seed in params.band_seeds]
            runs += [(seed, CURVES, assumption) for assumption in ASSUMPTIONS for seed in params.band_seeds]
            setups = [served(*run) for run in dict.fromkeys(runs)]
            result += sweep.crossings(setups, max(rates), params.precision)
    return result


def full_prompts(trace: Trace) -> dict[str, float]:
    """The share of prompts that take all of the 1024 tokens."""
    return {"full_prompts": float((trace.prompt_tokens == PROMPT_LIMIT).mean())}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    latency, found = rows["latency"], rows["crossing"]
    titles = ["OPT-13B, chatbot", sweep.TITLE, "vLLM's rate over the Orcas'"]
    drawn = sweep.drawn("fig17", PANEL, params.systems)
    figure, axes = plotting.panels(titles if params.crossings else titles[:1], width=3.6, height=3.1)
    with_paper = not params.another_run
    sweep.draw_curves(axes[0], latency, drawn if with_paper else {})
    if params.crossings:
        _draw_shares(axes[1], found[found["assumption"] == DRAWN], drawn if with_paper else {})
        _draw_ratios(axes[2], found[found["conversations"] == CURVES], with_paper)
    plotting.legend(figure, latency, with_paper=with_paper, more=plotting.seeds_band(latency))
    full = f"{latency['full_prompts'].mean():.0%} of the curves' prompts are full"
    note = f"Thin line, left: 0.5 s/token. Calibrated on Fig. 12's {ANCHOR}; {full}"
    plotting.footer(figure, latency, with_paper=with_paper, note=note)
    return {"fig17_chatbot": figure}


#: where the name of a kind of conversation stands, from its point on vLLM's curve (points): right of it, if not said
_BELOW = {"xytext": (0, -15), "ha": "center"}
_RIGHT = {"xytext": (7, 2), "ha": "left"}
_PLACES = {**dict.fromkeys((CURVES, "8 rounds", "one endless"), _BELOW), "16 rounds": {"xytext": (4, 14), "ha": "left"}}


def _draw_shares(axis: Axes, found: DataFrame, drawn: Any) -> None:
    for name, style in plotting.styles(found["system"]).items():
        means = found[found["system"] == name].groupby("conversations")[["full_prompts", "crossing_rate"]].mean()
        means = means.sort_values("full_prompts")
        shares, rates = 100 * means["full_prompts"], means["crossing_rate"]
        axis.plot(shares, rates, color=style.color, marker=style.marker, **plotting.LINE["modelled"])
        axis.plot(shares[CURVES], rates[CURVES], style.marker, color=style.color, markersize=9)
        for conversations in means.index if name == "vllm" else ():
            at = shares[conversations], rates[conversations]
            axis.annotate(
                conversations, at, textcoords="offset points", fontsize=8.5, **_PLACES.get(conversations, _RIGHT)
            )
        if name in drawn:
            theirs = paper.crossings("fig17", sweep.LEVEL)[PANEL][name]
            axis.plot([8, 22], [theirs] * 2, color=style.color, linestyle=plotting.PAPER["linestyle"], linewidth=1.6)
    if drawn:
        lowest = min(paper.crossings("fig17", sweep.LEVEL)[PANEL].values())
        axis.annotate("the paper's\n(share unknown)", (8, lowest), (0, -4), textcoords="offset points", va="top")
    axis.set_xticks(range(20, 101, 20))
    limits = {"ylim": (0, 1.08 * found["crossing_rate"].max()), "xlim": (6, 112)}
    axis.set(xlabel="prompts of all 1024 tokens (%)", ylabel="request rate (req/s)", **limits)


def _draw_ratios(axis: Axes, found: DataFrame, with_paper: bool) -> None:
    looks = plotting.styles(name for name in found["system"] if name != "vllm")
    theirs = paper.crossings("fig17", sweep.LEVEL)[PANEL] if with_paper else {}
    for place, assumption in enumerate(ASSUMPTIONS):
        ours = found[found["assumption"] == assumption].groupby("system")["crossing_rate"].mean()
        for index, (name, style) in enumerate(looks.items()):
            y, look = place + (index - (len(looks) - 1) / 2) * 0.22, {"color": style.color, "marker": style.marker}
            axis.plot(ours["vllm"] / ours[name], y, **look, markersize=6)
            if name in theirs:
                axis.plot(theirs["vllm"] / theirs[name], y, **look, **plotting.PAPER)
    axis.axvline(2, color=plotting.GREY, linewidth=0.8)
    axis.annotate("the text: 2", (2, -0.5), (-3, 0), textcoords="offset points", ha="right", va="top")
    axis.set_yticks(range(len(ASSUMPTIONS)), list(ASSUMPTIONS))
    axis.set(ylim=(len(ASSUMPTIONS) - 0.5, -0.6), xlabel="vLLM over Orca at 0.5 s/token", xlim=(1, 2.2))


def judge(rows: Rows, params: Params) -> list[Judgement]:
    found = rows["crossing"][rows["crossing"]["assumption"] == DRAWN]
    orcas = [name for name in params.systems if name != "vllm"]
    shares = found.groupby("conversations")["full_prompts"].mean().sort_values()
    rates = found.groupby(["conversations", "system"])["crossing_rate"].mean().unstack()
    ratios = rates[orcas].rdiv(rates["vllm"], axis=0)
    by_seed = found[found["conversations"] == CURVES].pivot(index="seed", columns="system", values="crossing_rate")

    def apart(rates: DataFrame) -> Series:
        return 100 * (rates[orcas].max(axis=1) / rates[orcas].min(axis=1) - 1)

    spans = "; ".join(
        f"{100 * share:.0f} % of the prompts full ({name}): " + ", ".join(f"{ratios[orca][name]:.2f}" for orca in orcas)
        for name, share in shares.items()
    )
    crossings = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.loc[CURVES].items())
    alike = ", ".join(f"{100 * share:.0f} % full: {apart(rates)[name]:.1f} %" for name, share in shares.items())
    ours, ends = ratios.loc[CURVES].to_dict(), {name: [ratios[name].min(), ratios[name].max()] for name in orcas}
    facts = {"full": 100 * shares[CURVES], "crossings": crossings, "spans": spans}
    off, off_ends = apart(rates)[CURVES], [apart(by_seed).min(), apart(by_seed).max()]
    return [
        Judgement("fig17-chatbot", ours, "modelled", ends, facts=facts),
        Judgement("fig17-orcas-alike", off, "modelled", off_ends, facts={"by_share": alike}),
    ]
