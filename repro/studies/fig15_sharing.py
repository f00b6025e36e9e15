"""Fig. 15 and §6.3: the share of K/V blocks that several sequences of one request save by sharing, OPT-13B.

The saving is 1 - physical / logical blocks, a block counting once for each sequence that refers to it; it is sampled
every second of the hour in which requests arrive. Parallel samples share their prompt's blocks only, so their saving is
the prompt's share of the memory: it follows from the lengths, and from how prompt and output lengths go together. Beams
share what they have in common, which depends on the beams that a model keeps: those are replayed from a recording
(repro.simulate.beams)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import model_validator

from repro.engine.errors import UserError
from repro.engine.executor import ParentChoices
from repro.engine.loop import Engine, Observer
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report.claims import Judgement
from repro.simulate.beams import KINDS, Turnover, recording
from repro.simulate.metrics import UsageSamples
from repro.simulate.serve import serve
from repro.studies.common import check_positive, check_seeds, check_some, costs_of_samples, deployment_of, trace_of
from repro.workloads import WORKLOADS, Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METHODS = ("parallel", "beam")
#: Fig. 15 prints its bars' values; §6.3 states 2 and 6 for ShareGPT.
PAPER = {
    ("parallel", "alpaca"): {2: 6.09, 4: 8.53, 6: 9.79},
    ("beam", "alpaca"): {2: 37.56, 4: 53.13, 6: 55.16},
    ("parallel", "sharegpt"): {2: 16.2, 6: 30.5},
    ("beam", "sharegpt"): {2: 44.3, 6: 66.3},
}
AS_DRAWN, INDEPENDENT = "as drawn", "independent"


class Params(Parameters):
    """Rates in req/s: Alpaca's as the authors ran it; ShareGPT's is not stated, 2 req/s is that of Fig. 13. Beams run
    for `beam_seconds`. `turnovers` are shares of beams replaced at a step, made up to show the sensitivity. `beams` is
    a recording's file (default: the package's own); `lengths` a CSV file of pairs in place of ShareGPT's."""

    methods: tuple[str, ...]
    workloads: tuple[str, ...]
    widths: tuple[int, ...]
    rate_alpaca: float
    rate_sharegpt: float
    duration_s: float
    beam_seconds: float
    turnovers: tuple[float, ...]
    seeds: tuple[int, ...]
    beams: str | None
    lengths: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_methods(self.methods)
        check_some("workloads", self.workloads)
        for workload in self.workloads:
            if workload not in WORKLOADS:
                raise UserError(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
        check_some("widths", self.widths)
        for width in self.widths:
            SamplingParams(n=width, use_beam_search="beam" in self.methods)
        for name in ("rate_alpaca", "rate_sharegpt", "duration_s", "beam_seconds"):
            check_positive(name, getattr(self, name))
        check_seeds(self.seeds)
        for share in self.turnovers:
            Turnover(share)
        if "beam" in self.methods:
            for workload in self.workloads:
                for width in self.widths:
                    recording(KINDS[workload], self.beams).parents(0, width, 0)
        return self


def check_methods(methods: tuple[str, ...]) -> None:
    check_some("methods", methods)
    if unknown := set(methods) - set(METHODS):
        raise UserError(f"unknown method {min(unknown)!r}; known: {', '.join(METHODS)}")


def points(params: Params) -> list[Point]:
    result = []
    for method in params.methods:
        for workload in params.workloads:
            seconds = params.duration_s if method == "parallel" else min(params.duration_s, params.beam_seconds)
            shared = {
                "method": method,
                "workload": workload,
                "duration_s": seconds,
                "lengths": params.lengths,
                "rate": params.rate_alpaca if workload == "alpaca" else params.rate_sharegpt,
                "beams": params.beams,
            }
            variants = [(seed, AS_DRAWN, None) for seed in params.seeds] + [(params.seeds[0], INDEPENDENT, None)]
            if method == "beam":
                variants += [(params.seeds[0], AS_DRAWN, share) for share in params.turnovers]
            result += [
                Point(
                    saving,
                    shared | {"width": width, "seed": seed, "dependence": dependence, "turnover": turnover},
                    weight=seconds * width * (1 if method == "parallel" else 5),
                )
                for width in params.widths
                for seed, dependence, turnover in variants
            ]
    return result


class PromptShare(Observer):
    """Share of the stored tokens that are the prompts', counted for each sequence, once a second of `stop_s`."""

    def __init__(self, stop_s: float) -> None:
        self.next_s, self.stop_s = 0.0, stop_s
        self.shares: list[float] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        now = engine.clock.now
        if now < self.next_s:
            return
        stored = list(engine.scheduler.stored_lengths(output.iteration + output.num_iterations - 1))
        if stored:
            self.shares.append(
                sum(group.request.prompt_tokens for group, _ in stored) / sum(tokens for _, tokens in stored)
            )
        self.next_s = np.inf if now + 1 >= self.stop_s else np.floor(now) + 1


def without_dependence(trace: Trace, max_model_len: int) -> Trace:
    """The trace with its outputs dealt out anew, so that a prompt's length says nothing about its output's.

    Where a long prompt meets a long output, the output is cut to what the model takes.
    """
    outputs = np.random.default_rng(0).permutation(trace.output_tokens)
    return replace(trace, output_tokens=np.minimum(outputs, max_model_len - trace.prompt_tokens))


def saving(
    method: str,
    workload: str,
    duration_s: float,
    lengths: str | None,
    rate: float,
    beams: str | None,
    width: int,
    seed: int,
    dependence: str,
    turnover: float | None,
) -> dict[str, Any]:
    """Blocks saved by sharing (%), and the prompts' share of the stored tokens (%)."""
    deployment = deployment_of("opt-13b")
    trace = trace_of(workload, rate, duration_s, seed, lengths)
    if dependence == INDEPENDENT:
        trace = without_dependence(trace, deployment.model.max_model_len)
    choices: ParentChoices | None = None
    if method == "beam":
        choices = recording(KINDS[workload], beams) if turnover is None else Turnover(turnover)
    usage, prompts = UsageSamples(0.0, duration_s), PromptShare(duration_s)
    costs = costs_of_samples(workload, beam_search=method == "beam")
    serve(
        system("vllm"),
        deployment,
        trace,
        costs,
        sampling=SamplingParams(n=width, use_beam_search=method == "beam"),
        observers=(usage, prompts),
        beams=choices,
    )
    return {
        "method": method,
        "workload": workload,
        "width": width,
        "rate": rate,
        "seed": seed,
        "dependence": dependence,
        "turnover": turnover,
        "system": "vllm",
        "evidence": "replayed",
        "device": costs.name,
        "trace_hash": trace.hash,
        "equals_paper_trace": trace.card.equals_paper_trace,
        "saving": 100 * usage.saving,
        "prompt_share": 100 * float(np.mean(prompts.shares)),
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    shown = [(method, workload) for method in params.methods for workload in params.workloads]
    titles = [
        f"{'Parallel sampling' if method == 'parallel' else 'Beam search'}, {_name(workload)}"
        for method, workload in shown
    ]
    with plotting.house():
        figure, axes = plotting.panels(titles, columns=len(params.workloads), width=4.2)
        for axis, (method, workload) in zip(axes, shown):
            _draw_panel(
                axis, rows[(rows["method"] == method) & (rows["workload"] == workload)], PAPER[method, workload], method
            )
        main = rows[(rows["dependence"] == AS_DRAWN) & rows["turnover"].isna()]
        dots = ". Dots: made-up shares of beams replaced at each step" if "beam" in params.methods else ""
        plotting.footer(figure, main, with_paper=True, note=f"Cross: prompt and output lengths independent{dots}")
    return {"fig15_sharing": figure}


def _name(workload: str) -> str:
    return {"alpaca": "Alpaca", "sharegpt": "ShareGPT"}[workload]


def _draw_panel(axis: Axes, rows: pd.DataFrame, printed: dict[int, float], method: str) -> None:
    from repro.report import plotting

    color, widths = plotting.STYLE["vllm"].color, list(dict.fromkeys(rows["width"]))
    # One bar a width; `bars` names its bars by system, so the ticks are set anew.
    main = rows[(rows["dependence"] == AS_DRAWN) & rows["turnover"].isna()]
    for place, width in enumerate(widths):
        values = main[main["width"] == width]["saving"]
        mean = values.mean()
        axis.bar(place - 0.2, mean, 0.38, color=color, alpha=0.75)
        axis.errorbar(
            place - 0.2, mean, [[mean - values.min()], [values.max() - mean]], color="black", linewidth=1, capsize=2.5
        )
        axis.annotate(
            f"{mean:.1f}", (place - 0.2, values.max()), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
        if width in printed:
            axis.bar(place + 0.2, printed[width], 0.38, facecolor="none", edgecolor=color, linewidth=1.3)
            axis.annotate(
                f"{printed[width]:g}",
                (place + 0.2, printed[width]),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color="#555555",
            )
        other = rows[(rows["width"] == width) & (rows["dependence"] == INDEPENDENT)]["saving"]
        axis.plot([place - 0.06] * len(other), other, "x", color="black", markersize=5)
        made_up = rows[(rows["width"] == width) & rows["turnover"].notna()]
        axis.plot([place - 0.34] * len(made_up), made_up["saving"], ".", color="black", markersize=4)
        for share, value in zip(made_up["turnover"], made_up["saving"]):
            axis.annotate(
                f"{share:g}",
                (place - 0.34, value),
                (-3, 0),
                textcoords="offset points",
                fontsize=6.5,
                ha="right",
                va="center",
            )
    axis.set_xticks(range(len(widths)), list(map(str, widths)))
    axis.grid(axis="x", visible=False)
    axis.set(
        xlabel="samples a request" if method == "parallel" else "beam width", ylabel="blocks saved (%)", ylim=(0, None)
    )


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    if params.beams is not None or params != replace(
        Params(), seeds=params.seeds, lengths=params.lengths, methods=params.methods
    ):
        return []  # other parameters than the paper's say nothing about its claims
    main = rows[(rows["dependence"] == AS_DRAWN) & rows["turnover"].isna()]

    def found(
        method: str, workload: str, widths: tuple[int, ...]
    ) -> tuple[dict[int, float], dict[int, list[float]], str]:
        here = main[(main["method"] == method) & (main["workload"] == workload)].groupby("width")["saving"]
        other = rows[(rows["method"] == method) & (rows["workload"] == workload) & (rows["dependence"] == INDEPENDENT)]
        apart = {width: round(value, 1) for width, value in zip(other["width"], other["saving"])}
        note = f"With prompt and output lengths independent: {apart}."
        if method == "beam":
            beams = recording(KINDS[workload])
            replaced = {width: round(beams.replaced_share(width), 2) for width in widths}
            of = f"{beams.manifest['model']}, {KINDS[workload]} prompts"
            note += f" Beams of {of}; share of beams replaced at a step: {replaced}."
        return (
            {width: here.mean()[width] for width in widths},
            {width: [here.min()[width], here.max()[width]] for width in widths},
            note,
        )

    judgements = []
    for method, alpaca, sharegpt in (
        ("parallel", "fig15-parallel-alpaca", "sharing-parallel-sharegpt"),
        ("beam", "fig15-beam-alpaca", "sharing-beam-sharegpt"),
    ):
        if method not in params.methods:
            continue
        ours, spread, note = found(method, "alpaca", params.widths)
        judgements.append(Judgement(alpaca, ours, "replayed", spread, note))
        ends, spread, note = found(method, "sharegpt", (2, 6))
        judgements.append(
            Judgement(
                sharegpt,
                list(ends.values()),
                "replayed",
                list(spread.values()),
                f"At {params.rate_sharegpt:g} req/s; the paper does not state the rate. {note}",
            )
        )
        if method == "beam":
            judgements.append(
                Judgement(
                    "beam-sharing-up-to-55", max(ours.values()), "replayed", note="Recorded beams of a small model."
                )
            )
        else:
            alpaca_rows = main[(main["method"] == method) & (main["workload"] == "alpaca")]
            # n sequences that share s blocks save (n - 1) s.
            blocks = alpaca_rows["saving"] * alpaca_rows["width"] / (alpaca_rows["width"] - 1)
            judgements.append(
                Judgement(
                    "prompt-share-of-kv",
                    blocks.mean(),
                    "replayed",
                    [blocks.min(), blocks.max()],
                    "Full blocks of prompts, as a share of all blocks, Alpaca. Of the tokens "
                    f"{alpaca_rows['prompt_share'].mean():.0f} % are prompts': the last block of a prompt, partly "
                    "filled, is copied when the samples part.",
                )
            )
    return judgements
