"""A cost model that is a table: step times measured on one machine, with straight lines between them.

Where `CostModel` explains the paper's A100 with a few numbers, this predicts a machine that is at hand. Decoding alone is
measured at numbers of sequences times two contexts, steps with prompts at numbers of sequences times prompt tokens
(`python -m repro.measure` makes both). Swaps and block copies are not in the table; runs that depend on them are not predicted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.errors import UserError
from repro.scheduler import SchedulerOutput


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an iteration. `padded`: a step costs as much as the next larger one in the table, as with CUDA graphs of fixed
    sizes; otherwise lines lie between.

    seqs           [n]     numbers of sequences that decode alone
    alone_s        [n]     such a step without any context
    per_context_s  [n]     and what each token of context adds
    mixed_seqs, mixed_prompt   [k], [m]  numbers of decoding sequences and of prompt tokens
    mixed_s        [k, m]  a step with both, without any context
    shortest_s     no step takes less, whatever noise or a line beyond the table would say; positive, or time would stand still
    """

    name: str
    padded: bool
    seqs: tuple[int, ...]
    alone_s: tuple[float, ...]
    per_context_s: tuple[float, ...]
    mixed_seqs: tuple[int, ...]
    mixed_prompt: tuple[int, ...]
    mixed_s: tuple[tuple[float, ...], ...]
    shortest_s: float

    def __post_init__(self) -> None:
        if not self.shortest_s > 0:
            raise UserError(f"step times of {self.name}: the shortest step takes {self.shortest_s} s; it must take some time; measure again")

    @classmethod
    def of(cls, name: str, rows: Iterable[Mapping[str, Any]], padded: bool) -> StepTimes:
        """From rows of seqs, prompt_tokens (0: decoding alone), context_tokens, seconds. UserError if some are missing."""
        rows = list(rows)
        decode: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            if not row["prompt_tokens"]:
                decode.setdefault(int(row["seqs"]), []).append((float(row["context_tokens"]), float(row["seconds"])))
        lines = {}
        for seqs, points in sorted(decode.items()):
            contexts, seconds = zip(*points)
            if len(set(contexts)) < 2:
                raise UserError(f"step times of {name}: decoding with {seqs} sequences is there at one context only; measure again")
            slope, alone = map(float, np.polyfit(contexts, seconds, 1))
            # More context never saves time; where noise says so, it costs nothing.
            lines[seqs] = (alone, slope) if slope > 0 else (float(np.mean(seconds)), 0.0)
        if not lines:
            raise UserError(f"step times of {name}: no decoding step is there; measure again")
        mixed = {(int(row["seqs"]), int(row["prompt_tokens"])): row for row in rows if row["prompt_tokens"]}
        if not mixed:
            raise UserError(f"step times of {name}: no step with a prompt is there; measure again")
        mixed_seqs, mixed_prompt = (sorted({key[place] for key in mixed}) for place in (0, 1))
        slope_at = np.interp(mixed_seqs, list(lines), [slope for _, slope in lines.values()])
        try:
            mixed_s = tuple(tuple(float(mixed[seqs, prompt]["seconds"]) - slope * float(mixed[seqs, prompt]["context_tokens"])
                                  for prompt in mixed_prompt) for seqs, slope in zip(mixed_seqs, slope_at))
        except KeyError as missing:
            raise UserError(f"step times of {name}: (sequences, prompt tokens) = {missing} is missing; measure again") from None
        shortest = min(seconds for points in decode.values() for _, seconds in points)
        return cls(name, padded, tuple(lines), *zip(*lines.values()), tuple(mixed_seqs), tuple(mixed_prompt), mixed_s, shortest)

    def decode_s(self, seqs: int) -> tuple[float, float]:
        """Seconds of a decoding step without context, and per token of context."""
        if self.padded and seqs <= self.seqs[-1]:
            place = bisect_left(self.seqs, seqs)
            return self.alone_s[place], self.per_context_s[place]
        return _line(seqs, self.seqs, self.alone_s), max(0.0, _line(seqs, self.seqs, self.per_context_s))

    def with_prompts_s(self, seqs: int, tokens: int) -> float:
        """Seconds of a step of `seqs` decoding sequences without context that prompts of `tokens` tokens join."""
        if self.padded:
            tokens, seqs = _padded(tokens, self.mixed_prompt), _padded(seqs, self.mixed_seqs)
        return _line(seqs, self.mixed_seqs, [_line(tokens, self.mixed_prompt, times) for times in self.mixed_s])

    def step_times(self, output: SchedulerOutput) -> Iterator[float]:
        """Seconds of the output's iterations, without end: from one to the next each sequence grows by a token."""
        constant, per_token = self.decode_s(max(output.num_decode_seqs, 1))
        if output.num_prefill_tokens:
            constant = self.with_prompts_s(output.num_decode_seqs, output.num_prefill_tokens)
        context = output.context_tokens
        while True:
            yield max(self.shortest_s, constant + per_token * context)
            context += output.num_decode_seqs


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """The next of the sizes, or beyond them the size itself."""
    return sizes[bisect_left(sizes, size)] if size <= sizes[-1] else size


def _line(x: float, xs: tuple[int, ...], ys: Iterable[float]) -> float:
    """Linear between the points, and beyond the last ones along the last line; before the first, the first."""
    ys = tuple(ys)
    if x >= xs[-1] and len(xs) > 1:
        return ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return float(np.interp(x, xs, ys))
