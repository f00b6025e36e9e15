"""Fig. 16: translation requests that all begin with the same examples; vLLM stores those once, Orca (Oracle) does not.

vLLM keeps the full blocks of the prefix for all requests and computes only the rest of each prompt. Orca computes the
whole prompt and holds it in every chunk. WMT16's own sentence lengths need a network: the default is a distribution
(see repro.workloads.translation), and the ratio of the two rates is shown under longer and shorter sentences and under
every open assumption of the cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.config import DEPLOYMENTS
from repro.engine.errors import UserError
from repro.engine.memory import PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import System, system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.cost_model import CostModel
from repro.simulate.metrics import BatchAverage
from repro.simulate.profiles import context_splits, cost_model
from repro.simulate.serve import crossing, serve
from repro.studies.common import check_positive, check_seeds, check_some
from repro.workloads import Trace
from repro.workloads.translation import MEAN_TOKENS, translation_trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL, LEVEL = "llama-13b", 0.5  # s/token
#: prefix tokens -> panel of Fig. 16
PANELS = {80: "1-shot/80", 341: "5-shot/341"}
#: What a request holds beyond the prefix is some 65 tokens, and even with it (110 to 400) it is shorter than
#: ShareGPT's: of Fig. 12's two anchors for a 13B model we take Alpaca's. LLaMA-13B has none of its own.
ANCHOR = "opt-13b/alpaca"


@dataclass(frozen=True)
class Assumption:
    """What may be otherwise: `scale` stretches the default sentences, the rest are choices of the cost model."""

    anchor: str = ANCHOR
    split: str = context_splits()[0]
    prefill_efficiency: float | None = None
    scale: float = 1.0


ASSUMPTIONS: dict[str, Assumption] = {
    "as drawn": Assumption(),
    "ShareGPT's anchor": Assumption(anchor="opt-13b/sharegpt"),
    **{f"slope: {split}": Assumption(split=split) for split in context_splits()[1:]},
    **{f"prefill: {efficiency}": Assumption(prefill_efficiency=efficiency) for efficiency in (0.3, 1.0)},
    **{f"sentences x {scale}": Assumption(scale=scale) for scale in (0.75, 1.25)},
}
DRAWN = next(iter(ASSUMPTIONS))


class Params(Parameters):
    """`prefixes` in tokens. Traces last `max_seconds`, those of the right panel `sensitivity_seconds`. `sentences`
    replaces the default lengths: "hub", a file of the data set, or a CSV file of pairs without the prefix."""

    prefixes: tuple[int, ...]
    max_seconds: float
    sensitivity_seconds: float
    seeds: tuple[int, ...]
    crossings: bool
    precision: float
    sentences: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_some("prefixes", self.prefixes)
        for prefix in self.prefixes:
            if not 1 <= prefix <= 1024:
                raise UserError(f"prefixes = {list(self.prefixes)}: a prefix has from 1 to 1024 tokens")
        check_seeds(self.seeds)
        for name in ("max_seconds", "sensitivity_seconds", "precision"):
            check_positive(name, getattr(self, name))
        return self


def points(params: Params) -> list[Point]:
    result = [Point(shared_prompt, {})]
    for prefix in params.prefixes:
        for name in ("orca-oracle", "vllm"):
            drawn = [rate for rate, _ in paper.points("fig16", PANELS.get(prefix, PANELS[341]), name)]
            shared = {"prefix_tokens": prefix, "system": system(name), "sentences": params.sentences}
            # The paper's rates lie close together where its own curve bends; ours bends a little before.
            rates = sorted({*drawn, *(round(share * max(drawn), 3) for share in (0.5, 0.65, 0.75, 0.85, 0.9))})
            result += [
                Point(
                    latency_at,
                    shared | {"duration_s": params.max_seconds, "rate": rate, "seed": seed},
                    weight=rate * params.max_seconds,
                )
                for rate in rates
                for seed in params.seeds
            ]
            if not params.crossings:
                continue
            runs = [(DRAWN, params.max_seconds, seed) for seed in params.seeds]
            runs += [
                (name, params.sensitivity_seconds, params.seeds[0])
                for name, assumption in ASSUMPTIONS.items()
                if params.sentences is None or assumption.scale == 1
            ]
            result += [
                Point(
                    crossing_of,
                    shared
                    | {
                        "assumption": assumption,
                        "duration_s": seconds,
                        "seed": seed,
                        "start": max(drawn),
                        "precision": params.precision,
                    },
                    weight=7 * max(drawn) * seconds,
                )
                for assumption, seconds, seed in runs
            ]
    return result


def _costs(assumption: Assumption) -> CostModel:
    return cost_model(
        "a100-2023",
        DEPLOYMENTS[MODEL],
        anchor=assumption.anchor,
        split=assumption.split,
        prefill_efficiency=assumption.prefill_efficiency,
    )


def _measure(prefix_tokens: int, system: System, trace: Trace, costs: CostModel) -> dict[str, Any]:
    batch = BatchAverage(0.0, trace.card.duration_s)
    served = serve(system, DEPLOYMENTS[MODEL], trace, costs, observers=[batch], shared_prefix_tokens=prefix_tokens)
    return {
        "prefix_tokens": prefix_tokens,
        "system": system.name,
        "evidence": "modelled",
        "device": costs.name,
        "duration_s": trace.card.duration_s,
        "seed": trace.card.seed,
        "trace_hash": trace.hash,
        "requests": len(trace),
        "batched_requests": batch.mean,
        "preemptions": served.engine.scheduler.num_preemptions,
        "latency_s_per_token": served.latency_s_per_token,
    }


def latency_at(
    prefix_tokens: int, system: System, sentences: str | None, duration_s: float, rate: float, seed: int
) -> dict[str, Any]:
    """One point of a curve: mean normalized latency (s/token) at `rate` (req/s)."""
    trace = translation_trace(prefix_tokens, rate, duration_s, seed, sentences)
    return {
        "part": "latency",
        "assumption": DRAWN,
        "rate": rate,
        **_measure(prefix_tokens, system, trace, _costs(ASSUMPTIONS[DRAWN])),
    }


def crossing_of(
    prefix_tokens: int,
    system: System,
    sentences: str | None,
    assumption: str,
    duration_s: float,
    seed: int,
    start: float,
    precision: float,
) -> dict[str, Any]:
    """The rate (req/s) at which the latency reaches 0.5 s/token, and the requests that are batched at that rate."""
    chosen = ASSUMPTIONS[assumption]
    costs = _costs(chosen)

    def at(rate: float) -> dict[str, Any]:
        trace = translation_trace(prefix_tokens, rate, duration_s, seed, sentences, chosen.scale)
        return _measure(prefix_tokens, system, trace, costs)

    rate = crossing(lambda rate: at(rate)["latency_s_per_token"], start, LEVEL, precision)
    return {"part": "crossing", "assumption": assumption, "crossing_rate": rate, **at(rate)}


def shared_prompt(users: int = 10, prompt_tokens: int = 4000) -> dict[str, Any]:
    """Physical blocks that hold a prompt which ten requests share, in the real manager at block size 16."""
    manager = PagedKVCacheManager(num_blocks=1000)
    manager.store_prefix("system", prompt_tokens)
    groups = [
        SequenceGroup(Request(user, 0.0, prompt_tokens + 1, 1, SamplingParams(), "system")) for user in range(users)
    ]
    for group in groups:
        manager.allocate(group, group.request.prompt_tokens)
    of_prompt = {
        block for group in groups for block in manager.block_table(group.seqs[0])[: prompt_tokens // manager.block_size]
    }
    return {
        "part": "shared prompt",
        "evidence": "exact",
        "device": None,
        "seed": None,
        "trace_hash": None,
        "blocks_of_prompt": len(of_prompt),
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    latency = rows[rows["part"] == "latency"]
    titles = [f"LLaMA-13B, {prefix} shared tokens" for prefix in params.prefixes]
    with plotting.house():
        figure, axes = plotting.panels(
            titles + ["vLLM's rate over Orca (Oracle)'s"] * params.crossings, width=3.9, height=3.2
        )
        for axis, prefix in zip(axes, params.prefixes):
            drawn = (
                {name: paper.points("fig16", PANELS[prefix], name) for name in ("orca-oracle", "vllm")}
                if prefix in PANELS
                else None
            )
            plotting.curves(
                axis, latency[latency["prefix_tokens"] == prefix], "rate", "latency_s_per_token", paper=drawn
            )
            axis.set(xlabel="request rate (req/s)", ylabel="normalized latency (s/token)", xlim=(0, None), ylim=(0, 1))
        if params.crossings:
            _draw_ratios(axes[-1], _ratios(rows, params.sensitivity_seconds))
        plotting.legend(figure, latency, with_paper=True)
        plotting.footer(
            figure,
            latency,
            with_paper=True,
            note=f"Calibrated on {ANCHOR} of Fig. 12; sentences of "
            f"{MEAN_TOKENS[0]:g} and {MEAN_TOKENS[1]:g} tokens on average"
            if params.sentences is None
            else f"Calibrated on {ANCHOR} of Fig. 12; sentences: {params.sentences}",
        )
    return {"fig16_shared_prefix": figure}


def _ratios(rows: pd.DataFrame, duration_s: float) -> pd.DataFrame:
    """[assumption and seed, prefix]: vLLM's crossing over Orca's, on traces of this length."""
    found = rows[(rows["part"] == "crossing") & (rows["duration_s"] == duration_s)]
    rates = found.pivot_table("crossing_rate", ["assumption", "seed", "prefix_tokens"], "system", sort=False)
    return (rates["vllm"] / rates["orca-oracle"]).unstack()


def _draw_ratios(axis: Axes, ratios: pd.DataFrame) -> None:
    ratios = ratios.groupby(level="assumption", sort=False).mean()
    places = range(len(ratios))
    for (prefix, values), marker in zip(ratios.items(), "osDv^"):
        axis.plot(values, places, marker, color="#0072B2", markersize=6, label=f"{prefix:g} tokens")
        if prefix in PANELS:
            theirs = paper.crossings("fig16", LEVEL)[PANELS[prefix]]
            ratio = theirs["vllm"] / theirs["orca-oracle"]
            axis.axvspan(0.85 * ratio, 1.15 * ratio, color="#EEEEEE", zorder=0)
            axis.plot([ratio], [0], marker, color="#0072B2", markerfacecolor="none", markersize=9)
    axis.set_yticks(places, list(ratios.index), fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="ratio of the rates at 0.5 s/token", xlim=(1, None))
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.4, 0))


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    blocks = rows[rows["part"] == "shared prompt"]["blocks_of_prompt"].iloc[0]
    judgements = [Judgement("shared-system-prompt", int(blocks), "exact", note="Counted in the real block manager.")]
    if not params.crossings or params != replace(Params(), seeds=params.seeds, sentences=params.sentences):
        return judgements
    ratios = _ratios(rows, params.max_seconds)
    spread = _ratios(rows, params.sensitivity_seconds).groupby(level="assumption", sort=False).mean()
    found = rows[(rows["part"] == "crossing") & (rows["duration_s"] == params.max_seconds)]
    means = found.groupby(["prefix_tokens", "system"])[["crossing_rate", "batched_requests"]].mean()
    measured = "; ".join(
        f"{prefix:g} tokens, {name}: {row['crossing_rate']:.2f} req/s with {row['batched_requests']:.0f} batched"
        for (prefix, name), row in means.iterrows()
    )
    others = "; ".join(
        f"{name}: " + ", ".join(f"{spread[prefix][name]:.2f}" for prefix in PANELS) for name in spread.index
    )
    config = DEPLOYMENTS[MODEL]
    drawn = paper.crossings("fig16", LEVEL)[PANELS[341]]["orca-oracle"]
    matrix_share = drawn * (341 + MEAN_TOKENS[0]) * config.model.flops_per_token / config.device.flops_per_s
    keys = {prefix: panel.replace("/", "-") for prefix, panel in PANELS.items()}
    judgements.append(
        Judgement(
            "fig16-shared-prefix",
            {key: ratios[prefix].mean() for prefix, key in keys.items()},
            "modelled",
            {key: [spread[prefix].min(), spread[prefix].max()] for prefix, key in keys.items()},
            note=f"{measured}. The interval spans sentence lengths and the cost model's assumptions, on traces of "
            f"{params.sensitivity_seconds:g} s: {others}. The paper's own Orca curve ({drawn:.2f} req/s with 341 "
            "tokens) "
            f"computes prompts at {matrix_share:.2f} of the datasheet's matrix rate, so prefill cannot be as slow as "
            "0.3.",
        )
    )
    return judgements
