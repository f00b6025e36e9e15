"""Fig. 14 to 16 measured on a GPU: saturated throughput with several sequences a request, and with a shared prefix."""

from pathlib import Path
from typing import Any

from repro.bench import kept
from repro.engine.systems import OF_THE_PAPER
from repro.harness.tables import ABOUT
from repro.simulate.beams import WIDTHS
from repro.studies import measured as shared
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Point, Rows, house, paper, plotting
from repro.studies.fig15_sharing import METHODS, PAPER
from repro.studies.fig16_shared_prefix import PANELS
from repro.studies.measured import INTERVAL, Measured

TABLES = {"sharing": ("method", "n", "system"), "prefix": ("prefix_tokens", "system")}
BASIC = 1  # one sequence a request: Alpaca's saturated runs of fig12_measured
SPEED = (*INTERVAL, "mean_batch", "saving", "host_share", "mark", "preemptions")
COLUMNS = ("system", "n", "prefix_tokens", *SPEED, "model", "kv_slots", *ABOUT)

Params = Measured


def points(params: Params) -> list[Point]:
    return [Point(measured, kept.runs(params.gpu, "sharing"))]


def measured(path: Path, evidence: str) -> dict[str, list[dict[str, Any]]]:
    """The runs that this study draws. One sequence a request belongs to both ways of decoding."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for row in shared.runs(path, evidence, ("sharing", "prefix", "saturated")):
        run = shared.columns(row, COLUMNS)
        if row["kind"] == "prefix":
            tables["prefix"].append(run)
        elif row["kind"] == "sharing":
            tables["sharing"].append({"method": "beam" if row["beams"] else "parallel", **run})
        elif row["workload"] == "alpaca" and row["n"] == BASIC and row["system"] != "faster-transformer":
            tables["sharing"] += [{"method": method, **run} for method in METHODS]
    return tables


def gains(rows: DataFrame, method: str) -> dict[int, tuple[float, float]]:
    """sequences a request -> how many times what Orca (Oracle) delivers vLLM does, plus or minus."""
    groups = rows[rows["method"] == method].groupby("n")
    return {int(n): found for n, group in groups if (found := shared.multiple_of(group, "orca-oracle"))}


def paper_gains(method: str) -> dict[int, float]:
    """The same from the rates of Fig. 14 at 0.5 s/token, and of Fig. 12d for one sequence."""
    panels = {BASIC: paper.crossings("fig12", 0.5)["opt-13b/alpaca"]}
    panels |= {n: paper.crossings("fig14", 0.5)[f"{method}/{n}"] for n in WIDTHS}
    return {n: rates["vllm"] / rates["orca-oracle"] for n, rates in panels.items()}


def paper_prefix_gain(prefix: int) -> float:
    """The same from the curves of Fig. 16 at 0.5 s/token (its text says 1.67 and 3.58)."""
    rates = paper.crossings("fig16", 0.5)[PANELS[prefix]]
    return rates["vllm"] / rates["orca-oracle"]


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    sharing, looks = rows["sharing"], plotting.styles(OF_THE_PAPER)
    titles = [*(METHODS[method] for method in METHODS), "vLLM over Orca (Oracle)"]
    throughput, axes = plotting.panels(titles, width=3.6, height=3.1)
    for axis, method in zip(axes, METHODS):
        chosen = sharing[sharing["method"] == method]
        for _, row in chosen.iterrows():
            axis.plot([row["n"]] * 2, row[[*INTERVAL[1:]]], color=looks[row["system"]].color, linewidth=1)
        plotting.curves(axis, chosen, "n", "tokens_per_s")
        axis.set(xlabel="sequences a request", ylim=(0, None))
        shared.label_rates(axis)
    more = _draw_gains(axes[2], sharing)
    for axis in axes:
        axis.set_xticks([BASIC, *WIDTHS])
    plotting.legend(throughput, sharing, with_paper=True, more=more)
    steady = shared.steadiness(sharing, "{system} {method} {n:.0f}: {mark}")
    note = "Hollow: the paper's ratio of rates at 0.5 s/token. Whiskers: 95 % interval from five parts of the run"
    plotting.footer(throughput, sharing, note=f"{note}. {steady}")
    titles = ["Blocks saved by sharing", "A shared prefix: throughput"]
    saving, axes = plotting.panels(titles, width=5.0, height=3.1)
    handles = _draw_saving(axes[0], sharing[(sharing["system"] == "vllm") & (sharing["n"] > BASIC)])
    handles += _draw_prefix(axes[1], rows["prefix"])
    plotting.place_legend(saving, handles)
    everything = shared.together(sharing, rows["prefix"])
    note = "Right: vLLM's multiple of Orca (Oracle), and Fig. 16's ratio of rates. Whiskers and ±: 95 % interval"
    plotting.footer(saving, everything, note=note)
    return {"fig14_measured": throughput, "fig15_measured": saving}


def _draw_gains(axis: Axes, rows: DataFrame) -> list[Any]:
    """Returns the legend's entries for the ways to decode."""
    handles, evidence = [], rows["evidence"].iloc[0]
    for shift, method in zip((-0.06, 0.06), METHODS):  # or the whiskers of one hide those of the other
        look = dict(color=plotting.WAYS[method].color, marker=plotting.WAYS[method].marker)
        ours, theirs = gains(rows, method), paper_gains(method)
        ratios, off = ([found[part] for found in ours.values()] for part in (0, 1))
        axis.errorbar(
            [n + shift for n in ours], ratios, off, capsize=2.5, elinewidth=1, **look, **plotting.LINE[evidence]
        )
        axis.plot(list(theirs), list(theirs.values()), **look, **plotting.PAPER)
        handles.append(plotting.key(f"right: {METHODS[method].lower()}", **look, **plotting.LINE[evidence]))
    axis.axhline(1, color=plotting.GREY, linewidth=0.8)
    axis.annotate("equal", (WIDTHS[-1], 1), (0, -3), textcoords="offset points", ha="right", va="top")
    axis.set(xlabel="sequences a request", ylabel="ratio of throughputs", ylim=(0, None))
    return handles


def _draw_saving(axis: Axes, rows: DataFrame) -> list[Any]:
    """Returns the legend's entries for the ways to decode and the paper's bars."""
    names, handles = {}, []
    for place, method in enumerate(METHODS):
        color = plotting.WAYS[method].color
        for index, (n, group) in enumerate(rows[rows["method"] == method].groupby("n")):
            x, drawn = 3.6 * place + index, PAPER[method, "alpaca"].get(int(n))
            plotting.pair(axis, x, 100 * group["saving"], group["evidence"].iloc[0], color, drawn)
            names[x] = f"{n:.0f}"
        handles.append(plotting.swatch(METHODS[method], color))
    axis.set_xticks(list(names), list(names.values()))
    axis.set(xlabel="sequences a request", ylabel="% of blocks")
    axis.grid(axis="x", visible=False)
    return [*handles, plotting.paper_bar()]


def _draw_prefix(axis: Axes, rows: DataFrame) -> list[Any]:
    """Returns the legend's entries for the systems."""
    looks, prefixes = plotting.styles(OF_THE_PAPER), sorted(rows["prefix_tokens"].unique())
    shared.label_rates(axis)
    axis.grid(axis="x", visible=False)
    if not prefixes:
        shared.not_measured(axis)
    for place, prefix in enumerate(prefixes):
        here = rows[rows["prefix_tokens"] == prefix]
        for index, (system, group) in enumerate(here.groupby("system", sort=False)):
            shared.throughput_bar(axis, group, place + 0.4 * index - 0.2, 0.38, color=looks[system].color)
        if found := shared.multiple_of(here, "orca-oracle"):
            text = f"×{found[0]:.2f} ± {found[1]:.2f}\npaper ×{paper_prefix_gain(int(prefix)):.2f}"
            at = place + 0.2, here["tokens_per_s_high"].max()
            axis.annotate(text, at, ha="center", va="top", fontsize=9)
    axis.set_xticks(range(len(prefixes)), [f"prefix of {prefix:.0f} tokens" for prefix in prefixes])
    return [plotting.swatch(plotting.label(system), looks[system].color) for system in dict.fromkeys(rows["system"])]


def judge(rows: Rows, params: Params) -> list[Judgement]:
    sharing, prefix = rows["sharing"], rows["prefix"]
    vllm = sharing[(sharing["system"] == "vllm") & (sharing["n"] > BASIC)]
    saved = {method: 100 * group.groupby("n")["saving"].mean() for method, group in vllm.groupby("method")}
    found = {method: gains(sharing, method) for method in METHODS}
    shared_prefix = {
        panel.replace("/", "-"): multiple
        for tokens, panel in (PANELS if len(prefix) else {}).items()
        if (multiple := shared.multiple_of(prefix[prefix["prefix_tokens"] == tokens], "orca-oracle"))
    }
    judged = {f"fig15-{method}-alpaca": {int(n): value for n, value in saved[method].items()} for method in saved}
    if "beam" in saved:
        judged["beam-sharing-up-to-55"] = saved["beam"].max()
    if "parallel" in saved:  # n sequences that share s blocks save (n - 1) s
        blocks = saved["parallel"] * saved["parallel"].index / (saved["parallel"].index - 1)
        judged["prompt-share-of-kv"] = blocks.mean(), [blocks.min(), blocks.max()]
    if shared_prefix:
        judged["fig16-shared-prefix"] = shared.with_interval(shared_prefix)
    widest = [found[method].get(max(WIDTHS)) for method in METHODS]
    if all(widest) and BASIC in found["beam"]:
        rising = {"one" if n == BASIC else f"beam-{n}": ratio for n, (ratio, _) in sorted(found["beam"].items())}
        basic = rising["one"]
        judged["gain-grows-with-sharing"] = {"basic": basic, "beam-6": rising["beam-6"], "rising": rising}
        least = min(ratio for ratio, _ in widest)
        judged["larger-gains-elsewhere"] = {"more-complex-decoding": 100 * (least / basic - 1)}
    return shared.on_gpu(sharing, judged)
