"""Beam search (§4.4): which beams live on, which have finished, and when the search is over.

It is transformers' search: of the best continuations of all beams, those that end with a stop token are finished, and
compete by their score; the best that go on are the next beams. The beams of a group are always equally long."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from repro.llm.state import Best, RequestState, SequenceState
from repro.llm.transfer import upload

_NEVER = np.float32(-1e9)  # the score of what must not be chosen, as in transformers


@dataclass(frozen=True)
class Finished:
    """A beam that ended: beam `parent` continued with `token` of this log-probability; `score` ranks it."""

    parent: int
    token: int
    logprob: float
    score: float


@dataclass(frozen=True)
class BeamStep:
    """Beam i continues beam `parents[i]` with `tokens[i]`; `logprobs[i]` is that token's. `finished`, best first."""

    parents: list[int]
    tokens: list[int]
    logprobs: list[float]
    finished: list[Finished]


def advance_beams(states: list[RequestState], logits: Tensor) -> list[BeamStep]:
    """The best continuations of each group's beams, given logits [groups, beams, vocabulary]; updates `beam_scores`.

    A beam that lives on keeps its place (the memory manager relies on it): of its continuations the best stays there,
    the others take the places of beams that end."""
    width, vocabulary = logits.shape[1:]
    # At the first step all beams are still the same prompt: only the first one's continuations count.
    start = [[0.0] + [_NEVER] * (width - 1) if state.beam_scores is None else state.beam_scores for state in states]
    scores = logits.float().log_softmax(-1)
    for place, state in enumerate(states):
        if len(state.sequences[0].tokens) < state.request.sampling.min_tokens:
            scores[place][:, sorted(state.stops)] = -torch.inf
    totals = scores + upload(np.array(start, np.float32), logits.device)[:, :, None]
    # With stop tokens, so many that `width` go on even if each beam's best ones are all of its stop tokens.
    num_stops = max(len(state.stops) for state in states)
    best, index = totals.flatten(1).topk(min((1 + num_stops) * width, width * vocabulary))
    own = scores.flatten(1).gather(1, index)
    best, own, index = best.cpu().numpy(), own.tolist(), index.cpu().numpy()
    origins, chosen = (index // vocabulary).tolist(), (index % vocabulary).tolist()
    return [_step(*one, width) for one in zip(states, best, own, origins, chosen)]


def _step(
    state: RequestState, total: np.ndarray, own: list[float], origin: list[int], token: list[int], width: int
) -> BeamStep:
    """One group's step, given its best continuations: summed and own log-probabilities, beams, tokens."""
    request, length = state.request, len(state.sequences[0].tokens) + 1
    is_last = length == request.output_tokens
    ends = [is_last or one in state.stops for one in token]
    finished = [
        Finished(origin[rank], token[rank], own[rank], float(total[rank]) / length**request.sampling.length_penalty)
        for rank in range(width)
        if ends[rank]
    ]
    running = np.argsort(-(total + np.where(ends, _NEVER, np.float32(0))), kind="stable")[:width].tolist()
    places = [running[rank] for rank in _places([origin[rank] for rank in running])]
    parents = list(range(width)) if state.beam_scores is None else [origin[rank] for rank in places]
    state.beam_scores = total[places]
    return BeamStep(parents, [token[rank] for rank in places], [own[rank] for rank in places], finished)


def extend_beams(state: RequestState, step: BeamStep, parents: list[int], best: list[Best] | None) -> None:
    """Let the beams go on as the step says, but from `parents`, and note which have finished; `best` by beam."""
    request = state.request
    histories = [(row.tokens, row.logprobs, row.best_logprobs) for row in state.sequences]

    def extend(row: SequenceState, parent: int, token: int, value: float) -> None:
        tokens, values, others = histories[parent]
        row.tokens, row.logprobs, row.best_logprobs = [*tokens, token], [*values, value], others
        if (count := request.sampling.logprobs) is not None:
            row.best_logprobs = [*others, best[parent].of(count, token, value)]

    for one in step.finished:
        row = SequenceState(state, 0, score=one.score, stopped=one.token in state.stops)
        row.stop_reason = one.token if row.stopped else None
        extend(row, one.parent, one.token, one.logprob)
        state.finished_beams.append(row)
    state.finished_beams = sorted(state.finished_beams, key=lambda row: -row.score)[: request.sampling.n]
    for row, *how in zip(state.sequences, parents, step.tokens, step.logprobs):
        extend(row, *how)


def is_over(state: RequestState) -> bool:
    """Whether the search ends here: at the length limit, or when `n` beams have finished and `early_stopping` says
    that no better one is to come."""
    sampling, length, limit = state.request.sampling, len(state.sequences[0].tokens), state.request.output_tokens
    if length == limit:
        return True
    if len(state.finished_beams) < sampling.n:
        return False
    if sampling.early_stopping is True:
        return True
    longest = limit if sampling.early_stopping == "never" and sampling.length_penalty > 0 else length
    return float(state.beam_scores.max()) / longest**sampling.length_penalty <= state.finished_beams[-1].score


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
