"""The requests of a run. Lengths that NumPy drew travel with the page, since the interpreter in it has no NumPy."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.explore.settings import Settings

#: key_of(settings) -> prompts and outputs, as many as the longest queue has that begins with them
Drawn = Mapping[str, tuple[list[int], list[int]]]
PREFIX = "system prompt"


@dataclass(frozen=True)
class Queue:
    """`trace_hash` is that of the lengths; `drawn_by` names the generator."""

    requests: list[Request]
    trace_hash: str
    drawn_by: str


def key_of(settings: Settings) -> str:
    """What the drawn lengths depend on."""
    prompts = f"{settings.shortest_prompt}-{settings.longest_prompt}"
    return f"{prompts}/{settings.mean_output}/{settings.spread}/{settings.seed}"


def queue(settings: Settings, drawn: Drawn) -> Queue:
    """The requests of a run in order of arrival, and where they come from. `arrival_s` counts steps here, not seconds.

    Without arrivals there are about twice as many as a run can serve. UserError if nothing would arrive."""
    arrivals = _arrivals(settings)
    count = len(arrivals) if settings.arrivals else saturating(settings)
    prompts, outputs = drawn.get(key_of(settings), ([], []))
    drawn_by = "NumPy"
    if len(prompts) < count:
        prompts, outputs = lengths(settings, count)
        drawn_by = "random.Random"
    prompts, outputs = prompts[:count], [min(output, settings.declared) for output in outputs[:count]]
    params = SamplingParams(max_tokens=settings.declared)
    prefix = PREFIX if settings.system_prompt and settings.is_paged else None
    made = [
        Request(number, float(arrival), prompt, output, params, prefix)
        for number, (arrival, prompt, output) in enumerate(zip(arrivals or [0] * count, prompts, outputs))
    ]
    return Queue(made, trace_hash(prompts, outputs), drawn_by)


def lengths(settings: Settings, count: int) -> tuple[list[int], list[int]]:
    """Prompts and outputs, uniform, of CPython's own generator: the same in every build of it."""
    prompts, outputs = (random.Random(f"{settings.seed} {what}") for what in ("prompts", "outputs"))
    mean, half = settings.mean_output, settings.half_spread
    return (
        [prompts.randint(settings.shortest_prompt, settings.longest_prompt) for _ in range(count)],
        [outputs.randint(mean - half, mean + half) for _ in range(count)],
    )


def trace_hash(prompts: list[int], outputs: list[int]) -> str:
    """The hash that the rows of saturated_queue carry: of all prompts, then all outputs, as 64-bit little-endian."""
    content = array("q", [*prompts, *outputs])
    if content.itemsize != 8 or array("H", [1]).tobytes() != b"\x01\x00":
        raise AssertionError("this machine does not store numbers as the hash wants them")
    return hashlib.sha256(content.tobytes()).hexdigest()


def saturating(settings: Settings) -> int:
    """About twice as many requests as a run can serve, counted as saturated_queue does."""
    mean = min(settings.mean_output, settings.declared)
    return settings.max_num_seqs * (2 + 2 * (settings.warmup_steps + settings.steps) // mean)


def _arrivals(settings: Settings) -> list[int]:
    """The steps in which requests arrive, a Poisson process as in §6.1; none if all are there from the beginning."""
    if not settings.arrivals:
        return []
    rng, moment, found = random.Random(f"{settings.seed} arrivals"), 0.0, []
    while (moment := moment + rng.expovariate(settings.arrivals / 100)) < settings.warmup_steps + settings.steps:
        found.append(int(moment))
    if not found:
        raise UserError(f"arrivals = {settings.arrivals}: no request arrives in this run; raise it")
    return found
