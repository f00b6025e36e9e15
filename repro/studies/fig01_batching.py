"""Fig. 1 (right): memory and throughput against the batch, for a system that reserves 2048 slots a request and vLLM.

Every point is a run of its own: so many requests at most, a queue that never empties, and the real scheduler and memory
manager; memory is what the manager holds, averaged over time. Where it does not grow any more, memory is full. Time
comes from the cost model, which this very figure calibrates: the throughput is no test of it."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from repro.engine.config import GIB
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.engine.systems import system
from repro.simulate.metrics import BatchAverage, UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies.base import (
    Axes,
    DataFrame,
    Figure,
    Judgement,
    Parameters,
    Point,
    Rows,
    house,
    paper,
    plotting,
    where,
)
from repro.studies.common import Lengths, Positive, Seeds, Some, about, check_serving, deployment_of, trace_of
from repro.studies.measured import together

TABLES = {"batches": ("system", "kv_gb", "limit", "seed")}
MODEL = "opt-13b"
#: "existing systems" keep room for the model's longest request, which is what Orca (Max) does
EXISTING, SYSTEMS = "orca-max", ("orca-max", "vllm")


class Params(Parameters):
    limits: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Some]
    kv_gb: Annotated[tuple[Positive, ...], Some]
    rate: Positive
    duration_s: Positive
    seeds: Seeds
    lengths: Lengths

    @model_validator(mode="after")
    def _holds_a_request(self) -> Self:
        for gb in self.kv_gb:
            check_serving(MODEL, "a100-2023", 16, _slots(gb))
        return self


def _slots(kv_gb: float) -> int:
    return int(kv_gb * GIB / deployment_of(MODEL).model.kv_bytes_per_token)


def points(params: Params) -> list[Point]:
    most = max(params.limits)
    runs = [(params.kv_gb[0], limit) for limit in params.limits] + [(gb, most) for gb in params.kv_gb[1:]]
    shared = params.pick("rate", "duration_s", "lengths")
    return [
        Point(batch_at, {"system_name": name, "kv_gb": gb, "limit": limit, "seed": seed, **shared}, "batches")
        for name in SYSTEMS
        for gb, limit in runs
        for seed in params.seeds
    ]


class _TokenRate(Observer):
    """Generated tokens and seconds of the iterations that begin from `start_s` to `stop_s`."""

    def __init__(self, start_s: float, stop_s: float) -> None:
        self.start_s, self.stop_s = start_s, stop_s
        self.tokens = self.seconds = 0.0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        if self.start_s <= start_s < self.stop_s:
            self.tokens += output.num_iterations * (output.num_decode_seqs + len(output.prefills))
            self.seconds += engine.clock.now - start_s


def batch_at(
    system_name: str, kv_gb: float, limit: int, rate: float, duration_s: float, seed: int, lengths: str | None
) -> dict[str, Any]:
    """A saturated run of at most `limit` requests in `kv_gb` GiB: mean batch, memory (GB, weights included) and
    tokens/s.

    The first third of the time, in which the batch fills up with requests that are all young, does not count."""
    deployment = deployment_of(MODEL, _slots(kv_gb))
    trace = trace_of("sharegpt", rate, duration_s, seed, lengths)
    costs = cost_model("a100-2023", deployment)  # Fig. 1 as it is: no anchor
    window = (duration_s / 3, duration_s)
    observers = batch, usage, tokens = BatchAverage(*window), UsageSamples(*window), _TokenRate(*window)
    serve(system(system_name).with_scheduler(max_num_seqs=limit), deployment, trace, costs, observers=observers)
    held = (1 - usage.mean("free")) * usage.samples[0].total * deployment.model.kv_bytes_per_token / GIB
    return {
        "system": system_name,
        "kv_gb": kv_gb,
        "limit": limit,
        "rate": rate,
        **about("replayed", costs.name, seed, trace),
        "batch": batch.mean,
        "memory_gb": paper.figure("table1")[MODEL]["weights_gb"] + held,
        "tokens_per_s": tokens.tokens / tokens.seconds,
    }


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    # The seeds of one limit differ a little in the batch that they reach: one place for all of them.
    shown = rows["batches"]
    shown = shown.assign(batch=shown.groupby(["system", "kv_gb", "limit"])["batch"].transform("mean"))
    grid, full = where(shown, kv_gb=params.kv_gb[0]), where(shown, limit=max(params.limits))
    timed = grid.assign(evidence="modelled").sort_values("system", ascending=False)  # Orca (Max) on top
    theirs = {} if params.another_run else paper.figure("fig1")
    drawn = theirs.get("memory_gb", {})
    memory = {name: drawn[key] for name, key in ((EXISTING, "existing"), ("vllm", "vllm")) if key in drawn}
    speed = {"vllm": theirs["throughput_tok_s"]} if theirs else {}
    figure, axes = plotting.panels(["Memory", "Throughput"], width=4.1, height=3.2)
    plotting.curves(axes[0], grid, "batch", "memory_gb", paper=memory)
    plotting.curves(axes[1], timed, "batch", "tokens_per_s", paper=speed)
    _mark_full(axes[0], full)
    axes[0].axhline(40, color=plotting.GREY, linewidth=0.8)
    axes[0].annotate("the GPU's 40 GB", (0, 40), (3, 3), textcoords="offset points")
    axes[0].set(ylabel="weights and K/V (GB)", ylim=(24, 42))
    last = where(timed, system=EXISTING).groupby("batch")["tokens_per_s"].mean()
    at = {"xytext": (18, -6), "textcoords": "offset points", "arrowprops": {"arrowstyle": "-", "color": "#D55E00"}}
    axes[1].annotate("Orca (Max) ends here:\nits memory is full", (last.index[-1], last.iloc[-1]), va="top", **at)
    axes[1].set(ylabel="tokens/s", ylim=(0, None))
    for axis in axes:
        axis.set(xlabel="batched requests", xlim=(0, 44))
    sizes = ", ".join(f"{gb:g}" for gb in sorted(params.kv_gb))
    more = [plotting.cross(f"memory is full ({sizes} GB of K/V)")]
    plotting.legend(figure, together(grid, timed), with_paper=bool(theirs), more=more)
    note = "A number is the batch at its cross. The throughput is calibrated on the paper's points"
    plotting.footer(figure, grid, with_paper=bool(theirs), note=note)
    return {"fig01_batching": figure}


def _mark_full(axis: Axes, full: DataFrame) -> None:
    """A cross where memory is full for each size of the K/V, with the batch that it holds; equal ones once."""
    for name, group in full.groupby("system"):
        color, numbered = plotting.styles([name])[name].color, ""
        for _, one in group.groupby("kv_gb"):
            x, y = one["batch"].mean(), one["memory_gb"].mean()
            axis.plot(x, y, color=color, zorder=5, **plotting.CROSS)
            if (text := f"{x:.1f}") != numbered:
                axis.annotate(text, (x, y), (7, -10), textcoords="offset points", color=color)
            numbered = text


def judge(rows: Rows, params: Params) -> list[Judgement]:
    full = where(rows["batches"], limit=max(params.limits))
    full = full.groupby(["kv_gb", "system"])["batch"].mean().unstack().rename(columns={EXISTING: "existing"})
    held = [f"{gb:g} GB of K/V hold {row['existing']:.1f} and {row['vllm']:.1f}" for gb, row in full.iterrows()]
    ours, ends = full.loc[params.kv_gb[0]].to_dict(), {name: [full[name].min(), full[name].max()] for name in full}
    return [Judgement("fig1-batch-at-40gb", ours, "replayed", ends, facts={"held": ", ".join(held)})]
