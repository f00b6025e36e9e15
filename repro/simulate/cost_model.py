"""How long an iteration takes, as a linear model: what it charges for. How much is data (see `profiles`).

    iteration = fixed + per_seq x sequences + per_group x groups + per_context_token x context tokens
                + max(0, per_prefill_token x prompt tokens - weight_read)
                + copy_per_block x blocks copied + swap_per_block x blocks swapped

Prompts and decodes share one iteration, hence one pass over the weights. While the weights stream in, the arithmetic
units are nearly idle: a prompt costs only what its arithmetic takes beyond that time."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from repro.checks import number, user_facing
from repro.engine.memory.interface import OpKind
from repro.engine.scheduler import SchedulerOutput
from repro.errors import UserError


@user_facing
@dataclass(frozen=True)
class CostModel:
    """Seconds per unit, by the formula above. `name` says on which machine, and goes into every row as its device.

    `prefill_shape`: numbers of prompt tokens in an iteration, and the share of the rate at which so many are computed;
    empty: all of it."""

    name: str
    fixed_s: float
    per_seq_s: float
    per_group_s: float
    per_context_token_s: float
    per_prefill_token_s: float
    weight_read_s: float
    copy_per_block_s: float
    swap_per_block_s: float
    prefill_shape: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self)[1:-1]:
            number(f"cost model {self.name}: {field.name}", getattr(self, field.name), 0)
        if self.fixed_s <= 0:
            raise UserError(f"cost model {self.name}: fixed_s = {self.fixed_s}, but an iteration must take some time")

    def constant_s(self, output: SchedulerOutput) -> float:
        """Seconds of an iteration, except for reading the context of its decoding sequences."""
        num_seqs = output.num_decode_seqs + len(output.prefills)
        num_groups = len(output.decodes) + len(output.prefills)
        prefill_s = self.per_prefill_token_s * output.num_prefill_tokens
        if self.prefill_shape and prefill_s:
            prefill_s /= float(np.interp(output.num_prefill_tokens, *self.prefill_shape))
        seconds = (
            self.fixed_s
            + self.per_seq_s * num_seqs
            + self.per_group_s * num_groups
            + max(0.0, prefill_s - self.weight_read_s)
        )
        if output.cache_ops:
            copies = sum(op.kind is OpKind.COPY for op in output.cache_ops)
            swaps = len(output.cache_ops) - copies
            seconds += copies * self.copy_per_block_s + swaps * self.swap_per_block_s
        return seconds

    def step_times(self, output: SchedulerOutput) -> Iterator[float]:
        """Seconds of the output's iterations, without end: from one to the next each sequence grows by a token."""
        constant, context = self.constant_s(output), output.context_tokens
        while True:
            yield constant + self.per_context_token_s * context
            context += output.num_decode_seqs


class PaddedCostModel(CostModel):
    """The same for static batches whose prompts are padded on the left: each sequence costs what the longest does."""

    def step_times(self, output: SchedulerOutput) -> Iterator[float]:
        longest = max((group.num_stored(output.iteration) for group in output.decodes), default=0)
        prompt = max((prefill.num_tokens for prefill in output.prefills), default=0)
        padded = {
            "context_tokens": longest * output.num_decode_seqs,
            "num_prefill_tokens": prompt * len(output.prefills),
        }
        return super().step_times(replace(output, **padded))
