"""Fig. 18a: the time of the paged attention kernel, from rows recorded on a GPU. Nothing is measured here.

The study knows no kernel: it reads experiments/recorded, whose rows `python -m repro bench kernels` makes."""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from repro.bench import kept
from repro.errors import UserError
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
from repro.studies.common import about
from repro.studies.fig18b_block_size import REFERENCE
from repro.studies.measured import Gpu, kernel_rows

_SHAPE = ("heads", "dtype", "batch", "context", "block_size", "kernel", "launch")
#: a table for each of the recorded benchmarks, by its name there
TABLES = {"fig18a": _SHAPE, "decode": _SHAPE, "block_sizes": _SHAPE}
BATCHES, CONTEXTS = (8, 32), (64, 128, 256)  # Fig. 18a's
HEADS = {"40 x 128": "OPT-13B: 40 heads of 128", "32/8 x 128": "LLaMA-3.1-8B: 32 query, 8 KV heads of 128"}
PERMUTED, IN_ORDER = "ours, permuted blocks", "ours, blocks in order"
FLASH, CUDNN = "SDPA flash", "SDPA cuDNN"
OURS = {"permuted": PERMUTED, "in order": IN_ORDER}
#: kernel -> colour, marker
LOOKS = {PERMUTED: ("#0072B2", "o"), IN_ORDER: ("#6A51A3", "P"), FLASH: ("#8C8B1F", "X"), CUDNN: ("#882255", "<")}


class Params(Parameters):
    gpu: Gpu
    dtype: Literal["float16", "bfloat16"]


def points(params: Params) -> list[Point]:
    """One point, kept as long as both files stay what they are; UserError naming the file that is missing."""
    path, evidence = kept.find(params.gpu, kept.KERNELS)
    manifest = path.with_name("manifest.json")
    for file in (path, manifest):
        if not file.is_file():
            raise UserError(
                f"gpu = {params.gpu!r}: {file} is missing; restore it, name a GPU that is recorded, or measure on one: "
                f"python -m repro bench kernels --out {path.parent}"
            )
    return [Point(recorded, {"path": path, "manifest": manifest, "evidence": evidence})]


def recorded(path: Path, manifest: Path, evidence: str) -> dict[str, list[dict[str, Any]]]:
    """Every recorded time (us) of a decode kernel, with its fraction of the copy bandwidth of that run."""
    device = json.loads(manifest.read_text(encoding="utf-8"))["device"]
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    # A kernel that did not take a shape has a remark in place of a time.
    for row in filter(itemgetter("us"), kernel_rows(path, evidence, *TABLES)):
        kernel = OURS[row["blocks"]] if row["contender"] == "ours" else row["contender"]
        times = {"microseconds": float(row["us"]), "fraction_of_copy": float(row["fraction_of_copy"])}
        shape = {name: row[name] for name in _SHAPE if name != "kernel"}
        tables[row["benchmark"]].append({"kernel": kernel, **shape, **times, **about(evidence, device)})
    return tables


def paper_scale(rows: DataFrame) -> DataFrame:
    """us by (batch, context) and kernel at Fig. 18a's shapes, launched by a graph: the kernel alone."""
    chosen = where(rows, launch="graph").astype({"context": int})
    return chosen.pivot(index=["batch", "context"], columns="kernel", values="microseconds")


def paper_times(system: str, batch: int) -> dict[int, float]:
    """context -> us, as Fig. 18a draws them."""
    return {int(context): us for context, us in paper.points("fig18a", f"{system}/batch-{batch}")}


def paper_overhead(batch: int) -> dict[int, float]:
    """context -> by how much the paper's kernel exceeds FasterTransformer's, in %."""
    theirs = paper_times("faster-transformer", batch)
    return {context: 100 * (us / theirs[context] - 1) for context, us in paper_times("vllm", batch).items()}


def _overhead(times: DataFrame, over: str) -> Any:
    """By how much ours over permuted blocks exceeds another kernel, in %."""
    return 100 * (times[PERMUTED] / times[over] - 1)


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    shapes = where(rows["decode"], dtype=params.dtype)
    return {
        "fig18a_kernels": _kernels(rows["fig18a"]),
        "fig18a_bandwidth": _bandwidth(shapes[shapes["kernel"] != IN_ORDER]),
        "fig18a_paging": _paging(shapes[shapes["kernel"].isin((PERMUTED, IN_ORDER))]),
        "fig18a_block_sizes": _block_sizes(rows["block_sizes"]),
    }


def _kernels(rows: DataFrame) -> Figure:
    titles = [*(f"Batch of {batch}" for batch in BATCHES), "Paged over contiguous"]
    figure, axes = plotting.panels(titles, width=3.6, height=3.3)
    times, clocked, handles = paper_scale(rows), plotting.LINE[rows["evidence"].iloc[0]], {}
    for axis, batch in zip(axes, BATCHES):
        for system, text in (("vllm", "paged, A100"), ("faster-transformer", "FasterTransformer, A100")):
            look = dict(color=plotting.STYLE[system].color, marker=plotting.STYLE[system].marker) | plotting.PAPER
            axis.plot(*zip(*paper_times(system, batch).items()), **look)
            handles[text] = plotting.key(f"the paper: {text}", **look)
        for kernel, (color, marker) in LOOKS.items():
            # Blocks in order lie under permuted ones, nearly at the same place: wider, so that both are seen.
            look = {"linewidth": 5, "markersize": 11, "zorder": 1.5} if kernel == IN_ORDER else {}
            look = dict(color=color, marker=marker) | clocked | look
            axis.plot(CONTEXTS, times.loc[batch, kernel].loc[list(CONTEXTS)], **look)
            handles[kernel] = plotting.key(kernel, **look)
        axis.set(yscale="log", ylim=(5, 300), ylabel="µs")
        plotting.log(axis)
    handles |= {batch: plotting.key(f"right: batch of {batch}", marker=marker) for batch, marker in zip(BATCHES, "os")}
    _overheads(axes[-1], times, clocked)
    for axis in axes:
        plotting.powers_of_two(axis, CONTEXTS, "context (tokens)")
        axis.set_xlim(54, 305)
    plotting.place_legend(figure, list(handles.values()))
    note = (
        "Levels differ by GPU and program; the right panel's pairs are of one run each. Blocks in order are "
        "contiguous, but still looked up. One median time a point, no spread kept"
    )
    plotting.footer(figure, rows, with_paper=True, note=note)
    return figure


def _overheads(axis: Axes, times: DataFrame, clocked: dict[str, Any]) -> None:
    """Three pairs of kernels, each at both batches, in the colour of the one that reads contiguous K and V."""
    theirs = plotting.STYLE["faster-transformer"].color
    for batch, marker in zip(BATCHES, "os"):
        axis.plot(*zip(*paper_overhead(batch).items()), color=theirs, marker=marker, **plotting.PAPER)
        for over in (IN_ORDER, CUDNN):
            ours = _overhead(times, over)[batch].loc[list(CONTEXTS)]
            axis.plot(CONTEXTS, ours, color=LOOKS[over][0], marker=marker, **clocked)
    axis.axhline(0, color=plotting.GREY, linewidth=0.8)
    names = ("the paper's over\nFasterTransformer's", theirs, 47), ("over blocks in order", LOOKS[IN_ORDER][0], 6)
    for text, color, height in (*names, ("over SDPA cuDNN", LOOKS[CUDNN][0], -40)):
        axis.annotate(text, (128, height), ha="center", color=color)
    axis.set(ylabel="more time (%)", ylim=(-50, 72))


def _places(rows: DataFrame) -> dict[tuple[int, str], float]:
    """(batch, context) -> its place: by batch, then context, a gap between batches, ragged last."""
    places: dict[tuple[int, str], float] = {}
    equal = {shape for shape in zip(rows["batch"], rows["context"]) if shape[1] != "ragged"}
    ragged = set(zip(rows["batch"], rows["context"])) - equal
    for batch, context in [*sorted(equal, key=lambda shape: (shape[0], int(shape[1]))), *sorted(ragged)]:
        last, place = next(reversed(places.items()), ((batch, context), -1.0))
        places[batch, context] = place + (1.0 if last[0] == batch else 1.7)
    return places


def _over_shapes(axis: Axes, rows: DataFrame, y: str, kernel: str, places: dict[tuple[int, str], float]) -> None:
    """One line for each batch."""
    color, marker = LOOKS[kernel]
    for batch, group in rows.groupby("batch"):
        group = group.assign(x=[places[batch, context] for context in group["context"]]).sort_values("x")
        axis.plot(group["x"], group[y], color=color, marker=marker, **plotting.LINE["recorded"])


def _name_shapes(axis: Axes, places: dict[tuple[int, str], float]) -> None:
    axis.set_xticks(list(places.values()), [context for _, context in places], rotation=45)
    for batch in dict.fromkeys(batch for batch, _ in places):
        own = [place for (other, _), place in places.items() if other == batch]
        at = dict(transform=axis.get_xaxis_transform(), ha="center", va="top")
        axis.text(sum(own) / len(own), 1.02, f"batch {batch}", color=plotting.GREY, **at)
    axis.set_xlabel("context (tokens)")


def _bandwidth(rows: DataFrame) -> Figure:
    figure, axes = plotting.panels(
        [f"Speed of reading K and V, {name}" for name in HEADS.values()], columns=1, width=8.4, height=3.0
    )
    places, looks = _places(rows), {kernel: look for kernel, look in LOOKS.items() if kernel in set(rows["kernel"])}
    for axis, heads in zip(axes, HEADS):
        axis.axhline(1, color=plotting.GREY, linewidth=0.8)
        text = "a copy, which also writes;\nreading alone can be faster"
        axis.annotate(text, (0, 1), (-8, -3), textcoords="offset points", va="top", fontsize=8.5)
        for kernel in reversed(looks):  # ours on top
            _over_shapes(axis, where(rows, heads=heads, kernel=kernel), "fraction_of_copy", kernel, places)
        _name_shapes(axis, places)
        axis.set(ylabel="fraction of copy bandwidth", ylim=(0, 1.28))
    line = plotting.LINE["recorded"]
    handles = [plotting.key(kernel, color, marker=marker, **line) for kernel, (color, marker) in looks.items()]
    plotting.place_legend(figure, handles)
    note = "Ragged: contexts of 1 to 2048 tokens, not given to SDPA. One median time a point, no spread kept"
    plotting.footer(figure, rows, note=f"{rows['dtype'].iloc[0]}, blocks of {REFERENCE}. {note}")
    return figure


def paging_cost(rows: DataFrame) -> DataFrame:
    """By heads, batch and context: both times (us), and the `percent` that permuted blocks take longer."""
    times = rows.pivot(index=["heads", "batch", "context"], columns="kernel", values="microseconds")
    return times.assign(percent=_overhead(times, IN_ORDER)).reset_index()


def _paging(rows: DataFrame) -> Figure:
    titles = [f"Permuted blocks over blocks in order, {name}" for name in HEADS.values()]
    figure, axes = plotting.panels(titles, columns=1, width=8.4, height=2.7, sharey=True)
    places, costs = _places(rows), paging_cost(rows)
    for axis, heads in zip(axes, HEADS):
        axis.axhline(0, color=plotting.GREY, linewidth=0.8)
        _over_shapes(axis, where(costs, heads=heads), "percent", PERMUTED, places)
        _name_shapes(axis, places)
        axis.set_ylabel("more time (%)")
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high + 0.14 * (high - low))
    least = costs.loc[costs["percent"].idxmin()]
    shape = f"batch {least['batch']}, context {least['context']}"
    times = f"{least[PERMUTED]:.1f} µs against {least[IN_ORDER]:.1f} µs"
    note = f"The lowest ({shape}) is {times}. One median time a point, no spread kept"
    plotting.footer(figure, rows, note=f"{rows['dtype'].iloc[0]}, blocks of {REFERENCE}. {note}")
    return figure


def _block_sizes(rows: DataFrame) -> Figure:
    figure, axes = plotting.panels(list(HEADS.values()), width=4.4, height=3.1, sharey=True)
    took = []
    for axis, heads in zip(axes, HEADS):
        axis.axhline(1, color=plotting.GREY, linewidth=0.8)
        handles, at_reference = [], []
        for number, ((batch, context), group) in enumerate(
            where(rows, heads=heads).groupby(["batch", "context"], sort=False)
        ):
            times, style = group.set_index("block_size")["microseconds"].sort_index(), plotting.other(number)
            look = dict(color=style.color, marker=style.marker, **plotting.LINE["recorded"])
            axis.plot(times.index, times / times[REFERENCE], **look)
            handles.append(plotting.key(f"batch {batch}, context {context}", **look))
            at_reference.append(f"{times[REFERENCE]:.0f}")
        took.append(f"{HEADS[heads].partition(':')[0]} {', '.join(at_reference)} µs")
        plotting.powers_of_two(axis, sorted(set(rows["block_size"].astype(int))))
    axes[0].set_ylabel(f"time over that at {REFERENCE}")
    plotting.place_legend(figure, handles)
    note = (
        f"float16. The axis does not begin at 0. With blocks of {REFERENCE}, in the legend's order: {'; '.join(took)}"
    )
    plotting.footer(figure, rows, note=f"{note}. One median time a point, no spread kept")
    return figure


def judge(rows: Rows, params: Params) -> list[Judgement]:
    times = paper_scale(rows["fig18a"])
    cost = _overhead(times, IN_ORDER)
    less = 100 * (1 - times[PERMUTED] / times[[FLASH, CUDNN]].min(axis=1))
    theirs = {batch: paper_overhead(batch).values() for batch in BATCHES}
    said = ", ".join(f"{min(found):.0f} to {max(found):.0f} % at batch {batch}" for batch, found in theirs.items())
    first = rows["fig18a"].iloc[0]
    facts = {"device": first["device"], "theirs": said, "least": less.min(), "most": less.max()}
    overhead = cost.groupby(level="batch").agg(["mean", "min", "max"])
    spans = {batch: [row["min"], row["max"]] for batch, row in overhead.iterrows()}
    on_gpu = {"evidence": first["evidence"], "device": first["device"]}
    return [
        Judgement("fig18a-kernel-overhead", [cost.min(), cost.max()], facts=facts, **on_gpu),
        Judgement("overhead-at-small-batches", overhead["mean"].to_dict(), interval=spans, **on_gpu),
    ]
