"""The settings of a scheduler: how it batches, its caps, and its policies."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from repro.checks import flag, member, user_facing, whole
from repro.engine.policies import ORDERS, VICTIMS, Order, Swaps, Victim, first_come, last_in_order, policy_of
from repro.errors import UserError


class Batching(enum.Enum):
    ITERATION = "iteration"  # Orca and vLLM: requests join and leave between any two iterations
    REQUEST = "request"  # FasterTransformer: a batch is formed, runs until all have finished, and returns together


class PreemptionMode(enum.Enum):
    RECOMPUTE = "recompute"
    SWAP = "swap"
    BY_GROUP = "by_group"  # the authors' rule: swap a group of several sequences, recompute a single one


@user_facing
@dataclass(frozen=True)
class SchedulerConfig:
    """Caps of one iteration. `max_num_batched_tokens` counts prompt tokens and decoding sequences together.

    `groups_count_once`: a running group counts as one against `max_num_seqs`, however many sequences it has (the
    authors' artifact). `max_padded_len`: a static batch, padded to its longest, is no longer than this.

    `order` of the queue, `victim` of a preemption and `preemption`, if it is a function, are policies of a user's own
    or names of known ones (`repro.engine.policies`); with `oracle` they see how long outputs will be."""

    batching: Batching = Batching.ITERATION
    preemption: PreemptionMode | Swaps = PreemptionMode.BY_GROUP
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = 2560
    groups_count_once: bool = False
    max_padded_len: int | None = None
    order: Order = first_come
    victim: Victim = last_in_order
    oracle: bool = False

    @property
    def longest_prompt(self) -> int | None:
        """The most tokens that a prompt may have, since it runs in one iteration; None: any number."""
        return self.max_num_batched_tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "batching", member("batching", self.batching, Batching))
        if not callable(self.preemption) or isinstance(self.preemption, type):
            object.__setattr__(self, "preemption", member("preemption", self.preemption, PreemptionMode))
        object.__setattr__(self, "order", policy_of("order", self.order, ORDERS))
        object.__setattr__(self, "victim", policy_of("victim", self.victim, VICTIMS))
        flag("oracle", self.oracle)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if name == "max_num_seqs" or self.max_num_batched_tokens is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), 1))
        if self.max_num_batched_tokens is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise UserError(
                f"max_num_seqs = {self.max_num_seqs} is more than max_num_batched_tokens = "
                f"{self.max_num_batched_tokens}, but each running sequence takes a token of an iteration; lower the "
                "first or raise the second"
            )
        if self.max_padded_len is not None and (self.batching is Batching.ITERATION or self.max_padded_len < 1):
            raise UserError(
                f"max_padded_len = {self.max_padded_len} is for static batches (Batching.REQUEST), at least 1 token"
            )
