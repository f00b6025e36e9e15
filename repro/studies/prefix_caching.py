"""What finding prefixes by their hash is worth, beside storing one in advance: Fig. 16's load, in virtual time.

In the paper a provider declares a prefix, and its blocks stay for good (§4.4). Today's engines find whatever blocks are
alike by themselves, as long as they are not needed for something else (`repro.engine.memory.prefix_cache`). Both run
here under the scheduler of 2023 and under chunked prefill, V1's. A time stamp in front of the prompt defeats it."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from repro.engine.config import DEPLOYMENTS
from repro.engine.systems import system
from repro.simulate.profiles import cost_model
from repro.simulate.prompts import hashes_of
from repro.simulate.serve import Served, crossing, serve
from repro.studies.base import Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import Positive, Seeds, Some, about
from repro.studies.sweep import LEVEL
from repro.workloads import Trace
from repro.workloads.translation import translation_trace

TABLES = {"crossing": ("prefix_tokens", "way", "scheduler", "seed")}
MODEL, ANCHOR, BLOCK_SIZE = "llama-13b", "opt-13b/alpaca", 16  # Fig. 16's
#: what becomes of the prefix -> in words
WAYS = {
    "computed": "each request computes it",
    "declared": "stored in advance",
    "cached": "found by hash",
    "stamped": "found by hash, after a time stamp",
}
NAMES = {"2023": "scheduler of 2023", "V1": "chunked prefill"}
SCHEDULERS = {"2023": system("vllm"), "V1": replace(system("vllm-v1"), prefix_caching=False)}


class Params(Parameters):
    prefixes: Annotated[tuple[Annotated[int, Field(ge=16, le=1024)], ...], Some]
    schedulers: Annotated[tuple[Literal["2023", "V1"], ...], Some]
    duration_s: Positive
    seeds: Seeds
    precision: Positive


def points(params: Params) -> list[Point]:
    shared = params.pick("duration_s", "precision")
    return [
        Point(crossing_of, {"prefix": prefix, "way": way, "scheduler": scheduler, "seed": seed, **shared}, "crossing")
        for prefix in params.prefixes
        for way in WAYS
        for scheduler in params.schedulers
        for seed in params.seeds
    ]


def run(prefix: int, way: str, scheduler: str, trace: Trace) -> Served:
    """The trace served by this scheduler, the prefix dealt with in this way."""
    chosen = SCHEDULERS[scheduler]
    if way in ("cached", "stamped"):
        chosen = replace(chosen, prefix_caching=True)
    told = 0 if way == "computed" else prefix
    hashes = hashes_of(prefix, BLOCK_SIZE, stamped=True) if way == "stamped" else None
    costs = cost_model("a100-2023", DEPLOYMENTS[MODEL], anchor=ANCHOR)
    return serve(chosen, MODEL, trace, costs, BLOCK_SIZE, shared_prefix_tokens=told, hashes=hashes)


def crossing_of(
    prefix: int, way: str, scheduler: str, duration_s: float, seed: int, precision: float
) -> dict[str, Any]:
    """The rate (req/s) at which the latency reaches 0.5 s/token, and what is found at that rate, in % of all prompts'
    tokens."""

    def trace_at(rate: float) -> Trace:
        return translation_trace(prefix, rate, duration_s, seed)

    rate = crossing(
        lambda rate: run(prefix, way, scheduler, trace_at(rate)).latency_s_per_token, 30.0, LEVEL, precision
    )
    trace = trace_at(rate)
    decided = run(prefix, way, scheduler, trace).engine.scheduler
    asked = int(trace.prompt_tokens.sum())
    stored = len(trace) * (prefix // BLOCK_SIZE) * BLOCK_SIZE if way == "declared" else 0
    return {
        "prefix_tokens": prefix,
        "way": way,
        "scheduler": scheduler,
        **about("modelled", "a100-2023", seed, trace),
        "crossing_rate": rate,
        "found_percent": 100 * max(decided.manager.num_hit, stored) / asked,
        "preemptions": decided.num_preemptions,
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    found, schedulers = rows["crossing"], params.schedulers
    titles = [f"LLaMA-13B, {prefix} tokens alike" for prefix in params.prefixes]
    figure, axes = plotting.panels(titles, width=5.2, height=2.9)
    height = 0.8 / len(schedulers)
    for axis, prefix in zip(axes, params.prefixes):
        for number, name in enumerate(schedulers):
            rates = where(found, prefix_tokens=prefix, scheduler=name).groupby("way")["crossing_rate"].mean()
            places = [place + (number - (len(schedulers) - 1) / 2) * height for place in range(len(WAYS))]
            look = {"color": plotting.other(number).color, **plotting.BAR["modelled"]}
            bars = axis.barh(places, [rates[way] for way in WAYS], height, **look)
            axis.bar_label(bars, fmt=" {:.1f}", fontsize=8)
        axis.set_yticks(range(len(WAYS)), list(WAYS.values()))
        axis.set(xlabel="req/s at 0.5 s/token", xlim=(0, 1.12 * found["crossing_rate"].max()))
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
    names = [plotting.swatch(NAMES[name], plotting.other(number).color) for number, name in enumerate(schedulers)]
    plotting.place_legend(figure, names)
    note = f"Sentences and step times as in Fig. 16, traces of {params.duration_s:g} s"
    plotting.footer(figure, found, note=note)
    return {"prefix_caching": figure}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    """No claim of the paper is about this."""
    return []
