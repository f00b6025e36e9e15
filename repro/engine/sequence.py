"""Requests and the sequences that they become.

A request turns into one SequenceGroup holding `n` sequences: parallel samples or beams of one prompt (§4.4). A group is
admitted, preempted and resumed as a whole (§4.5). Nothing here knows token values, blocks, or time but the arrival."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from repro import display
from repro.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """One request. Lengths in tokens, arrival in seconds from the start of the trace.

    `output_tokens` is the length at which the request ends at the latest; a trace's requests end exactly there.
    `prefix_id` names a prefix that the service has stored in advance (§4.4, "Shared prefix"). `priority` counts where
    the queue is ordered by it, the lowest first."""

    request_id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    sampling: SamplingParams
    prefix_id: str | None = None
    priority: int = 0

    def __str__(self) -> str:
        lengths = f"{self.prompt_tokens} + {self.output_tokens} tokens"
        return f"request {self.request_id} of {lengths} x {self.sampling.n} sequences"

    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        lengths = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        return {"request_id": self.request_id, "arrival_s": self.arrival_s, **lengths, "n": self.sampling.n}

    def _repr_html_(self) -> str:
        more = {"sampling": self.sampling, "prefix_id": self.prefix_id, "priority": self.priority}
        return display.fields(str(self), self.row() | more)


class Status(enum.Enum):
    WAITING = "waiting"  # not started, or preempted by recomputation
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a group. Compared and hashed by identity; `seq_id` is for people and logs."""

    seq_id: str


class SequenceGroup:
    """All sequences of one request, with the little state that the scheduler keeps about them.

    All live sequences of a group have the same length. While the group runs, each of them gets a token an iteration, so
    the length follows from the iteration's number; that makes many iterations cheap to advance together.

    seqs               its live sequences
    arrival            (seconds, request number): groups in this order are first come, first served
    rank               its place in the queue, the lowest first: its arrival, or what the order's policy says
    running_since      the iteration in which its present run began; None while it does not run
    generated_before   output tokens that each sequence got in earlier runs (a preemption ends a run)"""

    __slots__ = ("request", "seqs", "arrival", "rank", "status", "running_since", "generated_before", "num_preemptions")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.seqs = [Sequence(f"{request.request_id}.{i}") for i in range(request.sampling.n)]
        self.rank = self.arrival = (request.arrival_s, request.request_id)
        self.status = Status.WAITING
        self.running_since: int | None = None
        self.generated_before = 0
        self.num_preemptions = 0

    def num_stored(self, iteration: int) -> int:
        """Tokens of each live sequence whose K/V is in memory once `iteration` has run.

        The newest token's K/V is computed by the iteration that takes it as input, so a sequence of prompt p and output
        o never stores more than p + o - 1 tokens."""
        tokens, since = self.request.prompt_tokens + self.generated_before, self.running_since
        return tokens if since is None else tokens + iteration - since

    def num_generated(self, iteration: int) -> int:
        """Output tokens that each live sequence has when `iteration` begins."""
        return self.num_stored(iteration) - self.request.prompt_tokens

    @property
    def is_beam(self) -> bool:
        return self.request.sampling.use_beam_search

    def __repr__(self) -> str:
        return f"SequenceGroup({self.request.request_id}, {self.status.value}, {len(self.seqs)} sequences)"


by_rank = attrgetter("rank")  # sort key: the order of the queue
