"""What is measured in which order, within a budget, resuming where an earlier call stopped.

The most informative points come first; systems take turns within each kind of point, so that a clock that drifts hits
all of them alike. Rates are multiples of each system's own saturated throughput on this machine: in such relative axes
any GPU can be laid over the paper's curves. The rows file is all the state there is: it is written whole after every
point, and a point whose row it has, from the same code, is not measured again. Nothing that was ever measured is
removed from it."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from repro.bench.serving import calibrate, generate
from repro.bench.serving.recompute import recompute_row
from repro.bench.serving.warm_engine import Bench
from repro.engine.errors import UserError
from repro.harness import keys
from repro.harness.progress import duration
from repro.hashing import canonical_json, sha256_text, write_atomically
from repro.simulate.beams import WIDTHS
from repro.simulate.load import PREEMPTIONS, TRANSLATION, Load

ROWS = "serving.csv"
#: parallel completions of a request in the launch post's comparison
SAMPLES = 3
#: multiples of saturation at which latency is measured, the most telling first
MULTIPLES = (0.8, 0.5, 0.95)
RECOMPUTED = tuple(2**power for power in range(9))
#: block sizes (tokens) that serve a whole workload, the most telling first: each has a pool and graphs of its own
BLOCK_SIZES = (16, 64, 256, 8, 32, 128, 1)
#: tokens that all prompts of Fig. 16 begin with
PREFIXES = (80, 341)
ORCAS = ("orca-oracle", "orca-pow2", "orca-max")


@dataclass(frozen=True)
class Timing:
    """Windows (s): saturated from `warm_s` to `saturated_s`, latency to `latency_s`; FasterTransformer's long batches
    take longer."""

    warm_s: float
    saturated_s: float
    latency_s: float
    request_level_s: float


GPU_TIMING = {"sharegpt": Timing(8.0, 28.0, 30.0, 52.0), "alpaca": Timing(3.0, 13.0, 14.0, 14.0)}
#: windows (s) of what comes after the latency curves
SHAREGPT_WINDOW, WINDOW = {"warm_s": 6.0, "stop_s": 20.0}, {"warm_s": 3.0, "stop_s": 11.0}
CPU_TIMING = {"alpaca": Timing(4.0, 14.0, 24.0, 24.0)}


@dataclass(frozen=True)
class Step:
    """One point: `key` names its row (or rows) in the file, `expected_s` is what it will take."""

    key: str
    expected_s: float
    measure: Callable[[], list[dict[str, Any]]]

    @property
    def kind(self) -> str:
        return self.key.partition("/")[0]


def steps(bench: Bench, rows: Rows, timing: dict[str, Timing], systems: tuple[str, ...]) -> Iterator[Step]:
    """Every point in order. Later ones look at the rows of earlier ones, so they are made as they come. A CPU, far too
    slow for the paper's model, has only what a prediction is checked against."""
    load_on = partial(Load, max_model_len=bench.loaded.config.max_model_len)
    for workload, times in timing.items():
        for name in systems:
            stop_s = times.request_level_s if name == "faster-transformer" else times.saturated_s
            load = load_on(name, workload, None, times.warm_s, stop_s)
            yield Step(f"saturated/{workload}/{name}", stop_s + 2, lambda load=load: [bench.measure(load)])
    if bench.on_gpu:
        for size in RECOMPUTED:
            yield Step(f"recompute/{size}", 3, lambda size=size: [recompute_row(bench, size)])
        for name in ("vllm", "orca-max"):
            if name not in systems:
                continue
            load = load_on(name, "sharegpt", None, timing["sharegpt"].warm_s, timing["sharegpt"].saturated_s, n=SAMPLES)
            yield Step(f"saturated/sharegpt/{name}/{SAMPLES}", load.stop_s + 2, lambda load=load: [bench.measure(load)])
        if generate.fits(bench):
            yield Step("generate/sharegpt", 150, lambda: [generate.generate_row(bench, "sharegpt")])
    yield Step("steps", 60, lambda: list(calibrate.cells(bench)))
    for multiple in MULTIPLES:
        for workload, times in timing.items():
            for name in systems:
                key, found = f"latency/{workload}/{name}/{multiple:g}", rows.find(f"saturated/{workload}/{name}")
                rate = multiple * float(found["finished_rate"]) if found is not None else 0.0
                if not rate:  # without its saturation nobody knows its rate, so it is left out
                    yield Step(key, math.inf, list)
                    continue
                # Where requests are few, the window is longer, so that enough of them arrive to take a mean.
                stop_s = max(times.latency_s, times.warm_s + min(60 / rate, 2 * times.latency_s))
                load = load_on(name, workload, rate, times.warm_s, stop_s, seed=1)
                yield Step(
                    key,
                    1.2 * stop_s,
                    lambda load=load, multiple=multiple: [bench.measure(load) | {"multiple": multiple}],
                )
    if bench.on_gpu:
        yield from (step for step, name in _sharing_and_blocks(bench, load_on) if name in systems)


def _sharing_and_blocks(bench: Bench, load_on: Callable[..., Load]) -> Iterator[tuple[Step, str]]:
    """Saturated runs of what else vLLM shares and how else it may be set (Fig. 14 and 15, 16, 18b and 19b), each with
    its system."""

    def point(key: str, load: Load, more_s: float = 2) -> tuple[Step, str]:
        step = Step(key, load.stop_s + more_s, lambda: [bench.measure(load) | {"kind": step.kind}])
        return step, load.system

    few = partial(load_on, rate=None, **WINDOW)
    for method in ("parallel", "beam"):
        for width in WIDTHS:
            for name in ("vllm", *ORCAS):
                yield point(f"sharing/{method}/{width}/{name}", few(name, "alpaca", n=width, beams=method == "beam"))
    for prefix in PREFIXES:
        for name in ("vllm", "orca-oracle"):
            yield point(f"prefix/{prefix}/{name}", few(name, TRANSLATION, prefix_tokens=prefix))
    sharegpt = partial(load_on, rate=None, **SHAREGPT_WINDOW)
    for size in BLOCK_SIZES:
        for way in PREEMPTIONS:
            # The first one of a size has its pool to set up.
            yield point(
                f"blocks/{size}/sharegpt/{way}",
                sharegpt("vllm", "sharegpt", block_size=size, preemption=way),
                20 if way == PREEMPTIONS[0] else 2,
            )
        yield point(f"blocks/{size}/alpaca", few("vllm", "alpaca", block_size=size))


def code_hash(**setting: Any) -> str:
    """The hash of all that measures a point, and of what it measures on: rows with equal hashes belong together."""
    others = [generate.generate_row, recompute_row]
    return sha256_text(canonical_json([setting, keys.identify(calibrate.cells, {"others": others}).code]))


class Rows:
    """The rows file, in the order of measurement: `code` is the hash of what measures. Rows of other code stay in the
    file but do not count, unless it is named in `also`. UserError if the file is none of ours."""

    def __init__(self, path: Path, code: str, also: Collection[str] = ()) -> None:
        self.path, self.code = path, code
        self._counting = {code, *also}
        self.all: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.all = list(reader)
            if not {"key", "code"} <= set(reader.fieldnames or ()) or any(None in row for row in self.all):
                raise UserError(f"{path} does not hold rows of this program; name another folder, or move it away")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Those that count."""
        return [row for row in self.all if row["code"] in self._counting]

    def find(self, key: str) -> dict[str, Any] | None:
        """The first row of the newest measurement of a point, None if none counts."""
        found = [row for row in self.rows if row["key"] == key]
        return next((row for row in found if row["code"] == found[-1]["code"]), None)

    def add(self, key: str, rows: list[dict[str, Any]], **about: Any) -> None:
        self.all += [{"key": key, "code": self.code, **row, **about} for row in rows]
        text = io.StringIO()
        columns = dict.fromkeys(name for row in self.all for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.all)
        write_atomically(self.path, text.getvalue().encode())


def work_through(
    points: Iterator[Step],
    rows: Rows,
    budget_s: float,
    say: Callable[[str], None] = partial(print, flush=True),
    **about: Any,
) -> tuple[int, int]:
    """Measure what is missing and does not overrun the budget; how many points another call will measure, and how many
    none can.

    A later point that takes less may still fit. One that cannot be measured, for want of memory say, is left out as
    well."""
    started, later, never = time.monotonic(), 0, 0
    for step in points:
        if rows.find(step.key) is not None:
            continue
        spent = time.monotonic() - started
        if spent + step.expected_s > budget_s:
            later += 1
            continue
        try:
            measured = step.measure()
        except UserError as error:
            say(f"{step.key}: not measured: {error}")
            never += 1
            continue
        rows.add(step.key, measured, **about)
        took = time.monotonic() - started - spent
        say(f"{step.key}: {duration(took)}; {duration(spent + took)} of {duration(budget_s)}")
    return later, never
