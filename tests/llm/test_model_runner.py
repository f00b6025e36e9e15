"""Steps with prompts, padded to buckets as on a GPU: no token changes, and nothing but what was asked for is stored."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_executor import CONFIGS, SETTINGS, any_kind, assert_greedy, build, run, trace
from tiny import llm

from repro.engine.sequence import SamplingParams
from repro.llm.model_runner import MAX_CHUNKS, ROW_BUCKETS, TOKEN_BUCKETS, WIDE_CHUNKS, WIDE_TOKEN_BUCKETS, MixedShape
from repro.llm.pool import PoolSize


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
        for tokens in WIDE_TOKEN_BUCKETS:
            shape = MixedShape.wide(rows, tokens, 2048)
            assert shape.is_bucket and shape != MixedShape.bucket(rows, tokens, 2048)
            assert shape.size <= MixedShape.bucket(rows, TOKEN_BUCKETS[-1], 2048).size  # one buffer holds any
    # as many chunks as a bucket has, but of a batch that does not fit one
    assert not MixedShape(rows=300, tokens=64, chunks=MAX_CHUNKS, context=2048, longest=49).is_bucket
    assert np.all(np.diff(TOKEN_BUCKETS) > 0) and np.all(np.diff(WIDE_TOKEN_BUCKETS) > 0)


@pytest.mark.parametrize("system_name", ["vllm", "vllm-v1"])
def test_many_short_prompts_at_once_are_padded_and_change_no_token(tiny, system_name):
    """More than a bucket's chunks, and more than the wide one's; some of them over what a cache has found."""
    random, tokens, shapes = np.random.default_rng(7), [], []
    common = random.integers(0, 101, 8).tolist()
    prompts = [common * (index % 2) + random.integers(0, 101, 1 + index % 9).tolist() for index in range(110)]
    for pads in (False, True):
        engine = llm(tiny, system=system_name, pool=PoolSize(num_blocks=2000), max_num_seqs=70)
        runner = engine.executor.runner
        runner.pads, shape_of = pads, runner._mixed_shape
        runner._mixed_shape = lambda batch, of=shape_of: shapes.append(of(batch)) or shapes[-1]
        lengths = [SamplingParams(temperature=0, max_tokens=3 + index % 3) for index in range(110)]
        made = engine.generate(prompts, lengths, progress=False)
        tokens.append([one.token_ids for one in made])
    assert tokens[0] == tokens[1]
    assert {shape.chunks for shape in shapes if shape.is_bucket} >= {WIDE_CHUNKS}
    assert max(shape.chunks for shape in shapes) > WIDE_CHUNKS and not any(s.is_bucket for s in shapes if s.chunks > 64)


@pytest.mark.parametrize(
    "chunks, longest, tokens, kind",
    [
        (16, 2000, 2560, (2560, 16, 2560)),
        (16, 1000, 2561, None),
        (17, 256, 300, (384, 64, 256)),
        (64, 200, 1024, (1024, 64, 256)),
        (17, 257, 300, None),
        (64, 200, 1025, None),
        (65, 9, 300, None),
    ],
)
def test_which_bucket_holds_a_batch(chunks, longest, tokens, kind):
    _, executor = build("llama", slots=512)
    executor.runner.pads = True
    parts = SimpleNamespace(token_ids=range(tokens), rows=range(chunks), longest=longest)
    shape = executor.runner._mixed_shape(SimpleNamespace(num_decodes=3, max_context=40, chunks=parts))
    if kind:
        assert shape.is_bucket and (shape.tokens, shape.chunks, shape.longest) == kind and shape.rows == 8
    else:
        assert shape == MixedShape(3, tokens, chunks, shape.context, longest)
