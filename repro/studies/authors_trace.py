"""Fig. 2, 12, 13a and 19b on the authors' own trace, bit for bit.

Without a file of lengths this study reads the rows that were computed from the authors' once (experiments/
authors_trace); with a file it computes them. Ours is read on the rates that the paper draws, as the paper's own curves
must be: each rate has a trace of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from repro.engine.systems import system
from repro.hashing import sha256_file
from repro.studies import authors, sweep
from repro.studies import fig02_memory_waste as fig02
from repro.studies import fig12_basic_sampling as fig12
from repro.studies import fig19_preemption as fig19
from repro.studies.base import Figure, Judgement, Parameters, Point, Rows, house, paper, plotting
from repro.studies.common import Lengths, Positive, Rates, Seed, ServingBlockSizes, Window
from repro.studies.measured import together
from repro.workloads import AuthorsPairs, length_source

TABLES = {
    "pool": ("system", "seed"),
    "batches": ("system", "seed"),
    "latency": ("panel", "system", "rate", "seed"),
    "end_to_end": ("way", "block_size", "seed"),
}
ORCAS = ("orca-max", "orca-pow2", "orca-oracle")
PANELS = {f"{model}/sharegpt": f"{model.upper()}, ShareGPT" for model in ("opt-13b", "opt-66b", "opt-175b")}
#: a piece of Fig. 2 as the claim names it -> the columns that it holds
PIECES = {
    "token-states": ["token_states"],
    "reservation": ["reserved"],
    "internal": ["internal"],
    "external-and-others": ["rounding", "free"],
}


class Params(Parameters):
    usage_rate: Positive
    usage_window_s: Window
    batch_rate: Positive
    batch_window_s: Window
    beyond: Rates
    max_seconds: Positive
    preemption_rate: Positive
    preemption_seconds: Positive
    block_sizes: ServingBlockSizes
    seed: Seed
    lengths: Lengths
    free: ClassVar = ("lengths",)


def points(params: Params) -> list[Point]:
    lengths = params.lengths
    if lengths is None:
        return [authors.kept(**dict(zip(TABLES, TABLES)))]
    traced = {"lengths": lengths, "seed": params.seed, "arrivals": "authors"}
    pool = {"model": "opt-13b", "profile": "a100-2023", "block_size": 16, "kv_slots": None, "workload": "sharegpt"}
    filled = {
        "pool": {"rate": params.usage_rate, "window_s": params.usage_window_s},
        "batches": {"rate": params.batch_rate, "window_s": params.batch_window_s},
    }
    calls: list[tuple[str, Callable[..., Any], dict[str, Any]]] = [
        (table, fig02.saturated_run, {"system": system(name), **pool, **how, **traced})
        for table, how in filled.items()
        for name in (*ORCAS, "vllm")
    ]
    for panel in PANELS:
        for name in ("faster-transformer", *ORCAS, "vllm"):
            drawn = sweep.rates("fig12", panel, name)
            for rate in [*drawn, *(round(factor * drawn[-1], 4) for factor in params.beyond)]:
                seconds = fig12.seconds_of(panel, name, rate, params.max_seconds)
                setup = fig12.setup_of(panel, name, seconds, **traced)
                calls.append(("latency", sweep.latency_at, {"setup": setup, "rate": rate}))
    served = {"rate": params.preemption_rate, "duration_s": params.preemption_seconds, **traced}
    for size in params.block_sizes:
        for mode in fig19.MODES:
            calls.append(("end_to_end", fig19.end_to_end, {"mode": mode, "block_size": size, **served}))
    return [Point(on_lengths, {"call": call, "arguments": of, "lengths": lengths}, table) for table, call, of in calls]


def on_lengths(call: Callable[..., dict[str, Any]], arguments: Mapping[str, Any], lengths: str) -> dict[str, Any]:
    """A row of another study, which says by its evidence whether the lengths are the authors', and by a hash whose."""
    row = call(**arguments)
    if AuthorsPairs.of(length_source("sharegpt", lengths), "sharegpt", 2048).facts.equals_paper_trace:
        row["evidence"] += authors.ON_AUTHORS_LENGTHS
    return row | {"lengths_sha256": sha256_file(Path(lengths)) if Path(lengths).is_file() else None}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    with_paper = not params.another_run
    titles = ["Fig. 2: the K/V pool", "Fig. 13a: batched requests", "Fig. 19b: ways of preemption"]
    memory, axes = plotting.panels(titles, width=4.6, height=3.2)
    plotting.memory_bars(axes[0], rows["pool"], paper=paper.figure("fig2") if with_paper else None)
    axes[0].set_ylabel("KV cache (%)")
    plotting.bars(
        axes[1],
        rows["batches"],
        "batched_requests",
        paper=fig02.PAPER_BATCHES["sharegpt"] if with_paper else None,
        digits=2,
    )
    axes[1].set_ylabel("batched requests")
    ways = fig19.draw_curves(axes[2], rows["end_to_end"], "latency_s_per_token", "fig19b" if with_paper else None)
    axes[2].set(ylabel="latency (s/token)", yscale="log")
    plotting.log(axes[2])
    plotting.memory_legend(memory, with_paper=with_paper, more=ways)
    plotting.footer(memory, together(*(rows[name] for name in ("pool", "batches", "end_to_end"))), with_paper)
    note = "Calibrated: vLLM's lowest rate in each panel, and FasterTransformer's"
    curves = sweep.draw_panels(rows["latency"], "fig12", PANELS, len(PANELS), note, with_paper)
    return {"authors_trace": curves, "authors_trace_memory": memory}


def judge(rows: Rows, params: Params) -> list[Judgement]:
    if not all(table["evidence"].str.endswith(authors.ON_AUTHORS_LENGTHS).all() for table in rows.values()):
        return []  # of another file
    pool, batches = (rows[name].set_index("system") for name in ("pool", "batches"))
    pieces = {piece: {name: pool.loc[name, columns].sum() for name in ORCAS} for piece, columns in PIECES.items()}
    del pieces["internal"]["orca-oracle"]  # reserves what it needs: 0 by construction
    found = authors.crossings(rows["latency"], sweep.LEVEL)
    tables: dict[str, dict[str, Any]] = {"crossings": {}, "faster-transformer": {}}
    for (panel, name), rate in found.items():
        if name == "faster-transformer":
            tables[name][panel] = rate
        else:
            tables["crossings"].setdefault(panel, {})[name] = rate
    apart = fig19.differences(rows["end_to_end"], params.preemption_rate)
    middle = [apart[size] for size in fig19.MIDDLE]
    replayed, modelled = (kind + authors.ON_AUTHORS_LENGTHS for kind in ("replayed", "modelled"))
    facts = {"sha256": rows["pool"]["lengths_sha256"].iloc[0][:16]}
    return [
        Judgement("fig2-authors-trace", pieces, replayed, facts=facts),
        Judgement("fig13-authors-trace", batches["batched_requests"].to_dict(), replayed, facts=facts),
        Judgement("fig12-authors-trace", tables, modelled, facts=facts),
        Judgement("fig19b-authors-trace", max(middle), modelled, [min(middle), max(middle)], facts=facts),
    ]
