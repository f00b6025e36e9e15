"""What a trace asks of a server: replays of it under several settings, side by side.

    trace = read_trace("trace.csv")
    table = ask("block", trace, "opt-13b")
    print(answer("block", table))

Every number is modelled: the project's own scheduler and memory manager decide, a cost model says how long it takes.
Each is a distribution, over time or over requests. Settings that a question does not change are those of the authors'
vLLM of 2023, as in `repro.serve`."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.checks import flag, instance, lookup, user_facing, whole
from repro.engine.chunked import ChunkedPrefillConfig
from repro.engine.config import DEPLOYMENTS, Deployment, check_block_size
from repro.engine.loop import Engine, Observer, Outcome
from repro.engine.scheduler import SchedulerConfig, SchedulerOutput
from repro.engine.systems import system
from repro.errors import UserError
from repro.simulate.serve import serve
from repro.workloads import Trace

if TYPE_CHECKING:
    import pandas as pd

PARTS = 5  # of the requests in order of arrival, whose mean latencies show how far a mean can be trusted
ALIKE = 1.05  # the 90 % quantiles of settings within this factor of the best one are not told apart
#: makes a line of progress (repro.harness.progress.Progress) from the kind and the cost of each replay
Display = Callable[[Sequence[tuple[str, float]]], Any]


@user_facing
@dataclass(frozen=True)
class Setting:
    """One way to serve; what is None is as in the authors' vLLM. UserError for what cannot be.

    `block_size` in tokens; `preemption` "recompute" or "swap"; `max_num_seqs` running sequences;
    `max_num_batched_tokens` tokens of an iteration. `chunked`: prompts may be cut where that budget ends, as in V1.
    `at_once`: all requests are there at the start, so that only the server limits how many run."""

    block_size: int = 16
    preemption: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked: bool = False
    at_once: bool = False

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        flag("at_once", self.at_once)
        self.config(2048)

    def config(self, max_model_len: int) -> SchedulerConfig:
        """The scheduler's settings, for requests of at most `max_model_len` tokens."""
        names = ("preemption", "max_num_seqs", "max_num_batched_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if flag("chunked", self.chunked):
            return ChunkedPrefillConfig(**given, max_model_len=max_model_len)
        return system("vllm").with_scheduler(**given).scheduler


def _budget(tokens: int) -> Setting:
    return Setting(max_num_batched_tokens=tokens, max_num_seqs=min(256, tokens), chunked=True)


#: name -> the question, and its settings by what a table calls them
QUESTIONS: dict[str, tuple[str, dict[str, Setting]]] = {
    "fit": (
        "How many requests fit in the pool at once?",
        {"as they arrive": Setting(), "all at once": Setting(at_once=True)},
    ),
    "budget": (
        "Which token budget?",
        {"2560, prompts whole": Setting()} | {f"{n}, prompts cut": _budget(n) for n in (256, 512, 1024, 2048, 4096)},
    ),
    "seqs": ("Which cap on running sequences?", {str(n): Setting(max_num_seqs=n) for n in (8, 16, 32, 64, 128, 256)}),
    "block": (
        "Which block size, going by memory alone?",
        {str(n): Setting(block_size=n) for n in (1, 8, 16, 32, 64, 128, 256)},
    ),
    "preemption": ("Swap or recompute?", {name: Setting(preemption=name) for name in ("recompute", "swap")}),
}


class Running(Observer):
    """How many requests run, and whether others wait, with the seconds that this lasts."""

    def __init__(self) -> None:
        self.stretches: list[tuple[float, int, bool]] = []

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        running = len(output.decodes) + len(output.prefills) + len(output.chunks)
        waits = bool(engine.scheduler.waiting or engine.scheduler.swapped)
        self.stretches.append((engine.clock.now - start_s, running, waits))

    def summary(self, only_while_others_wait: bool) -> dict[str, float]:
        """Quantiles over time of the requests that run, while any do; the share of that time in which others wait."""
        seconds, running, waits = np.array(self.stretches).T
        share = float(seconds @ waits / seconds.sum())
        weights = seconds * waits if only_while_others_wait and share else seconds
        order = np.argsort(running, kind="stable")
        passed = np.cumsum(weights[order])
        at = [running[order[np.searchsorted(passed, level * passed[-1])]] for level in (0.1, 0.5, 0.9)]
        return {f"running_{name}": int(value) for name, value in zip((10, 50, 90), at)} | {"waiting_share": share}


def _run(trace: Trace, setting: Setting, deployment: Deployment, watch: Running) -> tuple[list[Outcome], Engine]:
    config, size = setting.config(deployment.model.max_model_len), setting.block_size
    # Nothing is known of what prompts hold, so V1 runs without its prefix cache.
    usual = replace(system("vllm-v1"), prefix_caching=False) if setting.chunked else system("vllm")
    chosen = replace(usual, scheduler=config)
    served = serve(chosen, deployment, trace, block_size=size, observers=[watch])
    return served.outcomes, served.engine


def replay(trace: Trace, setting: Setting, deployment: Deployment) -> dict[str, Any]:
    """One row: requests running (quantiles over time, %), normalized latency (s/token) and time to first token (s;
    quantiles over requests, %), output tokens/s, preemptions. `latency_low` and `latency_high` are the least and the
    greatest mean of PARTS parts of the trace. With `at_once`, requests running count only while others wait.

    UserError as `repro.serve`."""
    trace = replace(trace, arrival_s=np.zeros(len(trace))) if setting.at_once else trace
    watch = Running()
    outcomes, engine = _run(trace, setting, deployment, watch)
    latency = np.array([outcome.normalized_latency_s for outcome in outcomes])
    first = np.array([outcome.first_token_s - outcome.request.arrival_s for outcome in outcomes])
    parts = [part.mean() for part in np.array_split(latency, PARTS) if len(part)]
    row = watch.summary(setting.at_once)
    for name, values in (("latency", latency), ("first_token", first)):
        row |= {f"{name}_{level}": float(np.percentile(values, level)) for level in (50, 90, 99)}
    return row | {
        "latency_mean": float(latency.mean()),
        "latency_low": float(min(parts)),
        "latency_high": float(max(parts)),
        "tokens_per_s": float(trace.output_tokens.sum() / (engine.clock.now - trace.arrival_s[0])),
        "preemptions": engine.scheduler.num_preemptions,
        "evidence": "modelled",
    }


def _timed(key: Setting, call: Callable[[], dict[str, Any]]) -> tuple[Setting, dict[str, Any], float]:
    start = time.perf_counter()
    return key, call(), time.perf_counter() - start


@user_facing
def compare(
    trace: Trace,
    settings: Mapping[Hashable, Setting],
    deployment: Deployment | str = "opt-13b",
    jobs: int = 1,
    display: Display | None = None,
) -> pd.DataFrame:
    """A line a setting, called by its key, with the columns of `replay`; `jobs` processes replay. Equal settings are
    replayed once. `display` makes a line of progress.

    UserError for what is no trace, setting or deployment, and as `repro.serve`."""
    import pandas as pd
    from joblib import Parallel, delayed

    instance("trace", trace, Trace, "a Trace, such as repro.read_trace makes")
    if not isinstance(deployment, Deployment):
        deployment = lookup("deployment", DEPLOYMENTS, deployment)
    if not instance("settings", settings, Mapping, "a dict, name -> Setting"):
        raise UserError("settings is empty; give at least one Setting")
    todo = list(
        dict.fromkeys(instance(f"settings[{key!r}]", one, Setting, "a Setting") for key, one in settings.items())
    )
    progress = display([("replay", 1.0)] * len(todo)) if display else None
    calls = [delayed(_timed)(one, partial(replay, trace, one, deployment)) for one in todo]
    rows = {}
    try:
        for one, row, seconds in Parallel(whole("jobs", jobs, 1), return_as="generator_unordered")(calls):
            rows[one] = row
            if progress:
                progress.start(str(one), "replay", 1.0)
                progress.finish(str(one), seconds)
                progress.show()
    finally:
        if progress:
            progress.close()
    return pd.DataFrame({key: rows[one] for key, one in settings.items()}).T.infer_objects()


@user_facing
def ask(question: str, trace: Trace, deployment: Deployment | str = "opt-13b", jobs: int = 1) -> pd.DataFrame:
    """The table of one of QUESTIONS, as `compare`; `answer` puts it in a sentence. UserError also for no question."""
    return compare(trace, lookup("question", QUESTIONS, question)[1], deployment, jobs)


@user_facing
def answer(question: str, table: pd.DataFrame) -> str:
    """What a table of `ask` says, in a sentence or two. UserError for an unknown question."""
    lookup("question", QUESTIONS, question)
    if question == "fit":
        alone, full = table.loc["as they arrive"], table.loc["all at once"]
        many = "{0.running_50:.0f} requests run in the median, {0.running_10:.0f} to {0.running_90:.0f} for 80 %".format
        limit = (
            f"With a queue that is never empty {many(full)} of the time" if full.waiting_share else "All fit at once"
        )
        return f"{limit}. As they arrive {many(alone)}; others wait for {100 * alone.waiting_share:.0f} %."
    best = table.latency_90.min()
    same = table.latency_90 <= ALIKE * best
    if same.all():
        return f"It makes no difference above {100 * (ALIKE - 1):.0f} % in the 90 % quantile of normalized latency."
    others = ", ".join(f"{name}: {ratio:.2f}" for name, ratio in (table.latency_90[~same] / best).items())
    alike = ", ".join(map(str, table.index[same]))
    return f"The lowest 90 % quantile of normalized latency, {best:.3g} s/token, has {alike}. Times as much {others}."


def in_short(table: pd.DataFrame) -> pd.DataFrame:
    """A table of `compare` as text for a terminal: several quantiles in one cell."""
    groups = {
        "running 10/50/90 %": ["running_10", "running_50", "running_90"],
        "others wait": ["waiting_share"],
        "s/token 50/90/99 %": ["latency_50", "latency_90", "latency_99"],
        "mean, of parts": ["latency_mean", "latency_low", "latency_high"],
        "first token s 50/90/99 %": ["first_token_50", "first_token_90", "first_token_99"],
        "tokens/s": ["tokens_per_s"],
        "preempted": ["preemptions"],
    }
    return table[[]].assign(
        **{
            name: [" ".join(f"{value:.3g}" for value in row) for row in table[columns].to_numpy(float)]
            for name, columns in groups.items()
        }
    )
