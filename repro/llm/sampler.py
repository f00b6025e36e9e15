"""From logits to tokens: greedy or random (penalties, temperature, top-k, top-p; beams are in `repro.llm.beams`).

A random token is found by inverting the cumulative distribution at one number that is a hash of (seed, sample,
position). No generator has a state, so a request's tokens depend neither on its batch mates nor on preemption. What one
request asks for is computed on its own rows: it changes no bit of another's."""

import hashlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from repro.checks import whole
from repro.llm.state import SequenceState
from repro.llm.transfer import upload
from repro.sampling_params import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COLD = 1e-20  # a temperature below which logits divided by it could overflow


def seed_of(given: int | None) -> int:
    """The seed of a call, from 0 to 2**64 - 1: as given, or drawn. UserError for what is no whole number."""
    return secrets.randbits(48) if given is None else whole("seed", given, -math.inf, math.inf) % 2**64


def derived_seed(seed: int, index: int) -> int:
    """The seed of a run's request that was given none, from 0 to 2**64 - 1."""
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "little")


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
    """How each row of a batch is decoded; made anew when the batch's members change.

    `waits` says that the next step depends on this one's tokens: a sequence may stop, beams may fork, a penalty counts
    them. `adjusted` and `filtered` are the rows whose logits are changed, and those with top-k or top-p. `num_best` is
    how many log-probabilities of each row are asked for at most; None if no row asks."""

    rows: list[SequenceState]
    params: list[SamplingParams]
    all_greedy: bool
    has_beams: bool
    waits: bool
    prompt_tokens: np.ndarray
    adjusted: list[int]
    num_best: int | None
    _columns: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(rows: list[SequenceState]) -> "SamplingPlan":
        states = [row.request for row in rows]
        params = [state.request.sampling for state in states]
        has_beams = any(p.use_beam_search for p in params)
        adjusted = [row for row, state in enumerate(states) if state.is_adjusted]
        return SamplingPlan(
            rows,
            params,
            all_greedy=all(p.is_greedy for p in params),
            has_beams=has_beams,
            waits=has_beams or bool(adjusted) or any(state.can_stop for state in states),
            prompt_tokens=np.array([state.request.prompt_tokens for state in states]),
            adjusted=adjusted,
            num_best=max((p.logprobs for p in params if p.logprobs is not None), default=None),
        )

    @cached_property
    def filtered(self) -> list[int]:
        return [row for row, p in enumerate(self.params) if not p.is_greedy and (p.top_k or p.top_p < 1)]

    @cached_property
    def cold(self) -> bool:
        return any(p.temperature < _COLD for p in self.params if not p.is_greedy)

    @cached_property
    def seeds(self) -> np.ndarray:
        """uint64 [rows]; a request without a seed has its number."""
        given = [(row.request.request.request_id, p.seed) for row, p in zip(self.rows, self.params)]
        return np.array([number % 2**64 if seed is None else seed for number, seed in given], np.uint64)

    @cached_property
    def samples(self) -> np.ndarray:
        return np.array([row.index for row in self.rows])

    def column(self, name: str, device: torch.device) -> Tensor:
        """One of COLUMNS for every row, float32 [rows, 1]; uploaded once."""
        if name not in self._columns:
            values = np.array([COLUMNS[name](one) for one in self.params], np.float32)
            self._columns[name] = upload(values, device)[:, None]
        return self._columns[name]


COLUMNS: dict[str, Callable[[SamplingParams], float]] = {
    "temperature": lambda params: 1.0 if params.is_greedy else min(max(params.temperature, 1e-37), 1e37),
    "top_k": lambda params: min(params.top_k, 2**31) or np.inf,
    "top_p": lambda params: params.top_p,
    "is_greedy": lambda params: params.is_greedy,
}


def sample(logits: Tensor, plan: SamplingPlan, positions: np.ndarray) -> Tensor:
    """logits [rows, vocabulary] -> tokens int64 [rows]; `positions` int64 [rows] counts each row's tokens so far."""
    best = logits.argmax(-1)
    if plan.adjusted:
        rows = upload(np.array(plan.adjusted), logits.device)
        own = _adjusted(logits[rows].float(), plan, positions)
        best = best.index_copy(0, rows, own.argmax(-1))
    if plan.all_greedy:
        return best
    scores = logits.float()
    if plan.adjusted:
        scores = scores.index_copy(0, rows, own)
    temperature = plan.column("temperature", logits.device)
    if plan.cold:
        scores = torch.where(temperature < _COLD, scores - scores.amax(-1, keepdim=True), scores)
    scores = scores / temperature
    if plan.filtered:
        rows = upload(np.array(plan.filtered), logits.device)
        kept = scores[rows]
        threshold = _threshold(kept, *(plan.column(name, logits.device)[rows] for name in ("top_k", "top_p")))
        scores = scores.index_copy(0, rows, kept.masked_fill(kept < threshold, -torch.inf))
    # In the order of the vocabulary, not of the scores: two nearly equal scores that swap then change nothing.
    cumulative = scores.softmax(-1).double().cumsum(-1)
    u = upload(uniform(plan.seeds, plan.samples, positions), logits.device)
    drawn = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    return torch.where(plan.column("is_greedy", logits.device)[:, 0] > 0, best, drawn)


def _threshold(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest score that top-k, and then top-p of what it leaves, keep. [rows, 1]"""
    ordered = scores.sort(-1, descending=True).values
    rank = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    probability = ordered.softmax(-1)
    kept = (probability.cumsum(-1) - probability < top_p) | (top_p >= 1)
    last = (kept & (ordered > -torch.inf)).sum(-1, keepdim=True) - 1
    return ordered.gather(-1, last.clamp(min=0))


def _adjusted(logits: Tensor, plan: SamplingPlan, positions: np.ndarray) -> Tensor:
    """The logits, float32 [adjusted rows, vocabulary], without stop tokens before `min_tokens`, and with penalties.

    A row's own tokens are all known here: a plan with such rows waits for each step."""
    vocabulary = logits.shape[-1]
    barred, places, changes = [], [], []
    for place, row in enumerate(plan.adjusted):
        state, params = plan.rows[row], plan.params[row]
        if positions[row] < params.min_tokens:
            barred += [place * vocabulary + token for token in state.request.stops]
        output = np.array(state.tokens, np.int64)
        seen = np.unique(np.concatenate([state.request.prompt, output]))
        counts = np.bincount(output, minlength=vocabulary)[seen]
        lower = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        places.append(place * vocabulary + seen)
        changes.append(np.stack([np.full(len(seen), params.repetition_penalty), lower]))
    flat = logits.flatten()
    at = upload(np.concatenate(places), logits.device)
    divisor, lower = upload(np.concatenate(changes, axis=1).astype(np.float32), logits.device)
    values = flat[at]
    flat = flat.index_copy(0, at, torch.where(values > 0, values / divisor, values * divisor) - lower)
    if barred:
        flat = flat.index_fill(0, upload(np.array(barred), logits.device), -torch.inf)
    return flat.view_as(logits)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The model's log-probabilities of the tokens chosen, float32 [rows]."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None])[:, 0] - logits.logsumexp(-1)


def best_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The model's `count` best log-probabilities, best first, float32 [rows, count], and their tokens, int64."""
    logits = logits.float()
    values, tokens = logits.topk(count)
    return values - logits.logsumexp(-1, keepdim=True), tokens
