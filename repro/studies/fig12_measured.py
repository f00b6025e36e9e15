"""The paper's comparison measured on a GPU: saturated throughput of five systems, and what their memory held."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from repro.bench import kept
from repro.engine.config import DEVICES
from repro.engine.systems import OF_THE_PAPER
from repro.harness.tables import ABOUT
from repro.simulate.load import Load, predict
from repro.simulate.metrics import PIECES
from repro.simulate.step_times import StepTimes
from repro.studies import measured as shared
from repro.studies.base import Axes, DataFrame, Figure, Judgement, Point, Rows, Series, house, paper, plotting
from repro.studies.common import WORKLOAD_LABEL, deployment_of
from repro.studies.measured import INTERVAL, Measured

_RUN = ("workload", "system")
_STEP = ("seqs", "prompt_tokens", "context_tokens")
TABLES = {"saturated": (*_RUN, "n"), "latency": (*_RUN, "multiple"), "generate": ("workload",), "step": _STEP}
TABLES |= {"replayed": _RUN}
KINDS = ("saturated", "latency", "generate")
METRICS = (*INTERVAL, "finished_rate", "mean_batch", "latency_s_per_token", "preemptions", *PIECES)
COLUMNS = ("system", "workload", "n", "rate", "multiple", "mark", *METRICS, "model", "kv_slots", *ABOUT)

Params = Measured


def points(params: Params) -> list[Point]:
    given = kept.runs(params.gpu, *KINDS)
    replays = [
        Point(replayed, given | {"key": row["key"]}, "replayed", weight=10.0)
        for row in shared.runs(**given, kinds=("saturated",))
        if row["n"] in (None, 1)
    ]
    return [Point(measured, given), *replays]


def measured(path: Path, evidence: str) -> dict[str, list[dict[str, Any]]]:
    """The runs of each kind, with the columns that this study draws."""
    tables: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for row in shared.runs(path, evidence, KINDS):
        tables[row["kind"]].append(shared.columns(row, COLUMNS) | {"n": row.get("n") or 1})
    steps = shared.runs(path, evidence, ("step",))
    return tables | {"step": [shared.columns(row, (*_STEP, "seconds", "model", "kv_slots", *ABOUT)) for row in steps]}


def replayed(path: Path, evidence: str, key: str) -> dict[str, Any]:
    """A saturated run again, with every step as long as the measured mean."""
    row = shared.run_of(path, evidence, key)
    step_s = (row["stop_s"] - row["warm_s"]) / row["iterations"]
    steps = StepTimes("replay", False, (1,), (step_s,), 0.0, (0,), (1,), ((step_s,),), step_s)
    found = predict(Load.of(row), deployment_of("opt-13b", row["kv_slots"]), steps)
    found |= {"model": row["model"], "kv_slots": row["kv_slots"], "evidence": "replayed", "device": None}
    return shared.columns(found, COLUMNS)


def basic(rows: Rows, workload: str) -> DataFrame:
    """The saturated runs of a workload with one sequence a request."""
    found = rows["saturated"]
    return found[(found["workload"] == workload) & (found["n"] == 1)]


def ratios(rows: Rows, workload: str) -> dict[str, tuple[float, float]]:
    """system -> how many times its saturated throughput vLLM delivers, plus or minus."""
    chosen = basic(rows, workload)
    return {name: found for name in OF_THE_PAPER if name != "vllm" and (found := shared.multiple_of(chosen, name))}


def paper_ratios(workload: str) -> dict[str, float]:
    """The same from Fig. 12, at 0.5 s/token, OPT-13B."""
    rates = paper.crossings("fig12", 0.5)[f"opt-13b/{workload}"]
    return {name: rates["vllm"] / rate for name, rate in rates.items() if name != "vllm"}


@house
def draw(rows: Rows, params: Params) -> dict[str, Figure]:
    clocked = rows["saturated"][rows["saturated"]["n"] == 1]
    throughput, axes = plotting.panels(list(WORKLOAD_LABEL.values()), width=4.9, height=3.3)
    for axis, workload in zip(axes, WORKLOAD_LABEL):
        _draw_throughput(axis, rows, workload)
    axes[0].set_ylabel("useful output tokens/s")
    first = rows["saturated"].iloc[0]
    note = (
        f"{first['model'].upper()}, {first['kv_slots']:,.0f} slots. ×: how many times as much vLLM delivers; paper: "
        "its rates at 0.5 s/token. Whiskers and ±: 95 % interval from five parts of the run"
    )
    plotting.footer(throughput, clocked, note=note)
    figures = {"fig12_measured": throughput, "fig12_measured_memory": _draw_memory(rows, clocked)}
    if len(rows["latency"]):
        figures["fig12_measured_latency"] = _draw_latency(rows)
    return figures


def _draw_throughput(axis: Axes, rows: Rows, workload: str) -> None:
    chosen, looks = basic(rows, workload), plotting.styles(OF_THE_PAPER)
    ours, theirs = ratios(rows, workload), paper_ratios(workload)
    for place, name in enumerate(OF_THE_PAPER):
        found = chosen[chosen["system"] == name]
        if found.empty:
            axis.text(place, 0, "not\nmeasured", ha="center", va="bottom", color=plotting.GREY)
            continue
        mean = shared.throughput_bar(axis, found, place, 0.62, color=looks[name].color)
        lines = [*sorted(set(found["mark"].dropna()) - {"steady"}), f"{mean:,.0f}"]
        if name in ours:
            lines.append("×{:.{digits}f} ± {:.{digits}f}".format(*ours[name], digits=1 + (ours[name][0] < 10)))
        if name in theirs:
            lines.append(f"paper ×{theirs[name]:#.3g}")
        at = place, found["tokens_per_s_high"].max()
        axis.annotate("\n".join(lines), at, (0, 3), textcoords="offset points", ha="center", fontsize=9)
    plotting.name_systems(axis, OF_THE_PAPER)
    axis.margins(y=0.1)
    axis.yaxis.set_major_formatter("{x:,.0f}")


def _draw_memory(rows: Rows, clocked: DataFrame) -> Figure:
    titles = [f"{label}: {what}" for what in ("the K/V pool", "batched requests") for label in WORKLOAD_LABEL.values()]
    figure, axes = plotting.panels(titles, columns=2, width=4.7, height=3.0)
    for index, workload in enumerate(WORKLOAD_LABEL):
        real, replay = (found[found["workload"] == workload] for found in (clocked, rows["replayed"]))
        shares, again = (found.assign(**{piece: 100 * found[piece] for piece in PIECES}) for found in (real, replay))
        plotting.memory_bars(axes[index], shares, beside=again.set_index("system")[list(PIECES)].to_dict("index"))
        axes[index].set_ylabel("% of the K/V pool")
        plotting.bars(axes[index + 2], real, "mean_batch", beside=dict(zip(replay["system"], replay["mean_batch"])))
        axes[index + 2].set_ylabel("mean batch")
    pale = f"pale, to the right of {clocked['evidence'].iloc[0]}: replayed"
    plotting.memory_legend(figure, more=[plotting.swatch(pale, alpha=0.45)])
    note = "Above each bar of the pool: % without a token"
    plotting.footer(figure, shared.together(clocked, rows["replayed"]), note=note)
    return figure


def _draw_latency(rows: Rows) -> Figure:
    figure, axes = plotting.panels(list(WORKLOAD_LABEL.values()), width=4.7, height=3.2)
    latency = rows["latency"]
    for axis, workload in zip(axes, WORKLOAD_LABEL):
        chosen, saturated = latency[latency["workload"] == workload], basic(rows, workload)
        sustained = saturated.loc[saturated["system"] == "vllm", "finished_rate"].mean()
        if chosen.empty or sustained != sustained:
            shared.not_measured(axis)
            continue
        panel = f"opt-13b/{workload}"
        drawn, edge = paper.figure("fig12")[panel], paper.crossings("fig12", 0.5)[panel]["vllm"]
        curves = {name: paper.points("fig12", panel, name) for name in OF_THE_PAPER if name in drawn}
        theirs = {name: [(rate / edge, value) for rate, value in curve] for name, curve in curves.items()}
        chosen = chosen.assign(relative=chosen["rate"] / sustained)
        plotting.curves(axis, chosen, "relative", "latency_s_per_token", paper=theirs)
        for _, row in chosen[chosen["mark"] != "steady"].dropna(subset=["latency_s_per_token"]).iterrows():
            at = row["relative"], row["latency_s_per_token"]
            if row["mark"] == "overloaded":
                arrow = {"arrowstyle": "->", "color": "black", "linewidth": 1.3, "shrinkA": 4, "shrinkB": 0}
                axis.annotate("", (at[0], 1.5 * at[1]), at, arrowprops=arrow, zorder=6)
            else:
                axis.annotate("?", at, (7, -4), textcoords="offset points", fontweight="bold", zorder=6)
        axis.set(xlabel="request rate / what vLLM sustains", ylabel="latency (s/token)", yscale="log", xlim=(0, 1.06))
        plotting.log(axis)
    plotting.legend(figure, latency, with_paper=True)
    note = "Arrow: overloaded, a lower bound. ?: the run was too short, or the host was the limit"
    plotting.footer(figure, latency, with_paper=True, note=note)
    return figure


def judge(rows: Rows, params: Params) -> list[Judgement]:
    saturated, own = rows["saturated"], ratios(rows, "sharegpt")
    means = basic(rows, "sharegpt").groupby("system").mean(numeric_only=True)
    several = saturated[(saturated["workload"] == "sharegpt") & (saturated["n"] > 1)]
    fewest = several[several["n"] == several["n"].min()]
    judged: dict[str, Any] = {"hf-24x": None, "tgi-3.5x": None}
    if len(rows["generate"]) and "vllm" in means.index:
        judged["hf-24x"] = means.at["vllm", "tokens_per_s"] / rows["generate"]["tokens_per_s"].mean()
    if found := shared.multiple_of(fewest, "orca-max"):
        judged["tgi-3.5x"] = found[0], [found[0] - found[1], found[0] + found[1]]
    if {*OF_THE_PAPER} <= {*means.index}:
        judged |= _memory_claims(rows, means) | _ratio_claims(own, ratios(rows, "alpaca"))
    found = shared.on_gpu(saturated, judged | {"prefill-and-decode-bounds": _bounds(rows["step"])})
    facts = {"device": saturated.iloc[0]["device"], "n": fewest["n"].min()}
    return [replace(one, facts=facts) for one in found]


def _memory_claims(rows: Rows, means: DataFrame) -> dict[str, Any]:
    """What the pool held, and how many requests ran at once."""
    pool = 100 * means.loc[[name for name in OF_THE_PAPER if name != "faster-transformer"], list(PIECES)]
    orcas, vllm = pool.drop("vllm"), pool.loc["vllm"]
    wasted, batch = 100 - orcas["token_states"], means["mean_batch"]
    alpaca = basic(rows, "alpaca").groupby("system")["mean_batch"].mean()
    return {
        "fig2-token-states": pool["token_states"].to_dict(),
        "fig2-reservation": orcas["reserved"].to_dict(),
        "fig2-internal": orcas["internal"].to_dict(),
        "fig2-external-and-others": (pool["rounding"] + pool["free"]).to_dict(),
        "waste-under-4-percent": vllm["reserved"] + vllm["internal"],
        "waste-60-80": [wasted.min(), wasted.max()],
        "fig13-sharegpt": batch[pool.index].to_dict(),
        "fig13-alpaca": alpaca.reindex(orcas.index).dropna().to_dict(),
        "more-requests-batched": {f"vs-{name}": batch["vllm"] / batch[f"orca-{name}"] for name in ("oracle", "max")},
    }


def _ratio_claims(sharegpt: dict[str, tuple[float, float]], alpaca: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """How many times as much vLLM delivers, saturated, where the paper compares rates at a latency."""
    oracle, most = sharegpt["orca-oracle"], sharegpt["orca-max"]
    judged = {
        "rate-vs-oracle-sharegpt": shared.with_interval({"opt-13b": oracle}),
        "rate-vs-max-sharegpt": shared.with_interval({"opt-13b": most}),
        "rate-vs-fastertransformer": {
            f"opt-13b/{workload}": found["faster-transformer"][0]
            for workload, found in (("sharegpt", sharegpt), ("alpaca", alpaca))
        },
        "throughput-2-to-4x": [oracle[0], most[0]],
    }
    if "orca-oracle" in alpaca:
        judged["larger-gains-elsewhere"] = {"longer-sequences": 100 * (oracle[0] / alpaca["orca-oracle"][0] - 1)}
    return judged


def _bounds(steps: DataFrame) -> dict[str, dict[str, float]] | None:
    """What the steps with the longest prompts, and those of the fewest and the most decoding sequences alone, reach of
    the datasheet's bandwidth and matrix rate, in %. None without steps, and for a GPU whose datasheet is not kept."""
    gpu = next((one for name, one in DEVICES.items() if len(steps) and name in steps.iloc[0]["device"].lower()), None)
    if gpu is None:
        return None
    model, alone = (
        deployment_of("opt-13b").model,
        steps[steps["prompt_tokens"] == 0].sort_values(["seqs"], kind="stable"),
    )
    chosen = {
        "prefill": steps.sort_values(["prompt_tokens", "seqs"], ascending=[False, True]).iloc[0],
        "few decodes": alone.iloc[0],
        "many decodes": alone.iloc[-1],
    }

    def reached(step: Series) -> dict[str, float]:
        moved = model.weight_bytes + step["context_tokens"] * model.kv_bytes_per_token
        computed = (step["seqs"] + step["prompt_tokens"]) * model.flops_per_token
        rates = {"memory": moved / gpu.bytes_per_s, "arithmetic": computed / gpu.flops_per_s}
        return {bound: 100 * least / step["seconds"] for bound, least in rates.items()}

    return {name: reached(step) for name, step in chosen.items()}
