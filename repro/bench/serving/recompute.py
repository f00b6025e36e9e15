"""Fig. 19a's other half: recomputing 256 tokens of one sequence, at each block size."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from repro.bench.serving.warm_engine import Bench
from repro.engine.sequence import Request
from repro.simulate.load import GREEDY

TOKENS = 256
POOL_TOKENS = 1024
REPEATS, WARM_UP = 12, 3


def recompute_row(bench: Bench, block_size: int) -> dict[str, Any]:
    """Median seconds of a pass over 256 tokens, from the request to its token on the host, with nothing else to do."""
    with bench.small_pool(block_size, POOL_TOKENS):
        engine = bench.engine()
        seconds = []
        for index in range(REPEATS):
            started = time.perf_counter()
            engine.add(bench.submit(Request(index, 0.0, TOKENS, 1, GREEDY)))
            engine.step()
            bench.executor.flush()
            seconds.append(time.perf_counter() - started)
    return {
        "kind": "recompute",
        "block_size": block_size,
        "tokens": TOKENS,
        "seconds": float(np.median(seconds[WARM_UP:])),
        "evidence": "measured",
        "device": bench.device_name,
    }
