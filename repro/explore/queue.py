"""The requests of a run. Lengths that NumPy drew travel with the page: the interpreter in it has no NumPy."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Mapping

from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.explore.settings import Settings

#: key_of(settings) -> prompts and outputs, as many as the longest queue has that begins with them
Drawn = Mapping[str, tuple[list[int], list[int]]]
PREFIX = "system prompt"


def key_of(settings: Settings) -> str:
    """What the drawn lengths depend on."""
    prompts = f"{settings.shortest_prompt}-{settings.longest_prompt}"
    uniform = f"{prompts}/{settings.mean_output}/{settings.spread}"
    return f"{uniform if settings.lengths == 'uniform' else settings.lengths}/{settings.seed}"


def queue(settings: Settings, drawn: Drawn) -> tuple[list[Request], str, str]:
    """The requests of a run, in order of arrival, the hash of their lengths and the generator. `arrival_s` is a step.

    UserError if nothing would arrive, or for lengths of ShareGPT where none have been drawn."""
    arrivals = _arrivals(settings) if settings.arrivals else [0] * saturating(settings)
    count, drawn_by = len(arrivals), "NumPy"
    prompts, outputs = drawn.get(key_of(settings), ([], []))
    if len(prompts) < count:
        drawn_by = "random.Random"
        prompts, outputs = (_uniform if settings.lengths == "uniform" else _again)(settings, count, drawn)
    prompts, outputs = prompts[:count], [min(output, settings.declared) for output in outputs[:count]]
    params = SamplingParams(max_tokens=settings.declared)
    prefix = PREFIX if settings.system_prompt and settings.is_paged else None
    made = [
        Request(number, float(arrival), prompt, output, params, prefix)
        for number, (arrival, prompt, output) in enumerate(zip(arrivals, prompts, outputs))
    ]
    return made, trace_hash(prompts, outputs), drawn_by


def saturating(settings: Settings) -> int:
    """About twice as many requests as a run can serve, counted as saturated_queue does."""
    mean = min(settings.mean_output, settings.declared)
    return settings.max_num_seqs * (2 + 2 * (settings.warmup_steps + settings.steps) // mean)


def trace_hash(prompts: list[int], outputs: list[int]) -> str:
    """The hash that the rows of saturated_queue carry: all prompts, then all outputs, as 64-bit little-endian."""
    return hashlib.sha256(struct.pack(f"<{2 * len(prompts)}q", *prompts, *outputs)).hexdigest()


def _uniform(settings: Settings, count: int, drawn: Drawn) -> tuple[list[int], list[int]]:
    """By CPython's own generator, which is the same in every build of it."""
    prompts, outputs = (random.Random(f"{settings.seed} {what}") for what in ("prompts", "outputs"))
    mean, half = settings.mean_output, settings.half_spread
    return (
        [prompts.randint(settings.shortest_prompt, settings.longest_prompt) for _ in range(count)],
        [outputs.randint(mean - half, mean + half) for _ in range(count)],
    )


def _again(settings: Settings, count: int, drawn: Drawn) -> tuple[list[int], list[int]]:
    """Lengths of ShareGPT for another seed: drawn again from those of all seeds that are there."""
    pairs = [pair for key, both in drawn.items() if key.startswith("sharegpt/") for pair in zip(*both)]
    if not pairs:
        raise UserError("lengths = 'sharegpt': none have been drawn here; use 'uniform'")
    chosen = random.Random(f"{settings.seed} pairs").choices(pairs, k=count)
    return [prompt for prompt, _ in chosen], [output for _, output in chosen]


def _arrivals(settings: Settings) -> list[int]:
    """The steps in which requests arrive: a Poisson process, as in §6.1."""
    rng, moment, found = random.Random(f"{settings.seed} arrivals"), 0.0, []
    while (moment := moment + rng.expovariate(settings.arrivals / 100)) < settings.warmup_steps + settings.steps:
        found.append(int(moment))
    if not found:
        raise UserError(f"arrivals = {settings.arrivals}: no request arrives in this run; raise it")
    return found
