"""A trace's requests, and which blocks of them hold the same. Nobody needs the token ids themselves."""

from __future__ import annotations

from collections.abc import Iterator

from repro.engine.chunked import samples_of
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.sequence import Request, SamplingParams
from repro.workloads import Trace

#: name of the prefix that all of a run's prompts begin with
PREFIX = "shared"
#: numbers of a prompt's own blocks begin beyond those of the prefix, of each prompt beyond those of any other
_OWN = 2**32


def requests_of(
    trace: Trace, sampling: SamplingParams, prefix_id: str | None = None, splits_samples: bool = False
) -> Iterator[Request]:
    """The requests of a trace in their order; with `splits_samples` n for each (`System.splits_samples`)."""
    lengths = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    for index, (arrival, prompt, output) in enumerate(lengths):
        request = Request(index, arrival, prompt, output, sampling, prefix_id)
        if splits_samples and sampling.n > 1:
            yield from samples_of(request, index * sampling.n)
        else:
            yield request


def hashes_of(prefix_tokens: int, block_size: int, n: int = 1, stamped: bool = False) -> Hashes:
    """What the blocks of `requests_of` hold: all prompts begin with the same `prefix_tokens`, the prompts of the `n`
    requests of one are alike, and nothing else is. `stamped`: a token of its own stands first in each prompt.

    Numbers stand for the hashes: two are equal where the tokens up to the block's end are."""
    known: dict[Request, list[int]] = {}

    def numbers(request: Request) -> list[int]:
        prompt, end = request.prompt_tokens, request.prompt_tokens + request.output_tokens
        common = 0 if stamped else min(prefix_tokens, prompt)
        ends = [tokens // block_size for tokens in (common, prompt, end)]
        own, output = _OWN * (request.request_id // n + 1), -_OWN * (request.request_id + 1)
        return [*range(ends[0]), *range(own + ends[0], own + ends[1]), *range(output + ends[1], output + ends[2])]

    def hashes(request: Request) -> list[int]:
        found = known.get(request)
        if found is None:
            found = known[request] = numbers(request)
        return found

    return hashes
