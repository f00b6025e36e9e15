"""Steps with prompts, padded to buckets as on a GPU: no token changes, and nothing but what was asked for is stored."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_executor import CONFIGS, SETTINGS, any_kind, assert_greedy, build, run, trace
from tiny import llm

from repro.engine.sequence import SamplingParams
from repro.llm.model_runner import CHUNKS, MANY_CHUNKS, MANY_SIZES, ROW_BUCKETS, SIZES, MixedShape
from repro.llm.pool import PoolSize

pytestmark = pytest.mark.usefixtures("one_thread")


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


def test_every_bucket_is_captured_before_and_fits_into_the_buffer():
    _, executor = build("llama", slots=512)
    runner = executor.runner
    shapes = runner._mixed_buckets(2048)
    assert len(set(shapes)) == len(shapes) and max(shape.size for shape in shapes) == len(runner._packed)
    for shape in shapes:
        ends = shape.rows + shape.chunks
        parts = [len(part) for part in shape.split(torch.arange(shape.size))]
        assert parts == [shape.tokens] * 3 + [ends] * 3 + [shape.chunks + 1]
    runner.pads = True
    most = runner._row_buckets[-1]
    for count, tokens, chunks in itertools.product((0, 1, most // 2, most), (1, 60, 700, 2500), (1, 64, 65, 250)):
        if chunks <= tokens:
            shape = runner._mixed_shape(batch_of(count, tokens, chunks))
            assert shape in shapes and shape.tokens >= count + tokens and shape.rows >= count and shape.chunks >= chunks


def batch_of(count, tokens, chunks):
    """What decides which bucket holds a batch."""
    parts = SimpleNamespace(token_ids=range(tokens), rows=range(chunks), longest=tokens - chunks + 1)
    return SimpleNamespace(num_decodes=count, max_context=40, chunks=parts)


@pytest.mark.parametrize("system_name", ["vllm", "vllm-v1"])
def test_many_short_prompts_at_once_are_padded_and_change_no_token(tiny, system_name):
    """More than most buckets have; some of them over what a cache has found."""
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
    assert {shape.chunks for shape in shapes if shape.is_bucket} == {CHUNKS, MANY_CHUNKS}


@pytest.mark.parametrize(
    "count, tokens, chunks, kind",
    [
        (3, 61, 16, (64, 64, CHUNKS)),
        (3, 62, 16, (128, 64, CHUNKS)),
        (32, 480, 1, (512, 64, CHUNKS)),
        (64, 2048, 2, (2176, 64, CHUNKS)),
        (60, 2560, 65, (2816, 256, MANY_CHUNKS)),
        (65, 60, 9, (128, 128, CHUNKS)),
        (129, 10, 9, (192, 192, CHUNKS)),
        (129, 2688, 9, None),
        (257, 10, 9, None),
        (3, 300, 257, None),
    ],
)
def test_which_bucket_holds_a_batch(count, tokens, chunks, kind):
    """Rows and prompts are padded together; there are never more rows than tokens."""
    assert np.all(np.diff(SIZES) > 0) and set(MANY_SIZES) <= set(SIZES) and SIZES[-1] == 2560 + ROW_BUCKETS[-1]
    _, executor = build("llama", slots=512, options={"max_num_seqs": 256})
    executor.runner.pads = True
    batch = batch_of(count, tokens, chunks)
    shape = executor.runner._mixed_shape(batch)
    if kind:
        assert shape.is_bucket and (shape.tokens, shape.rows, shape.chunks) == kind and shape.longest == kind[0]
    else:
        assert shape == MixedShape(count + tokens, count, chunks, shape.context, batch.chunks.longest)
