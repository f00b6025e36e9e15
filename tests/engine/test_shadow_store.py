"""Every live token is where its block table says, whatever is shared, copied, swapped or re-parented.

Random requests on pools of few blocks, for every manager, preemption mode, decoding method and way of batching.
`shadow.Shadow` does the checking.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from loads import DECODINGS, Build, Load, contiguous, loads, paged
from shadow import Shadow

from repro.engine.memory import Reservation, reserve_max, reserve_oracle, reserve_pow2
from repro.engine.scheduler import Batching, PreemptionMode


def search(decoding: str, build: Build, examples: int, *configs: tuple) -> Counter[str]:
    """Run `examples` random loads; what happened in all of them together."""
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(loads(decoding))
    def check(load: Load) -> None:
        for arguments in configs:
            shadow = Shadow(load.scheduler(build, load.config(*arguments)), load.seed, load.stop_rate, load.lookahead)
            for prefix_id, num_tokens in load.prefixes.items():
                shadow.store_prefix(prefix_id, num_tokens)
            seen.update(shadow.run(load.requests))

    check()
    return seen


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("mode", PreemptionMode)
def test_paged(mode: PreemptionMode, decoding: str) -> None:
    seen = search(decoding, paged, 100, (mode,))
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
def test_contiguous(reservation: Reservation, decoding: str) -> None:
    seen = search(
        decoding, contiguous(reservation), 25, *((PreemptionMode.BY_GROUP, batching) for batching in Batching)
    )
    assert seen["finish"] and seen["held"] and not seen["preempt"] and not seen["swap_out"]
    assert bool(seen["copy"]) == (decoding != "single")
    assert bool(seen["fork"]) == (decoding in ("beam", "mixed"))
