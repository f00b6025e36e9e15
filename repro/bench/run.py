"""Works through a benchmark's steps within a budget, and goes on where an earlier call stopped."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from repro.bench.benchmark import Benchmark, Step
from repro.bench.rows import Recording, Row
from repro.engine.errors import UserError
from repro.hashing import canonical_json, sha256_text
from repro.setup.machine import machine

_clock = tqdm.format_interval
_BAR = "{percentage:3.0f}% {bar} {elapsed}<{remaining} {desc}"


def measure(name: str, benchmark: Benchmark, folder: Path, code: str) -> None:
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
    later, never = work_through(steps, recording, left_s, benchmark.setting, benchmark.shown)
    about = {**benchmark.finish(recording), "seconds": round(time.monotonic() - started, 1)}
    recording.end(about, points_left_out=later + never)
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
    shown: Sequence[str] = (),
    say: Callable[[str], None] = tqdm.write,
) -> tuple[int, int]:
    """Measure what is missing and does not overrun the budget (a later point that takes less may still fit); how many
    points another call will measure, and how many none can, for want of memory say."""
    missing = {step.key: step.expected_s for step in steps() if recording.find(step.key) is None}
    left_s, done_s, later, never, started = sum(missing.values()), 0.0, 0, 0, time.monotonic()
    say(f"{len(missing)} points to measure, about {_clock(left_s)}; the budget has {_clock(max(0, budget_s))} left")
    width = max(map(len, missing), default=0)
    if missing:
        say(f"{'point':{width}} {'took':>7} {'left':>7}  " + _line(shown, shown))
    with tqdm(total=left_s, bar_format=_BAR, disable=None, leave=False) as bar:
        for step in steps():
            if step.key not in missing:
                continue
            bar.set_description_str(step.key)
            left_s -= step.expected_s
            spent = time.monotonic() - started
            if step.measure is None or spent + step.expected_s > budget_s:
                later += 1
                bar.total -= step.expected_s
                continue
            try:
                rows = list(step.measure())
            except UserError as error:
                say(f"{step.key}: not measured: {error}")
                never += 1
                continue
            recording.add(step.key, rows, setting)
            now = time.monotonic() - started
            done_s += step.expected_s
            bar.update(step.expected_s)
            left = max(0, min(left_s * now / done_s, budget_s - now))
            said = f"{step.key:{width}} {_clock(now - spent):>7} {_clock(left):>7}  "
            lines = [_line(map(row.get, shown), shown) for row in rows]
            for line in list(filter(str.strip, lines)) or [""]:
                say((said + line).rstrip())
                said = " " * len(said)
    return later, never


def _line(values: Iterable[Any], columns: Sequence[str]) -> str:
    texts = ("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in values)
    return "  ".join(f"{text:{max(12, len(column))}}" for text, column in zip(texts, columns))
