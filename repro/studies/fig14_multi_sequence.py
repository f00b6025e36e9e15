"""Fig. 14: parallel sampling and beam search with 2, 4 and 6 sequences a request, OPT-13B on Alpaca.

vLLM shares what the sequences of a request have in common; the Orcas give each its own chunk, and a beam that continues
another one copies that one's whole chunk, as the authors' do. Everything runs in virtual time as for Fig. 12. With
several sequences it matters how the host's cost divides between a request and its sequences, and what a step of beam
search costs besides; each is calibrated on one crossing (repro/simulate/a100-2023.toml: per_request_ms, beam_step_ms).
Which beams survive is replayed from a recording of a real model (repro.simulate.beams)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import model_validator

from repro.engine.memory import CacheOp, ContiguousKVCacheManager, KVCacheManager
from repro.engine.sequence import SamplingParams, SequenceGroup
from repro.engine.systems import System, system
from repro.harness.experiment import Point
from repro.harness.parameters import Parameters
from repro.report import paper
from repro.report.claims import Judgement
from repro.simulate.beams import recording
from repro.simulate.cost_model import CostModel
from repro.simulate.serve import crossing, serve
from repro.studies.common import (
    check_positive,
    check_seeds,
    check_some,
    check_systems,
    costs_of_samples,
    deployment_of,
    trace_of,
)
from repro.studies.fig15_sharing import check_methods

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

LEVEL = 0.5  # s/token
CALIBRATED = {("parallel/6", "vllm"), ("beam/6", "vllm")}
BASIC = "basic/1"  # one sequence a request: Fig. 12d, which the gain is compared with


class Params(Parameters):
    """`max_seconds` caps the traces (an hour, as the authors'); `beam_seconds` those of beam search, where no two
    iterations are alike and an hour takes long; they have `beam_seeds`. `beams` is a recording's file (default: the
    package's own)."""

    methods: tuple[str, ...]
    widths: tuple[int, ...]
    systems: tuple[str, ...]
    max_seconds: float
    beam_seconds: float
    seeds: tuple[int, ...]
    beam_seeds: tuple[int, ...]
    crossings: bool
    precision: float
    beams: str | None

    @model_validator(mode="after")
    def _possible(self) -> Params:
        check_methods(self.methods)
        check_some("widths", self.widths)
        check_systems(self.systems)
        check_seeds(self.seeds)
        check_seeds(self.beam_seeds)
        for name in ("max_seconds", "beam_seconds", "precision"):
            check_positive(name, getattr(self, name))
        for width in self.widths:
            SamplingParams(n=width, use_beam_search="beam" in self.methods)
            if "beam" in self.methods:
                recording("instruction", self.beams).parents(0, width, 0)
        return self

    @property
    def panels(self) -> list[str]:
        return [f"{method}/{width}" for method in self.methods for width in self.widths]


def drawn_points(panel: str, name: str) -> list[tuple[float, float]]:
    """The paper's points; none for a width or a system that it does not draw."""
    systems = paper.figure("fig14").get(panel, {})
    return paper.points("fig14", panel, name) if name in systems else []


class ChunkCopyingKVCacheManager(ContiguousKVCacheManager):
    """Copies all of a beam's chunk when another beam takes it over, not only the blocks that hold tokens."""

    def fork(self, group: SequenceGroup, parents: list[int], num_tokens: int) -> list[CacheOp]:
        return super().fork(group, parents, len(self.block_table(group.seqs[0])) * self.block_size)


@dataclass(frozen=True)
class ChunkCopyingSystem(System):
    def manager(self, num_blocks: int, block_size: int, max_model_len: int, num_cpu_blocks: int = 0) -> KVCacheManager:
        return ChunkCopyingKVCacheManager(
            num_blocks, block_size, reservation=self.reservation, max_model_len=max_model_len
        )


def _system(panel: str, name: str) -> System:
    known = system(name)
    if known.reservation is None or not panel.startswith("beam"):
        return known
    return ChunkCopyingSystem(known.name, known.label, known.scheduler, known.reservation)


def points(params: Params) -> list[Point]:
    result = []
    for panel in params.panels:
        beam = panel.startswith("beam")
        seconds = min(params.max_seconds, params.beam_seconds) if beam else params.max_seconds
        seeds = params.beam_seeds if beam else params.seeds
        for name in params.systems:
            shared = {"panel": panel, "system": _system(panel, name), "duration_s": seconds, "beams": params.beams}
            start = _start(panel, name)
            cost = seconds * int(panel.partition("/")[2]) * (5 if beam else 1)
            result += [
                Point(latency_at, shared | {"rate": rate, "seed": seed}, weight=rate * cost)
                for rate in _rates(panel, name)
                for seed in seeds
            ]
            if params.crossings:
                variants = [True, False] if beam and name != "vllm" else [True]
                result += [
                    Point(
                        crossing_of,
                        shared | {"start": start, "seed": seed, "precision": params.precision, "copies": copies},
                        weight=8 * start * cost,
                    )
                    for copies in variants
                    for seed in seeds
                ]
    if params.crossings:
        result += [
            Point(
                crossing_of,
                {
                    "panel": BASIC,
                    "system": system(name),
                    "duration_s": params.max_seconds,
                    "beams": None,
                    "start": paper.crossings("fig12", LEVEL)["opt-13b/alpaca"][name],
                    "seed": params.seeds[0],
                    "precision": params.precision,
                    "copies": True,
                },
                weight=200 * params.max_seconds,
            )
            for name in ("orca-oracle", "vllm")
            if name in params.systems
        ]
    return result


def _rates(panel: str, name: str) -> list[float]:
    """The drawn rates; for what is not drawn, those of the systems and the nearest width that are."""
    if drawn := drawn_points(panel, name):
        return [rate for rate, _ in drawn]
    method, _, width = panel.partition("/")
    nearest = min((2, 4, 6), key=lambda known: abs(known - int(width)))
    return sorted(
        {
            rate
            for known in paper.figure("fig14")[f"{method}/{nearest}"]
            for rate, _ in drawn_points(f"{method}/{nearest}", known)
        }
    )


def _start(panel: str, name: str) -> float:
    """Where the search for a crossing begins; its result does not depend on that by more than its precision."""
    return paper.crossings("fig14", LEVEL).get(panel, {}).get(name) or max(_rates(panel, name))


def _latency(
    panel: str, system: System, duration_s: float, rate: float, seed: int, beams: str | None, costs: CostModel
) -> float:
    method, _, width = panel.partition("/")
    sampling = SamplingParams(n=int(width), use_beam_search=method == "beam")
    trace = trace_of("alpaca", rate, duration_s, seed, None)
    return serve(
        system,
        deployment_of("opt-13b"),
        trace,
        costs,
        sampling=sampling,
        beams=recording("instruction", beams) if method == "beam" else None,
    ).latency_s_per_token


def _costs(panel: str, copies: bool = True) -> CostModel:
    costs = costs_of_samples("alpaca", beam_search=panel.startswith("beam"))
    return costs if copies else replace(costs, copy_per_block_s=0.0)


def latency_at(
    panel: str, system: System, duration_s: float, rate: float, seed: int, beams: str | None
) -> dict[str, Any]:
    """One point of a curve: mean normalized latency (s/token) of a trace at `rate` (req/s)."""
    costs = _costs(panel)
    return {
        "part": "latency",
        "panel": panel,
        "system": system.name,
        "rate": rate,
        "seed": seed,
        "copies": True,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": trace_of("alpaca", rate, duration_s, seed, None).hash,
        "latency_s_per_token": _latency(panel, system, duration_s, rate, seed, beams, costs),
    }


def crossing_of(
    panel: str,
    system: System,
    duration_s: float,
    start: float,
    seed: int,
    precision: float,
    beams: str | None,
    copies: bool,
) -> dict[str, Any]:
    """The rate (req/s) at which the system's latency reaches 0.5 s/token; without `copies` copying blocks takes no
    time."""
    costs = _costs(panel, copies)
    rate = crossing(lambda rate: _latency(panel, system, duration_s, rate, seed, beams, costs), start, LEVEL, precision)
    return {
        "part": "crossing",
        "panel": panel,
        "system": system.name,
        "seed": seed,
        "copies": copies,
        "evidence": "modelled",
        "device": costs.name,
        "trace_hash": None,
        "crossing_rate": rate,
    }


def draw(rows: pd.DataFrame, params: Params) -> dict[str, Figure]:
    from repro.report import plotting

    latency = rows[rows["part"] == "latency"]
    with plotting.house():
        curves, axes = plotting.panels(
            [_title(panel) for panel in params.panels], columns=len(params.widths), width=3.6, height=2.6
        )
        for axis, panel in zip(axes, params.panels):
            drawn = {name: found for name in params.systems if (found := drawn_points(panel, name))}
            plotting.curves(axis, latency[latency["panel"] == panel], "rate", "latency_s_per_token", paper=drawn)
            axis.set(ylim=(0, 1.0), xlabel="request rate (req/s)", ylabel="normalized latency (s/token)")
            axis.set_xlim(left=0)
        plotting.legend(curves, latency, with_paper=True)
        plotting.footer(
            curves,
            latency,
            with_paper=True,
            note="Calibrated: the host's cost of a request, on vLLM's crossing with 6 "
            "parallel samples; that of a beam step, on vLLM's with 6 beams",
        )
        figures = {"fig14_multi_sequence": curves}
        if params.crossings and any(panel in paper.figure("fig14") for panel in params.panels):
            figures["fig14_crossings"] = _draw_crossings(rows[rows["part"] == "crossing"], params)
    return figures


def _draw_crossings(found: pd.DataFrame, params: Params) -> Figure:
    from repro.report import plotting

    looks = plotting.styles(params.systems)
    panels = [panel for panel in params.panels if panel in paper.figure("fig14")]
    shown = found[found["panel"].isin(panels)]
    figure, (axis,) = plotting.panels(
        ["Crossing of 0.5 s/token: deviation from the paper's curve"], width=9.0, height=3.4
    )
    axis.axhspan(-20, 20, color="#EEEEEE", zorder=0)
    axis.axhline(0, color="#888888", linewidth=0.8)
    for place, panel in enumerate(panels):
        for index, name in enumerate(params.systems):
            drawn = paper.crossings("fig14", LEVEL)[panel].get(name)
            for copies, here in shown[(shown["panel"] == panel) & (shown["system"] == name)].groupby("copies"):
                if drawn is None:
                    continue
                deviation = 100 * (here["crossing_rate"] / drawn - 1)
                look = dict(color=looks[name].color, marker=looks[name].marker) | (
                    {} if copies else {"markerfacecolor": "none"}
                )
                axis.errorbar(
                    place + (index - (len(params.systems) - 1) / 2) * 0.17 + (0 if copies else 0.05),
                    deviation.mean(),
                    [[deviation.mean() - deviation.min()], [deviation.max() - deviation.mean()]],
                    capsize=2.5,
                    markersize=5.5,
                    linewidth=1.1,
                    **look,
                )
                if (panel, name) in CALIBRATED:
                    axis.annotate(
                        "calibrated",
                        (place + 0.26, deviation.mean()),
                        (0, -13),
                        textcoords="offset points",
                        fontsize=7.5,
                        ha="center",
                    )
    axis.set_xticks(range(len(panels)), [_title(panel).replace(", ", "\n") for panel in panels])
    axis.set_ylabel("ours over the paper's (%)")
    axis.grid(axis="x", visible=False)
    plotting.legend(figure, shown)
    plotting.footer(figure, shown, note="Hollow: copying beams takes no time" if "beam" in params.methods else "")
    return figure


def _title(panel: str) -> str:
    method, _, width = panel.partition("/")
    return f"Parallel sampling, {width} samples" if method == "parallel" else f"Beam search, width {width}"


def judge(rows: pd.DataFrame, params: Params) -> list[Judgement]:
    found = rows[rows["part"] == "crossing"]
    if (
        found.empty
        or params.beams is not None
        or params != replace(Params(), seeds=params.seeds, beam_seeds=params.beam_seeds, methods=params.methods)
    ):
        return []  # short traces saturate later, and a part of the panels is no figure
    charged = found[found["copies"]].groupby(["panel", "system"])["crossing_rate"]
    free = found[~found["copies"].astype(bool)].groupby(["panel", "system"])["crossing_rate"].mean()
    mean, low, high = (dict(getattr(charged, statistic)()) for statistic in ("mean", "min", "max"))

    def table(value: Callable[[tuple[str, str]], Any]) -> dict[str, Any]:
        return {panel: {name: value((panel, name)) for name in params.systems} for panel in params.panels}

    def gain(panel: str, rates: Any = mean) -> float:
        return mean[panel, "vllm"] / rates[panel, "orca-oracle"]

    note = (
        "vLLM's crossings with 6 parallel samples and with 6 beams are the calibrations of per_request_ms and "
        "beam_step_ms, and so no tests of the model."
    )
    gains = {"basic": gain(BASIC)}
    if "beam" in params.methods:
        read = {
            panel: {name: round(float(free[panel, name]), 3) for name in params.systems if name != "vllm"}
            for panel in params.panels
            if panel.startswith("beam")
        }
        drawn = paper.crossings("fig14", LEVEL)
        lost = [
            100 * (1 - drawn[f"beam/{width}"]["orca-oracle"] / drawn[f"parallel/{width}"]["orca-oracle"])
            for width in params.widths
        ]
        note += (
            f" Beams: traces of {params.beam_seconds:g} s. In the paper Orca (Oracle) serves {min(lost):.0f} to "
            f"{max(lost):.0f} % fewer requests with beams than with samples, though both take the same memory, so a "
            "beam step itself cost time there; one constant a step fits vLLM, Oracle and Pow2, none a request or a "
            f"sequence does. If the Orcas' copies took no time: {read}."
        )
        rising = [gain(BASIC), *(gain(f"beam/{width}") for width in params.widths)]
        gains |= {
            "beam-6": gain("beam/6"),
            "rises over basic and beam 2 4 6": all(left < right for left, right in zip(rising, rising[1:])),
        }
        text = ", ".join(f"{value:.2f}" for value in rising)
        gain_note = (
            f"Basic and beam 2, 4, 6: {text}; beam 6 if Oracle's copies took no time: {gain('beam/6', free):.2f}."
        )
    else:
        gain_note = "Parallel 2, 4, 6: " + ", ".join(f"{gain(panel):.2f}" for panel in params.panels) + "."
    widest = {panel: gain(panel) for panel in params.panels if panel.endswith(f"/{max(params.widths)}")}
    return [
        Judgement("fig14-curves", table(mean.get), "modelled", table(lambda key: [low[key], high[key]]), note),
        Judgement("gain-grows-with-sharing", gains, "modelled", note=gain_note),
        Judgement(
            "larger-gains-elsewhere",
            {"more-complex-decoding": min(widest.values()) > gain(BASIC)},
            "modelled",
            note=f"Over Orca (Oracle) on Alpaca: one sequence a request {gain(BASIC):.2f}, "
            + ", ".join(f"{panel} {value:.2f}" for panel, value in widest.items())
            + ".",
        ),
    ]
