"""Traces that people bring: arrivals and lengths from the public formats, or from a plain CSV of one's own.

    trace = read_trace("AzureLLMInferenceTrace_conv.csv", duration_s=600)
    print(trace.card)

Nothing is drawn: a request stays what it was, when it was. What is left out is counted on the card. Files with lengths
only (pairs, ShareGPT's and Alpaca's JSON) go through `make_trace`, which draws the arrivals."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import math
import os
from array import array
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from repro.checks import instance, number, shown, user_facing, whole
from repro.errors import UserError
from repro.workloads import make_trace
from repro.workloads.formats import AZURE, Format, count, rows_of, unfit
from repro.workloads.hub import is_dataset_file
from repro.workloads.lengths import SourceFacts
from repro.workloads.trace import QUANTILES, Trace, TraceCard, _hash_arrays, _mean_output_by_prompt, rank_correlation

PARTS = 12  # equal parts of a trace's time, for its rate over time
#: A log that is written as requests end is out of order by minutes; a longer step back is a clock that starts again.
MOST_BACK_S = 3600.0
_WRITTEN_FROM = datetime(2000, 1, 1, tzinfo=UTC)  # a trace has no date


@dataclass(frozen=True)
class FileCard(TraceCard):
    """The card of a trace from a file: also what was left out of it, and its rate over time.

    `rate_over_time` is in requests/s, in PARTS equal parts. `gap_variation` is the variance of the gaps between
    arrivals over their squared mean: about 1 for Poisson arrivals, more for bursts, None where there are no gaps. The
    seed is 0 and means nothing."""

    num_rows: int
    left_out: tuple[tuple[str, int], ...]  # (why, rows)
    num_out_of_order: int
    rate_over_time: tuple[float, ...]
    gap_variation: float | None

    def __str__(self) -> str:
        left = ", ".join(f"{rows:,} {why}" for why, rows in self.left_out if rows) or "nothing"
        back = f"; {self.num_out_of_order:,} stood after a later one and were sorted" * bool(self.num_out_of_order)
        varied = "undefined" if self.gap_variation is None else f"{self.gap_variation:.2f}"
        mean = f"{self.mean_prompt_tokens:.2f} / {self.mean_output_tokens:.2f}"
        names, levels = ("prompt", "output"), " ".join(f"{100 * level:g}" for level in QUANTILES)
        quantiles = [" ".join(f"{q:.0f}" for q in many) for many in (self.prompt_quantiles, self.output_quantiles)]
        return "\n".join(
            [
                f"{self.source.source}: {self.num_requests:,} requests in {self.duration_s:g} s, "
                f"{self.rate_per_s:.3g}/s, hash {self.hash[:12]}",
                f"left out of {self.num_rows:,} rows: {left}{back}",
                f"arrivals: {self.arrivals}; variation of their gaps {varied} (Poisson: 1)",
                f"rate over time, {PARTS} parts of {self.duration_s / PARTS:.3g} s: "
                + " ".join(f"{rate:.3g}" for rate in self.rate_over_time),
                f"tokens: mean {mean}; quantiles, {levels} %: "
                + ", ".join(f"{name} {values}" for name, values in zip(names, quantiles)),
            ]
        )


@user_facing
def read_trace(
    path: str | os.PathLike[str],
    max_model_len: int = 2048,
    start_s: float = 0.0,
    duration_s: float | None = None,
    speed: float = 1.0,
) -> Trace:
    """The requests of a file in one of FORMATS (repro.workloads.formats), in order of arrival, with a FileCard.

    Time 0 is the earliest row. Only rows of `duration_s` s (None: all) from `start_s` s on are taken; time then runs
    `speed` times as fast, so that a service's trace suits one machine. Rows out of order are sorted. Left out and
    counted are rows outside that window, requests without output (failures) or prompt, and those of more than
    `max_model_len` tokens, prompt and output together. Reading ends MOST_BACK_S behind the window.

    Raises UserError, with the line, for what is none of the formats, a time that is negative, not finite or more than
    MOST_BACK_S before an earlier line's, and a length that is no whole number; and if nothing is left."""
    path = Path(instance("path", path, (str, os.PathLike), "the name of a file"))
    whole("max_model_len", max_model_len, 2)
    number("start_s", start_s, 0)
    number("speed", speed, 0, above=True)
    stop_s = math.inf if duration_s is None else start_s + number("duration_s", duration_s, 0, above=True)
    kind, rows = rows_of(path)
    times, lengths = array("d"), array("q")
    latest, ended = -math.inf, 0
    for line, (time, *tokens) in rows:
        times.append(_when(path, line, kind, time))
        for column, cell in zip(kind.columns[1:], tokens):
            try:
                lengths.append(count(cell))
            except ValueError:
                raise unfit(path, line, f"{column} is {shown(cell)}, not a whole number of tokens") from None
        latest = max(latest, times[-1])
        if (back := (latest - times[-1]) / kind.per_second) > MOST_BACK_S:
            what = f"{kind.columns[0]} is {back:,.0f} s before an earlier line's"
            raise unfit(path, line, f"{what}, too far to sort; if the clock starts again there, split the file")
        if times[-1] - times[0] > (stop_s + MOST_BACK_S) * kind.per_second:
            ended = line
            break
    if not times:
        raise unfit(path, 1, "no request in the file")
    raw, pairs = np.array(times), np.array(lengths).reshape(-1, 2)
    seconds = (raw - raw.min()) / kind.per_second
    stop_s = min(stop_s, float(seconds.max())) if duration_s is None else stop_s
    inside = (seconds >= start_s) & ((seconds < stop_s) | (duration_s is None))
    reasons = {
        f"outside {start_s:g}-{stop_s:g} s" + f" (read to line {ended})" * bool(ended): inside,
        "failed (no output tokens)": pairs[:, 1] > 0,
        "without a prompt": pairs[:, 0] > 0,
        f"longer than {max_model_len:,} tokens": pairs.sum(axis=1) <= max_model_len,
    }
    left, left_out = np.ones(len(raw), dtype=bool), []
    for why, fits in reasons.items():
        left_out.append((why, int((left & ~fits).sum())))
        left &= fits
    if not left.any():
        found = ", ".join(f"{rows:,} {why}" for why, rows in left_out if rows)
        raise UserError(f"{path}: none of {len(raw):,} rows is left ({found}); take another window or a longer model")
    order = np.flatnonzero(left)[np.argsort(seconds[left], kind="stable")]
    arrival, (prompt, output) = (seconds[order] - start_s) / speed, np.ascontiguousarray(pairs[order].T)
    duration = (stop_s - start_s) / speed
    means = {"mean_prompt_tokens": float(prompt.mean()), "mean_output_tokens": float(output.mean())}
    gaps = np.diff(arrival)
    card = FileCard(
        workload=kind.name,
        source=SourceFacts(
            source=f"{path.name} ({kind.label})",
            recipe="the file's requests in order of arrival; nothing is drawn",
            filter=f"prompt + output <= {max_model_len} ({len(order)} of {len(raw)} rows kept)",
            num_pairs=len(order),
            dropped_share=1.0 - len(order) / len(raw),
            **means,
        ),
        arrivals="as in the file" + f", {speed:g} times as fast" * (speed != 1) + kind.remark,
        rate_per_s=len(order) / duration if duration else 0.0,
        duration_s=duration,
        seed=0,
        num_requests=len(order),
        **means,
        mean_inverse_output=float((1.0 / output).mean()),
        prompt_quantiles=tuple(map(float, np.quantile(prompt, QUANTILES))),
        output_quantiles=tuple(map(float, np.quantile(output, QUANTILES))),
        rank_correlation=rank_correlation(prompt, output),
        mean_output_by_prompt=_mean_output_by_prompt(prompt, output),
        hash=_hash_arrays(arrival, prompt, output),
        num_rows=len(raw),
        left_out=tuple(left_out),
        num_out_of_order=int((np.maximum.accumulate(raw) > raw).sum()),
        rate_over_time=rate_over_time(arrival, duration),
        gap_variation=float(gaps.var() / gaps.mean() ** 2) if len(gaps) > 1 and gaps.any() else None,
    )
    return Trace(kind.name, arrival, prompt, output, card)


def _when(path: Path, line: int, kind: Format, cell: object) -> float:
    try:
        time = kind.read(cell)
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not 0 <= time < math.inf:
        raise unfit(path, line, f"{kind.columns[0]} is {shown(cell)}, not a time from 0 on")
    return time


def rate_over_time(arrival_s: np.ndarray, duration_s: float, parts: int = PARTS) -> tuple[float, ...]:
    """Requests/s in equal parts of the time from 0 to `duration_s` s; none where that is 0."""
    if not duration_s:
        return ()
    return tuple(map(float, np.histogram(arrival_s, parts, (0.0, duration_s))[0] * parts / duration_s))


def with_arrivals(path: str, rate: float, duration_s: float, max_model_len: int = 2048) -> Trace:
    """Lengths of a file without arrivals (pairs, ShareGPT's or Alpaca's JSON), with Poisson arrivals. UserError as
    `make_trace`."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        if is_dataset_file(path) and b'"instruction"' in file.read(4096):
            return make_trace("alpaca", rate, duration_s, 0, path, max_model_len)
    return make_trace("sharegpt", rate, duration_s, 0, path, max_model_len)


@user_facing
def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace as CSV in Azure's columns, which `read_trace` reads back, with times to the microsecond; compressed
    if the name ends in .gz. OSError where nothing can be written."""
    instance("trace", trace, Trace, "a Trace")
    text, path = io.StringIO(newline=""), Path(path)
    dates = [_WRITTEN_FROM + timedelta(seconds=second) for second in trace.arrival_s.tolist()]
    times = [date.isoformat(" ", "microseconds") for date in dates]
    rows = zip(times, trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    csv.writer(text, lineterminator="\n").writerows([AZURE.columns, *rows])
    data = text.getvalue().encode("utf-8")
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix.lower() == ".gz" else data)
