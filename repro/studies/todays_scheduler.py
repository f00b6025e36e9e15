"""What later vLLM's batching and its prefix cache are worth on the paper's own loads: the scheduler of 2023, then with
chunked prefill, then with prefixes found by hash too, which is vLLM V1.

Step times are those of the paper's A100 with the authors' code: what is compared is decisions, not kernels. A chunk
reads the context before it, which those step times do not charge. n samples run as one group with copy-on-write in
2023, and as n requests over the cache in V1: what each way keeps, computes twice and copies is counted."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from repro.engine.chunked import ChunkedPrefillScheduler
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.memory import OpKind
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SamplingParams
from repro.engine.systems import System, of_today, system
from repro.simulate.cost_model import CostModel
from repro.simulate.metrics import TokenGaps, UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import Served, crossing, serve
from repro.studies.base import DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import Positive, Seeds, Some, about, costs_of_samples, deployment_of, named
from repro.studies.sweep import LEVEL
from repro.workloads import Trace, make_trace
from repro.workloads.chatbot import chatbot_trace
from repro.workloads.translation import translation_trace

TABLES = {"crossing": ("load", "scheduler", "seed"), "served": ("load", "scheduler", "seed")}
#: of the ladder -> in words. All run 256 sequences at most, as later vLLM does.
SCHEDULERS = {
    "2023": "scheduler of 2023",
    "chunks": "chunked prefill, 2,048 tokens",
    "512": "chunked prefill, 512 tokens",
    "cache": "2,048 tokens and a prefix cache",
}
_V1 = system("vllm-v1")
SYSTEMS: dict[str, System] = {
    "2023": of_today(system("vllm")),
    "chunks": replace(_V1, prefix_caching=False),
    "512": replace(_V1, prefix_caching=False).with_scheduler(max_num_batched_tokens=512),
    "cache": _V1,
}


@dataclass(frozen=True)
class Load:
    """A load of the paper's evaluation: its name in words, model, anchor of the step times, samples a prompt, tokens
    that all prompts begin with, and a rate (req/s) to look for the crossing from."""

    label: str
    model: str
    anchor: str
    n: int
    prefix_tokens: int
    start: float

    def trace(self, name: str, rate: float, duration_s: float, seed: int) -> Trace:
        if self.prefix_tokens:
            return translation_trace(self.prefix_tokens, rate, duration_s, seed)
        make = chatbot_trace if name == "chatbot" else partial(make_trace, name.partition(" ")[0])
        return make(rate=rate, duration_s=duration_s, seed=seed)

    @property
    def costs(self) -> CostModel:
        if self.n > 1:
            return costs_of_samples("alpaca")
        return cost_model("a100-2023", deployment_of(self.model), anchor=self.anchor)


LOADS = {
    "sharegpt": Load("ShareGPT (Fig. 12)", "opt-13b", "opt-13b/sharegpt", 1, 0, 2.0),
    "alpaca": Load("Alpaca (Fig. 12)", "opt-13b", "opt-13b/alpaca", 1, 0, 20.0),
    **{f"alpaca x {n}": Load(f"Alpaca, {n} samples", "opt-13b", "opt-13b/alpaca", n, 0, 20.0 / n) for n in (2, 4, 6)},
    "translation": Load("Translation, 341 alike (Fig. 16)", "llama-13b", "opt-13b/alpaca", 1, 341, 30.0),
    "chatbot": Load("Chatbot (Fig. 17)", "opt-13b", "opt-13b/sharegpt", 1, 0, 1.0),
}


class Params(Parameters):
    loads: Annotated[tuple[Annotated[str, named("load", LOADS)], ...], Some]
    share: Annotated[float, Field(gt=0, le=1)]
    duration_s: Positive
    seeds: Seeds
    precision: Positive


def points(params: Params) -> list[Point]:
    shared = params.pick("share", "duration_s", "precision")
    return [Point(compared, {"load": load, "seed": seed, **shared}) for load in params.loads for seed in params.seeds]


class Work(Observer):
    """Prompt tokens computed, and blocks copied."""

    def __init__(self) -> None:
        self.prompt_tokens = self.copies = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self.prompt_tokens += output.num_prefill_tokens
        self.copies += sum(op.kind is OpKind.COPY for op in output.cache_ops)


def run(load: str, scheduler: str, trace: Trace, *observers: Observer) -> Served:
    """The trace served to its end."""
    asked = LOADS[load]
    prefix = asked.prefix_tokens if scheduler == "cache" else 0  # found, but not declared
    sampling = SamplingParams(n=asked.n)
    return serve(
        SYSTEMS[scheduler],
        asked.model,
        trace,
        asked.costs,
        sampling=sampling,
        observers=observers,
        shared_prefix_tokens=prefix,
    )


def prompts_of(served: Served, n: int) -> Iterator[list[Outcome]]:
    """The outcomes of each prompt: one, or in V1 one a sample."""
    width = n if isinstance(served.engine.scheduler, ChunkedPrefillScheduler) else 1
    for first in range(0, len(served.outcomes), width):
        yield served.outcomes[first : first + width]


def latency(served: Served, n: int) -> float:
    """Mean normalized latency (s/token): a prompt is done when its last sample is."""
    ends = [max(one.normalized_latency_s for one in outcomes) for outcomes in prompts_of(served, n)]
    return float(np.mean(ends))


def compared(
    load: str, share: float, duration_s: float, seed: int, precision: float
) -> dict[str, list[dict[str, Any]]]:
    """The rate at which each scheduler's latency reaches 0.5 s/token; then all at `share` of 2023's."""
    asked = LOADS[load]
    crossings, served = [], []
    for scheduler in SYSTEMS:
        rate = crossing(
            lambda rate, scheduler=scheduler: latency(
                run(load, scheduler, asked.trace(load, rate, duration_s, seed)), asked.n
            ),
            asked.start,
            LEVEL,
            precision,
        )
        common = {"load": load, "scheduler": scheduler}
        trace = asked.trace(load, rate, duration_s, seed)
        crossings.append(common | about("modelled", "a100-2023", seed, trace) | {"crossing_rate": rate})
        rate = share * crossings[0]["crossing_rate"]
        trace = asked.trace(load, rate, duration_s, seed)
        about_it = common | about("modelled", "a100-2023", seed, trace) | {"rate": rate}
        served.append(about_it | measures(load, scheduler, trace))
    return {"crossing": crossings, "served": served}


def measures(load: str, scheduler: str, trace: Trace) -> dict[str, Any]:
    """What requests and memory see of one run: times in ms, blocks as shares of the pool."""
    n = LOADS[load].n
    gaps, work, usage = TokenGaps(), Work(), UsageSamples(0.0, float(trace.arrival_s[-1]), 1.0)
    served = run(load, scheduler, trace, gaps, work, usage)
    manager, asked = served.engine.scheduler.manager, int(trace.prompt_tokens.sum())
    first = [min(one.first_token_s for one in outcomes) for outcomes in prompts_of(served, n)]
    return {
        "latency_s_per_token": latency(served, n),
        "gap_median_ms": 1e3 * gaps.quantile(0.5),
        "gap_99_ms": 1e3 * gaps.quantile(0.99),
        "first_mean_ms": 1e3 * float(np.mean(first - trace.arrival_s)),
        "preemptions": served.engine.scheduler.num_preemptions,
        "found_percent": 100 * manager.num_hit / manager.num_asked if manager.num_asked else 0.0,
        "computed_percent": 100 * work.prompt_tokens / asked,
        "copies_a_prompt": work.copies / len(trace),
        "blocks_percent": 100 * float(np.mean([one.physical_blocks for one in usage.samples])) / manager.num_blocks,
    }


#: columns of "served" -> title and axis of their panels
SEEN = {
    "gap_99_ms": ("Time between two tokens", "99th percentile (ms)"),
    "first_mean_ms": ("Time to the first token", "mean (ms)"),
    "computed_percent": ("Prompt tokens computed", "share of the prompts (%)"),
}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    loads = list(params.loads)
    titles = ["Rate at 0.5 s/token over 2023's", *(title for title, _ in SEEN.values())]
    height = 0.55 * len(loads) + 1.2
    figure, axes = plotting.panels(titles, columns=2, width=5.4, height=height)
    rates = rows["crossing"].groupby(["load", "scheduler"])["crossing_rate"].mean().unstack()
    _bars(axes[0], rates.div(rates["2023"], axis=0).loc[loads], "times the rate of 2023's scheduler", "{:.2f}")
    axes[0].axvline(1, color=plotting.GREY, linewidth=0.7)
    for axis, (column, (_, label)) in zip(axes[1:], SEEN.items()):
        means = rows["served"].groupby(["load", "scheduler"])[column].mean().unstack().loc[loads]
        _bars(axis, means, label, "{:,.0f}")
    for axis in axes[1::2]:
        axis.set_yticklabels([])
    names = [plotting.swatch(text, plotting.other(place).color) for place, text in enumerate(SCHEDULERS.values())]
    plotting.place_legend(figure, names)
    note = f"All but the first at {params.share:g} of 2023's rate; traces of {params.duration_s:g} s"
    plotting.footer(figure, rows["served"], note=note)
    return {"todays_scheduler": figure}


def _bars(axis: Any, means: DataFrame, label: str, shown: str) -> None:
    """A group of bars for each load."""
    height = 0.8 / len(SCHEDULERS)
    for place, scheduler in enumerate(SCHEDULERS):
        at = [row + (place - (len(SCHEDULERS) - 1) / 2) * height for row in range(len(means))]
        look = {"color": plotting.other(place).color, **plotting.BAR["modelled"]}
        bars = axis.barh(at, means[scheduler], height, **look)
        axis.bar_label(bars, fmt=f" {shown}", fontsize=7.5)
    axis.set_yticks(range(len(means)), [LOADS[load].label for load in means.index], fontsize=8)
    axis.set(xlabel=label, xlim=(0, 1.18 * float(means.max().max())))
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)


def tables(rows: Rows, params: Params) -> dict[str, DataFrame]:
    """n samples two ways: blocks in use, prompt tokens computed and found, blocks copied."""
    chosen = where(rows["served"], seed=params.seeds[0])
    several = [name for name, load in LOADS.items() if load.n > 1]
    chosen = chosen[chosen["load"].isin(several) & chosen["scheduler"].isin(["2023", "cache"])]
    columns = ["rate", "blocks_percent", "computed_percent", "found_percent", "copies_a_prompt", "preemptions"]
    return {"todays_scheduler_samples": chosen[["load", "scheduler", *columns]].round(2).reset_index(drop=True)}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    """No claim of the paper is about this."""
    return []
