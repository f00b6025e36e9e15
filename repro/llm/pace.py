"""How many threads an iteration takes on a CPU, found by timing one with a single thread and with all there are.

Threads that wait for each other cost more than they give where others use the same cores, and for small models always.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from joblib import cpu_count

LONG_S = 0.5  # an iteration that takes this long is timed once


@dataclass(frozen=True)
class Pace:
    """The threads that torch is left with, and what one iteration of one sequence took with them, in seconds."""

    num_threads: int
    seconds: float

    def __str__(self) -> str:
        threads = "1 thread" if self.num_threads == 1 else f"{self.num_threads} threads"
        return f"{threads}, {1e3 * self.seconds:.3g} ms an iteration"


def settle(iteration: Callable[[], object], known: Pace | None = None) -> Pace:
    """Leave torch, in this whole process, with one thread if that is faster than those it has now.

    It has no more than the cores that the process may keep busy, by its affinity and its control group's quota. Each is
    timed by the best of three iterations, by a single one if that is long. What is `known` of this model stays as long
    as torch has those threads."""
    most = min(torch.get_num_threads(), cpu_count())
    if known is not None and known.num_threads == torch.get_num_threads():
        return known
    repeats = 3 if _seconds(iteration) < LONG_S else 1  # the first one also sets things up
    found = []
    for num_threads in sorted({1, most}, reverse=True):
        torch.set_num_threads(num_threads)
        found.append(Pace(num_threads, min(_seconds(iteration) for _ in range(repeats))))
    best = min(found, key=lambda pace: pace.seconds)
    torch.set_num_threads(best.num_threads)
    return best


def _seconds(iteration: Callable[[], object]) -> float:
    start = time.perf_counter()
    iteration()
    return time.perf_counter() - start
