"""What an iteration is charged, and where each coefficient comes from: the calibration behind every modelled figure.

Fig. 1's throughput curve gives the time of a decode iteration; it cannot say how its slope divides between sequences
and context, so three divisions are kept. A prompt costs what its arithmetic takes beyond the pass over the weights, at
an assumed share of the matrix rate. Each panel of Fig. 12 adds one anchor. The datasheets of four GPUs show what a
roofline would promise instead."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from repro.engine.config import DEPLOYMENTS, DEVICES
from repro.engine.scheduler import Prefill, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.simulate.cost_model import CostModel
from repro.simulate.profiles import a100_2023, context_splits, cost_model
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, paper, plotting
from repro.studies.common import Count, Some, about, named

TABLES = {"decode": ("curve", "batch"), "prompt": ("efficiency", "prompt_tokens"), "anchor": ("panel", "split")}

BATCHES = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 64, 96, 128)
SHORT_CONTEXT = 50  # tokens: about what an Alpaca request has on average
PROMPTS = tuple(range(0, 2049, 64))
_BESIDE = {"textcoords": "offset points"}


class Params(Parameters):
    devices: Annotated[tuple[Annotated[str, named("device", DEVICES)], ...], Some]
    context_tokens: Count
    prefill_efficiencies: tuple[float, ...]
    free: ClassVar = ("devices", "context_tokens", "prefill_efficiencies")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for efficiency in self.prefill_efficiencies:
            cost_model("a100-2023", DEPLOYMENTS["opt-13b"], prefill_efficiency=efficiency)
        return self


def points(params: Params) -> list[Point]:
    return [
        Point(decode_times, params.pick("devices", "context_tokens"), "decode"),
        Point(prompt_times, {"efficiencies": params.prefill_efficiencies}, "prompt"),
        Point(anchors, {}, "anchor"),
    ]


def _seconds(costs: CostModel, batch: int = 0, context: int = 0, prompt: int = 0) -> float:
    output = SchedulerOutput(0, num_decode_seqs=batch, context_tokens=batch * context, num_prefill_tokens=prompt)
    group = SequenceGroup(Request(0, 0.0, max(prompt, 1), 1, SamplingParams()))
    output.decodes, output.prefills = [group] * batch, [Prefill(group, prompt, 0)] if prompt else []
    return next(costs.step_times(output))


def decode_times(devices: tuple[str, ...], context_tokens: int) -> list[dict[str, Any]]:
    """Milliseconds of a decode iteration of OPT-13B for each batch: every split of Fig. 1's slope, every datasheet."""
    deployment = DEPLOYMENTS["opt-13b"]
    calibrated = {split: cost_model("a100-2023", deployment, split=split) for split in context_splits()}
    models = {"a100-2023": (calibrated["sequence"], context_tokens)}
    # At Fig. 1's own context all splits agree by construction; with short contexts they part.
    for split, costs in calibrated.items():
        if split != "sequence":
            models[f"a100-2023, slope: {split}, {SHORT_CONTEXT} tokens"] = costs, SHORT_CONTEXT
    for name in devices:
        promised = cost_model("datasheet", replace(deployment, device=DEVICES[name]))
        models[f"datasheet, {name}"] = promised, context_tokens
    return [
        about("modelled", costs.name)
        | {"curve": name, "batch": batch, "milliseconds": 1e3 * _seconds(costs, batch, context)}
        for name, (costs, context) in models.items()
        for batch in BATCHES
    ]


def prompt_times(efficiencies: tuple[float, ...]) -> list[dict[str, Any]]:
    """Milliseconds that a prompt adds to an iteration of OPT-13B with 20 decoding sequences."""
    rows = []
    for efficiency in efficiencies:
        costs = cost_model("a100-2023", DEPLOYMENTS["opt-13b"], prefill_efficiency=efficiency)
        alone = _seconds(costs, 20) + costs.per_seq_s
        for prompt in PROMPTS:
            added = _seconds(costs, 20, prompt=prompt) - alone if prompt else 0.0
            found = {"efficiency": efficiency, "prompt_tokens": prompt, "milliseconds": 1e3 * added}
            rows.append(about("modelled", costs.name) | found)
    return rows


def anchors() -> list[dict[str, Any]]:
    """The anchors (ms) as the profile holds them."""
    costs = cost_model("a100-2023", DEPLOYMENTS["opt-13b"])
    return [
        about("modelled", costs.name) | {"panel": panel, "split": split, "milliseconds": float(value)}
        for panel, values in a100_2023()["anchors_ms"].items()
        for split, value in values.items()
    ]


def fig1_iteration_ms() -> list[tuple[float, float]]:
    """(batch, milliseconds of an iteration) at Fig. 1's drawn points: batch over throughput."""
    return [(batch, 1e3 * batch / rate) for batch, rate in paper.points("fig1", "throughput_tok_s") if batch > 1]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    titles = ["Decode iteration, OPT-13B", "What a prompt adds", "Anchors of Fig. 12's panels"]
    figure, axes = plotting.panels(titles, width=3.7, height=3.2)
    handles = _draw_decode(axes[0], rows["decode"], params)
    _draw_prompts(axes[1], rows["prompt"])
    _draw_anchors(axes[2], rows["anchor"])
    plotting.place_legend(figure, handles)
    note = "Hollow: the paper, batch over throughput at Fig. 1's points; they are the calibration, no test"
    plotting.footer(figure, rows["prompt"], note=note)
    return {"cost_model": figure}


def _draw_decode(axis: Axes, rows: DataFrame, params: Params) -> list[Any]:
    """Returns the legend's entries; the readings of the slope are those of the anchors' panel, too."""
    dots = dict(marker="o", linestyle="", color="black", markersize=7, markerfacecolor="none")
    axis.plot(*zip(*fig1_iteration_ms()), **dots)
    handles = [plotting.key("Fig. 1", **dots)]
    number = {"a100-2023": 0}
    for name, group in rows.groupby("curve", sort=False):
        style = plotting.other(number.setdefault(name, len(number)))
        ours = name.startswith("a100-2023")
        look = plotting.LINE["modelled"] | {"linewidth": 1.9 if ours else 1.2}
        axis.plot(group["batch"], group["milliseconds"], color=style.color, **look)
        name = f"{name}, slope: {context_splits()[0]}" if name == "a100-2023" else name
        handles.append(plotting.key(name, style.color, marker=style.marker if ours else "", **look))
    axis.set(xlabel=f"sequences ({params.context_tokens} tokens each)", ylabel="ms per iteration")
    axis.set(xlim=(0, None), ylim=(0, None))
    return handles


def _draw_prompts(axis: Axes, rows: DataFrame) -> None:
    spread = rows.groupby("prompt_tokens")["milliseconds"].agg(["min", "max"])
    color = plotting.other(0).color
    axis.fill_between(spread.index, spread["min"], spread["max"], color=color, alpha=0.15, linewidth=0)
    for efficiency, group in rows.groupby("efficiency"):
        used = efficiency == a100_2023()["prefill_efficiency"]
        look = plotting.LINE["modelled"] | {"linewidth": 1.9 if used else 0.9}
        axis.plot(group["prompt_tokens"], group["milliseconds"], color=color, **look)
        end = group["prompt_tokens"].iloc[-1], group["milliseconds"].iloc[-1]
        axis.annotate(f"{efficiency:g}" + ("\nin use" if used else ""), end, (4, 0), va="center", **_BESIDE)
    said = "at these shares of\n312 TFLOP/s, which\nare an assumption"
    axis.annotate(said, (0.03, 0.97), xycoords="axes fraction", va="top")
    axis.set(xlabel="prompt tokens in the iteration", ylabel="ms added", ylim=(0, None), xlim=(0, 2600))


def _draw_anchors(axis: Axes, rows: DataFrame) -> None:
    panels = list(dict.fromkeys(rows["panel"]))
    for number, (split, group) in enumerate(rows.groupby("split", sort=False)):
        style, places = plotting.other(number), [panels.index(panel) for panel in group["panel"]]
        axis.plot(group["milliseconds"], places, style.marker, color=style.color, markersize=6.5, zorder=3 - number / 9)
        if split == context_splits()[0]:
            for value, place in zip(group["milliseconds"], places):
                axis.annotate(f"{value:+.2f}", (value, place), (0, 6), ha="center", color=style.color, **_BESIDE)
    names = [panel.replace("opt-", "OPT-").replace("b/", "B\n") for panel in panels]
    names = [name.replace("sharegpt", "ShareGPT").replace("alpaca", "Alpaca") for name in names]
    axis.set_yticks(range(len(panels)), names)
    axis.set(ylim=(len(panels) - 0.5, -0.7), xlabel="ms added to every iteration")
    axis.axvline(0, color=plotting.GREY, linewidth=0.8)
    axis.margins(x=0.1)


def judge(rows: Rows, params: Params) -> list[Judgement]:
    decode = a100_2023()["decode"]
    line = f"{decode['fixed_ms']} ms + {decode['per_seq_ms']} ms x batch"
    return [Judgement("fig1-throughput", line, "modelled")]
