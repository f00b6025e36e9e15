"""A trace's requests, and what their prompts hold: token ids that nobody needs, but for which of them are alike."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from repro.engine.chunked import samples_of
from repro.engine.memory.prefix_cache import Hashes, block_hashes
from repro.engine.sequence import Request, SamplingParams
from repro.workloads import Trace

#: name of the prefix that all of a run's prompts begin with
PREFIX = "shared"
#: token ids of a prompt's own begin beyond any of the prefix
_OWN = 2**32


def requests_of(
    trace: Trace, sampling: SamplingParams, prefix_id: str | None = None, splits_samples: bool = False
) -> Iterator[Request]:
    """The requests of a trace in their order; with `splits_samples` n for each (`System.splits_samples`)."""
    lengths = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    for index, (arrival, prompt, output) in enumerate(lengths):
        request = Request(index, arrival, prompt, output, sampling, prefix_id)
        if splits_samples:
            yield from samples_of(request, index * sampling.n)
        else:
            yield request


def hashes_of(prefix_tokens: int, block_size: int, n: int = 1, stamped: bool = False) -> Hashes:
    """What the blocks of `requests_of` hold: all prompts begin with the same `prefix_tokens`, the prompts of the `n`
    requests of one are alike, and nothing else is. `stamped`: a token of its own stands first in each prompt."""

    @functools.cache
    def hashes(request_id: int, num_prompt: int, num_output: int) -> list[bytes]:
        own, output = _OWN * (request_id // n + 1), -_OWN * (request_id + 1)
        first = [own] if stamped else []
        common = range(len(first), min(prefix_tokens, num_prompt))
        prompt = [*first, *common, *range(own + 1, own + 1 + num_prompt - prefix_tokens)]
        return block_hashes([*prompt, *range(output, output + num_output)], block_size)

    return lambda request: hashes(request.request_id, request.prompt_tokens, request.output_tokens)
