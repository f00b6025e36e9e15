"""How long an iteration takes, as a linear model: what it charges for, and profiles that say how much.

    step = fixed + sequences x per_seq + groups x per_group + context x per_context_token
                 + prompt tokens x per_prefill_token + bytes copied / copy rate + bytes swapped / link rate

Coefficients are data: repro/profiles/*.yaml names each one's source. Nothing here is fitted while running.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from repro.errors import UserError
from repro.memory.interface import OpKind
from repro.scheduler import SchedulerOutput


@dataclass(frozen=True)
class CostModel:
    """Seconds per unit (see the module's formula); rates in bytes per second; `name` goes into every row."""

    name: str
    fixed_s: float
    per_seq_s: float
    per_group_s: float
    per_context_token_s: float
    per_prefill_token_s: float
    copy_s_per_block: float
    swap_s_per_block: float

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if not 0 <= value < float("inf"):
                raise UserError(f"cost model {self.name}: {field.name} = {value} must be a finite number of seconds, not negative")
        if self.fixed_s + self.per_seq_s <= 0:
            raise UserError(f"cost model {self.name}: an iteration must take time; fixed_s and per_seq_s are both 0")

    def constant_s(self, output: SchedulerOutput) -> float:
        """Seconds of an iteration, except for reading the context of its decoding sequences."""
        num_seqs = output.num_decode_seqs + len(output.prefills)
        num_groups = len(output.decodes) + len(output.prefills)
        seconds = (self.fixed_s + self.per_seq_s * num_seqs + self.per_group_s * num_groups
                   + self.per_prefill_token_s * output.num_prefill_tokens)
        if output.cache_ops:
            copies = sum(op.kind is OpKind.COPY for op in output.cache_ops)
            swaps = len(output.cache_ops) - copies
            seconds += copies * self.copy_s_per_block + swaps * self.swap_s_per_block
        return seconds

    def step_times(self, output: SchedulerOutput) -> Iterator[float]:
        """Seconds of the output's iterations, without end: from one to the next each sequence grows by a token."""
        constant, context = self.constant_s(output), output.context_tokens
        while True:
            yield constant + self.per_context_token_s * context
            context += output.num_decode_seqs
