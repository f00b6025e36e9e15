"""What is measured in which order, within a budget, resuming where an earlier call stopped.

The most informative points come first; systems take turns within each kind of point, so that a clock that drifts hits all of
them alike. Rates are multiples of each system's own saturated throughput on this machine: in such relative axes any GPU can be
laid over the paper's curves. The rows file is all the state there is: it is written whole after every point, and a point whose
row it has, from the same code, is not measured again.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from repro.measure import calibrate, generate
from repro.measure.bench import Bench
from repro.measure.load import Load
from repro.measure.recompute import recompute_row
from repro.progress import duration
from repro.store import write_atomically

ROWS = "serving.csv"
#: parallel completions of a request in the launch post's comparison
SAMPLES = 3
#: multiples of saturation at which latency is measured, the most telling first
MULTIPLES = (0.8, 0.5, 0.95)
BLOCK_SIZES = tuple(2**power for power in range(9))


@dataclass(frozen=True)
class Timing:
    """Windows (s): saturated from `warm_s` to `saturated_s`, latency to `latency_s`; FasterTransformer's long batches take longer."""

    warm_s: float
    saturated_s: float
    latency_s: float
    request_level_s: float


GPU_TIMING = {"sharegpt": Timing(8.0, 28.0, 30.0, 52.0), "alpaca": Timing(3.0, 13.0, 14.0, 14.0)}
CPU_TIMING = {"alpaca": Timing(4.0, 14.0, 24.0, 24.0)}


@dataclass(frozen=True)
class Step:
    """One point: `key` names its row (or rows) in the file, `expected_s` is what it will take."""

    key: str
    expected_s: float
    measure: Callable[[], list[dict[str, Any]]]


def steps(bench: Bench, rows: Rows, timing: dict[str, Timing], systems: tuple[str, ...]) -> Iterator[Step]:
    """Every point in order. Later ones look at the rows of earlier ones, so they are made as they come."""
    for workload, times in timing.items():
        for name in systems:
            stop_s = times.request_level_s if name == "faster-transformer" else times.saturated_s
            load = Load(name, workload, None, times.warm_s, stop_s)
            yield Step(f"saturated/{workload}/{name}", stop_s + 2, lambda load=load: [bench.measure(load)])
    if bench.on_gpu:
        for size in BLOCK_SIZES:
            yield Step(f"recompute/{size}", 3, lambda size=size: [recompute_row(bench, size)])
        for name in ("vllm", "orca-max"):
            load = Load(name, "sharegpt", None, timing["sharegpt"].warm_s, timing["sharegpt"].saturated_s, n=SAMPLES)
            yield Step(f"saturated/sharegpt/{name}/{SAMPLES}", load.stop_s + 2, lambda load=load: [bench.measure(load)])
        if generate.fits(bench):
            yield Step("generate/sharegpt", 60, lambda: [generate.generate_row(bench, "sharegpt")])
    yield Step("steps", 60, lambda: list(calibrate.cells(bench)))
    for multiple in MULTIPLES:
        for workload, times in timing.items():
            for name in systems:
                found = rows.find(f"saturated/{workload}/{name}")
                if found is not None:
                    rate = multiple * float(found["finished_rate"])
                    # Where requests are few, the window is longer, so that enough of them arrive to take a mean.
                    stop_s = max(times.latency_s, times.warm_s + min(60 / rate, 2 * times.latency_s))
                    load = Load(name, workload, rate, times.warm_s, stop_s, seed=1)
                    yield Step(f"latency/{workload}/{name}/{multiple:g}", 1.2 * stop_s,
                               lambda load=load, multiple=multiple: [bench.measure(load) | {"multiple": multiple}])


class Rows:
    """The rows file: `code` is the hash of what measures. Rows of other code do not count, unless it is named in `also`."""

    def __init__(self, path: Path, code: str, also: Collection[str] = ()) -> None:
        self.path, self.code = path, code
        self.rows: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = [row for row in csv.DictReader(file) if row["code"] in (code, *also)]

    def find(self, key: str) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["key"] == key), None)

    def add(self, key: str, rows: list[dict[str, Any]], **about: Any) -> None:
        self.rows += [{"key": key, "code": self.code, **row, **about} for row in rows]
        text = io.StringIO()
        columns = dict.fromkeys(name for row in self.rows for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomically(self.path, text.getvalue().encode())


def work_through(points: Iterator[Step], rows: Rows, budget_s: float, say: Callable[[str], None] = partial(print, flush=True), **about: Any) -> int:
    """Measure what is missing until the budget would be overrun; how many points had to be left out."""
    started, left_out = time.monotonic(), 0
    for step in points:
        if rows.find(step.key) is not None:
            continue
        spent = time.monotonic() - started
        if spent + step.expected_s > budget_s:
            left_out += 1
            continue
        rows.add(step.key, step.measure(), **about)
        took = time.monotonic() - started - spent
        say(f"{step.key}: {duration(took)}; {duration(spent + took)} of {duration(budget_s)}")
    return left_out
