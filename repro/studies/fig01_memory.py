"""What follows from the configuration alone: Table 1, Fig. 1 (left), Fig. 3, and every other sum that a claim rests on.

Nothing here is timed or random. Table 1 and Fig. 1 come from the architectures in `repro.engine.config`; Fig. 3 is read
off the contiguous memory manager while it serves the figure's two requests. Fig. 1's right half needs the engine and is
not drawn here."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from repro.engine.config import DEPLOYMENTS, GB, GIB
from repro.engine.memory.contiguous import ContiguousKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.report.claims.arithmetic import COMPUTE
from repro.report.claims.rules import leaves
from repro.studies.base import (
    Axes,
    DataFrame,
    Figure,
    Judgement,
    Parameters,
    Point,
    Rows,
    Series,
    house,
    paper,
    plotting,
)
from repro.studies.common import Some, about, named

TABLES = {"table1": ("deployment",), "chunks": ("request",), "claims": ("claim", "key")}
_PIECES = ("token_states", "reserved", "internal")  # of a chunk, from its first slot
_MIDDLE = {"ha": "center", "va": "center"}
#: Fig. 3's two requests: (name, prompt, words generated so far, words still to come); word = token, as in the figure.
REQUESTS = (
    ("A", "Four score and seven years ago our", "fathers", "brought forth"),
    ("B", "You only live", "once", "<eos>"),
)


class Params(Parameters):
    deployments: Annotated[tuple[Annotated[str, named("deployment", paper.figure("table1"))], ...], Some]
    chunk_slots: tuple[int, int]
    free: ClassVar = ("deployments",)

    @model_validator(mode="after")
    def _chunks_hold_the_words(self) -> Self:
        for (name, *texts), slots in zip(REQUESTS, self.chunk_slots):
            words = len(" ".join(texts).split())
            if slots < words or slots & (slots - 1):
                raise UserError(
                    f"chunk_slots = {list(self.chunk_slots)}: request {name} needs a power of two of at least {words} "
                    "slots"
                )
        return self


def points(params: Params) -> list[Point]:
    return [
        *(Point(table1, {"deployment": name}, "table1") for name in params.deployments),
        Point(contiguous_requests, {"chunk_slots": params.chunk_slots}, "chunks"),
        *(Point(exact_claim, {"claim": claim_id}, "claims") for claim_id in COMPUTE),
    ]


def table1(deployment: str) -> dict[str, Any]:
    """A row of Table 1 from the architecture; the bytes left for K/V are the paper's choice and taken from it.

    Weights in 10^9 bytes, the KV cache in 2^30: the units in which the printed digits come out."""
    config, printed = DEPLOYMENTS[deployment], paper.figure("table1")[deployment]
    per_token = config.model.kv_bytes_per_token
    return about("exact") | {
        "deployment": deployment,
        "parameters": config.model.num_parameters,
        "kv_bytes_per_token": per_token,
        "weights_gb": config.model.weight_bytes / GB,
        "kv_gib": printed["kv_gb"],
        "gpu_gb": printed["gpu_gb"],
        "slots_of_printed_memory": printed["kv_gb"] * GIB // per_token,
        "slots_in_runs": config.kv_slots,
    }


def contiguous_requests(chunk_slots: tuple[int, int]) -> list[dict[str, Any]]:
    """Fig. 3 by the memory manager: where each request's chunk starts and how its slots are used.

    A third request held the slots between the two and has finished: that gap is free, and only in one piece."""

    def declared(request: Request, max_model_len: int) -> int:
        return chunk_slots[request.request_id] - request.prompt_tokens

    slots = chunk_slots[0] + 2 * chunk_slots[1]
    manager = ContiguousKVCacheManager(slots, block_size=1, reservation=declared, max_model_len=max(chunk_slots))
    lengths = [[len(words.split()) for words in texts] for _, *texts in REQUESTS]
    groups = [_group(index, prompt, now + later) for index, (prompt, now, later) in enumerate(lengths)]
    stored = [prompt + now for prompt, now, _ in lengths]
    finished = _group(1, 1, 1)
    manager.allocate(groups[0], lengths[0][0])
    first = manager.usage([(groups[0], stored[0])])
    manager.allocate(finished, 1)
    manager.allocate(groups[1], lengths[1][0])
    manager.free(finished)
    both = manager.usage(zip(groups, stored))
    return [
        about("exact")
        | {"request": name, "start": manager.block_table(group.seqs[0])[0], "pool_slots": slots}
        | {piece: getattr(now, piece) - (getattr(before, piece) if before else 0) for piece in _PIECES}
        for (name, *_), group, now, before in zip(REQUESTS, groups, (first, both), (None, first))
    ]


def _group(request_id: int, prompt: int, output: int) -> SequenceGroup:
    return SequenceGroup(Request(request_id, 0.0, prompt, output, SamplingParams(max_tokens=output)))


def exact_claim(claim: str) -> list[dict[str, Any]]:
    """One row for each key of a claim that is pure arithmetic (`repro.report.claims.arithmetic`)."""
    shared, found = about("exact") | {"claim": claim}, leaves(COMPUTE[claim]())
    return [shared | {"key": ".".join(path), "value": value} for path, value in found]


def judge(rows: Rows, params: Params) -> list[Judgement]:
    judgements = []
    for claim, group in rows["claims"].fillna({"key": ""}).groupby("claim", sort=False):
        values = dict(zip(group["key"], group["value"]))
        judgements.append(Judgement(claim, values.get("", values), "exact"))
    table = rows["table1"].set_index("deployment")
    billions = ", ".join(f"{count / 1e9:.2f}" for count in table["parameters"])
    chunks = rows["chunks"].set_index("request")
    unused = {f"{name.lower()}_{piece}": chunks.at[name, piece] for name in chunks.index for piece in _PIECES[:0:-1]}
    return [
        *judgements,
        Judgement("table1-params", table["weights_gb"].to_dict(), "exact", facts={"billions": billions}),
        *(one for name, row in table.iterrows() for one in _judge_table1(name, row)),
        Judgement("fig3-unused-slots", unused, "exact"),
    ]


def _judge_table1(deployment: str, row: Series) -> list[Judgement]:
    size, slots = deployment.removeprefix("opt-"), row["slots_of_printed_memory"] / 1000
    needed = 9700 * row["kv_bytes_per_token"] / GIB
    judgements = [Judgement(f"table1-slots-{size}", slots, "exact", facts={"row": row, "needed_gib": needed})]
    if size == "13b":
        printed = paper.figure("table1")[deployment]["weights_gb"]
        weights = {"printed": printed, "weights_gb": row["weights_gb"], "share": row["weights_gb"] / row["gpu_gb"]}
        judgements += [
            Judgement("kv-bytes-per-token", int(row["kv_bytes_per_token"]), "exact"),
            Judgement("kv-bytes-per-request", 2048 * row["kv_bytes_per_token"] / GIB, "exact"),
            Judgement("fig1-weights-share", printed / row["gpu_gb"], "exact", facts=weights),
            Judgement("fig1-kv-share", row["kv_gib"] / row["gpu_gb"], "exact"),
        ]
    return judgements


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    return {"fig01_memory": _draw_table1(rows["table1"]), "fig03_contiguous": _draw_chunks(rows["chunks"])}


def _draw_table1(table: DataFrame) -> Figure:
    figure, (axis,) = plotting.panels([""], width=7.6, height=0.6 + 0.75 * len(table))
    colors = {"weights": "#9DB0C8", "KV cache": plotting.PIECES["token_states"][1], "others": "#C9C9C9"}
    for place, row in enumerate(table.itertuples()):
        printed = paper.figure("table1")[row.deployment]
        ours = {"weights": row.weights_gb, "KV cache": row.kv_gib}
        theirs = {"weights": printed["weights_gb"], "KV cache": printed["kv_gb"]}
        for parts, y, hollow in ((ours, place - 0.2, False), (theirs, place + 0.2, True)):
            left = 0.0
            for name, gb in (parts | {"others": row.gpu_gb - sum(parts.values())}).items():
                share = 100 * gb / row.gpu_gb
                look = dict(plotting.PAPER_BAR, edgecolor=colors[name]) if hollow else {"facecolor": colors[name]}
                axis.barh(y, share, 0.36, left=left, **look)
                texts = [f"{gb:.{0 if hollow or name == 'KV cache' else 1}f} GB"]
                if name == "KV cache":
                    slots = printed["kv_kslots"] if hollow else row.slots_of_printed_memory / 1000
                    texts = [f"{texts[0]} = {slots:.1f}K slots", f"{slots:.1f}K slots"]
                if name == "others":
                    axis.text(100.8, y, texts[0], va="center", color=plotting.GREY)
                elif fitting := [text for text in texts if share > 1.25 * len(text)]:
                    axis.text(left + share / 2, y, fitting[0], fontsize=9, **_MIDDLE)
                left += share
    names = [f"{name.upper()}\n{paper.figure('table1')[name]['gpus']}" for name in table["deployment"]]
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="share of GPU memory (%)", xlim=(0, 100))
    handles = [plotting.swatch(name, color) for name, color in colors.items()]
    plotting.place_legend(figure, [*handles, plotting.paper_bar("Table 1 as printed")])
    ours = "Weights from the architecture (GB: 10^9 bytes), slots from the printed KV memory (GB: 2^30 bytes)"
    plotting.footer(figure, table, note=f"{ours}. At the right: others")
    return figure


def _draw_chunks(chunks: DataFrame) -> Figure:
    """The pool to scale on top; below it the first slots of either chunk, one cell a slot."""
    figure = plotting.Figure(figsize=(8.4, 4.0), layout="constrained")
    axes = figure.subplots(1 + len(chunks), 1, height_ratios=[1.5, 1, 1])
    pool = int(chunks["pool_slots"].iloc[0])
    axes[0].barh(0, pool, 0.6, color=plotting.PIECES["free"][1])
    records = chunks.astype(dict.fromkeys((*_PIECES, "start"), int)).to_dict("records")
    for axis, row, (name, *texts) in zip(axes[1:], records, REQUESTS):
        left = row["start"]
        for piece in _PIECES:
            axes[0].barh(0, row[piece], 0.6, left=left, color=plotting.PIECES[piece][1])
            left += row[piece]
        text = f"request {name}:\n{left - row['start']:,} slots"
        axes[0].text((row["start"] + left) / 2, 0, text, **_MIDDLE)
        _draw_first_slots(axis, row, name, " ".join(texts).split())
    ends = sorted((row["start"], row["start"] + sum(row[piece] for piece in _PIECES)) for row in records)
    gap = (ends[0][1] + ends[1][0]) / 2
    axes[0].text(gap, 0, "free", **_MIDDLE)
    first = {"arrowprops": {"arrowstyle": "-", "color": plotting.GREY}, "va": "bottom", "ha": "left"}
    held = "{}'s {token_states} tokens and {reserved} reserved slots, enlarged below".format(
        REQUESTS[0][0], **records[0]
    )
    axes[0].annotate(held, (records[0]["start"] + 5, 0.3), (60, 0.36), **first)
    axes[0].set(xlim=(0, 1.03 * pool), ylim=(-0.4, 0.62), xlabel="slot of the pool", yticks=[])
    axes[0].grid(visible=False)
    looks = [plotting.PIECES[piece] for piece in _PIECES]
    handles = [plotting.swatch(text, color) for text, color, _ in looks]
    plotting.place_legend(figure, [*handles, plotting.swatch("external fragmentation", plotting.PIECES["free"][1])])
    gap = "the width of the gap between the two chunks is ours, the paper gives none"
    plotting.footer(figure, chunks, note=f"Slots as counted by the contiguous memory manager; {gap}")
    return figure


def _draw_first_slots(axis: Axes, row: dict[str, Any], name: str, words: list[str]) -> None:
    shown = 13
    for slot in range(shown):
        piece = _PIECES[(slot >= row["token_states"]) + (slot >= row["token_states"] + row["reserved"])]
        axis.barh(0, 1, 0.8, left=slot, color=plotting.PIECES[piece][1], edgecolor="white", linewidth=1)
        word = words[slot] if slot < len(words) else "\u00b7"
        axis.text(slot + 0.5, 0, word, fontsize=8, **_MIDDLE)
    axis.text(shown + 0.15, 0, f"{row['internal']:,} never used", va="center")
    axis.set(xlim=(0, shown + 2.6), ylim=(-0.5, 0.5), xticks=[], yticks=[0], yticklabels=[f"request {name}"])
    plotting.bare(axis)
