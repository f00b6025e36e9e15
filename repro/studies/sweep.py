"""Sweeps over the request rate: a set-up's latency at given rates, and the rate at which it reaches 0.5 s/token.

Fig. 12, 14, 16 and 17 are such sweeps. Their studies state the set-ups; points, rows (tables `latency` and `crossing`),
drawing and summing up are here. The crossing is bisected on our own curve, so it needs no grid of rates.

The module has `points` and `draw` like a study: of it, a kept result depends on what computed it only. Where the
function of a point is a study's own, the study imports by name what it uses (repro.harness.sources)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from repro.engine.config import Deployment
from repro.engine.executor import ParentChoices
from repro.engine.loop import Observer
from repro.engine.sequence import SamplingParams
from repro.engine.systems import System
from repro.simulate.beams import KINDS, recording
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import context_splits
from repro.simulate.serve import Served, crossing, serve
from repro.studies.base import Axes, DataFrame, Figure, Parameters, Point, paper, plotting
from repro.studies.common import Positive, Seeds, about, costs_of_samples, deployment_of
from repro.workloads import Trace

LEVEL = 0.5  # s/token
TITLE = "Crossing of 0.5 s/token"
#: what draws below a panel's curves, if anything
Under = Callable[["Axes", str], None] | None
#: What the cost model leaves open, beside its anchor: name -> arguments of `cost_model`.
OPEN: dict[str, dict[str, Any]] = {
    **{f"slope: {split}": {"split": split} for split in context_splits()[1:]},
    **{f"prefill: {efficiency}": {"prefill_efficiency": efficiency} for efficiency in (0.3, 1.0)},
    "prefill: shape of the H200": {"prefill_shape": "h200"},
}


class SweepParameters(Parameters):
    """What every sweep has, beside what its study adds."""

    max_seconds: Positive
    seeds: Seeds
    crossings: bool
    precision: Positive


@dataclass(frozen=True)
class Setup:
    """What serves which requests, whatever their rate (req/s).

    `labels` are the columns that tell its rows from those of other set-ups, beside system and seed. `trace` makes the
    requests of a rate, a duration (s) and a seed. `beams` makes what says where beams continue. `facts` are columns
    read off a trace; a crossing has those of the trace at its rate."""

    labels: Mapping[str, Any]
    system: System
    deployment: Deployment
    costs: CostModel
    trace: Callable[..., Trace]
    duration_s: float
    seed: int
    sampling: SamplingParams = SamplingParams()
    beams: Callable[[], ParentChoices] | None = None
    shared_prefix_tokens: int = 0
    facts: Callable[[Trace], Mapping[str, Any]] | None = None

    @property
    def name(self) -> str:
        return " ".join(map(str, (*self.labels.values(), self.system.name, self.seed)))

    @property
    def work(self) -> float:
        """What serving 1 req/s costs, relative to other set-ups; no two steps of beam search are alike."""
        return self.duration_s * self.sampling.n * (5 if self.sampling.use_beam_search else 1)

    def trace_at(self, rate: float) -> Trace:
        return self.trace(rate=rate, duration_s=self.duration_s, seed=self.seed)

    def serve(self, trace: Trace, observers: Iterable[Observer] = ()) -> Served:
        beams = self.beams and self.beams()
        options = {"sampling": self.sampling, "beams": beams, "shared_prefix_tokens": self.shared_prefix_tokens}
        return serve(self.system, self.deployment, trace, self.costs, observers=observers, **options)

    def crossing(self, start: float, precision: float) -> float:
        """The rate (req/s) at which the mean normalized latency reaches 0.5 s/token, searched for from `start`."""
        return crossing(lambda rate: self.serve(self.trace_at(rate)).latency_s_per_token, start, LEVEL, precision)

    def row(self, trace: Trace | None = None, evidence: str = "modelled") -> dict[str, Any]:
        """What its rows say of themselves."""
        facts = self.facts(trace) if self.facts and trace else {}
        return {**self.labels, "system": self.system.name} | about(evidence, self.costs.name, self.seed, trace) | facts


def of_samples(workload: str, method: str, width: int, beams: str | None = None) -> dict[str, Any]:
    """Part of a set-up: OPT-13B with `width` sequences a request, samples ("parallel") or beams ("beam"), the latter
    replayed from a recording (a file, by default the package's own)."""
    beam = method == "beam"
    return {
        "deployment": deployment_of("opt-13b"),
        "costs": costs_of_samples(workload, beam_search=beam),
        "sampling": SamplingParams(n=width, use_beam_search=beam),
        "beams": partial(recording, KINDS[workload], beams) if beam else None,
    }


def latency_at(setup: Setup, rate: float, observers: Iterable[Observer] = ()) -> dict[str, Any]:
    """One point of a curve: mean normalized latency (s/token) at `rate` (req/s)."""
    trace = setup.trace_at(rate)
    served = setup.serve(trace, observers)
    return {
        **setup.row(trace),
        "rate": rate,
        "requests": len(trace),
        "latency_s_per_token": served.latency_s_per_token,
        "preemptions": served.engine.scheduler.num_preemptions,
    }


def crossing_of(setup: Setup, start: float, precision: float) -> dict[str, Any]:
    """The rate (req/s) at which the latency reaches 0.5 s/token, on traces of one seed."""
    rate = setup.crossing(start, precision)
    return {**setup.row(setup.trace_at(rate) if setup.facts else None), "crossing_rate": rate}


def points(setups: Sequence[Setup], rates: Iterable[float], at: Callable[..., Any] = latency_at) -> list[Point]:
    """A curve: every set-up at every rate (req/s)."""
    return [
        Point(at, {"setup": setup, "rate": rate}, "latency", weight=rate * setup.work)
        for rate in rates
        for setup in setups
    ]


def crossings(
    setups: Iterable[Setup], start: float, precision: float, of: Callable[..., Any] = crossing_of
) -> list[Point]:
    """The crossing of every set-up, searched for from `start` (req/s)."""
    shared = {"start": start, "precision": precision}
    return [Point(of, {"setup": setup, **shared}, "crossing", weight=8 * start * setup.work) for setup in setups]


def drawn(figure: str, panel: str, systems: Iterable[str]) -> dict[str, list[paper.Point]]:
    """System -> the paper's points in a panel, of those systems that it draws."""
    known = paper.figure(figure).get(panel, {})
    return {name: paper.points(figure, panel, name) for name in systems if name in known}


def rates(figure: str, panel: str, name: str, instead: str | None = None) -> list[float]:
    """The rates that the paper draws for a system; without any, those of all systems in this panel or in `instead`."""
    if found := drawn(figure, panel, [name]):
        return list(dict.fromkeys(rate for rate, _ in found[name]))
    curves = paper.figure(figure)[instead or panel]
    return sorted({rate for points in drawn(figure, instead or panel, curves).values() for rate, _ in points})


def draw_curves(axis: Axes, latency: DataFrame, theirs: Mapping[str, list[paper.Point]]) -> None:
    """One panel of latency curves, up to 1 s/token, with the paper's points."""
    plotting.curves(axis, latency, "rate", "latency_s_per_token", paper=theirs)
    axis.axhline(LEVEL, color=plotting.GREY, linewidth=0.7)
    axis.set(xlabel="request rate (req/s)", ylabel="latency (s/token)", xlim=(0, None), ylim=(0.02, 1.15))
    plotting.log(axis)


def draw_panels(
    latency: DataFrame,
    figure: str,
    titles: Mapping[str, str],
    columns: int,
    note: str,
    with_paper: bool,
    under: Under = None,
    more: Iterable[Any] = (),
) -> Figure:
    """The latency curves of a figure, panel by panel (`titles`: panel -> title); `under` draws what lies below them,
    `more` are the legend's entries for it."""
    drawing, axes = plotting.panels(list(titles.values()), columns=columns, width=3.3, height=2.5)
    for axis, panel in zip(axes, titles):
        if under:
            under(axis, panel)
        here = latency[latency["panel"] == panel]
        draw_curves(axis, here, drawn(figure, panel, dict.fromkeys(here["system"])) if with_paper else {})
    plotting.legend(drawing, latency, with_paper=with_paper, more=[*plotting.seeds_band(latency), *more])
    plotting.footer(drawing, latency, with_paper=with_paper, note=note)
    return drawing


def draw(
    found: DataFrame,
    figure: str,
    titles: Mapping[str, str],
    within: float,
    step: float,
    note: str,
    crosses: str = "",
    readings: Mapping[tuple[str, str], float] | None = None,
    calibrated: Iterable[tuple[str, str]] = (),
    traced: Mapping[tuple[str, str], float] | None = None,
) -> Figure:
    """How far our crossings lie from the paper's (%), by panel (`titles`: panel -> title) and system, `step` apart.

    The band is what lies `within` (%). `crosses` says what the crosses are: `readings` by panel and system, or rows
    whose `copies` is false. Black: `traced` by panel and system."""
    theirs = paper.crossings(figure, LEVEL)
    shown = found[[name in theirs.get(panel, {}) for panel, name in zip(found["panel"], found["system"])]]
    looks, panels = plotting.styles(shown["system"]), list(dict.fromkeys(shown["panel"]))
    drawing, (axis,) = plotting.panels([f"{TITLE}: ours over the paper's"], width=9.0, height=3.6)
    plotting.band(axis, -within, within, f"within {within:g} %")
    axis.axhline(0, color=plotting.GREY, linewidth=0.8)
    for place, panel in enumerate(panels):
        for index, (name, style) in enumerate(looks.items()):
            drawn_rate, x = theirs[panel][name], place + (index - (len(looks) - 1) / 2) * step
            rows = shown[(shown["panel"] == panel) & (shown["system"] == name)]
            other = None if readings is None else readings.get((panel, name))
            if "copies" in rows:
                free, rows = rows[~rows["copies"]], rows[rows["copies"]]
                other = free["crossing_rate"].mean() if len(free) else None
            off = 100 * (rows["crossing_rate"] / drawn_rate - 1)
            plotting.whisker(axis, x, off)
            axis.plot(x, off.mean(), style.marker, color=style.color, markersize=6.5)
            if (panel, name) in calibrated:
                axis.annotate(
                    "calibrated", (x, off.mean()), (10, -7), textcoords="offset points", ha="center", va="top"
                )
            if other is not None:
                axis.plot(x + 0.4 * step, 100 * (other / drawn_rate - 1), color=style.color, **plotting.CROSS)
            if traced and (panel, name) in traced:
                axis.plot(x, 100 * (traced[panel, name] / drawn_rate - 1), "_", color="black", markersize=9, zorder=5)
    axis.set_xticks(range(len(panels)), [titles[panel].replace(", ", "\n") for panel in panels])
    axis.set(ylabel="deviation of the rate (%)", xlim=(-0.6, len(panels) - 0.25))
    axis.grid(axis="x", visible=False)
    more = [plotting.cross(crosses)] if crosses else []
    if traced:
        more.append(plotting.key("on the authors' own trace", "black", marker="_", linestyle="", markersize=9))
    plotting.legend(drawing, shown, more=more)
    plotting.footer(drawing, shown, note=note)
    return drawing


def spread(found: DataFrame, *by: str, of: str = "crossing_rate") -> tuple[dict[Any, float], dict[Any, list[float]]]:
    """The means over seeds of a column by some others, and [least, most]."""
    groups = found.groupby(list(by) if len(by) > 1 else by[0])[of]
    mean, low, high = (dict(getattr(groups, statistic)()) for statistic in ("mean", "min", "max"))
    return mean, {key: [low[key], high[key]] for key in mean}
