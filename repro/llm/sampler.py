"""From logits to tokens: greedy, random (temperature, top-k, top-p) and beam search (§4.4).

A random token is found by inverting the cumulative distribution at one number that is a hash of (seed, sample,
position). No generator has a state, so a request's tokens depend neither on its batch mates nor on preemption. Beam
search is of fixed length (stop tokens are ignored): at each step the `n` best continuations of all beams survive."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from repro.engine.sequence import SamplingParams
from repro.llm.state import RequestState, SequenceState
from repro.llm.transfer import upload

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: a bijection of 64-bit integers whose outputs look independent."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def uniform(seeds: np.ndarray, samples: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in (0, 1), one per triple; equal triples give equal numbers."""
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) + _GOLDEN)
        key = _mix(key + samples.astype(np.uint64) * _GOLDEN)
        key = _mix(key + positions.astype(np.uint64) * _GOLDEN)
    return ((key >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32


@dataclass(frozen=True)
class SamplingPlan:
    """How each row of a batch is decoded; made anew when the batch's members change. Arrays are [rows].

    `waits` says that the next step depends on this one's tokens: a sequence may stop, or beams may fork."""

    all_greedy: bool
    has_beams: bool
    waits: bool
    prompt_tokens: np.ndarray
    params: list[SamplingParams]
    request_ids: list[int]
    samples: np.ndarray
    _columns: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(rows: list[SequenceState], can_stop: bool) -> "SamplingPlan":
        requests = [row.request.request for row in rows]
        params = [request.sampling for request in requests]
        has_beams = any(p.use_beam_search for p in params)
        return SamplingPlan(
            all_greedy=all(map(_is_greedy, params)),
            has_beams=has_beams,
            waits=has_beams or (can_stop and not all(p.ignore_eos for p in params)),
            prompt_tokens=np.array([request.prompt_tokens for request in requests]),
            params=params,
            request_ids=[request.request_id for request in requests],
            samples=np.array([row.index for row in rows]),
        )

    @cached_property
    def seeds(self) -> np.ndarray:
        return np.array([id if p.seed is None else p.seed for id, p in zip(self.request_ids, self.params)])

    def column(self, name: str, device: torch.device) -> Tensor:
        """One of COLUMNS for every row, float32 [rows, 1]; uploaded once."""
        if name not in self._columns:
            values = np.array([COLUMNS[name](one) for one in self.params], np.float32)
            self._columns[name] = upload(values, device)[:, None]
        return self._columns[name]


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0 or params.use_beam_search


COLUMNS: dict[str, Callable[[SamplingParams], float]] = {
    "temperature": lambda params: params.temperature or 1.0,
    "top_k": lambda params: params.top_k or np.inf,
    "top_p": lambda params: params.top_p,
    "is_greedy": _is_greedy,
}


def sample(logits: Tensor, plan: SamplingPlan, positions: np.ndarray) -> Tensor:
    """logits [rows, vocabulary] -> tokens int64 [rows]; `positions` int64 [rows] counts each row's tokens so far."""
    best = logits.argmax(-1)
    if plan.all_greedy:
        return best
    scores = logits.float() / plan.column("temperature", logits.device)
    if any(p.top_k or p.top_p < 1 for p in plan.params):
        scores = scores.masked_fill(scores < _threshold(scores, plan), -torch.inf)
    # In the order of the vocabulary, not of the scores: two nearly equal scores that swap then change nothing.
    cumulative = scores.softmax(-1).double().cumsum(-1)
    u = upload(uniform(plan.seeds, plan.samples, positions), logits.device)
    drawn = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    return torch.where(plan.column("is_greedy", logits.device)[:, 0] > 0, best, drawn)


def _threshold(scores: Tensor, plan: SamplingPlan) -> Tensor:
    """The lowest score that top-k, and then top-p of what it leaves, keep. [rows, 1]"""
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= plan.column("top_k", scores.device), -torch.inf)
    probability = ordered.softmax(-1)
    kept = probability.cumsum(-1) - probability < plan.column("top_p", scores.device)
    last = (kept & (ordered > -torch.inf)).sum(-1, keepdim=True) - 1
    return ordered.gather(-1, last)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The model's log-probabilities of the tokens chosen, float32 [rows]."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


@dataclass(frozen=True)
class BeamStep:
    """Beam i continues beam `parents[i]` with `tokens[i]`; `logprobs[i]` is that token's."""

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]


def advance_beams(states: list[RequestState], logits: Tensor) -> list[BeamStep]:
    """The best continuations of each group's beams, given logits [groups, beams, vocabulary]; updates `beam_scores`.

    A beam that lives on keeps its place (the memory manager relies on it): of its continuations the best stays there,
    the others take the places of beams that end."""
    width, vocabulary = logits.shape[1:]
    # At the first step all beams are still the same prompt: only the first one's continuations count.
    start = [[0.0] + [-np.inf] * (width - 1) if state.beam_scores is None else state.beam_scores for state in states]
    scores = logits.float().log_softmax(-1)
    totals = scores + upload(np.array(start, np.float32), logits.device)[:, :, None]
    best, index = totals.flatten(1).topk(width)
    own = scores.flatten(1).gather(1, index)
    best, own, index = best.cpu().numpy(), own.tolist(), index.cpu().numpy()
    steps, origins, chosen = [], index // vocabulary, (index % vocabulary).tolist()
    for state, total, value, origin, token in zip(states, best, own, origins, chosen):
        places = _places(origin.tolist())
        parents = list(range(width)) if state.beam_scores is None else origin[places].tolist()
        state.beam_scores = total[places]
        steps.append(BeamStep(parents, [token[rank] for rank in places], [value[rank] for rank in places]))
    return steps


def _places(origin: list[int]) -> list[int]:
    """place -> rank of the continuation that takes it, given the beam that each rank continues."""
    chosen: list[int | None] = [None] * len(origin)
    waiting = []
    for rank, parent in enumerate(origin):
        if chosen[parent] is None:
            chosen[parent] = rank
        else:
            waiting.append(rank)
    return [waiting.pop(0) if rank is None else rank for rank in chosen]
