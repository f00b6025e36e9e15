"""Steps with prompts, padded to buckets as on a GPU: no token changes, and nothing but what was asked for is stored."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_executor import CONFIGS, SETTINGS, any_kind, assert_greedy, build, run, trace

from repro.llm.model_runner import MAX_CHUNKS, ROW_BUCKETS, TOKEN_BUCKETS, MixedShape


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["llama", *(name for name in CONFIGS if name.startswith("opt"))])
def test_padding_changes_no_greedy_token(name, setting):
    scheduler, executor = build(name, **SETTINGS[setting])
    executor.runner.pads = True
    requests = trace(0, 8)
    tokens = run(scheduler, executor, requests)
    for request, ids in requests:
        assert_greedy(name, ids, tokens[request.request_id][0])


def test_padding_changes_no_token_of_any_kind_of_request():
    requests = trace(3, 40, any_kind)
    results = []
    for pads in (False, True):
        scheduler, executor = build("llama", slots=512)
        executor.runner.pads = pads
        results.append(run(scheduler, executor, requests))
    assert results[0] == results[1]


def test_padding_writes_no_other_slot():
    scheduler, executor = build("llama", block_size=4, slots=64)
    executor.runner.pads = True
    run(scheduler, executor, trace(1, 1))
    written = ~executor.store.caches[0].isnan().flatten(2).all(-1)
    request, _ = trace(1, 1)[0]
    assert written.sum() == request.prompt_tokens + request.output_tokens - 1


def test_a_bucket_holds_the_batch_or_the_batch_stays_as_it_is():
    for rows in (*ROW_BUCKETS, 3):
        for tokens in TOKEN_BUCKETS:
            shape = MixedShape.bucket(rows, tokens, 2048)
            parts = shape.split(torch.arange(shape.size))
            assert shape.is_bucket and [len(part) for part in parts] == [
                tokens,
                rows + tokens,
                rows + tokens,
                *[rows + MAX_CHUNKS] * 3,
                MAX_CHUNKS + 1,
            ]
    # as many chunks as a bucket has, but of a batch that does not fit one: the longest is shorter than all together
    assert not MixedShape(rows=300, tokens=64, chunks=MAX_CHUNKS, context=2048, longest=49).is_bucket
    assert np.all(np.diff(TOKEN_BUCKETS) > 0)
