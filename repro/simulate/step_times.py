"""A cost model that is a table: step times measured on one machine, with straight lines between them.

Where `CostModel` explains the paper's A100 with a few numbers, this predicts a machine that is at hand. Decoding alone
is measured at numbers of sequences times two contexts, steps with prompts at numbers of sequences times prompt tokens
(`python -m repro bench serving` makes both). Prompts in the grid begin with their first token; what a chunk reads that
is stored already, because the prompt was cut or found, is one more number. Swaps, block copies, random samples and
beams are not in the table: runs that depend on them take longer than it says."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.engine.scheduler import SchedulerOutput
from repro.errors import UserError


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an iteration. `padded`: a step costs as much as the next larger one in the table, as with CUDA graphs
    of fixed sizes; otherwise lines lie between.

    seqs           [n]     numbers of sequences that decode alone
    alone_s        [n]     such a step without any context
    per_context_s          what each token of context adds to any step: it is read once, whatever batch it belongs to
    mixed_seqs, mixed_prompt   [k], [m]  numbers of decoding sequences and of prompt tokens
    mixed_s        [k, m]  a step with both, without any context
    together       whether mixed_prompt counts the tokens of decoding sequences, too: where both are padded as one
    per_read_s             what each pair of a prompt's token and a stored token before its chunk adds
    shortest_s     no step takes less, whatever noise or a line beyond the table would say; positive, or time would
    stand still"""

    name: str
    padded: bool
    seqs: tuple[int, ...]
    alone_s: tuple[float, ...]
    per_context_s: float
    mixed_seqs: tuple[int, ...]
    mixed_prompt: tuple[int, ...]
    mixed_s: tuple[tuple[float, ...], ...]
    shortest_s: float
    per_read_s: float = 0.0
    together: bool = False

    def __post_init__(self) -> None:
        if not self.shortest_s > 0:
            raise UserError(
                f"step times of {self.name}: the shortest step takes {self.shortest_s} s; it must take some time; "
                "measure again"
            )

    @classmethod
    def of(cls, name: str, rows: Iterable[Mapping[str, Any]], padded: bool) -> "StepTimes":
        """From rows of seqs, prompt_tokens (0: decoding alone), context_tokens, seconds. UserError if some lack.

        Rows with `stored` are chunks that follow as many tokens; without such rows reading these costs nothing. Where
        rows have `step_tokens`, steps with prompts are padded to so many, decoding sequences' tokens included."""

        def lacks(what: str) -> UserError:
            return UserError(f"step times of {name}: {what}; measure again")

        rows = list(rows)
        chunks = [row for row in rows if row.get("stored") is not None]
        rows = [row for row in rows if row.get("stored") is None]
        decode: dict[int, list[tuple[float, float]]] = {}
        for row in rows:
            if not row["prompt_tokens"]:
                decode.setdefault(int(row["seqs"]), []).append((float(row["context_tokens"]), float(row["seconds"])))
        if not decode:
            raise lacks("no decoding step is there")
        if thin := [seqs for seqs, points in decode.items() if len({context for context, _ in points}) < 2]:
            raise lacks(f"decoding with {thin[0]} sequences is there at one context only")
        slope = _common_slope(decode.values())
        alone = {
            seqs: float(np.mean([seconds - slope * context for context, seconds in points]))
            for seqs, points in sorted(decode.items())
        }
        with_prompts = [row for row in rows if row["prompt_tokens"]]
        if not with_prompts:
            raise lacks("no step with a prompt is there")
        together = with_prompts[0].get("step_tokens") is not None
        size = "step_tokens" if together else "prompt_tokens"
        mixed = {
            (int(row["seqs"]), int(row[size])): float(row["seconds"]) - slope * float(row["context_tokens"])
            for row in with_prompts
        }
        seqs, prompts = (tuple(sorted({key[place] for key in mixed})) for place in (0, 1))
        if together:  # no step is smaller than what decodes in it: the smallest that there is stands for these
            for count in seqs:
                least = min(prompt for prompt in prompts if (count, prompt) in mixed)
                mixed |= {(count, prompt): mixed[count, least] for prompt in prompts if prompt <= count}
        try:
            mixed_s = tuple(tuple(mixed[count, prompt] for prompt in prompts) for count in seqs)
        except KeyError as missing:
            raise lacks(f"(sequences, prompt tokens) = {missing} is missing") from None
        shortest = min(seconds for points in decode.values() for _, seconds in points)
        reads: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for row in chunks:
            tokens, seconds = int(row["prompt_tokens"]), float(row["seconds"]) - slope * float(row["context_tokens"])
            reads.setdefault((int(row["seqs"]), tokens), []).append((tokens * float(row["stored"]), seconds))
        per_read = _common_slope(reads.values()) if reads else 0.0
        table = tuple(alone), tuple(alone.values()), slope, seqs, prompts, mixed_s
        return cls(name, padded, *table, shortest, per_read, together)

    def alone(self, seqs: int) -> float:
        """Seconds of a step without context in which `seqs` sequences decode."""
        return _line(_padded(seqs, self.seqs) if self.padded else seqs, self.seqs, self.alone_s)

    def with_prompts(self, seqs: int, tokens: int) -> float:
        """Seconds of a step of `seqs` decoding sequences without context that prompts of `tokens` tokens join."""
        if self.together:
            tokens += seqs
        if self.padded:
            tokens = _padded(tokens, self.mixed_prompt)
            seqs = seqs if self.together else _padded(seqs, self.mixed_seqs)
        return _line(seqs, self.mixed_seqs, [_line(tokens, self.mixed_prompt, times) for times in self.mixed_s])

    def step_times(self, output: SchedulerOutput) -> Iterator[float]:
        """Seconds of the output's iterations, without end: from one to the next each sequence grows by a token."""
        if output.num_prefill_tokens:
            constant = self.with_prompts(output.num_decode_seqs, output.num_prefill_tokens)
            if self.per_read_s:
                parts = (*output.prefills, *output.chunks)
                constant += self.per_read_s * sum(
                    (one.num_tokens - one.num_cached) * one.num_cached for one in parts if one.num_cached
                )
        else:
            constant = self.alone(max(output.num_decode_seqs, 1))
        context = output.context_tokens
        while True:
            yield max(self.shortest_s, constant + self.per_context_s * context)
            context += output.num_decode_seqs


def _common_slope(lines: Iterable[list[tuple[float, float]]]) -> float:
    """The slope that fits all lines (points x, y), each with a height of its own; 0 if it falls. With many sequences
    the pool leaves room for contexts of nearly one length only; their own slopes would be noise."""
    apart = np.concatenate([np.array(points) - np.mean(points, axis=0) for points in lines])
    return max(0.0, float(apart[:, 0] @ apart[:, 1] / (apart[:, 0] @ apart[:, 0])))


def _padded(size: int, sizes: tuple[int, ...]) -> int:
    """The next of the sizes, or beyond them the size itself."""
    return sizes[bisect_left(sizes, size)] if size <= sizes[-1] else size


def _line(x: float, xs: tuple[int, ...], ys: Iterable[float]) -> float:
    """Linear between the points, and beyond the last ones along the last line; before the first, the first."""
    ys = tuple(ys)
    if x >= xs[-1] and len(xs) > 1:
        return ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return float(np.interp(x, xs, ys))
