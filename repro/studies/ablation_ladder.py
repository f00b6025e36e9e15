"""From request-level batching to vLLM, one mechanism at a time: how much each adds to the rate that is served.

The paper's baselines differ from vLLM in several things at once. Here each rung changes one, in the same engine, with
the same cost model and the same caps of an iteration:

    request batching     a batch runs until all have finished; every sequence reserves the model's maximum length
    iteration batching   requests join and leave between iterations (Orca (Max))
    exact reservation    each sequence reserves its true length, which no real system knows (Orca (Oracle))
    paging               blocks on demand; requests that no longer fit are recomputed; every sequence has blocks of its
    own
    sharing              sequences of a request share blocks, and copy on write
    swapping             what no longer fits is swapped to the CPU instead of being recomputed

An order had to be chosen; another one would credit each rung with something else, as gains multiply. Modelled, OPT-13B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.errors import UserError
from repro.engine.memory import CacheOp, KVCacheManager, PagedKVCacheManager, reserve_max, reserve_oracle
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerConfig
from repro.engine.sequence import SamplingParams, SequenceGroup
from repro.engine.systems import System
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement
from repro.simulate.beams import KINDS, recording
from repro.simulate.serve import crossing, serve
from repro.studies.common import check_positive, check_seeds, check_some, costs_of_samples, deployment_of, trace_of
from repro.studies.fig15_sharing import METHODS
from repro.workloads import WORKLOADS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVEL = 0.5  # s/token


class UnsharedPagedKVCacheManager(PagedKVCacheManager):
    """Paging alone: every sequence has blocks of its own, and whatever it takes over from another one is copied."""

    shares = False

    def layout(self, group: SequenceGroup, num_tokens: int) -> tuple[int, int, int]:
        return 0, 0, self.cdiv(num_tokens)

    def tokens_to_compute(self, group: SequenceGroup, num_tokens: int) -> int:
        """The prompt once, as with contiguous chunks; what the sequences have generated, for each of them."""
        prompt = group.request.prompt_tokens
        return prompt + (num_tokens - prompt) * len(group.seqs)

    def blocks_at_most(self, group: SequenceGroup) -> int:
        return self.cdiv(group.request.prompt_tokens + group.request.output_tokens - 1) * group.request.sampling.n

    def spread_prompt(self, group: SequenceGroup, num_tokens: int) -> list[CacheOp]:
        return self.copies(group, [0] * len(group.seqs), group.request.prompt_tokens)

    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        return self.copies(group, parents, num_tokens)


@dataclass(frozen=True)
class UnsharedSystem(System):
    def manager(self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int = 0) -> KVCacheManager:
        return UnsharedPagedKVCacheManager(num_blocks, block_size, num_cpu_blocks=num_cpu_blocks)


def rungs() -> list[System]:
    """The ladder from the bottom up. All rungs have vLLM's caps, so that these are no mechanism of their own."""
    caps = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE)
    by_request = SchedulerConfig(batching=Batching.REQUEST)
    return [
        System("request batching", "request batching", by_request, reserve_max),
        System("iteration batching", "iteration batching", caps, reserve_max),
        System("exact reservation", "exact reservation", caps, reserve_oracle),
        UnsharedSystem("paging", "paging", caps),
        System("sharing", "sharing", caps),
        System("swapping", "swapping", SchedulerConfig(preemption=PreemptionMode.SWAP)),
    ]


class Params(Parameters):
    """`settings` are "workload/method/sequences a request"; `beam_seconds` caps the traces of beam search."""

    settings: tuple[str, ...]
    max_seconds: float
    beam_seconds: float
    seeds: tuple[int, ...]
    precision: float
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_some("settings", self.settings)
        for setting in self.settings:
            parts = setting.split("/")
            if len(parts) != 3 or parts[0] not in WORKLOADS or parts[1] not in METHODS or not parts[2].isdecimal():
                raise UserError(
                    f"setting {setting!r} must be workload/method/sequences, such as sharegpt/parallel/4; workloads: "
                    f"{', '.join(WORKLOADS)}; methods: {', '.join(METHODS)}"
                )
            if _sampling(setting).use_beam_search:
                recording(KINDS[parts[0]]).parents(0, int(parts[2]), 0)
        for name in ("max_seconds", "beam_seconds", "precision"):
            check_positive(name, getattr(self, name))
        check_seeds(self.seeds)
        return self


def _sampling(setting: str) -> SamplingParams:
    _, method, count = setting.split("/")
    return SamplingParams(n=int(count), use_beam_search=method == "beam")


def points(params: Params) -> list[Point]:
    result = []
    for setting in params.settings:
        beam = _sampling(setting).use_beam_search
        seconds = min(params.max_seconds, params.beam_seconds) if beam else params.max_seconds
        result += [
            Point(
                sustained,
                {
                    "setting": setting,
                    "system": rung,
                    "duration_s": seconds,
                    "seed": seed,
                    "precision": params.precision,
                    "lengths": params.lengths,
                },
                weight=(index + 1) * seconds * (10 if setting.startswith("alpaca") else 1) * (5 if beam else 1),
            )
            for index, rung in enumerate(rungs())
            for seed in params.seeds
        ]
    return result


def sustained(
    setting: str, system: System, duration_s: float, seed: int, precision: float, lengths: str | None
) -> dict[str, Any]:
    """The rate (req/s) at which one rung reaches 0.5 s/token."""
    workload = setting.split("/")[0]
    sampling, deployment = _sampling(setting), deployment_of("opt-13b")
    costs = costs_of_samples(workload, sampling.use_beam_search)
    beams = recording(KINDS[workload]) if sampling.use_beam_search else None

    def latency(rate: float, seconds: float) -> float:
        trace = trace_of(workload, rate, seconds, seed, lengths)
        return serve(system, deployment, trace, costs, sampling=sampling, beams=beams).latency_s_per_token

    # Rungs lie far apart: a short trace says where to look.
    nearby = crossing(lambda rate: latency(rate, min(duration_s, 300.0)), 1.0, LEVEL, 0.25)
    rate = crossing(lambda rate: latency(rate, duration_s), nearby, LEVEL, precision)
    return {
        "setting": setting,
        "system": system.name,
        "seed": seed,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": None,
        "crossing_rate": rate,
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    with plotting.house():
        figure, axes = plotting.panels(
            [_title(setting) for setting in params.settings], columns=2, width=4.6, height=3.0
        )
        for axis, setting in zip(axes, params.settings):
            _draw_ladder(axis, rows[rows["setting"] == setting])
        plotting.footer(figure, rows, note="Logarithmic: equal heights are equal factors")
    return {"ablation_ladder": figure}


def _draw_ladder(axis: Axes, rows: pd.DataFrame) -> None:
    rates = rows.groupby("system", sort=False)["crossing_rate"]
    mean, low, high = rates.mean(), rates.min(), rates.max()
    for place, (name, rate) in enumerate(mean.items()):
        before = mean.iloc[place - 1] if place else mean.iloc[0] / 2
        color = "#888888" if place == 0 else "#0072B2" if rate >= before else "#D55E00"
        axis.bar(place, rate - before, 0.7, bottom=before, color=color, alpha=0.75)
        if high[name] > low[name]:
            axis.errorbar(
                place, rate, [[rate - low[name]], [high[name] - rate]], color="black", linewidth=1, capsize=2.5
            )
        if place:
            axis.plot([place - 1.35, place + 0.35], [before, before], color="#555555", linewidth=0.8)
            axis.annotate(
                f"x{rate / before:.2f}",
                (place, max(rate, before)),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axis.annotate(
            f"{rate:.2f}",
            (place, min(rate, before)),
            (0, -3),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color="#555555",
        )
    axis.set_yscale("log")
    axis.set_ylim(mean.min() / 3, mean.max() * 1.6)
    axis.set_xticks(range(len(mean)), [name.replace(" ", "\n") for name in mean.index], fontsize=7.5)
    axis.grid(axis="x", visible=False)
    axis.set_ylabel("req/s at 0.5 s/token")


def _title(setting: str) -> str:
    workload, method, count = setting.split("/")
    name = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}[workload]
    kind = "one sequence" if count == "1" else f"{count} {'beams' if method == 'beam' else 'samples'}"
    return f"{name}, {kind}"


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    return []  # the paper has no such ladder
