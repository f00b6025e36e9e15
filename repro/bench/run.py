"""Works through a benchmark's steps within a budget, and goes on where an earlier call stopped."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.errors import UserError
from repro.hashing import canonical_json, sha256_text
from repro.setup.machine import machine

_clock = tqdm.format_interval
_ROWS_SHOWN = 40  # of a recording with more, only the file is named
#: makes the line of progress (repro.harness.progress.Progress) from the kind and the expected seconds of each point
Display = Callable[[Sequence[tuple[str, float]]], Any]


def measure(name: str, benchmark: Benchmark, folder: Path, code: str, display: Display | None = None) -> None:
    """Record a benchmark in `folder`. `code` is the hash of the source that measures; the budget counts from here."""
    started, options = time.monotonic(), benchmark.options
    recording = Recording(folder, name, hash_of(code, benchmark.setting), options.also_code)
    about = {**machine(), **benchmark.setting, "method": benchmark.method, **benchmark.start(recording)}
    if options.commit:
        about["commit"] = options.commit
    recording.begin(about)
    on = [str(benchmark.setting[part]) for part in ("device", "cpu", "model", "dtype") if part in benchmark.setting]
    print(f"{name}: {', '.join(on)}; rows go to {recording.path}", flush=True)

    def steps() -> Iterator[Step]:
        return (step for step in benchmark.steps(recording) if step.kind in options.only)

    left_s = benchmark.budget_s - (time.monotonic() - started)
    later, never = work_through(steps, recording, left_s, benchmark.setting, display)
    about = {**benchmark.finish(recording), "seconds": round(time.monotonic() - started, 1)}
    recording.end(about, points_left_out=later + never)
    if benchmark.shown and 0 < len(recording.rows) <= _ROWS_SHOWN:
        columns = ["key", *benchmark.shown]
        print(pd.DataFrame(recording.rows).reindex(columns=columns).to_string(index=False, na_rep=""))
    said = f"{len(recording.rows)} rows in {recording.path}"
    said += f"; {never} points cannot be measured, see above" if never else ""
    overrun = f"{later} points left out, as the budget of {options.budget} would be overrun: call again to go on"
    print(f"{said}; {overrun}" if later else said)


def hash_of(code: str, setting: Row) -> str:
    """The hash of all that measures a point, and of what it measures on: rows with equal hashes belong together."""
    return sha256_text(canonical_json([setting, code]))


def work_through(
    steps: Callable[[], Iterator[Step]],
    recording: Recording,
    budget_s: float,
    setting: Row,
    display: Display | None = None,
    say: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Measure what is missing and does not overrun the budget (a later point that takes less may still fit); how many
    points another call will measure, and how many none can, for want of memory say."""
    missing = [step for step in steps() if recording.find(step.key) is None]
    total_s, later, never, started = sum(step.expected_s for step in missing), 0, 0, time.monotonic()
    say(f"{len(missing)} points to measure, about {_clock(total_s)}; the budget has {_clock(max(0, budget_s))} left")
    keys = {step.key for step in missing}
    line = display([(step.kind, step.expected_s) for step in missing]) if display and missing else None
    for step in steps():
        if step.key not in keys:
            continue
        if step.measure is None or time.monotonic() - started + step.expected_s > budget_s:
            later += 1
            continue
        if line:
            line.start(step.key, step.kind, step.expected_s)
            line.show()
        try:
            rows = list(step.measure())
        except UserError as error:
            (line.say if line else say)(f"{step.key}: not measured: {error}")
            never += 1
            continue
        recording.add(step.key, rows, setting)
        if line:
            line.finish(step.key)
    if line:
        line.close()
    return later, never
