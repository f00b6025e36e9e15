"""Sampling against exact distributions; random numbers that depend on the request alone."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from repro.engine.sequence import Request, SamplingParams
from repro.llm.sampler import SamplingPlan, logprobs, sample, uniform
from repro.llm.state import RequestState

VOCABULARY = 50


def plan(*params: SamplingParams) -> SamplingPlan:
    rows = [
        RequestState(Request(index, 0.0, 1, 1, one), np.zeros(1, np.int64)).sequences[0]
        for index, one in enumerate(params)
    ]
    return SamplingPlan.of(rows)


def exact(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that temperature, then top-k, then top-p leave, by their definitions in float64."""
    scores = logits / params.temperature
    order = np.argsort(-scores)
    kept = order[: params.top_k or len(order)]
    p = np.exp(scores[kept] - scores.max())
    p /= p.sum()
    count = int((np.cumsum(p) - p < params.top_p).sum())
    result = np.zeros(len(logits))
    result[kept[:count]] = p[:count] / p[:count].sum()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8},
    ],
)
def test_tokens_follow_the_distribution(options):
    logits = np.random.default_rng(0).normal(size=VOCABULARY) * 2
    params, count = SamplingParams(seed=3, **options), 20_000
    tokens = sample(torch.tensor(logits).float().expand(count, -1), plan(*[params] * count), np.arange(count)).numpy()
    expected = exact(logits, params)
    observed = np.bincount(tokens, minlength=VOCABULARY) / count
    assert set(np.flatnonzero(observed)) <= set(np.flatnonzero(expected))
    tolerance = 5 * np.sqrt(expected * (1 - expected) / count) + 1e-3
    assert (np.abs(observed - expected) <= tolerance).all()


def test_a_row_depends_on_its_own_parameters_only():
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=2, top_p=0.5),
        SamplingParams(n=2, use_beam_search=True),
        SamplingParams(temperature=0.3),
    ]
    together = sample(logits, plan(*params), np.arange(6))
    for row in range(1, 5):
        alone = sample(logits[row : row + 1], plan(params[row]), np.array([row]))
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()


def test_uniform_numbers_are_uniform_and_independent_of_each_other():
    grid = np.stack(np.meshgrid(np.arange(40), np.arange(40), np.arange(40), indexing="ij"), -1).reshape(-1, 3).T
    u = uniform(*grid)
    assert u.min() > 0 and u.max() < 1 and len(np.unique(u)) == len(u)
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 120  # chi-squared with 63 degrees of freedom: p is about 1e-5
    cube = u.reshape(40, 40, 40)
    for axis in range(3):
        a, b = np.take(cube, range(39), axis).ravel(), np.take(cube, range(1, 40), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


def test_logprobs_are_those_of_the_softmax():
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([3, 0, 49, 7])
    expected = logits.double().softmax(-1).log()[torch.arange(4), tokens]
    assert torch.allclose(logprobs(logits, tokens).double(), expected, atol=1e-5)
