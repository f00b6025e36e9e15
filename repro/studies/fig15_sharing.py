"""Fig. 15 and §6.3: the share of K/V blocks that several sequences of one request save by sharing, OPT-13B.

The saving is 1 - physical / logical blocks, a block counting once for each sequence that refers to it: as the authors
plot it, 1 - 1 / the mean of logical / physical, here of samples a second apart in the window of their script. Parallel
samples share their prompt's blocks only, so their saving is the prompt's share of the memory: it follows from the
lengths, and from how prompt and output lengths go together. Beams share what they have in common, which depends on the
beams that a model keeps: those are replayed from a recording (repro.simulate.beams)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.simulate.beams import KINDS, Turnover, recording
from repro.simulate.metrics import UsageSamples
from repro.studies import sweep
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting
from repro.studies.common import (
    WORKLOAD_LABEL,
    Lengths,
    Positive,
    Seeds,
    Some,
    Window,
    Workloads,
    about,
    deployment_of,
    trace_of,
)
from repro.studies.sweep import Setup
from repro.workloads import Trace

TABLES = {
    "saving": ("method", "workload", "width", "seed", "dependence", "turnover"),
    "turnover": ("kind", "width", "from_step"),
}
#: kinds of recorded prompts -> what they are called; how many steps of a recording are averaged
PROMPTS = {"instruction": "Instructions (stand for Alpaca)", "chat": "Chat (stands for ShareGPT)", "text": "Plain text"}
BIN = 128
#: ways to have several sequences a request -> label
METHODS = {"parallel": "Parallel sampling", "beam": "Beam search"}
Methods = Annotated[tuple[Literal["parallel", "beam"], ...], Some]
Widths = Annotated[tuple[int, ...], Some]
#: Fig. 15 prints its bars' values; §6.3 states 2 and 6 for ShareGPT.
PAPER = {
    ("parallel", "alpaca"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("beam", "alpaca"): {2: 37.56, 4: 53.13, 6: 55.16},
    ("parallel", "sharegpt"): {2: 16.2, 6: 30.5},
    ("beam", "sharegpt"): {2: 44.3, 6: 66.3},
}
AS_DRAWN, INDEPENDENT = "as drawn", "independent"


class Params(Parameters):
    methods: Methods
    workloads: Workloads
    widths: Widths
    rate_alpaca: Positive
    rate_sharegpt: Positive
    window_s: Window
    turnovers: tuple[float, ...]
    seeds: Seeds
    beams: str | None
    lengths: Lengths
    free: ClassVar = ("seeds", "lengths", "methods")

    @model_validator(mode="after")
    def _recorded(self) -> Params:
        check_samples(self.methods, self.workloads, self.widths, self.beams)
        for share in self.turnovers:
            Turnover(share)
        return self


def check_samples(methods: Iterable[str], workloads: Iterable[str], widths: Iterable[int], beams: str | None) -> None:
    """UserError for a number of sequences that no request can have, or whose beams the recording does not have."""
    for method in methods:
        for width in widths:
            SamplingParams(n=width, use_beam_search=method == "beam")
            for workload in workloads if method == "beam" else ():
                recording(KINDS[workload], beams).parents(0, width, 0)


def points(params: Params) -> list[Point]:
    result = []
    for method in params.methods:
        for workload in params.workloads:
            rate = params.rate_alpaca if workload == "alpaca" else params.rate_sharegpt
            variants = [(seed, AS_DRAWN, None) for seed in params.seeds] + [(params.seeds[0], INDEPENDENT, None)]
            if method == "beam":
                variants += [(params.seeds[0], AS_DRAWN, share) for share in params.turnovers]
            setups = [
                setup_of(method, workload, width, params.window_s[1], *variant, params.lengths, params.beams)
                for width in params.widths
                for variant in variants
            ]
            run = {"rate": rate, "from_s": params.window_s[0]}
            result += [Point(saving, {"setup": each, **run}, "saving", weight=each.work) for each in setups]
    if "beam" in params.methods:
        result.append(Point(turnover, {"widths": params.widths, "beams": params.beams}, "turnover"))
    return result


def setup_of(
    method: str,
    workload: str,
    width: int,
    duration_s: float,
    seed: int,
    dependence: str = AS_DRAWN,
    turnover: float | None = None,
    lengths: str | None = None,
    beams: str | None = None,
) -> Setup:
    """vLLM with `width` sequences a request; with a `turnover`, made-up beams take the place of recorded ones."""
    chosen = Setup(
        {"method": method, "workload": workload, "width": width, "dependence": dependence, "turnover": turnover},
        system("vllm"),
        trace=partial(trace_of if dependence == AS_DRAWN else independent_trace, workload, lengths=lengths),
        duration_s=duration_s,
        seed=seed,
        **sweep.of_samples(workload, method, width, beams),
    )
    return chosen if turnover is None else replace(chosen, beams=partial(Turnover, turnover))


class PromptShare(Observer):
    """Share of the stored tokens that are the prompts', counted for each sequence, once a second of the window."""

    def __init__(self, start_s: float, stop_s: float) -> None:
        self.next_s, self.stop_s = start_s, stop_s
        self.shares: list[float] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = engine.clock.now
        if now < self.next_s:
            return
        stored = list(engine.scheduler.stored_lengths(output.iteration + output.num_iterations - 1))
        if stored:
            prompts = sum(group.request.prompt_tokens for group, _ in stored)
            self.shares.append(prompts / sum(tokens for _, tokens in stored))
        self.next_s = np.inf if now + 1 >= self.stop_s else np.floor(now) + 1


def independent_trace(workload: str, rate: float, duration_s: float, seed: int, lengths: str | None) -> Trace:
    """A trace whose outputs are dealt out anew, so that a prompt's length says nothing about its output's. An output is
    cut to what the model takes."""
    trace = trace_of(workload, rate, duration_s, seed, lengths)
    outputs = np.random.default_rng(0).permutation(trace.output_tokens)
    longest = deployment_of("opt-13b").model.max_model_len
    return replace(trace, output_tokens=np.minimum(outputs, longest - trace.prompt_tokens))


def saving(setup: Setup, rate: float, from_s: float) -> dict[str, Any]:
    """Blocks saved by sharing (%), and the prompts' share of the stored tokens (%), from `from_s` on while requests
    arrive."""
    trace = setup.trace_at(rate)
    usage, prompts = (watch(from_s, setup.duration_s) for watch in (UsageSamples, PromptShare))
    setup.serve(trace, (usage, prompts))
    logical = [sample.logical_blocks / sample.physical_blocks for sample in usage.samples if sample.physical_blocks]
    return {
        **setup.row(trace, "replayed"),
        "rate": rate,
        "equals_paper_trace": trace.card.equals_paper_trace,
        "saving": 100 * (1 - 1 / float(np.mean(logical))),
        "prompt_share": 100 * float(np.mean(prompts.shares)),
    }


def turnover(widths: Iterable[int], beams: str | None) -> list[dict[str, Any]]:
    """Share of the recorded beams (%) that end at a step and are replaced, by kind of prompt, in bins of steps."""
    rows = []
    for kind, width in product(PROMPTS, widths):
        whole = recording(kind, beams)
        length = len(whole.texts[width][0]) // width
        for start in range(0, length, BIN):
            cut = slice(start * width, (start + BIN) * width)
            part = replace(whole, texts={width: [text[cut] for text in whole.texts[width]]})
            row = {"kind": kind, "width": width, "from_step": start, "replaced": 100 * part.replaced_share(width)}
            rows.append(row | about("recorded", whole.manifest["device"]))
    return rows


def recorded(rows: DataFrame) -> DataFrame:
    """The rows whose lengths are as drawn and whose beams are not made up."""
    return rows[(rows["dependence"] == AS_DRAWN) & rows["turnover"].isna()]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    found, with_paper = rows["saving"], not params.another_run
    shown = [(method, workload) for method in params.methods for workload in params.workloads]
    titles = [f"{METHODS[method]}, {WORKLOAD_LABEL[workload]}" for method, workload in shown]
    figure, axes = plotting.panels(titles, columns=len(params.workloads), width=4.0)
    for axis, (method, workload) in zip(axes, shown):
        here = found[(found["method"] == method) & (found["workload"] == workload)]
        _draw_panel(axis, here, method, PAPER[method, workload] if with_paper else {})
    handles = [plotting.swatch(METHODS[method], plotting.WAYS[method].color) for method in params.methods]
    handles += [plotting.paper_bar()] * with_paper
    handles.append(plotting.cross("if prompts and outputs were independent"))
    shares = sorted(found["turnover"].dropna().unique())
    handles += [plotting.key(f"made-up beams, {share:g} replaced", **look) for share, look in zip(shares, MADE_UP)]
    plotting.place_legend(figure, handles)
    note = "Made-up: so many of the beams replaced at each step"
    plotting.footer(figure, recorded(found), with_paper=with_paper, note=note if shares else "")
    figures = {"fig15_sharing": figure}
    return figures | ({"fig15_turnover": _draw_turnover(rows["turnover"])} if len(rows["turnover"]) else {})


def _draw_turnover(rows: DataFrame) -> Figure:
    kinds, widths = list(dict.fromkeys(rows["kind"])), list(dict.fromkeys(rows["width"]))
    figure, axes = plotting.panels([PROMPTS[kind] for kind in kinds], columns=len(kinds), width=3.4)
    looks = {width: plotting.other(place) for place, width in enumerate(widths)}
    for axis, kind in zip(axes, kinds):
        for width, found in rows[rows["kind"] == kind].groupby("width"):
            look = {"color": looks[width].color, "marker": looks[width].marker, "markersize": 4.5}
            axis.plot(found["from_step"] + BIN / 2, found["replaced"], linewidth=1.6, **look)
        axis.set(
            xlabel="step of the search", ylabel="beams replaced at a step (%)", ylim=(0, 1.08 * rows["replaced"].max())
        )
    keys = [plotting.key(f"{width} beams", looks[width].color, marker=looks[width].marker) for width in widths]
    plotting.place_legend(figure, keys)
    plotting.footer(figure, rows, note=f"Each point is the mean of {BIN} steps and all prompts of its kind")
    return figure


#: how the made-up beams are drawn, from the smallest share that is replaced
MADE_UP = [{"marker": marker, "linestyle": "", "color": "black", "markersize": 4.5} for marker in "v_^"]


def _draw_panel(axis: Axes, rows: DataFrame, method: str, printed: dict[int, float]) -> None:
    color, widths = plotting.WAYS[method].color, list(dict.fromkeys(rows["width"]))
    for place, width in enumerate(widths):
        here = rows[rows["width"] == width]
        ours = recorded(here)["saving"]
        plotting.pair(axis, place, ours, "replayed", color, printed.get(width), alone=not printed)
        if printed and width not in printed:
            text = {"ha": "center", "va": "bottom", "color": plotting.GREY}
            axis.annotate("not\nstated", (place + 0.2, 0), (0, 3), textcoords="offset points", **text)
        other, made_up = here[here["dependence"] == INDEPENDENT]["saving"], here[here["turnover"].notna()]
        axis.plot([place - 0.32] * len(other), other, color="black", **plotting.CROSS)
        for look, (_, beams) in zip(MADE_UP, made_up.sort_values("turnover").groupby("turnover")):
            axis.plot([place - 0.45] * len(beams), beams["saving"], **look)
    axis.set_xticks(range(len(widths)), list(map(str, widths)))
    axis.grid(axis="x", visible=False)
    counted = {"parallel": "samples a request", "beam": "beam width"}
    axis.set(xlabel=counted[method], ylabel="blocks saved (%)", ylim=(0, None))


def judge(rows: Rows, params: Params) -> list[Judgement]:
    judgements = []
    for method in params.methods:
        of_method = rows["saving"][rows["saving"]["method"] == method]
        for workload, widths in (("alpaca", params.widths), ("sharegpt", (2, 6))):
            here = of_method[of_method["workload"] == workload]
            ours, ends = (
                {width: values[width] for width in widths}
                for values in sweep.spread(recorded(here), "width", of="saving")
            )
            other, beams = here[here["dependence"] == INDEPENDENT], recording(KINDS[workload])
            facts = {
                "apart": {width: round(value, 1) for width, value in zip(other["width"], other["saving"])},
                "rate": params.rate_sharegpt,
                "beams": f"{beams.manifest['model']}, {KINDS[workload]} prompts",
                "replaced": {width: round(beams.replaced_share(width), 2) for width in widths},
            }
            claim = f"fig15-{method}-alpaca"
            if workload == "sharegpt":
                claim, ours, ends = f"sharing-{method}-sharegpt", list(ours.values()), list(ends.values())
            judgements.append(Judgement(claim, ours, "replayed", ends, facts=facts))
        alpaca = recorded(of_method[of_method["workload"] == "alpaca"])
        if method == "beam":
            means = alpaca.groupby("width")["saving"].mean()
            judgements.append(Judgement("beam-sharing-up-to-55", means.max(), "replayed"))
        else:
            # n sequences that share s blocks save (n - 1) s.
            blocks = alpaca["saving"] * alpaca["width"] / (alpaca["width"] - 1)
            ends, facts = [blocks.min(), blocks.max()], {"tokens": alpaca["prompt_share"].mean()}
            judgements.append(Judgement("prompt-share-of-kv", blocks.mean(), "replayed", ends, facts=facts))
    return judgements
