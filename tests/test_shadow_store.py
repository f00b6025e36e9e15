"""Every live token is where its block table says, whatever is shared, copied, swapped, recomputed or re-parented.

Random requests on pools of few blocks, for every manager, preemption mode, decoding method and way of batching.
`shadow.Shadow` does the checking.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import Shadow

from repro.errors import UserError
from repro.memory import (ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, reserve_max, reserve_oracle,
                          reserve_pow2)
from repro.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig
from repro.sequence import Request, SamplingParams

MAX_MODEL_LEN = 64
DECODINGS = ("single", "parallel", "beam", "mixed", "prefix")


@dataclass(frozen=True)
class Load:
    """A random run: requests, how scarce memory and caps are, and what happens while it runs."""

    requests: tuple[Request, ...]
    block_size: int
    spare_blocks: int
    cpu_blocks: int
    watermark: float
    prefixes: dict[str, int]
    spare_seqs: int | None
    spare_tokens: int | None
    seed: int
    stop_rate: float
    lookahead: int

    def config(self, preemption: PreemptionMode, batching: Batching = Batching.ITERATION) -> SchedulerConfig:
        """Caps just large enough for the largest request, plus what is to spare; None is no cap."""
        width = max(request.sampling.n for request in self.requests)
        max_num_seqs = 256 if self.spare_seqs is None else width + self.spare_seqs
        max_tokens = None
        if self.spare_tokens is not None:
            max_tokens = max(max_num_seqs, *(request.prompt_tokens for request in self.requests)) + self.spare_tokens
        return SchedulerConfig(batching, preemption, max_num_seqs, max_tokens)

    def run(self, build: type, config: SchedulerConfig) -> Counter[str]:
        """Run on the smallest pool that takes every request alone, plus what is to spare."""
        num_blocks = 1
        while not self.takes_all(build, num_blocks, config):
            num_blocks += 1
        shadow = Shadow(Scheduler(build(self, num_blocks + self.spare_blocks), config), self.seed, self.stop_rate,
                        self.lookahead)
        for prefix_id, num_tokens in self.prefixes.items():
            shadow.store_prefix(prefix_id, num_tokens)
        seen = shadow.run(self.requests)
        assert seen["finish"] == len(self.requests)
        return seen

    def takes_all(self, build: type, num_blocks: int, config: SchedulerConfig) -> bool:
        scheduler = Scheduler(build(self, num_blocks), config)
        try:
            for prefix_id, num_tokens in self.prefixes.items():
                scheduler.manager.store_prefix(prefix_id, num_tokens)
            for request in self.requests:
                scheduler.add(request)
        except (UserError, IndexError):
            return False
        return True


def paged(load: Load, num_blocks: int) -> KVCacheManager:
    return PagedKVCacheManager(num_blocks, load.block_size, load.watermark, load.cpu_blocks)


def contiguous(reservation):
    def build(load: Load, num_blocks: int) -> KVCacheManager:
        return ContiguousKVCacheManager(num_blocks, load.block_size, reservation=reservation, max_model_len=MAX_MODEL_LEN)
    return build


@st.composite
def loads(draw: st.DrawFn, decoding: str) -> Load:
    """How scarce memory is and in which blocks is drawn, so that it shrinks; the requests come from a seed, because
    hypothesis on its own tries mostly short lists of small ones, which never get into each other's way."""
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    longest_prompt, longest_output = rng.choice(((4, 40), (24, 12), (24, 40)))
    requests, arrival = [], 0
    for number in range(rng.randint(3, 12)):
        arrival += rng.choice((0, 0, 0, 1, 2, 5))
        kind = rng.choice(("single", "parallel", "beam")) if decoding in ("mixed", "prefix") else decoding
        width = 1 if kind == "single" else rng.randint(2, 4)
        prefix_id = rng.choice((None, "short", "long")) if decoding == "prefix" else None
        output = rng.choice((1, 2, longest_output, rng.randint(1, longest_output)))
        requests.append(Request(number, float(arrival), rng.randint(1, longest_prompt), output,
                                SamplingParams(n=width, use_beam_search=kind == "beam"), prefix_id))
    prefixes = {"short": rng.randint(0, 6), "long": rng.randint(7, 20)} if decoding == "prefix" else {}
    return Load(tuple(requests), draw(st.sampled_from((4, 1, 2, 16))), draw(st.integers(0, 6)),
                rng.choice((200, 20, 3, 0)), rng.choice((0.0, 0.01, 0.2)), prefixes, rng.choice((None, 0, 3)),
                rng.choice((None, 0, 10)), seed, rng.choice((0.0, 0.02)), rng.choice((1, 4, 1000)))


def search(decoding: str, build: type, examples: int, *configs: tuple) -> Counter[str]:
    """Run `examples` random loads; what happened in all of them together."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(loads(decoding))
    def check(load: Load) -> None:
        for arguments in configs:
            seen.update(load.run(build, load.config(*arguments)))

    check()
    return seen


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("mode", PreemptionMode)
def test_paged(mode: PreemptionMode, decoding: str) -> None:
    seen = search(decoding, paged, 150, (mode,))
    assert seen["finish"] and seen["preempt"] and seen["recompute"] and seen["stop"]
    assert seen["swap_out"] == seen["swap_in"]
    swaps = mode is PreemptionMode.SWAP or (mode is PreemptionMode.BY_GROUP and decoding != "single")
    assert bool(seen["swap_out"]) == swaps
    assert bool(seen["copy"]) == bool(seen["share"]) == (decoding != "single")
    assert bool(seen["fork"]) == (decoding in ("beam", "mixed", "prefix"))
    assert bool(seen["cached"]) == (decoding == "prefix")
    assert seen["together"] or decoding == "beam"


@pytest.mark.parametrize("decoding", ("single", "parallel", "beam", "mixed"))
@pytest.mark.parametrize("reservation", (reserve_max, reserve_pow2, reserve_oracle))
def test_contiguous(reservation, decoding: str) -> None:
    seen = search(decoding, contiguous(reservation), 40, *((PreemptionMode.BY_GROUP, batching) for batching in Batching))
    assert seen["finish"] and seen["held"] and not seen["preempt"] and not seen["swap_out"]
    assert bool(seen["copy"]) == (decoding != "single")
    assert bool(seen["fork"]) == (decoding in ("beam", "mixed"))
