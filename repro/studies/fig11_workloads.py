"""Fig. 11: how long the prompts and outputs of our traces are, beside the paper's own histograms.

Every other experiment replays such traces, so this one shows what they are: the histograms in the paper's 128 bins, the
shares up to each length, and how the output goes with the prompt, which the paper does not print. The rows also carry
each trace's card. Nothing is served here: no system, speed or memory is involved."""

from typing import Any, ClassVar, Self

import numpy as np
from pydantic import model_validator

from repro.studies.base import Axes, DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import WORKLOAD_LABEL, Lengths, Positive, Seeds, about, trace_of
from repro.workloads import WORKLOADS, Trace, check_arrivals
from repro.workloads.fig11 import fig11_data
from repro.workloads.trace import QUANTILES

TABLES = {
    "cards": ("workload", "seed"),
    "prompt_ranges": ("workload", "seed", "prompt_range"),
    "bins": ("workload", "seed", "length", "bin"),
}
#: The paper's word for each length and a colour that no system has.
LENGTHS = {"prompt": ("input", "#5F7A8A"), "output": ("output", "#A0703C")}
_HOLLOW = (
    "Hollow: left the paper's histogram, right measured on the authors' pairs (not known for Alpaca). All of it went "
    "into the embedded distributions but for Spearman's correlation"
)
_DRAWN = 0.995  # of the paper's requests; beyond, the histograms cannot be told from the axis


class Params(Parameters):
    rate: Positive
    duration_s: Positive
    seeds: Seeds
    lengths: Lengths
    free: ClassVar = ("rate", "duration_s", "seeds", "lengths")

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        check_arrivals(self.rate, self.duration_s, self.seeds[0])
        return self


def points(params: Params) -> list[Point]:
    shared = params.pick("rate", "duration_s")
    return [
        Point(lengths_of_trace, {"workload": workload, "seed": seed, "lengths": lengths, **shared})
        for workload in WORKLOADS
        for lengths in [params.lengths if workload == "sharegpt" else None]
        for seed in params.seeds
    ]


def lengths_of_trace(
    workload: str, rate: float, duration_s: float, seed: int, lengths: str | None
) -> dict[str, list[dict[str, Any]]]:
    """A trace's card, the mean output by range of the prompt, and its histograms."""
    trace = trace_of(workload, rate, duration_s, seed, lengths)
    common = {"workload": workload, **about("replayed", seed=seed, trace=trace), "rate": rate, "duration_s": duration_s}
    names = ("prompt_range", "requests", "mean_output_tokens")
    ranges = [dict(zip(names, values)) for values in trace.card.mean_output_by_prompt]
    bins = [*_bins(trace, "prompt"), *_bins(trace, "output")]
    found = {"cards": [_card(trace)], "prompt_ranges": ranges, "bins": bins}
    return {table: [common | row for row in rows] for table, rows in found.items()}


def _card(trace: Trace) -> dict[str, Any]:
    card, source = trace.card, trace.card.source
    levels = [f"p{100 * level:g}" for level in QUANTILES]
    of_card = ("mean_prompt_tokens", "mean_output_tokens", "mean_inverse_output", "rank_correlation")
    of_source = ("dropped_share", "mean_prompt_tokens", "mean_output_tokens")
    return {
        "card": str(card),
        "equals_paper_trace": card.equals_paper_trace,
        **{name: getattr(source, name) for name in ("source", "recipe", "filter")},
        "source_pairs": source.num_pairs,
        **{f"source_{name}": getattr(source, name) for name in of_source},
        "requests": card.num_requests,
        **{name: getattr(card, name) for name in of_card},
        **{f"prompt_{level}": value for level, value in zip(levels, card.prompt_quantiles)},
        **{f"output_{level}": value for level, value in zip(levels, card.output_quantiles)},
    }


def _edges(workload: str, length: str) -> np.ndarray:
    """The 129 edges of the paper's bins, in tokens; a bin holds its left edge, the last one both."""
    histogram = fig11_data()[workload][length]
    return np.linspace(histogram["min_tokens"], histogram["max_tokens"], len(histogram["density"]) + 1)


def _paper_density(workload: str, length: str) -> np.ndarray:
    """The heights of the paper's histogram, scaled by less than 0.01 % so that the area is 1."""
    density = np.array(fig11_data()[workload][length]["density"])
    return density / (density * np.diff(_edges(workload, length))).sum()


def _bins(trace: Trace, length: str) -> list[dict[str, Any]]:
    """`density` is the share of requests per token, `cumulative` that of all requests up to the bin's end.

    Lengths of a user's file that lie outside the paper's bins belong to no bin, but count among the requests."""
    tokens = np.sort(getattr(trace, f"{length}_tokens"))
    edges = _edges(trace.name, length)
    density = np.histogram(tokens, edges)[0] / len(tokens) / np.diff(edges)
    cumulative = np.searchsorted(tokens, edges[1:], side="left") / len(tokens)
    cumulative[-1] = (tokens <= edges[-1]).mean()
    return [
        {"length": length, "bin": number, "density": here, "cumulative": up_to}
        for number, (here, up_to) in enumerate(zip(density.tolist(), cumulative.tolist()))
    ]


def judge(rows: Rows, params: Params) -> list[Judgement]:
    cards = rows["cards"].set_index(["seed", "workload"])
    of = {workload: cards.xs(workload, level="workload") for workload in WORKLOADS}
    means = {workload: card[["mean_prompt_tokens", "mean_output_tokens"]] for workload, card in of.items()}
    ratios = (means["sharegpt"] / means["alpaca"]).set_axis(["input", "output"], axis="columns")
    rebuilt = "rebuilt from this figure's histograms and printed means: what is tested is the rebuilding, not the paper"
    note = f"Both workloads are {rebuilt}."
    if params.lengths is not None:
        are = "are" if of["sharegpt"]["equals_paper_trace"].all() else "are not"
        note = f"ShareGPT's pairs come from a file and {are} those of the paper's trace; Alpaca's are {rebuilt}."
    means_of = {name: mean.mean().tolist() for name, mean in means.items()}
    spread = {name: list(zip(mean.min(), mean.max())) for name, mean in means.items()}
    apart = {name: [ratios[name].min(), ratios[name].max()] for name in ratios}
    return [
        Judgement("fig11-means", means_of, "replayed", spread, note),
        Judgement("fig11-ratios", ratios.mean().to_dict(), "replayed", apart, note),
    ]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    return {"fig11_workloads": _draw_histograms(rows), "fig11_dependence": _draw_dependence(rows)}


def _bins_of(rows: Rows, workload: str, length: str) -> DataFrame:
    return where(rows["bins"], workload=workload, length=length)


def _spread(rows: DataFrame, by: str, value: str) -> DataFrame:
    """Mean, least and most over the seeds, in the order of the rows."""
    return rows.groupby(by, sort=False)[value].agg(["mean", "min", "max"])


def _sources(rows: Rows) -> str:
    own = ", the paper's own pairs"
    return "; ".join(
        f"{WORKLOAD_LABEL[card.workload]}: {card.source}{own if card.equals_paper_trace else ''}"
        for card in rows["cards"].drop_duplicates("workload").itertuples()
    )


def _draw_histograms(rows: Rows) -> Figure:
    panels = [(workload, length) for workload in WORKLOADS for length in LENGTHS]
    titles = [f"{WORKLOAD_LABEL[workload]}, {LENGTHS[length][0]}" for workload, length in panels]
    figure, axes = plotting.panels(titles, columns=2, width=4.2)
    cards = rows["cards"]
    for axis, (workload, length) in zip(axes, panels):
        _draw_bins(axis, _spread(_bins_of(rows, workload, length), "bin", "density"), workload, length)
        means = where(cards, workload=workload)[f"mean_{length}_tokens"]
        span = f" ({means.min():.2f} to {means.max():.2f})" if len(means) > 1 else ""
        printed = fig11_data()[workload][length]["mean_tokens"]
        _write_in_corner(axis, f"mean {means.mean():.2f}{span}\nthe paper's {printed}")
        axis.set(xlabel=f"{LENGTHS[length][0]} length (tokens)", ylabel="requests (% a token)")
    handles = [plotting.swatch(f"{name} length of our traces", color, alpha=0.45) for name, color in LENGTHS.values()]
    plotting.place_legend(figure, [*handles, plotting.key("the paper's histogram", "black", linewidth=0.9)])
    note = f"Outline: the paper's, drawn up to the length that {100 * _DRAWN:g} % of its requests stay below"
    plotting.footer(figure, rows["cards"], note=f"{note}. {_sources(rows)}")
    return figure


def _write_in_corner(axis: Axes, text: str) -> None:
    axis.text(0.97, 0.95, text, transform=axis.transAxes, ha="right", va="top")


def _draw_bins(axis: Axes, ours: DataFrame, workload: str, length: str) -> None:
    edges, paper, color = _edges(workload, length), _paper_density(workload, length), LENGTHS[length][1]
    axis.stairs(100 * ours["mean"], edges, fill=True, color=color, alpha=0.45, linewidth=0)
    axis.stairs(100 * ours["max"], edges, baseline=100 * ours["min"], fill=True, color=color, alpha=0.6, linewidth=0)
    axis.stairs(100 * paper, edges, color="black", linewidth=0.9)
    axis.set_xlim(0, edges[1:][np.cumsum(paper) * np.diff(edges) > _DRAWN][0])


def _draw_dependence(rows: Rows) -> Figure:
    shown = ("shares up to a length", "output by prompt")
    titles = [f"{WORKLOAD_LABEL[workload]}, {what}" for workload in WORKLOADS for what in shown]
    figure, axes = plotting.panels(titles, columns=2, width=4.2)
    for (shares, means), workload in zip(zip(axes[::2], axes[1::2]), WORKLOADS):
        cards, ranges = (where(rows[name], workload=workload) for name in ("cards", "prompt_ranges"))
        for length, (_, color) in LENGTHS.items():
            _draw_shares(shares, _bins_of(rows, workload, length), workload, length, color)
            quantiles = cards[[f"{length}_p{100 * level:g}" for level in QUANTILES]]
            shares.plot(quantiles.mean(), 100 * np.array(QUANTILES), ".", color=color, markersize=6)
        shares.set(xscale="log", ylim=(0, 102), xlabel="length (tokens)", ylabel="requests up to it (%)")
        plotting.log(shares, "x")
        _draw_output_by_prompt(means, ranges[ranges["requests"] > 0], cards, workload)
    handles = [plotting.key(f"{name}, our traces", color, linewidth=1.6) for name, color in LENGTHS.values()]
    handles.append(plotting.key("their quantiles", marker=".", linestyle=""))
    handles.append(plotting.key("the paper's trace", marker="o", linestyle="", markerfacecolor="none"))
    plotting.place_legend(figure, handles)
    plotting.footer(figure, rows["cards"], note=f"{_HOLLOW}. {_sources(rows)}")
    return figure


def _draw_shares(axis: Axes, bins: DataFrame, workload: str, length: str, color: str) -> None:
    edges = _edges(workload, length)
    # An edge closes its bin on the left, so what lies below it are the lengths up to the whole number before.
    ends = np.append(np.ceil(edges[1:-1]) - 1, edges[-1])
    ours = _spread(bins, "bin", "cumulative")
    paper = np.cumsum(_paper_density(workload, length) * np.diff(edges))
    apart = np.unique(np.searchsorted(np.log(ends), np.linspace(np.log(ends[0]), np.log(ends[-1]), 24)))
    axis.fill_between(ends, 100 * ours["min"], 100 * ours["max"], color=color, alpha=0.3, linewidth=0)
    axis.plot(ends, 100 * ours["mean"], color=color, linewidth=1.6)
    axis.plot(ends[apart], 100 * paper[apart], "o", color=color, markerfacecolor="none", markersize=5.5)


def _draw_output_by_prompt(axis: Axes, ranges: DataFrame, cards: DataFrame, workload: str) -> None:
    correlations = cards["rank_correlation"].dropna()
    ours, color = _spread(ranges, "prompt_range", "mean_output_tokens"), LENGTHS["output"][1]
    places = np.arange(len(ours))
    axis.bar(places, ours["mean"], 0.6, color=color, alpha=0.45)
    whiskers = [ours["mean"] - ours["min"], ours["max"] - ours["mean"]]
    axis.errorbar(places, ours["mean"], whiskers, color="black", linewidth=0, elinewidth=1, capsize=2.5)
    known = dict(fig11_data()[workload]["mean_output_by_prompt"])
    if measured := [(place, known[last]) for place, last in zip(places, map(_last_of, ours.index)) if last in known]:
        axis.plot(*zip(*measured), "o", color="black", markerfacecolor="none", markersize=8)
    axis.set_xticks(places, ours.index)
    axis.grid(axis="x", visible=False)
    axis.set(xlabel="prompt length (tokens)", ylabel="mean output (tokens)")
    axis.set_ylim(0, 1.4 * ours["max"].max())
    if len(correlations):
        authors = f"the authors' pairs {fig11_data()[workload]['spearman']:+.3g}"
        _write_in_corner(axis, f"Spearman's correlation {correlations.mean():+.3f}\n{authors}")


def _last_of(prompt_range: str) -> int:
    """The last length of a range as the card names it: 64 of "17-64", the longest there is of "1025+"."""
    return int(prompt_range.partition("-")[2] or fig11_data()["max_model_len"])
