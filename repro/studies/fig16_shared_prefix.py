"""Fig. 16: translation requests that all begin with the same examples; vLLM stores those once, Orca (Oracle) does not.

vLLM keeps the full blocks of the prefix for all requests and computes only the rest of each prompt. Orca computes the
whole prompt and holds it in every chunk. WMT16's own sentence lengths need a network: the default is a distribution
(see repro.workloads.translation), and the ratio of the two rates is shown under longer and shorter sentences and under
every open assumption of the cost model."""

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field

from repro.engine.config import DEPLOYMENTS
from repro.engine.memory import PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import system
from repro.simulate.metrics import BatchAverage
from repro.simulate.profiles import cost_model
from repro.studies import sweep
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Point, Rows, house, paper, plotting, where
from repro.studies.common import Positive, Some, about, lengths_of
from repro.studies.sweep import Setup, latency_at
from repro.workloads.translation import LLAMA_TOKENIZER, MEAN_TOKENS, translation_trace

TABLES = {
    "latency": ("prefix_tokens", "system", "rate", "seed"),
    "crossing": ("prefix_tokens", "system", "assumption", "duration_s", "seed"),
    "shared_prompt": ("users", "prompt_tokens"),
}
MODEL, SYSTEMS = "llama-13b", ("orca-oracle", "vllm")
#: prefix tokens -> panel of Fig. 16
PANELS = {80: "1-shot/80", 341: "5-shot/341"}
#: What a request holds beyond the prefix is some 65 tokens, and even with it (110 to 400) it is shorter than
#: ShareGPT's: of Fig. 12's two anchors for a 13B model we take Alpaca's. LLaMA-13B has none of its own.
ANCHOR = "opt-13b/alpaca"
#: assumptions: name -> arguments of the cost model. The first one is the curve.
ASSUMPTIONS = {"as drawn": {}, "ShareGPT's anchor": {"anchor": "opt-13b/sharegpt"}, **sweep.OPEN}
#: assumptions that stretch the default sentences: name -> factor
SCALES = {f"sentences x {scale}": scale for scale in (0.75, 1.25)}
ASSUMPTIONS |= dict.fromkeys(SCALES, {})
DRAWN, SLOW_PREFILL = next(iter(ASSUMPTIONS)), "prefill: 0.3"
_REACH = {"color": plotting.GREY, "linewidth": 6, "alpha": 0.4, "solid_capstyle": "butt"}


class Params(sweep.SweepParameters):
    prefixes: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Some]
    sensitivity_seconds: Positive
    sentences: Annotated[str | None, lengths_of("translation", tokenizer=LLAMA_TOKENIZER)]
    free: ClassVar = ("seeds", "sentences")


def setup_of(
    prefix: int, name: str, sentences: str | None, duration_s: float, seed: int, assumption: str = DRAWN
) -> Setup:
    """One system, whose requests begin with the same `prefix` tokens, under one assumption."""
    return Setup(
        {"prefix_tokens": prefix, "assumption": assumption, "duration_s": duration_s},
        system(name),
        DEPLOYMENTS[MODEL],
        cost_model("a100-2023", DEPLOYMENTS[MODEL], **{"anchor": ANCHOR} | ASSUMPTIONS[assumption]),
        partial(translation_trace, prefix, lengths=sentences, scale=SCALES.get(assumption, 1.0)),
        duration_s,
        seed,
        shared_prefix_tokens=prefix,
    )


def points(params: Params) -> list[Point]:
    result = [Point(shared_prompt, {"users": 10, "prompt_tokens": 4000}, "shared_prompt")]
    runs = [(params.max_seconds, seed) for seed in params.seeds]
    names = [name for name in ASSUMPTIONS if params.sentences is None or name not in SCALES]
    others = [(params.sensitivity_seconds, params.seeds[0], name) for name in names]
    for prefix in params.prefixes:
        for name in SYSTEMS:
            drawn = sweep.rates("fig16", PANELS.get(prefix, PANELS[341]), name)
            # The paper's rates lie close together where its own curve bends; ours bends a little before.
            rates = sorted({*drawn, *(round(share * max(drawn), 3) for share in (0.5, 0.65, 0.75, 0.85, 0.9))})
            served = partial(setup_of, prefix, name, params.sentences)
            result += sweep.points([served(*run) for run in runs], rates, batched_at)
            if params.crossings:
                setups = [served(*run) for run in runs + others]
                result += sweep.crossings(setups, max(drawn), params.precision, crossing_of)
    return result


def batched_at(setup: Setup, rate: float) -> dict[str, Any]:
    """One point of a curve, with the mean number of running requests."""
    batch = BatchAverage(0.0, setup.duration_s)
    return latency_at(setup, rate, [batch]) | {"batched_requests": batch.mean}


def crossing_of(setup: Setup, start: float, precision: float) -> dict[str, Any]:
    """The rate (req/s) at which the latency reaches 0.5 s/token, and what is served at that rate."""
    row = batched_at(setup, setup.crossing(start, precision))
    return {"crossing_rate": row.pop("rate"), **row}


def shared_prompt(users: int, prompt_tokens: int) -> dict[str, Any]:
    """Physical blocks that hold a prompt which several requests share, in the real manager at block size 16."""
    manager = PagedKVCacheManager(num_blocks=1000)
    manager.store_prefix("system", prompt_tokens)
    of_prompt: set[int] = set()
    for user in range(users):
        group = SequenceGroup(Request(user, 0.0, prompt_tokens + 1, 1, SamplingParams(), "system"))
        manager.allocate(group, prompt_tokens + 1)
        of_prompt.update(manager.block_table(group.seqs[0])[: prompt_tokens // manager.block_size])
    return {"users": users, "prompt_tokens": prompt_tokens, **about("exact"), "blocks_of_prompt": len(of_prompt)}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    latency = rows["latency"]
    titles = [f"LLaMA-13B, {prefix} shared tokens" for prefix in params.prefixes]
    titles += ["vLLM over Orca (Oracle)"] * params.crossings
    figure, axes = plotting.panels(titles, width=3.6, height=3.1)
    with_paper, more = not params.another_run, plotting.seeds_band(latency)
    for axis, prefix in zip(axes, params.prefixes):
        theirs = sweep.drawn("fig16", PANELS.get(prefix, ""), SYSTEMS)
        sweep.draw_curves(axis, where(latency, prefix_tokens=prefix), theirs if with_paper else {})
        if params.crossings:
            _draw_prefill(axis, where(rows["crossing"], prefix_tokens=prefix, duration_s=params.sensitivity_seconds))
    if params.crossings:
        more.append(plotting.key("crossing with prompts at 0.3 to 0.5 of the matrix rate", **_REACH))
        more += _draw_ratios(axes[-1], ratios(rows["crossing"], params.sensitivity_seconds), with_paper)
    plotting.legend(figure, latency, with_paper=with_paper, more=more)
    means = f"sentences of {MEAN_TOKENS[0]:g} and {MEAN_TOKENS[1]:g} tokens on average"
    sentences = means if params.sentences is None else f"sentences: {params.sentences}"
    note = f"Thin line: 0.5 s/token. Calibrated on Fig. 12's {ANCHOR}; {sentences}"
    plotting.footer(figure, latency, with_paper=with_paper, note=note)
    return {"fig16_shared_prefix": figure}


def _draw_prefill(axis: Axes, crossing: DataFrame) -> None:
    """From where to where the crossing of each system moves with the speed of prompts."""
    found = crossing[crossing["assumption"].isin([DRAWN, SLOW_PREFILL])]
    for name, here in found.groupby("system"):
        ends = here.groupby("assumption")["crossing_rate"].mean()
        axis.plot(ends, [sweep.LEVEL] * len(ends), **_REACH | {"color": plotting.styles(SYSTEMS)[name].color})


def ratios(crossing: DataFrame, duration_s: float) -> DataFrame:
    """[assumption and seed, prefix]: vLLM's crossing over Orca's, on traces of this length."""
    rates = where(crossing, duration_s=duration_s).pivot_table(
        "crossing_rate", ["assumption", "seed", "prefix_tokens"], "system", sort=False
    )
    return (rates["vllm"] / rates["orca-oracle"]).unstack()


def _draw_ratios(axis: Axes, found: DataFrame, with_paper: bool) -> list[Any]:
    """Returns the legend's entries for the prefixes."""
    found = found.groupby(level="assumption", sort=False).mean()
    places, handles = range(len(found)), []
    for number, (prefix, values) in enumerate(found.items()):
        style = plotting.other(number)
        look = {"color": style.color, "marker": style.marker, "linestyle": "", "markersize": 6.5}
        axis.plot(values, places, **look)
        handles.append(plotting.key(f"right: {prefix:g} tokens", **look))
        if prefix in PANELS and with_paper:
            theirs = paper.crossings("fig16", sweep.LEVEL)[PANELS[prefix]]
            ratio = theirs["vllm"] / theirs["orca-oracle"]
            plotting.band(axis, 0.85 * ratio, 1.15 * ratio, "paper\n±15 %", side="x")
            axis.plot([ratio], [0], **look | {"markerfacecolor": "none", "markersize": 10})
    axis.set_yticks(places, list(found.index))
    axis.set(ylim=(len(found) - 0.5, -1.7), xlabel="ratio of the rates at 0.5 s/token", xlim=(1, None))
    return handles


def judge(rows: Rows, params: Params) -> list[Judgement]:
    crossing = rows["crossing"]
    long = ratios(crossing, params.max_seconds)
    spread = ratios(crossing, params.sensitivity_seconds).groupby(level="assumption", sort=False).mean()
    means = crossing[crossing["duration_s"] == params.max_seconds].groupby(["prefix_tokens", "system"])
    measured = "; ".join(
        f"{prefix:g} tokens, {name}: {row['crossing_rate']:.2f} req/s with {row['batched_requests']:.0f} batched"
        for (prefix, name), row in means[["crossing_rate", "batched_requests"]].mean().iterrows()
    )
    by_name = {name: ", ".join(f"{spread[prefix][name]:.2f}" for prefix in PANELS) for name in spread.index}
    others = "; ".join(f"{name}: {found}" for name, found in by_name.items())
    config, drawn = DEPLOYMENTS[MODEL], paper.crossings("fig16", sweep.LEVEL)[PANELS[341]]["orca-oracle"]
    matrix_share = drawn * (341 + MEAN_TOKENS[0]) * config.model.flops_per_token / config.device.flops_per_s
    keys = {prefix: panel.replace("/", "-") for prefix, panel in PANELS.items()}
    ours = {key: long[prefix].mean() for prefix, key in keys.items()}
    ends = {key: [spread[prefix].min(), spread[prefix].max()] for prefix, key in keys.items()}
    facts = {"measured": measured, "others": others, "drawn": drawn, "matrix_share": matrix_share}
    facts |= {"seconds": params.sensitivity_seconds}
    return [
        Judgement("shared-system-prompt", int(rows["shared_prompt"]["blocks_of_prompt"].iloc[0]), "exact"),
        Judgement("fig16-shared-prefix", ours, "modelled", ends, facts=facts),
    ]
