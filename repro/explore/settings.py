"""What a reader can set, with the values of experiments/saturated_queue.yaml, and the runs that the page begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from repro.checks import instance, lookup, user_facing, whole
from repro.engine.config import check_block_size
from repro.errors import UserError

#: policy -> the system of the paper that reserves like it
POLICIES = {"max": "orca-max", "pow2": "orca-pow2", "oracle": "orca-oracle", "paged": "vllm", "yours": ""}
#: whether chunks are rounded up to powers of two: all but the oracle's, by Orca's buddy allocator, or none
CHUNKS = ("explainer", "buddy", "exact")
RULES = ("reservation", "preemption")

_BOUNDS = {
    "kv_slots": (256, 2_000_000),
    "max_num_seqs": (1, 256),
    "max_model_len": (16, 131_072),
    "declared": (1, 131_072),
    "mean_output": (8, 4096),
    "spread": (0, 100),
    "shortest_prompt": (1, 65_536),
    "longest_prompt": (1, 65_536),
    "system_prompt": (0, 65_536),
    "arrivals": (0, 400),
    "warmup_steps": (0, 5000),
    "steps": (1, 5000),
    "seed": (0, 2**53 - 1),  # JavaScript has no larger whole numbers
}


@user_facing
@dataclass(frozen=True)
class Settings:
    """One run. Lengths in tokens, time in steps; UserError for values that cannot be or do not go together.

    policy                 one of POLICIES; all but "paged" reserve a contiguous chunk, if `rule` is "reservation"
    kv_slots, block_size   the pool in slots (tokens), and the block of paged memory
    max_num_seqs           sequences that run together at most
    max_model_len          tokens of the longest request that could come; bounds every reservation
    declared               max_tokens of every request, at which its output ends at the latest
    mean_output, spread    outputs are uniform, `spread` % of their mean to either side
    shortest_prompt, longest_prompt   prompts are uniform between these two
    system_prompt          tokens at the head of every prompt that paged memory stores once (§4.4); 0: none
    arrivals               requests in 100 steps, at random moments; 0: all are there from the beginning
    chunks                 one of CHUNKS
    warmup_steps, steps    steps that do not count, then those that do
    rule, code             what a reader's `code` is for the policy "yours": one of RULES"""

    policy: str = "paged"
    kv_slots: int = 405_239
    block_size: int = 16
    max_num_seqs: int = 128
    max_model_len: int = 40_960
    declared: int = 2048
    mean_output: int = 256
    spread: int = 100
    shortest_prompt: int = 1000
    longest_prompt: int = 7000
    system_prompt: int = 0
    arrivals: int = 0
    chunks: str = "explainer"
    warmup_steps: int = 512
    steps: int = 2000
    seed: int = 0
    rule: str = "reservation"
    code: str = ""

    def __post_init__(self) -> None:
        for name, bounds in _BOUNDS.items():
            whole(name, getattr(self, name), *bounds)
        check_block_size(self.block_size)
        for name, known in (("policy", POLICIES), ("chunks", CHUNKS), ("rule", RULES)):
            lookup(name, dict.fromkeys(known, name), getattr(self, name))
        instance("code", self.code, str, "the text of a Python function")
        if self.shortest_prompt > self.longest_prompt:
            raise UserError(
                f"shortest_prompt = {self.shortest_prompt} is more than longest_prompt = {self.longest_prompt}"
            )
        if self.system_prompt > self.shortest_prompt:
            raise UserError(
                f"system_prompt = {self.system_prompt} is longer than shortest_prompt = {self.shortest_prompt}, but "
                "every prompt begins with it"
            )
        if self.longest_prompt + self.longest_output > self.max_model_len:
            raise UserError(
                f"longest_prompt = {self.longest_prompt} and an output of {self.longest_output} are together more than "
                f"max_model_len = {self.max_model_len}; shorten them or raise it"
            )

    @property
    def is_paged(self) -> bool:
        return self.policy == "paged" or (self.policy == "yours" and self.rule == "preemption")

    @property
    def half_spread(self) -> int:
        """How far outputs lie from their mean at most, in tokens."""
        return min(self.mean_output * self.spread // 100, self.mean_output - 1)

    @property
    def longest_output(self) -> int:
        """Tokens; a server stops at the declared max_tokens."""
        return min(self.mean_output + self.half_spread, self.declared)

    @property
    def relevant(self) -> Settings:
        """The same run without what it does not look at, so that equal runs have equal settings."""
        usual: dict[str, Any] = {} if self.policy == "yours" else {"rule": "reservation", "code": ""}
        usual |= {"chunks": "explainer"} if self.is_paged else {"block_size": 16, "system_prompt": 0}
        return replace(self, **usual)


def settings(values: Mapping[str, Any]) -> Settings:
    """Settings by name, as a page or a notebook gives them; UserError for a name that is not known."""
    return Settings(**values).relevant


#: name -> what differs from the settings above. The first is what the page shows first.
PRESETS: dict[str, dict[str, Any]] = {
    "2,048 tokens declared": {},
    "16,384 tokens declared": {"declared": 16_384},
    "256 tokens declared": {"declared": 256},
    "all outputs alike": {"spread": 0},
    "blocks of 256": {"block_size": 256},
    "system prompt of 1,000 shared": {"system_prompt": 1000},
    # Table 1's pool for OPT-13B, with the mean lengths of ShareGPT (Fig. 11): 161 and 338 tokens. Uniform, unlike its.
    "OPT-13B on one A100": {
        "kv_slots": 15_728,
        "max_model_len": 2048,
        "declared": 2048,
        "mean_output": 338,
        "shortest_prompt": 16,
        "longest_prompt": 306,
        "chunks": "buddy",
    },
}


def first_runs() -> list[Settings]:
    """What the page shows without running anything: every preset with every policy."""
    runs = [
        Settings(**{**preset, "policy": policy}).relevant
        for preset in PRESETS.values()
        for policy in list(POLICIES)[:4]
    ]
    return list({tuple(asdict(one).values()): one for one in runs}.values())
