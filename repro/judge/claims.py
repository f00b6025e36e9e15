"""What is claimed of a server, and when it holds: thresholds are fixed here, before anything is measured.

A probe gives one value a repeat. The verdict follows from their median, where all repeats lie on its side of the
thresholds, or two thirds of at least five; between the two thresholds lies what decides nothing."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from repro.checks import by_name
from repro.hashing import canonical_json

#: so many repeats need not agree all: this share of them is enough
_MANY, _SHARE = 5, 2 / 3


class Verdict(enum.StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    REPORTED = "reported"  # a number that nothing is claimed of


@dataclass(frozen=True)
class Claim:
    """`statistic` says what the value is. The claim holds at `holds` or beyond, and does not at `fails` or beyond.

    `share` is the part of the whole budget of time that its probe gets. Between `least` and `most` repeats are made:
    more than the least only while they decide nothing."""

    name: str
    says: str
    statistic: str
    evidence: str
    holds: float
    fails: float
    share: float
    least: int = 3
    most: int = 9

    @property
    def threshold(self) -> str:
        """In words."""
        if self.holds == self.fails:
            return ""
        low, high = ("<=", ">=") if self.holds < self.fails else (">=", "<=")
        return f"holds {low} {self.holds:g}, does not {high} {self.fails:g}"

    def side(self, value: float) -> Verdict:
        """What one value says."""
        if self.holds == self.fails:
            return Verdict.REPORTED
        sign = 1 if self.holds < self.fails else -1
        if sign * value <= sign * self.holds:
            return Verdict.HOLDS
        return Verdict.FAILS if sign * value >= sign * self.fails else Verdict.UNDECIDED

    def decide(self, values: Sequence[float]) -> Verdict:
        """What several values say: their median's verdict, if enough of them give it."""
        if not values:
            return Verdict.UNDECIDED
        verdict, count = self.side(statistics.median(values)), len(values)
        alike = sum(self.side(value) is verdict for value in values)
        enough = count if count < _MANY else _SHARE * count
        return verdict if alike >= enough else Verdict.UNDECIDED


_TIMES = "times of tokens"
CLAIMS: dict[str, Claim] = by_name(
    Claim(
        "prefix_reuse",
        "a prompt that was seen before is not computed again",
        "time to first token of a prompt seen before / of a fresh one as long",
        _TIMES,
        holds=0.5,
        fails=0.7,
        share=0.08,
    ),
    Claim(
        "samples_computed_once",
        "n samples of a prompt compute it once",
        "time until all have a first token: 4 samples of one prompt / 4 prompts as long",
        _TIMES,
        holds=0.5,
        fails=0.7,
        share=0.1,
    ),
    Claim(
        "iteration_batching",
        "a request that comes while another runs joins it and ends before it",
        "tokens the running one still lacks when the newcomer has ended / when it came",
        "order and number of tokens",
        holds=0.5,
        fails=0.1,
        share=0.07,
    ),
    Claim(
        "chunked_prefill",
        "a long prompt is computed in parts, between the next tokens of others",
        "longest wait of a stream for its next token beside a long prompt / that prompt's time alone",
        _TIMES,
        holds=0.5,
        fails=0.7,
        share=0.15,
    ),
    Claim(
        "first_come_order",
        "who comes first gets the first token first",
        "pairs of requests served against the order of their arrival / all pairs that can be told apart",
        "order of first tokens",
        holds=0.1,
        fails=0.25,
        share=0.15,
        least=2,
        most=5,
    ),
    Claim(
        "throughput",
        "saturation: output tokens per second as more ask at once",
        "most output tokens per second, of all numbers of clients tried",
        "times and numbers of tokens",
        holds=0.0,
        fails=0.0,
        share=0.1,
        least=1,
        most=1,
    ),
    Claim(
        "full_pool_preempts",
        "when outputs outgrow the pool, running requests stand still and later go on",
        "most tokens that another stream got while one stood still, and then went on to its full length",
        "order and number of tokens",
        holds=10,
        fails=3,
        share=0.27,
        least=1,
        most=1,
    ),
    Claim(
        "samples_stored_once",
        "n samples of a prompt hold it in memory once",
        "how many run at once, of prompts that would need 2.5 pools: as samples of one prompt / as different prompts",
        "order of tokens",
        holds=2.0,
        fails=1.25,
        share=0.08,
        least=1,
        most=3,
    ),
)


@dataclass(frozen=True)
class Finding:
    """One row of the ledger: a claim of a server. `value` is the median of `repeats`, `low` and `high` their range;
    None where nothing was measured. `numbers` is a JSON object of what else was counted, `note` says why a verdict is
    what it is where the value alone does not."""

    server: str
    claim: str
    verdict: str
    value: float | None
    low: float | None
    high: float | None
    repeats: int
    threshold: str
    statistic: str
    evidence: str
    numbers: str
    note: str
    model: str
    url: str
    seed: int

    def row(self) -> dict[str, object]:
        return asdict(self)


class CannotTell(Exception):
    """A probe has found out that it cannot decide; the message says why."""


@dataclass
class Trial:
    """A claim under test: the values of its repeats, and what else was counted (medians are taken of lists)."""

    claim: Claim
    values: list[float] = field(default_factory=list)
    numbers: dict[str, float | list[float]] = field(default_factory=dict)
    note: str = ""
    verdict: Verdict | None = None  # of a probe that knows more than its values say

    def add(self, value: float, **numbers: float) -> None:
        """One repeat, and what was counted in it."""
        self.values.append(value)
        for name, number in numbers.items():
            self.numbers.setdefault(name, []).append(number)  # type: ignore[union-attr]

    @property
    def is_over(self) -> bool:
        """Whether enough repeats were made."""
        count = len(self.values)
        is_decided = self.claim.decide(self.values) is not Verdict.UNDECIDED
        return count >= self.claim.most or (count >= self.claim.least and is_decided)

    def finding(self, server: str, model: str, url: str, seed: int) -> Finding:
        """What it has come to."""
        claim, values = self.claim, self.values
        enough = len(values) >= claim.least
        verdict = self.verdict or (claim.decide(values) if enough else Verdict.UNDECIDED)
        value, low, high = (statistics.median(values), min(values), max(values)) if values else (None, None, None)
        numbers = {name: statistics.median(one) if isinstance(one, list) else one for name, one in self.numbers.items()}
        return Finding(
            server=server,
            claim=claim.name,
            verdict=str(verdict),
            value=_rounded(value),
            low=_rounded(low),
            high=_rounded(high),
            repeats=len(values),
            threshold=claim.threshold,
            statistic=claim.statistic,
            evidence=claim.evidence,
            numbers=canonical_json({name: _rounded(number) for name, number in numbers.items()}),
            note=self.note,
            model=model,
            url=url,
            seed=seed,
        )


def _rounded(value: float | None) -> float | None:
    """Four significant digits: more would be noise."""
    return None if value is None else float(f"{value:.4g}")
