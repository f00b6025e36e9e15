"""Beam search against transformers' own, with stop tokens, length penalties and every way of early stopping."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_executor import VOCABULARY, Stepwise, build, loaded, reference, run, trace

from repro.engine.sequence import Request
from repro.llm.beams import advance_beams
from repro.llm.state import RequestState
from repro.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

STOPS = tuple(range(7, VOCABULARY, 6))
SEARCHES = [
    {"length_penalty": penalty, "early_stopping": early}
    for penalty in (-0.7, 0.0, 1.0, 2.0)
    for early in (False, True, "never")
]


def theirs(name: str, prompt: tuple[int, ...], params: SamplingParams, stops: tuple[int, ...]):
    ids = torch.tensor([prompt])
    return reference(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=params.n,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        eos_token_id=list(stops) or None,
        pad_token_id=1,  # transformers takes 0 for none
        return_dict_in_generate=True,
        output_scores=True,
    )


def assert_theirs(name: str, executor, requests, stops: tuple[int, ...]) -> int:
    """Every request's beams and scores are transformers'; how many of them ended before their limit."""
    early = 0
    for request, ids in requests:
        beams = executor.finished[request.request_id].ranked
        expected = theirs(name, ids, request.sampling, stops)
        assert [row.score for row in beams] == pytest.approx(expected.sequences_scores.tolist(), rel=1e-5, abs=1e-5)
        for row, tokens in zip(beams, expected.sequences[:, len(ids) :].tolist(), strict=True):
            assert row.tokens + [1] * (len(tokens) - len(row.tokens)) == tokens
            assert row.stopped == (row.tokens[-1] in stops)
            early += len(row.tokens) < request.output_tokens
    return early


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_beams_end_where_those_of_transformers_end(search):
    width = 2 + len(str(search)) % 3
    model = dataclasses.replace(loaded("llama"), eos=frozenset(STOPS))
    requests = [
        (
            dataclasses.replace(
                request, output_tokens=12, sampling=SamplingParams(width, True, max_tokens=12, **search)
            ),
            ids,
        )
        for request, ids in trace(11, 6)
    ]
    scheduler, executor = build("llama", model=model, slots=1024)
    run(scheduler, executor, requests, wrap=Stepwise)
    early = assert_theirs("llama", executor, requests, STOPS)
    assert early > 0 or search["length_penalty"] > 1  # which favours long beams
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


@pytest.mark.parametrize("setting", ["orca-max", "faster-transformer", "vllm"])
def test_beams_share_a_batch_with_all_else_under_every_memory(setting):
    """Stop tokens of the request's own, a least length, and samples that stop in between."""
    kinds = [
        {"n": 3, "use_beam_search": True, "min_tokens": 4, "stop_token_ids": STOPS, "early_stopping": True},
        {"n": 2, "seed": 1, "stop_token_ids": STOPS[:4]},
        {"n": 2, "use_beam_search": True},
    ]
    requests = [
        (
            dataclasses.replace(request, output_tokens=10, sampling=SamplingParams(max_tokens=10, **kinds[place % 3])),
            ids,
        )
        for place, (request, ids) in enumerate(trace(12, 9))
    ]
    scheduler, executor = build("qwen2", setting=setting, slots=2048)
    run(scheduler, executor, requests, wrap=Stepwise)
    assert assert_theirs("qwen2", executor, requests[::3], STOPS) > 0
    assert assert_theirs("qwen2", executor, requests[2::3], ()) == 0
    assert (
        min(len(row.tokens) for request, _ in requests[::3] for row in executor.finished[request.request_id].ranked)
        >= 4
    )
    assert scheduler.manager.num_free_blocks == scheduler.manager.num_blocks


def test_groups_of_beams_advance_together_as_each_does_alone():
    """Some at their first step, some later; the choices of one do not depend on the others'."""
    rng = np.random.default_rng(3)
    for width in (2, 4, 6):
        request = Request(0, 0.0, 1, 9, SamplingParams(n=width, use_beam_search=True))
        scores = [
            None,
            np.sort(rng.normal(size=width).astype(np.float32)),
            None,
            rng.normal(size=width).astype(np.float32),
        ]
        logits = torch.tensor(rng.normal(size=(4, width, VOCABULARY)) * 3)
        together, alone = (
            [RequestState(request, np.zeros(1, np.int64), beam_scores=given) for given in scores] for _ in range(2)
        )
        steps = advance_beams(together, logits)
        assert steps == [advance_beams([state], logits[place : place + 1])[0] for place, state in enumerate(alone)]
        for one, other in zip(together, alone):
            assert np.array_equal(one.beam_scores, other.beam_scores)


def test_beams_that_live_on_keep_their_place():
    rng = np.random.default_rng(2)
    for _ in range(200):
        width = int(rng.integers(2, 7))
        state = RequestState(
            Request(0, 0.0, 1, 9, SamplingParams(n=width, use_beam_search=True)), np.zeros(1, np.int64)
        )
        (first,) = advance_beams([state], torch.randn(1, 1, VOCABULARY).expand(-1, width, -1))
        assert first.parents == list(range(width)) and len(set(first.tokens)) == width
        before = state.beam_scores.copy()
        logits = torch.tensor(rng.normal(size=(width, VOCABULARY)) * 3)
        (step,) = advance_beams([state], logits[None])
        assert all(step.parents[parent] == parent for parent in step.parents)
        totals = before[:, None] + logits.log_softmax(-1).numpy()
        best = {divmod(index, VOCABULARY) for index in np.argsort(-totals.ravel())[:width].tolist()}
        assert set(zip(step.parents, step.tokens)) == best
        assert np.allclose(state.beam_scores, [totals[pair] for pair in zip(step.parents, step.tokens)], atol=1e-4)
