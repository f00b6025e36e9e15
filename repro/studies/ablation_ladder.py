"""From request-level batching to vLLM, one mechanism at a time: how much each adds to the rate that is served.

The paper's baselines differ from vLLM in several things at once. Here each rung changes one, in the same engine, with
the same cost model and the same caps of an iteration:

    request batching     a batch runs until all have finished; every sequence reserves the model's maximum length
    iteration batching   requests join and leave between iterations (Orca (Max))
    exact reservation    each sequence reserves its true length, which no real system knows (Orca (Oracle))
    paging               blocks on demand; requests that no longer fit are recomputed; every sequence has its own blocks
    sharing              sequences of a request share blocks, and copy on write
    swapping             what no longer fits is swapped to the CPU instead of being recomputed

An order had to be chosen; another one would credit each rung with something else, as gains multiply. Modelled, OPT-13B.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator

from repro.engine.memory import CacheOp, KVCacheManager, PagedKVCacheManager, reserve_max, reserve_oracle
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerConfig
from repro.engine.sequence import SequenceGroup
from repro.engine.systems import System
from repro.studies import sweep
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import WORKLOAD_LABEL, Lengths, Positive, Seeds, Some, trace_of
from repro.studies.fig15_sharing import METHODS, check_samples
from repro.studies.sweep import Setup, crossing_of
from repro.workloads import WORKLOADS

TABLES = {"crossing": ("setting", "system", "seed")}
GAIN, LOSS = "#8571BD", "#D9A441"


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
    def manager(
        self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int = 0, *unused: object
    ) -> KVCacheManager:
        return UnsharedPagedKVCacheManager(num_blocks, block_size, num_cpu_blocks=num_cpu_blocks)


def rungs() -> list[System]:
    """The ladder from the bottom up. All rungs have vLLM's caps, so that these are no mechanism of their own."""
    caps = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE)
    return [
        System("request batching", "request batching", SchedulerConfig(batching=Batching.REQUEST), reserve_max),
        System("iteration batching", "iteration batching", caps, reserve_max),
        System("exact reservation", "exact reservation", caps, reserve_oracle),
        UnsharedSystem("paging", "paging", caps),
        System("sharing", "sharing", caps),
        System("swapping", "swapping", SchedulerConfig(preemption=PreemptionMode.SWAP)),
    ]


def _setting(text: str) -> str:
    parts = text.split("/")
    if len(parts) != 3 or parts[0] not in WORKLOADS or parts[1] not in METHODS or not parts[2].isdecimal():
        raise ValueError(
            "must be workload/method/sequences, such as sharegpt/parallel/4; workloads: "
            f"{', '.join(WORKLOADS)}; methods: {', '.join(METHODS)}"
        )
    check_samples([parts[1]], [parts[0]], [int(parts[2])], None)
    return text


class Params(Parameters):
    settings: Annotated[tuple[Annotated[str, AfterValidator(_setting)], ...], Some]
    max_seconds: Positive
    beam_seconds: Positive
    seeds: Seeds
    precision: Positive
    lengths: Lengths


def points(params: Params) -> list[Point]:
    result = []
    for setting in params.settings:
        workload, method, count = setting.split("/")
        seconds = min(params.max_seconds, params.beam_seconds) if method == "beam" else params.max_seconds
        shared = {"trace": partial(trace_of, workload, lengths=params.lengths), "duration_s": seconds}
        shared |= sweep.of_samples(workload, method, int(count))
        for index, rung in enumerate(rungs()):
            for seed in params.seeds:
                setup = Setup({"setting": setting}, rung, seed=seed, **shared)
                weight = (index + 1) * setup.work * (10 if workload == "alpaca" else 1)
                searched = {"setup": setup, "precision": params.precision}
                result.append(Point(sustained, searched, "crossing", weight=weight))
    return result


def sustained(setup: Setup, precision: float) -> dict[str, Any]:
    """The rate (req/s) at which one rung reaches 0.5 s/token. Rungs lie far apart: a short trace says where to look."""
    nearby = replace(setup, duration_s=min(setup.duration_s, 300.0)).crossing(1.0, 0.25)
    return crossing_of(setup, nearby, precision)


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    found = rows["crossing"]
    figure, axes = plotting.panels(list(map(_title, params.settings)), columns=2, width=4.5, height=2.9)
    for axis, setting in zip(axes, params.settings):
        _draw_ladder(axis, where(found, setting=setting))
    handles = [plotting.swatch("gained", GAIN), plotting.swatch("lost", LOSS), plotting.key("the rate of a rung")]
    plotting.place_legend(figure, handles)
    note = "Numbers: the rate, and what it gains over the rung before. Logarithmic: equal heights are equal factors"
    plotting.footer(figure, found, note=note)
    return {"ablation_ladder": figure}


def _draw_ladder(axis: Axes, rows: DataFrame) -> None:
    rates = rows.groupby("system", sort=False)["crossing_rate"]
    mean = rates.mean()
    for place, (name, rate) in enumerate(mean.items()):
        before = mean.iloc[place - 1] if place else rate
        end = place + (1.35 if place < len(mean) - 1 else 0.35)
        axis.plot([place - 0.35, end], [rate, rate], color=plotting.GREY)
        axis.bar(place, rate - before, 0.7, bottom=before, color=GAIN if rate >= before else LOSS)
        plotting.whisker(axis, place, rates.get_group(name))
        text = f"{rate:.2f}" + (f"\n×{rate / before:.2f}" if place else "")
        axis.annotate(text, (place, max(rate, before)), (0, 3), textcoords="offset points", ha="center")
    axis.set(ylim=(mean.min() / 1.5, mean.max() * 2), ylabel="req/s at 0.5 s/token")
    plotting.log(axis)
    axis.set_xticks(range(len(mean)), [name.replace(" ", "\n") for name in mean.index], fontsize=8.5)
    axis.grid(axis="x", visible=False)


def _title(setting: str) -> str:
    workload, method, count = setting.split("/")
    kind = "one sequence" if count == "1" else f"{count} {'beams' if method == 'beam' else 'samples'}"
    return f"{WORKLOAD_LABEL[workload]}, {kind}"


def judge(rows: Rows, params: Params) -> list[Judgement]:
    return []  # the paper has no such ladder
