"""Where one request's time went: its latency as a sum of causes, in seconds.

    queued           from its arrival until it is scheduled first
    prompt           iterations that compute its prompt, or a part of it, for the first time
    own_steps        iterations in which it decodes, but for what the next line takes of them
    others_prompts   what such an iteration took beyond the latest ones without a prompt (see `repro.feed.receipts`)
    stalled          nothing was computed for it: a part of its prompt found no budget or no memory, the host was busy
                     between two iterations, or its static batch was not done
    preempted        driven out and waiting to be computed again
    recomputed       iterations that compute again what had been stored
    swapped          in CPU memory

`queued` names whom it waited behind, `preempted` and `swapped` who drove it out, `stalled` whom a static batch waited
for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from repro import display

QUEUED, PROMPT, OWN_STEPS, OTHERS_PROMPTS = "queued", "prompt", "own_steps", "others_prompts"
STALLED, PREEMPTED, RECOMPUTED, SWAPPED = "stalled", "preempted", "recomputed", "swapped"
CAUSES = (QUEUED, PROMPT, OWN_STEPS, OTHERS_PROMPTS, STALLED, PREEMPTED, RECOMPUTED, SWAPPED)
#: how a sentence introduces the culprits of a cause
_WORDS = {QUEUED: "behind", STALLED: "for", PREEMPTED: "by", SWAPPED: "by"}


@dataclass(frozen=True)
class Receipt:
    """`causes` has the seconds of each cause, none of them negative; they add up to `latency_s`, which is from arrival
    to the last token, or until the request was taken back.

    `culprits` has, by cause, other requests by their numbers and the seconds of it that are theirs (its own number: it
    drove itself out). They may be fewer than the cause's seconds: not all that a request waits for is another one, and
    of the queue only the longest waits are named. `recomputed_tokens` were computed again, for each of its sequences;
    `cached_tokens` were found when it started."""

    request_id: int
    arrival_s: float
    latency_s: float
    causes: dict[str, float]
    culprits: dict[str, dict[int, float]]
    num_preemptions: int
    recomputed_tokens: int
    cached_tokens: int

    def culprit(self, cause: str) -> int | None:
        """The request that most of a cause is due to, if any."""
        found = self.culprits.get(cause)
        return max(found, key=found.__getitem__) if found else None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        culprits = {
            cause: [{"request_id": number, "seconds": seconds} for number, seconds in found.items()]
            for cause, found in self.culprits.items()
        }
        return {**vars(self), "causes": dict(self.causes), "culprits": culprits}

    def row(self) -> dict[str, Any]:
        """As a row of a table: a column for each cause, and for each kind of culprit the one that most is due to."""
        return {
            "request_id": self.request_id,
            "arrival_s": self.arrival_s,
            "latency_s": self.latency_s,
            **{f"{cause}_s": seconds for cause, seconds in self.causes.items()},
            **{f"{cause}_{word}": self.culprit(cause) for cause, word in _WORDS.items()},
            "num_preemptions": self.num_preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def __str__(self) -> str:
        parts = [self._part(cause, seconds) for cause, seconds in self.causes.items() if seconds]
        counts = {
            "preemptions": self.num_preemptions,
            "tokens computed again": self.recomputed_tokens,
            "prompt tokens found": self.cached_tokens,
        }
        counted = [f"{what} {count:,}" for what, count in counts.items() if count]
        return f"request {self.request_id} took {self.latency_s:.3g} s: " + "; ".join([", ".join(parts), *counted])

    def _repr_html_(self) -> str:
        return display.fields(str(self), self.row())

    def _part(self, cause: str, seconds: float) -> str:
        said = f"{cause.replace('_', ' ')} {seconds:.3g} s"
        if cause not in self.culprits:
            return said
        names = [
            f"{'itself' if number == self.request_id else f'request {number}'} {part:.3g} s"
            for number, part in self.culprits[cause].items()
        ]
        rest = seconds - sum(self.culprits[cause].values())
        if rest > seconds / 100:
            names.append(f"the rest {rest:.3g} s")
        return f"{said} ({_WORDS[cause]} {', '.join(names)})"
