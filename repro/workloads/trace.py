"""A trace: when each request arrives and how long its prompt and output are; and the card that says what it is.

Everything downstream sees a workload only as these three arrays, so that the simulator, the real model and the GPU run
the same requests. The card states how the trace was made and how it looks, so that a reader can judge it."""

import dataclasses
import functools
import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from repro import display
from repro.checks import instance, number, whole
from repro.errors import UserError
from repro.workloads.lengths import ARRIVALS_STREAM, LengthSource, SourceFacts

if TYPE_CHECKING:
    import pandas as pd

TICK_S = 0.01  # the authors draw a Poisson count of arrivals for each 10 ms
MAX_REQUESTS = 20_000_000  # a trace beyond this is a slip of the keyboard, not an experiment
QUANTILES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
PROMPT_RANGES = (16, 64, 256, 1024)  # last prompt length of each range but the open one
_DTYPES = {"arrival_s": np.float64, "prompt_tokens": np.int64, "output_tokens": np.int64}  # of a trace's arrays


@dataclass(frozen=True)
class TraceCard:
    """What a trace is and how it looks, in tokens and seconds. Everything but `source` is of this trace."""

    workload: str
    source: SourceFacts
    arrivals: str
    rate_per_s: float
    duration_s: float
    seed: int
    num_requests: int
    mean_prompt_tokens: float
    mean_output_tokens: float
    mean_inverse_output: float  # normalized latency weighs a request by 1 / output
    prompt_quantiles: tuple[float, ...]  # at QUANTILES
    output_quantiles: tuple[float, ...]
    rank_correlation: float | None  # Spearman's, of prompt and output; None where one of them is constant
    mean_output_by_prompt: tuple[tuple[str, int, float | None], ...]  # (prompt range, requests, mean output)
    hash: str

    @property
    def equals_paper_trace(self) -> bool:
        """Whether the length pairs that this trace draws from are, by content, those of the paper's trace."""
        return self.source.equals_paper_trace

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with `equals_paper_trace` and the quantile levels."""
        levels = [f"p{100 * level:g}" for level in QUANTILES]
        return dataclasses.asdict(self) | {
            "equals_paper_trace": self.equals_paper_trace,
            "prompt_quantiles": dict(zip(levels, self.prompt_quantiles)),
            "output_quantiles": dict(zip(levels, self.output_quantiles)),
        }

    def __str__(self) -> str:
        source = self.source
        count = "a distribution" if source.num_pairs is None else f"{source.num_pairs:,} pairs"
        correlation = "undefined" if self.rank_correlation is None else f"{self.rank_correlation:+.3f}"
        ranges = ", ".join(f"{mean:.0f} for {name}" for name, _, mean in self.mean_output_by_prompt if mean is not None)
        levels = " ".join(f"{100 * level:g}" for level in QUANTILES) + " %"
        paper = "equal those of the paper's trace" if self.equals_paper_trace else "are not those of the paper's trace"
        return "\n".join(
            [
                f"{self.workload}: {self.num_requests:,} requests, {self.rate_per_s:g}/s for {self.duration_s:g} s, "
                f"seed {self.seed}, hash {self.hash[:12]}",
                f"lengths: {source.source}: {count}; {source.filter}; mean {source.mean_prompt_tokens:.2f} / "
                f"{source.mean_output_tokens:.2f}; they {paper}",
                f"drawn by: {source.recipe}",
                f"arrivals: {self.arrivals}",
                f"this trace: mean {self.mean_prompt_tokens:.2f} / {self.mean_output_tokens:.2f}, rank correlation "
                f"{correlation}, mean output {ranges} prompt tokens",
                f"quantiles, {levels}: prompt {_whole(self.prompt_quantiles)}, output {_whole(self.output_quantiles)}",
            ]
        )


def _whole(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.0f}" for value in values)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival: three arrays of one length, read-only. UserError where they cannot be a trace."""

    name: str
    arrival_s: np.ndarray  # float64, not decreasing
    prompt_tokens: np.ndarray  # int64, at least 1
    output_tokens: np.ndarray  # int64, at least 1
    card: TraceCard

    def __post_init__(self) -> None:
        for field, dtype in _DTYPES.items():
            array = instance(field, getattr(self, field), np.ndarray, "an array")
            if array.dtype != dtype or array.shape != self.arrival_s.shape or array.ndim != 1:
                raise UserError(f"{field}: need {dtype.__name__}, one value a request; got {array.dtype} {array.shape}")
            array.setflags(write=False)
        if not np.isfinite(self.arrival_s).all() or (np.diff(self.arrival_s, prepend=0.0) < 0).any():
            raise UserError("arrival_s must be finite, not negative, and must not decrease")
        if len(self) and min(self.prompt_tokens.min(), self.output_tokens.min()) < 1:
            raise UserError("every prompt and every output has at least one token")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def row(self, number: int) -> dict[str, Any]:
        """A request as a row of a table."""
        return {"request_id": number, **{name: getattr(self, name)[number].item() for name in _DTYPES}}

    def to_frame(self) -> "pd.DataFrame":
        """The requests, a row each."""
        import pandas as pd

        return pd.DataFrame({"request_id": np.arange(len(self)), **{name: getattr(self, name) for name in _DTYPES}})

    def _repr_html_(self) -> str:
        return display.indexed(str(self.card), len(self), self.row)

    @functools.cached_property
    def hash(self) -> str:
        """sha256 of the three arrays."""
        return _hash_arrays(self.arrival_s, self.prompt_tokens, self.output_tokens)


def _hash_arrays(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array, dtype in zip(arrays, _DTYPES.values(), strict=True):
        digest.update(np.ascontiguousarray(array, np.dtype(dtype).newbyteorder("<")).tobytes())
    return digest.hexdigest()


def check_arrivals(rate_per_s: float, duration_s: float, seed: int) -> None:
    """UserError where rate, duration or seed cannot be, or the trace would be absurdly long."""
    number("rate", rate_per_s, 0, above=True)
    number("duration_s", duration_s, 0, above=True)
    whole("seed", seed, 0, math.inf)
    expected = rate_per_s * duration_s
    if expected > MAX_REQUESTS:
        raise UserError(
            f"rate {rate_per_s:g}/s for {duration_s:g} s makes about {expected:.2g} requests, more than "
            f"{MAX_REQUESTS:,}: lower the rate or the duration"
        )


def poisson_arrivals(rate_per_s: float, duration_s: float, seed: int) -> np.ndarray:
    """Arrival times in [0, duration_s), float64, sorted: Poisson counts per 10 ms, as the authors drew.

    All arrivals of a tick carry its start. The counts come from a Poisson process whose times are floored to the tick;
    its unit-rate gaps depend on the seed alone, so traces of one seed at two rates are one pattern on two time scales:
    what differs along a curve over rates is the rate. Raises UserError as check_arrivals."""
    check_arrivals(rate_per_s, duration_s, seed)
    expected = rate_per_s * duration_s
    rng = np.random.default_rng([seed, ARRIVALS_STREAM])
    times = np.zeros(1)
    while times[-1] < expected:  # nearly always once: six standard deviations to spare
        more = int(expected - times[-1] + 6 * math.sqrt(expected)) + 10
        times = np.concatenate([times, times[-1] + np.cumsum(rng.standard_exponential(more))])
    times = times[1:] / rate_per_s
    return np.floor(times[times < duration_s] / TICK_S) * TICK_S


def authors_arrivals(rate_per_s: float, duration_s: float, seed: int) -> np.ndarray:
    """Arrival times as the authors' generator draws them, bit for bit: one Poisson count for each 10 ms of the
    duration, from NumPy's legacy generator. Raises UserError as check_arrivals."""
    check_arrivals(rate_per_s, duration_s, seed)
    if seed >= 2**32:
        raise UserError(f"seed is {seed}: the authors' generator takes seeds below {2**32}")
    counts = np.random.RandomState(seed).poisson(rate_per_s * TICK_S, int(duration_s * 100))
    return np.repeat(np.arange(len(counts)), counts) * TICK_S


#: how requests arrive -> the function that draws their times, and what a trace's card says of it
ARRIVALS = {
    "poisson": (
        poisson_arrivals,
        "Poisson, counts per 10 ms, each arrival at the start of its 10 ms; one seed gives one pattern of unit-rate "
        "gaps, scaled to the rate",
    ),
    "authors": (authors_arrivals, "the authors' own: Poisson counts per 10 ms from NumPy's legacy generator"),
}


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Spearman's correlation of two equally long arrays (ties share their mean rank), None if undefined."""
    ranks = []
    for values in (x, y):
        _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[position])
    if len(x) < 2 or np.ptp(ranks[0]) == 0 or np.ptp(ranks[1]) == 0:
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _mean_output_by_prompt(prompt: np.ndarray, output: np.ndarray) -> tuple[tuple[str, int, float | None], ...]:
    group = np.searchsorted(PROMPT_RANGES, prompt)
    counts = np.bincount(group, minlength=len(PROMPT_RANGES) + 1)
    totals = np.bincount(group, weights=output, minlength=len(PROMPT_RANGES) + 1)
    starts = (1, *(last + 1 for last in PROMPT_RANGES))
    names = [f"{start}-{last}" for start, last in zip(starts, PROMPT_RANGES)] + [f"{starts[-1]}+"]
    return tuple((name, int(n), float(t / n) if n else None) for name, n, t in zip(names, counts, totals))


def build_trace(
    workload: str, lengths: LengthSource, rate_per_s: float, duration_s: float, seed: int, arrivals: str = "poisson"
) -> Trace:
    """A trace with lengths drawn from `lengths`; `arrivals` is one of ARRIVALS. UserError when no request arrives."""
    draw, described = ARRIVALS[arrivals]
    arrival_s = draw(rate_per_s, duration_s, seed)
    if len(arrival_s) == 0:
        raise UserError(f"no request arrives in {duration_s:g} s at rate {rate_per_s:g}/s (seed {seed}): raise either")
    prompt, output = np.ascontiguousarray(lengths.draw(len(arrival_s), seed).T)
    card = TraceCard(
        workload=workload,
        source=lengths.facts,
        arrivals=described,
        rate_per_s=float(rate_per_s),
        duration_s=float(duration_s),
        seed=int(seed),
        num_requests=len(arrival_s),
        mean_prompt_tokens=float(prompt.mean()),
        mean_output_tokens=float(output.mean()),
        mean_inverse_output=float((1.0 / output).mean()),
        prompt_quantiles=tuple(float(q) for q in np.quantile(prompt, QUANTILES)),
        output_quantiles=tuple(float(q) for q in np.quantile(output, QUANTILES)),
        rank_correlation=rank_correlation(prompt, output),
        mean_output_by_prompt=_mean_output_by_prompt(prompt, output),
        hash=_hash_arrays(arrival_s, prompt, output),
    )
    return Trace(workload, arrival_s, prompt, output, card)
