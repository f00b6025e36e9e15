"""Why a prompt was not found in the prefix cache: where it parts from those before it, and what has been evicted."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from repro.engine.memory.prefix_cache import Start


@dataclass(frozen=True)
class Missed:
    """Of a prompt's `prompt_tokens`, the first `found` were in the cache when it started.

    `parted_at` is the first token at which it differs from the prompt before it that it resembles most, None if it
    differs nowhere; `evicted` are the tokens behind the found ones whose blocks had been cached, and `evicted_by` the
    requests that took these blocks over, by their numbers in the event log (None: one of an earlier call)."""

    prompt_tokens: int
    found: int
    parted_at: int | None
    evicted: int
    evicted_by: tuple[int | None, ...]

    def __str__(self) -> str:
        parts = [f"{self.found:,} of {self.prompt_tokens:,} prompt tokens found"]
        if self.evicted:
            names = ["an earlier call" if one is None else f"request {one}" for one in self.evicted_by]
            parts.append(f"{self.evicted:,} more had been there and were evicted for {', '.join(names)}")
        if self.parted_at is not None:
            parts.append(f"token {self.parted_at:,} is the first that no earlier prompt had there")
        return "; ".join(parts)


def why_missed(prompt: np.ndarray, start: Start, before: Iterable[np.ndarray], block_size: int) -> Missed:
    """`prompt` and those that had started `before` it, int64 [tokens]; `start` as its memory manager noted it."""
    alike = max((common_tokens(prompt, other) for other in before), default=0)
    parted = alike if alike < len(prompt) else None
    takers = tuple(dict.fromkeys(start.evicted))
    return Missed(len(prompt), start.found, parted, len(start.evicted) * block_size, takers)


def common_tokens(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens both begin with."""
    least = min(len(one), len(other))
    different = np.flatnonzero(one[:least] != other[:least])
    return int(different[0]) if len(different) else least
