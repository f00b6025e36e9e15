"""What a reader can set. The values are those of experiments/saturated_queue.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from repro.checks import instance, lookup, user_facing, whole
from repro.engine.config import check_block_size
from repro.errors import UserError

_KNOWN = {
    "policy": ("max", "pow2", "oracle", "paged", "yours"),
    "lengths": ("uniform", "sharegpt"),
    # Rounded up to powers of two: all chunks but the oracle's; all, by Orca's buddy allocator; none.
    "chunks": ("explainer", "buddy", "exact"),
    "rule": ("reservation", "preemption"),
}
_FROM_0 = ("spread", "system_prompt", "arrivals", "warmup_steps", "seed")  # other numbers begin at 1
_MOST = {"spread": 100, "seed": 2**53 - 1}  # JavaScript has no larger whole numbers; others end at 2,000,000
#: what lengths of ShareGPT do not look at, and the mean of their outputs (Fig. 11)
SHAREGPT = {"mean_output": 338, "spread": 100, "shortest_prompt": 1000, "longest_prompt": 7000, "system_prompt": 0}
SHAREGPT_LONGEST = 2048  # prompt + output: the model's maximum in §6.1


@user_facing
@dataclass(frozen=True)
class Settings:
    """One run. Lengths in tokens, time in steps. UserError for values that cannot be or do not go together."""

    policy: str = "paged"  # or what a contiguous chunk is reserved for; "yours" runs a reader's rule
    kv_slots: int = 405_239  # tokens that the pool holds
    block_size: int = 16  # of paged memory
    max_num_seqs: int = 128  # sequences that run together at most
    max_model_len: int = 40_960  # of the longest request that could come; bounds every reservation
    declared: int = 2048  # max_tokens of every request, at which its output ends at the latest
    lengths: str = "uniform"  # or as drawn from Fig. 11's histograms; the next five are for uniform ones
    mean_output: int = 256
    spread: int = 100  # outputs lie up to this many % of their mean to either side of it
    shortest_prompt: int = 1000
    longest_prompt: int = 7000
    system_prompt: int = 0  # how every prompt begins, stored once in paged memory (§4.4)
    arrivals: int = 0  # requests in 100 steps, at random moments; 0: all are there from the beginning
    chunks: str = "explainer"
    warmup_steps: int = 512  # do not count
    steps: int = 2000  # count
    seed: int = 0
    rule: str = "reservation"  # what a reader's `code` decides
    code: str = ""

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self) if one.type == "int"):
            least = 10 if name == "steps" else 0 if name in _FROM_0 else 1  # of 10 steps, one is sampled
            whole(name, getattr(self, name), least, _MOST.get(name, 2_000_000))
        for name, known in _KNOWN.items():
            lookup(name, dict.fromkeys(known, name), getattr(self, name))
        check_block_size(self.block_size)
        instance("code", self.code, str, "the text of a Python function")
        if self.shortest_prompt > self.longest_prompt or self.system_prompt > self.shortest_prompt:
            raise UserError(
                f"system_prompt = {self.system_prompt}, shortest_prompt = {self.shortest_prompt}, longest_prompt = "
                f"{self.longest_prompt}: none of them may be longer than the next"
            )
        if self.longest > self.max_model_len:
            raise UserError(
                f"a request can have {self.longest} tokens, more than max_model_len = {self.max_model_len}; choose "
                "shorter lengths or raise it"
            )

    @property
    def is_paged(self) -> bool:
        return self.policy == "paged" or (self.policy == "yours" and self.rule == "preemption")

    @property
    def half_spread(self) -> int:
        """How far outputs lie from their mean at most, in tokens."""
        return min(self.mean_output * self.spread // 100, self.mean_output - 1)

    @property
    def longest(self) -> int:
        """Prompt and output of the longest request, in tokens; a server stops at the declared max_tokens."""
        if self.lengths == "sharegpt":
            return SHAREGPT_LONGEST
        return self.longest_prompt + min(self.mean_output + self.half_spread, self.declared)

    @property
    def relevant(self) -> Settings:
        """The same run without what it does not look at, so that equal runs have equal settings."""
        usual: dict[str, Any] = dict(SHAREGPT) if self.lengths == "sharegpt" else {}
        usual |= {} if self.policy == "yours" else {"rule": "reservation", "code": ""}
        return replace(
            self, **usual | ({"chunks": "explainer"} if self.is_paged else {"block_size": 16, "system_prompt": 0})
        )
