"""The numbers that stand for the hashes of simulated prompts say the same as hashes of tokens would."""

import random

import pytest

from repro.engine.memory.prefix_cache import block_hashes
from repro.engine.sequence import Request, SamplingParams
from repro.simulate.prompts import hashes_of


def tokens_of(request: Request, prefix: int, n: int, stamped: bool) -> list[tuple]:
    """The request's tokens: a common prefix, unless a token of its own stands first; the prompt's own; its outputs."""
    common = min(prefix, request.prompt_tokens) * (not stamped)
    prompt = request.request_id // n
    own = [("own", prompt, place) for place in range(common, request.prompt_tokens)]
    output = [("output", request.request_id, place) for place in range(request.output_tokens)]
    return [("common", place) for place in range(common)] + own + output


@pytest.mark.parametrize("seed", range(20))
def test_two_numbers_are_equal_where_two_hashes_are(seed: int) -> None:
    draw = random.Random(seed)
    size, prefix, n, stamped = draw.choice((1, 2, 16)), draw.choice((0, 7, 40)), draw.choice((1, 3)), seed % 4 == 0
    hashes, ids, pairs = hashes_of(prefix, size, n, stamped), {}, set()
    for prompt in range(6):
        lengths = draw.randint(1, 60), draw.randint(1, 20)
        for sample in range(n):
            request = Request(prompt * n + sample, 0.0, *lengths, SamplingParams())
            tokens = [ids.setdefault(token, len(ids)) for token in tokens_of(request, prefix, n, stamped)]
            expected, found = block_hashes(tokens, size), hashes(request)
            assert len(found) == len(expected)
            pairs |= set(zip(expected, found))
    assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}) > 1
