"""A queue that never empties: how many sequences contiguous and paged memory hold, step by step.

An article that explains PagedAttention does this with an interactive simulator and prints what it shows. It prints less
than it takes to repeat that, so ours stands on one set of assumptions, the same for all setups and stated in
experiments/saturated_queue.yaml. Everything is counted in steps of the real scheduler and managers; no time occurs."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from repro.bench import kept
from repro.errors import UserError
from repro.studies.base import DataFrame, Figure, Judgement, Parameters, Point, Rows, house, plotting, where
from repro.studies.common import Count, Seeds, about
from repro.studies.measured import GpuOrNone, kernel_rows
from repro.studies.saturated import SETUPS, Load, head_of_queue, replay

TABLES = {"replay": ("setup", "seed"), "head": ("seed", "step"), "kernel": ("device",)}
LENGTHS = "Prompts uniform from 1,000 to 7,000, outputs from 1 to 511"

#: tokens a step, and % of the slots that hold a token where it is given, as the explainer prints them
PRINTED = {
    "contiguous (2048)": (43.7, 48),
    "contiguous (16384)": (12.0, 13.5),
    "contiguous (256)": (60.0, 66),
    "oracle (equal outputs)": (96.7, 96.9),
    "paged": (95.4, 99.8),
    "paged (16384)": (95.4,),
    "paged (equal outputs)": (96.3,),
    "paged (block 256)": (93.0,),
    "paged (shared)": (122.9,),
    "paged (256, shared)": (112.6,),
}


class Params(Parameters):
    kv_slots: Count
    max_num_seqs: Count
    max_model_len: Count
    shortest_prompt: Count
    longest_prompt: Count
    mean_output: Count
    system_prompt: Count
    warmup_steps: Annotated[int, Field(ge=0)]
    steps: Count
    seeds: Seeds
    gpu: GpuOrNone

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.system_prompt <= self.shortest_prompt <= self.longest_prompt:
            raise UserError(
                f"shortest_prompt = {self.shortest_prompt} must be from system_prompt = {self.system_prompt}, with "
                f"which every prompt begins, up to longest_prompt = {self.longest_prompt}"
            )
        longest = self.longest_prompt + max(setup.declared for setup in SETUPS.values())
        if longest > self.max_model_len:
            raise UserError(
                f"longest_prompt = {self.longest_prompt} and the largest declared max_tokens are {longest} tokens "
                f"together, more than max_model_len = {self.max_model_len}"
            )
        if self.kv_slots < 2 * self.max_model_len:
            raise UserError(
                f"kv_slots = {self.kv_slots} is too small for chunks of {self.max_model_len} slots, rounded up; use at "
                f"least {2 * self.max_model_len}"
            )
        return self

    @property
    def load(self) -> Load:
        return Load(**self.pick(*(field.name for field in fields(Load))))


def points(params: Params) -> list[Point]:
    given, load = kept.given(params.gpu, kept.KERNELS), params.load
    replays = [
        Point(replay, {"name": name, "setup": setup, "load": load, "seed": seed}, "replay", weight=load.steps)
        for name, setup in SETUPS.items()
        for seed in params.seeds
    ]
    queue = Point(head_of_queue, {"load": load, "seed": params.seeds[0]}, "head", weight=load.steps)
    return [*replays, queue, *([Point(kernel, given, "kernel")] if given else [])]


def kernel(path: Path, evidence: str) -> dict[str, Any]:
    """The speed that our attention kernel keeps over permuted blocks, the least over Fig. 18a's shapes: 1 would cost
    nothing."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for row in kernel_rows(path, evidence, "fig18a"):
        if row["contender"] == "ours" and row["launch"] == "graph":
            times.setdefault((row["batch"], row["context"]), {})[row["blocks"]] = float(row["us"])
            device = row["device"]
    return {**about(evidence, device), "speed": min(time["in order"] / time["permuted"] for time in times.values())}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    replays = rows["replay"]
    titles = ["Where the slots are", "Tokens a step"]
    figure, axes = plotting.panels(titles, columns=1, width=10.8, height=3.1, sharex=True)
    plotting.memory_bars(axes[0], replays, by="setup", beside={})
    setups = list(dict.fromkeys(replays["setup"]))
    for place, name in enumerate(setups):
        ours, color = where(replays, setup=name)["tokens_per_step"], plotting.other(0).color
        plotting.pair(axes[1], place, ours, "replayed", color)
    axes[1].grid(axis="x", visible=False)
    axes[1].tick_params(axis="x", labelsize=8.5)
    printed = {name: PRINTED[name] for name in setups if name in PRINTED and not params.another_run}
    for name, (tokens, *share) in printed.items():
        for axis, value in zip(axes, (*share, tokens) if share else (None, tokens)):
            if value is not None:
                x = setups.index(name)
                axis.plot([x + 0.02, x + 0.42], [value] * 2, color="black", linewidth=2.4)
                at = {"textcoords": "offset points", "ha": "center", "va": "top", "fontsize": 8.5}
                axis.annotate(f"{value:g}", (x + 0.24, value), (0, -3), **at)
    axes[0].set_ylabel("% of the slots")
    axes[1].set_ylabel("tokens a step")
    line = plotting.key("printed in the explaining article", "black", linewidth=2.4)
    plotting.memory_legend(figure, more=[line] if printed else [])
    brackets = "declared max_tokens (2048 where none is given), or what differs"
    plotting.footer(figure, replays, note=f"Above each bar of the slots: % without a token. In brackets: {brackets}")
    return {"saturated_queue": figure, "saturated_queue_fragmentation": _fragmentation(rows["head"])}


def _fragmentation(rows: DataFrame) -> Figure:
    figure, (axis,) = plotting.panels(["Oracle, outputs of 1 to 511 tokens"], width=7.6, height=3.0)
    step, needed, largest = (rows[name] for name in ("step", "needed", "largest_run"))
    looks = {
        "free_slots": (plotting.PIECES["free"][1], "all free slots"),
        "needed": (plotting.other(3).color, "the next request needs"),
        "largest_run": (plotting.other(0).color, "largest free piece"),
    }
    for column, (color, _) in looks.items():
        axis.step(step, rows[column], where="post", color=color, linewidth=1.6)
    shade = dict(color=looks["needed"][0], alpha=0.12, linewidth=0)
    axis.fill_between(step, largest, needed, where=largest < needed, step="post", **shade)
    axis.set(xlabel="step", ylabel="slots", yscale="log")
    plotting.log(axis)
    handles = [plotting.key(text, color, linewidth=1.6) for color, text in looks.values()]
    plotting.place_legend(figure, [*handles, plotting.swatch("it does not fit", looks["needed"][0], alpha=0.12)])
    plotting.footer(figure, rows)
    return figure


def judge(rows: Rows, params: Params) -> list[Judgement]:
    by_setup = rows["replay"].groupby("setup")
    table = by_setup.mean(numeric_only=True)
    least, most = by_setup.min(numeric_only=True), by_setup.max(numeric_only=True)
    tokens, recorded, queue = table["tokens_per_step"], rows["kernel"], rows["head"]
    equal, paged = "paged (equal outputs)", tokens["paged"]
    stuck = queue[(queue["largest_run"] < queue["needed"]) & (queue["needed"] <= queue["free_slots"])]
    first = stuck.sort_values("free_slots", kind="stable").head(1).to_dict("records")
    text = "Step {step:.0f}: {needed:,.0f} slots needed, {free_slots:,.0f} free, the largest piece {largest_run:,.0f}."
    facts = {
        "where": f"{LENGTHS}: ours, for all of these claims; {len(params.seeds)} seeds.",
        "sequences": paged,
        "stuck": "".join(text.format(**step) for step in first),
    }

    def said(claim_id: str, ours: Any, interval: Any = None) -> Judgement:
        return Judgement(claim_id, ours, "replayed", interval, facts=facts)

    def ends(setup: str, column: str) -> list[Any]:
        return [least.at[setup, column], most.at[setup, column]]

    def single(claim_id: str, setup: str, column: str) -> Judgement:
        return said(claim_id, table.at[setup, column], ends(setup, column))

    def several(claim_id: str, keys: dict[str, tuple[str, dict[str, str]]], **more: Any) -> Judgement:
        """`keys`: key of the claim -> (setup, {key below it: column}). `more` are values without an interval."""
        ours, interval = {}, {}
        for key, (setup, columns) in keys.items():
            ours[key] = {name: table.at[setup, column] for name, column in columns.items()}
            interval[key] = {name: ends(setup, column) for name, column in columns.items()}
        return said(claim_id, ours | more, interval | dict.fromkeys(more))

    rate = {"tokens_per_step": "tokens_per_step"}
    states = {**rate, "effective_pct": "token_states"}
    full = {"sequences": "tokens_per_step", **states}
    lost = {"preemptions": "preemptions", "discarded_tokens": "discarded_tokens"}
    over = {"contiguous": ("contiguous (16384)", full), "paged": ("paged (16384)", rate)}
    known = {"oracle": ("oracle (equal outputs)", states), "paged": (equal, rate)}
    preempted = {"default": ("paged", lost | {"delivered_tokens": "delivered_tokens"}), "spread0": (equal, lost)}
    more_often = {"mixed": table.at["paged", "preemptions"], "uniform": table.at[equal, "preemptions"]}
    without = {"paged": equal, "oracle": "oracle (equal outputs)"}
    behind = {"tokens_per_step": {name: tokens[setup] for name, setup in without.items()}}
    spans = {"tokens_per_step": {name: ends(setup, "tokens_per_step") for name, setup in without.items()}}
    sharing = {"block16": tokens["paged (shared)"], "block256": tokens["paged (256, shared)"]}
    small = [name for name, setup in SETUPS.items() if setup.memory == "paged" and setup.block_size == 16]
    return [
        several("explainer-default", {"contiguous": ("contiguous (2048)", full), "paged": ("paged", full)}),
        several("explainer-overdeclared", over),
        several("explainer-honest-256", {"contiguous": ("contiguous (256)", states)}),
        several("explainer-no-uncertainty", known),
        said("effective-tokens", behind, spans),
        *_with_penalty(recorded, tokens[equal]),
        single("explainer-external-fragmentation", "oracle", "blocked_pct"),
        several("explainer-preemptions", preempted, **{"uniform lengths preempt more": more_often}),
        said("explainer-block-size", {"16": paged, "256": tokens["paged (block 256)"]}),
        said("explainer-sharing", sharing | {"gain_pct": 100 * (sharing["block16"] / paged - 1)}),
        said("explainer-gap", {f"declared_{n}": paged / tokens[f"contiguous ({n})"] for n in (2048, 16384)}),
        said("explainer-first-block", len(stuck)),
        single("last-block-measured", "paged", "empty_mib"),
        said("last-block-bound", int(most.loc[small, "empty_slots_most"].max())),
    ]


def _with_penalty(recorded: DataFrame, paged: float) -> list[Judgement]:
    """What a recorded kernel's speed makes of the tokens a step."""
    if recorded.empty:
        return []
    speed, evidence, device = recorded.iloc[0][["speed", "evidence", "device"]]
    return [
        Judgement("explainer-no-uncertainty", {"kernel_penalty": speed}, evidence, device=device),
        Judgement("effective-tokens", {"effective_tokens_per_step": speed * paged}, evidence, device=device),
    ]
