"""Fig. 1 (right): memory and throughput against the batch, for a system that reserves 2048 slots a request and for
vLLM.

Every point is a run of its own: so many requests at most, a queue that never empties, and the real scheduler and memory
manager; memory is what the manager holds, averaged over time. Where it does not grow any more, memory is full. Time
comes from the cost model, which this very figure calibrates: the throughput is no test of it.

The figure's GB of K/V are GiB, as everywhere in the paper (1.6 GB a request of 2048 tokens in §3, 12 GB for 15.7K slots
in Table 1), on top of 26 GB of weights. Its lines end at 39 of the GPU's 40 GB, 13 of them K/V; Table 1 has 12."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.config import GIB
from repro.engine.errors import UserError
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.engine.systems import system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.metrics import BatchAverage, UsageSamples
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies.common import check_positive, check_seeds, check_serving, check_some, deployment_of, trace_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MODEL = "opt-13b"
#: "existing systems" keep room for the model's longest request, which is what Orca (Max) does
EXISTING, SYSTEMS = "orca-max", ("orca-max", "vllm")


class Params(Parameters):
    """`limits`: the most requests that may run. `kv_gb` (GiB): pools; the first one is the figure's, the others say how
    many requests they hold. `rate` (req/s) keeps the queue full."""

    limits: tuple[int, ...]
    kv_gb: tuple[float, ...]
    rate: float
    duration_s: float
    seeds: tuple[int, ...]
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_some("limits", self.limits)
        if not all(1 <= limit <= 256 for limit in self.limits):
            raise UserError(f"limits = {list(self.limits)}: a batch has from 1 to 256 requests")
        check_some("kv_gb", self.kv_gb)
        for gb in self.kv_gb:
            check_positive("kv_gb", gb)
            check_serving(MODEL, "a100-2023", 16, _slots(gb))
        check_positive("rate", self.rate)
        check_positive("duration_s", self.duration_s)
        check_seeds(self.seeds)
        return self


def _slots(kv_gb: float) -> int:
    return int(kv_gb * GIB / deployment_of(MODEL).model.kv_bytes_per_token)


def points(params: Params) -> list[Point]:
    most = max(params.limits)
    runs = [(params.kv_gb[0], limit) for limit in params.limits] + [(gb, most) for gb in params.kv_gb[1:]]
    return [
        Point(
            batch_at,
            {
                "system_name": name,
                "kv_gb": gb,
                "limit": limit,
                "rate": params.rate,
                "duration_s": params.duration_s,
                "seed": seed,
                "lengths": params.lengths,
            },
        )
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

    The first third of the time, in which the batch fills up with requests that are all young, does not count.
    """
    deployment = deployment_of(MODEL, _slots(kv_gb))
    trace = trace_of("sharegpt", rate, duration_s, seed, lengths)
    costs = cost_model("a100-2023", deployment)  # Fig. 1 as it is: no anchor
    window = (duration_s / 3, duration_s)
    batch, usage, tokens = BatchAverage(*window), UsageSamples(*window), _TokenRate(*window)
    serve(
        system(system_name).with_scheduler(max_num_seqs=limit),
        deployment,
        trace,
        costs,
        observers=(batch, usage, tokens),
    )
    held = (1 - usage.mean("free")) * usage.samples[0].total * deployment.model.kv_bytes_per_token / GIB
    return {
        "system": system_name,
        "kv_gb": kv_gb,
        "limit": limit,
        "rate": rate,
        "seed": seed,
        "evidence": "replayed",
        "device": costs.name,
        "trace_hash": trace.hash,
        "batch": batch.mean,
        "memory_gb": paper.figure("table1")[MODEL]["weights_gb"] + held,
        "tokens_per_s": tokens.tokens / tokens.seconds,
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    import pandas as pd

    from repro.report import plotting

    # The seeds of one limit differ a little in the batch that they reach: one place for all of them.
    shown = rows.assign(batch=rows.groupby(["system", "kv_gb", "limit"])["batch"].transform("mean"))
    grid, full = shown[shown["kv_gb"] == params.kv_gb[0]], shown[shown["limit"] == max(params.limits)]
    timed = grid.assign(evidence="modelled")
    theirs = paper.figure("fig1")
    memory = {EXISTING: theirs["memory_gb"]["existing"], "vllm": theirs["memory_gb"]["vllm"]}
    with plotting.house():
        figure, axes = plotting.panels(["Memory", "Throughput"], width=4.2, height=3.2)
        plotting.curves(axes[0], grid, "batch", "memory_gb", paper=memory)
        plotting.curves(axes[1], timed, "batch", "tokens_per_s", paper={"vllm": theirs["throughput_tok_s"]})
        _mark_full(axes[0], full, plotting)
        axes[0].axhline(40, color="#888888", linewidth=0.8)
        axes[0].annotate("GPU: 40 GB", (0, 40), (3, 3), textcoords="offset points", fontsize=8)
        axes[0].set(ylabel="weights and K/V (GB)", ylim=(24, 42))
        axes[1].set(ylabel="tokens/s", ylim=(0, None))
        for axis in axes:
            axis.set(xlabel="batched requests", xlim=(0, 43))
        plotting.legend(figure, pd.concat([grid, timed]), with_paper=True)
        plotting.footer(
            figure,
            grid,
            with_paper=True,
            note="Memory is replayed; time is modelled, calibrated on the right panel's points themselves",
        )
    return {"fig01_batching": figure}


def _mark_full(axis: Axes, full: pd.DataFrame, plotting: Any) -> None:
    for (name, _kv_gb), group in full.groupby(["system", "kv_gb"]):
        x, y = group["batch"].mean(), group["memory_gb"].mean()
        axis.plot(x, y, "x", color=plotting.styles([name])[name].color, markersize=8, markeredgewidth=1.6, zorder=5)
        axis.annotate(f"{x:.1f}", (x, y), (6, -10), textcoords="offset points", fontsize=8)


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params != replace(Params(), seeds=params.seeds, lengths=params.lengths):
        return []  # other pools than the paper's say nothing about its claim
    full = rows[rows["limit"] == max(params.limits)].groupby(["kv_gb", "system"])["batch"].mean().unstack()
    keys = {"existing": EXISTING, "vllm": "vllm"}
    others = ", ".join(
        f"{kv_gb:g} GB of K/V hold {row[EXISTING]:.1f} and {row['vllm']:.1f}" for kv_gb, row in full.iterrows()
    )
    return [
        Judgement(
            "fig1-batch-at-40gb",
            {key: full[name][params.kv_gb[0]] for key, name in keys.items()},
            "replayed",
            {key: [full[name].min(), full[name].max()] for key, name in keys.items()},
            note=f"With the 13 GB of K/V at which the figure's lines end. The interval spans what a full GPU may "
            f"mean: {others} (12 GB are Table 1's, 14 leave nothing of the 40 for anything else).",
        )
    ]
