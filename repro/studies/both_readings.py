"""The words of `what_the_paper_does_not_say`: every item with its two readings, and the table of them.

Made from rows alone, like every figure; what the paper prints is written out here, what it draws comes from
repro.report.paper. This module runs nothing and judges nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from repro.engine.config import DEPLOYMENTS, GB, GIB
from repro.report import paper
from repro.studies.fig18a_kernels import paper_overhead

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MODELS = ("opt-13b", "opt-66b", "opt-175b")
LEVEL, LEVELS = 0.5, tuple(level / 20 for level in range(2, 21))  # s/token
#: Fig. 13 prints its bars: part of the rows -> (panel of Fig. 12, rate in req/s, vLLM's requests)
BATCHED = {"fig13a": ("opt-13b/sharegpt", 2.0, 30.42), "fig13b": ("opt-13b/alpaca", 30.0, 132.44)}
_SHARES = (0.16, 0.27, 0.27, 0.22, 0.08)  # of the table's width, column by column


class Item(NamedTuple):
    """A row of the table, in words; `evidence` says what our number is."""

    where: str
    one_reading: str
    another_reading: str
    ours: str
    evidence: str


def readings(rows: pd.DataFrame) -> list[Item]:
    """All items: memory, serving, preemption."""
    return [*_memory(rows), *_serving(rows), *_preemption(rows)]


def _memory(rows: pd.DataFrame) -> list[Item]:
    pool, drawn = rows[rows["part"] == "fig02"].set_index("system"), paper.figure("fig2")
    vllm, literal = pool.loc["vllm"], rows[rows["part"] == "until completed"]["token_states"].mean()

    def both(values: Mapping[str, float] | pd.Series) -> str:
        return " and ".join(f"{values[name]:.1f}" for name in ("orca-pow2", "orca-oracle"))

    outside = {name: pieces["external & others"] for name, pieces in drawn.items()}
    shared = rows[rows["saving"].notna()].iloc[0]
    blocks = shared["saving"] * shared["width"] / (shared["width"] - 1)  # n sequences that share s save (n - 1) s
    small, large = (DEPLOYMENTS[name].model for name in MODELS[:2])
    printed = paper.figure("table1")
    kv, kv_66b = printed["opt-13b"]["kv_gb"], printed["opt-66b"]["kv_gb"]
    weights = " and ".join(f"{DEPLOYMENTS[name].model.num_parameters * 2 / GB:.1f}" for name in MODELS[1:])
    printed_weights = " and ".join(str(printed[name]["weights_gb"]) for name in MODELS[1:])
    return [
        Item(
            "Table 1: GB",
            f"GB = 2^30 bytes: {kv} GB hold {kv * GIB // small.kv_bytes_per_token:,} slots (printed: 15.7K)",
            f"GB = 10^9 bytes: {kv * GB // small.kv_bytes_per_token:,} slots; but weights are in these",
            "2^30 for K/V and 10^9 for weights: only so do the printed digits come out",
            "exact",
        ),
        Item(
            "Table 1: OPT-66B's slots",
            f"printed: 9.7K, which need {9700 * large.kv_bytes_per_token / GIB:.1f} GB",
            f"printed: {kv_66b} GB, which hold {kv_66b * GIB // large.kv_bytes_per_token:,}",
            f"runs use {DEPLOYMENTS['opt-66b'].kv_slots:,}",
            "exact",
        ),
        Item(
            "Table 1: weights of OPT-66B, OPT-175B",
            f"printed: {printed_weights} GB",
            "two bytes for each parameter of the published architectures",
            f"{weights} GB",
            "exact",
        ),
        Item(
            "Fig. 2: external & others, Pow2 and Oracle",
            f"with the buddy allocator's rounding, as the figure books it: {both(outside)} %",
            "rounding is internal fragmentation, since it lies inside the chunk",
            f"first: {both(pool['rounding'] + pool['free'])} %; second: {both(pool['free'])} % external, "
            f"{both(pool['internal'] + pool['rounding'])} % internal",
            "replayed",
        ),
        Item(
            "Fig. 2, launch post: vLLM's waste",
            f"all that holds no token: {100 - drawn['vllm']['token states']:.1f} % drawn; what is free is "
            'called half "reservation", half "internal"',
            'slots of last blocks without a token: the post\'s "under 4 %"',
            f"first: {100 - vllm['token_states']:.1f} %; second: {vllm['reserved'] + vllm['internal']:.1f} %",
            "replayed",
        ),
        Item(
            "§3: prompts take 12 % of K/V",
            "blocks full of prompt, of all blocks",
            "tokens of prompts, of all stored tokens",
            f"first: {blocks:.0f} %; second: {shared['prompt_share']:.0f} %",
            "replayed",
        ),
        Item(
            "§4.5: no new request until the preempted are completed",
            "to the letter",
            f"until they run again (Fig. 2 draws {drawn['vllm']['token states']:.1f} % token states)",
            f"first: {literal:.1f} % token states; second: {vllm['token_states']:.1f} %",
            "replayed",
        ),
    ]


def _serving(rows: pd.DataFrame) -> list[Item]:
    basic = rows[rows["panel"].notna() & rows["crossing_rate"].notna()].set_index(["panel", "system"])
    latency = rows[rows["part"] == "latency"].set_index("panel")["latency_s_per_token"]
    panels = [f"{model}/sharegpt" for model in MODELS]
    ours, drawn = (
        {other: [ratio(panel, other) for panel in panels] for other in ("orca-max", "orca-oracle")}
        for ratio in (
            lambda panel, other: (
                basic.loc[(panel, "vllm"), "crossing_rate"] / basic.loc[(panel, other), "crossing_rate"]
            ),
            lambda panel, other: ratio_drawn("fig12", panel, other, LEVEL),
        )
    )
    anywhere = [
        ratio for panel in panels for level in LEVELS if (ratio := ratio_drawn("fig12", panel, "orca-max", level))
    ]
    chat = [ratio_drawn("fig17", "opt-13b/chatbot", name, LEVEL) for name in ("orca-max", "orca-pow2", "orca-oracle")]
    at_2, at_30 = dict(paper.points("fig19b", "recompute"))[16], dict(paper.points("fig18b", "alpaca"))[16]
    end_rate, end_latency = paper.line("fig12", "opt-13b/alpaca", "vllm")[-1]
    return [
        *(_batched(rows, part) for part in BATCHED),
        Item(
            "§6.2: 8x over Orca (Max)",
            "printed: 2.7 to 8 times the rate on ShareGPT",
            f"drawn: {_span(drawn['orca-max'])} at {LEVEL:g} s/token, at most {max(anywhere):.1f} at any latency from "
            f"{LEVELS[0]:g} up",
            f"{_span(ours['orca-max'])} at {LEVEL:g} s/token",
            "modelled",
        ),
        Item(
            "Abstract: gains grow with larger models",
            "13B to 66B: they do",
            f"66B to 175B: they do not. Drawn, over Oracle: {_list(drawn['orca-oracle'])}",
            _list(ours["orca-oracle"]),
            "modelled",
        ),
        Item(
            "§6.5: 2x in the chatbot",
            "printed: twice the rate of the three Orcas",
            f"drawn: {_span(chat)} at {LEVEL:g} s/token",
            _chatbot(rows),
            "modelled",
        ),
        Item(
            "Fig. 19b and 12a: 2 req/s",
            f"Fig. 19b at 2.01 req/s: {at_2:.3f} s/token (ShareGPT, block 16)",
            f"Fig. 12a at 2.0 req/s: {dict(paper.line('fig12', panels[0], 'vllm'))[2.0]:.2f} s/token",
            f"{latency[panels[0]]:.2f} s/token at 2.01 req/s",
            "modelled",
        ),
        Item(
            "Fig. 18b and 12d: 30 req/s",
            f"Fig. 18b at 30.1 req/s: {at_30:.2f} s/token (Alpaca, block 16)",
            f"Fig. 12d leaves the plot ({end_latency:.2f} s/token) at {end_rate:.1f} req/s",
            f"{latency['opt-13b/alpaca']:.1f} s/token at 30.1 req/s",
            "modelled",
        ),
    ]


def _batched(rows: pd.DataFrame, part: str) -> Item:
    panel, rate, printed = BATCHED[part]
    curve = rows[rows["part"] == part].sort_values("rate")
    rates, batch = curve["rate"].to_numpy(), curve["batched_requests"].to_numpy()
    reached = f"at {np.interp(printed, batch, rates):.1f} req/s" if batch[0] <= printed <= batch[-1] else "elsewhere"
    return Item(
        f"Fig. 13{part[-1]} and 12{'a' if 'sharegpt' in panel else 'd'}: vLLM's batch",
        f"{printed:g} requests on average at {rate:g} req/s",
        f"{LEVEL:g} s/token is reached at {paper.crossings('fig12', LEVEL)[panel]['vllm']:.2f} req/s; beyond, the "
        "queue grows all hour",
        f"{np.interp(rate, rates, batch):.1f} at {rate:g} req/s; {printed:g} {reached}",
        "replayed",
    )


def _chatbot(rows: pd.DataFrame) -> str:
    texts = []
    found = rows[rows["conversations"].notna() & rows["crossing_rate"].notna()]
    for name, here in found.groupby("conversations", sort=False):
        rates = here.set_index("system")["crossing_rate"]
        texts.append(
            f"{_span(rates['vllm'] / rates.drop('vllm'))} with {100 * here['full_prompts'].mean():.0f} % of the "
            f"prompts full ({name})"
        )
    return "; ".join(texts)


def _preemption(rows: pd.DataFrame) -> list[Item]:
    case = rows[rows["part"] == "swap"]
    peaks, pool = case.groupby("num_cpu_blocks")["swapped"].max(), case["num_blocks"].iloc[0]
    served = rows[rows["part"] == "swap in service"]
    pass_ms = rows[(rows["part"] == "alone") & (rows["way"] == "recompute")]["milliseconds"].iloc[0]
    drawn_ms = dict(paper.points("fig19a", "recompute"))[16]
    overhead = {batch: paper_overhead(batch).values() for batch in (8, 32)}
    return [
        Item(
            "§4.5: swap space bounded by the GPU's memory",
            "as a rule: never more blocks out than the pool has",
            "where the swap space is no larger than the pool (the authors' 20 GiB is larger than OPT-13B's 12)",
            f"{peaks.iloc[-1]:.0f} blocks out of a pool of {pool:.0f}; {peaks.iloc[0]:.0f} with room for {pool:.0f}; "
            f"{served['swapped'].max():.0f} of {served['num_blocks'].iloc[0]:.0f} serving ShareGPT",
            "replayed",
        ),
        Item(
            "§7.1: kernel 20 to 26 % slower",
            f"Fig. 18a, batch 32: {_span(overhead[32], 0)} %",
            f"Fig. 18a, batch 8: {_span(overhead[8], 0)} %",
            "another comparison, of one kernel with itself: fig18a_kernels",
            "recorded",
        ),
        Item(
            "§7.3: recomputing never above 20 % of swapping",
            f"20 % of its time: drawn are {_span(swap_shares_drawn(), 0)} %",
            "20 % more than its time: true of the drawn points",
            f"{_span(swap_shares(rows), 0)} % (swapping is calibrated)",
            "modelled",
        ),
        Item(
            "Fig. 19a: recomputing 256 tokens",
            f"as drawn: {drawn_ms:.1f} ms (block 16)",
            f"before the plot script's factor of 0.9: {drawn_ms / 0.9:.1f} ms",
            f"{pass_ms:.1f} ms",
            "modelled",
        ),
    ]


def _span(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def ratio_drawn(figure: str, panel: str, other: str, level: float) -> float | None:
    """vLLM's rate over another system's where the paper's curves reach a latency (s/token); None if one does not."""
    rates = paper.crossings(figure, level)[panel]
    return rates["vllm"] / rates[other] if rates["vllm"] and rates[other] else None


def swap_shares(rows: pd.DataFrame) -> list[float]:
    """Recomputing, in % of swapping out and in, for each block size of Fig. 19a."""
    ms = rows[rows["part"] == "alone"].pivot(index="block_size", columns="way", values="milliseconds")
    return (100 * ms["recompute"] / ms["swap-in+out"]).tolist()


def swap_shares_drawn() -> list[float]:
    return [
        100 * again / swap
        for (_, again), (_, swap) in zip(paper.points("fig19a", "recompute"), paper.points("fig19a", "swap-in+out"))
    ]


def draw_table(rows: pd.DataFrame) -> Figure:
    from repro.report import plotting

    width, size, line = 12.0, 8.0, 0.155  # inches, points, inches
    items = [Item("where", "one reading", "another reading", "ours", "evidence"), *readings(rows)]
    # Letters that fit into a column; the first one is bold and wider.
    most = [
        int(share * width * 72 / (size * (0.65 if column == 0 else 0.53))) - 2 for column, share in enumerate(_SHARES)
    ]
    cells = [
        [textwrap.wrap(text.replace(" %", "\u00a0%"), letters) for text, letters in zip(item, most)] for item in items
    ]
    heights = [line * max(map(len, row)) + 0.1 for row in cells]
    figure = plotting.Figure(figsize=(width, sum(heights) + 0.35), layout="constrained")
    axis = figure.add_subplot()
    axis.set(xlim=(0, 1), ylim=(sum(heights), 0))
    axis.axis("off")
    top = 0.0
    for index, (row, height) in enumerate(zip(cells, heights)):
        if index % 2:
            axis.axhspan(top, top + height, color="#F2F4F7", zorder=0)
        for column, lines in enumerate(row):
            axis.text(
                sum(_SHARES[:column]) + 0.006,
                top + 0.05,
                "\n".join(lines),
                fontsize=size,
                va="top",
                linespacing=1.25,
                fontweight="bold" if index == 0 or column == 0 else "normal",
                color="#0072B2" if column >= 3 and index else "#222222",
            )
        top += height
    plotting.footer(figure, rows, note="Printed and drawn: by the paper")
    return figure
