"""Lesson 1: contiguous memory, and what it wastes (§3.1, §6.1, Fig. 2)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from statistics import mean
from typing import NamedTuple

from repro.course.grading import Grade, ask_all, raised
from repro.course.toy import run
from repro.engine.loop import Engine, Observer
from repro.engine.memory import ContiguousKVCacheManager, Reservation, reserve_max, reserve_oracle, reserve_pow2
from repro.engine.scheduler import Scheduler, SchedulerOutput
from repro.engine.sequence import Request, SequenceGroup
from repro.sampling_params import SamplingParams

MAX_MODEL_LEN = 64
NUM_SLOTS = 256


class Asked(NamedTuple):
    """What a server knows of a request when it arrives: its prompt's length, and the user's limit of the output."""

    prompt_tokens: int
    max_tokens: int


Account = Callable[[int, int, int, int], dict[str, int]]
Reserve = Callable[[Asked, int], int]


def trace(seed: int, count: int = 30) -> list[Request]:
    """Requests with outputs of 1 to 30 tokens, whose users allow up to an eighth more."""
    rng, made = random.Random(seed), []
    for number in range(count):
        output = rng.randint(1, 30)
        most = SamplingParams(max_tokens=output + rng.randint(0, output // 8))
        made.append(Request(number, float(number // 2), rng.randint(1, 20), output, most))
    return made


class _Slots(Observer):
    """Sums up over the iterations where the pool's slots are."""

    def __init__(self) -> None:
        self.sums: Counter[str] = Counter()

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        usage = engine.scheduler.manager.usage(engine.scheduler.stored_lengths(output.iteration))
        for part in ("token_states", "reserved", "internal", "rounding"):
            self.sums[part] += getattr(usage, part)


def shares(reservation: Reservation, requests: Iterable[Request]) -> dict[str, float]:
    """Of all slots given to requests, summed over the iterations: the percentages that hold a token, wait for one,
    never get one, and come of rounding (see repro.engine.memory.MemoryUsage)."""
    manager = ContiguousKVCacheManager(NUM_SLOTS, 1, reservation=reservation, max_model_len=MAX_MODEL_LEN)
    slots = _Slots()
    run(Scheduler(manager), requests, [slots])
    return {part: 100 * count / slots.sums.total() for part, count in slots.sums.items()}


def table(seed: int = 0) -> dict[str, dict[str, float]]:
    """`shares` of the three Orcas, on one trace."""
    orcas = {"Orca (Max)": reserve_max, "Orca (Pow2)": reserve_pow2, "Orca (Oracle)": reserve_oracle}
    return {name: shares(policy, trace(seed)) for name, policy in orcas.items()}


def grade_account(account: Account) -> Grade:
    """Ask where the slots of one sequence are, in states of real requests; the engine's own books are the answer."""
    asked = sorted(_states(), key=lambda one: (one[0][3], one[0]))
    return ask_all("where the slots are", "books", account, asked)


def _states() -> Iterator[tuple[tuple[int, int, int, int], dict[str, int], str]]:
    rng = random.Random(0)
    for policy in (reserve_max, reserve_pow2, reserve_oracle):
        for request in trace(rng.randrange(1000), 20):
            manager = ContiguousKVCacheManager(NUM_SLOTS, 1, reservation=policy, max_model_len=MAX_MODEL_LEN)
            group = SequenceGroup(request)
            manager.allocate(group, request.prompt_tokens)
            final, planned = request.prompt_tokens + request.output_tokens, manager.reserved_tokens(group)
            stored, held = rng.randint(request.prompt_tokens, final - 1), len(manager.block_table(group.seqs[0]))
            usage = manager.usage([(group, stored)])
            right = {"used": usage.token_states, "reserved": usage.reserved}
            right |= {"internal": usage.internal, "rounding": usage.rounding}
            words = f"{stored} tokens stored now, {final} at the end; {planned} slots reserved, in a chunk of {held}"
            yield (stored, final, planned, held), right, words


def grade_reserve(reserve: Reserve) -> Grade:
    """Run ten traces under the student's policy, which must waste less than Orca (Pow2) on the mean of them."""
    task = "a reservation"

    def policy(request: Request, max_model_len: int) -> int:
        return reserve(Asked(request.prompt_tokens, request.sampling.max_tokens), max_model_len)

    pow2, yours = [], []
    for seed in range(10):
        pow2.append(100 - shares(reserve_pow2, trace(seed))["token_states"])
        try:
            yours.append(100 - shares(policy, trace(seed))["token_states"])
        except Exception as error:
            return Grade(task, "raises", f"{raised(error)}.", f"It does so on waste.trace({seed}).")
    text = f"Of the slots that are given away {mean(yours):.1f}% hold no token; with Orca (Pow2) {mean(pow2):.1f}%"
    if mean(yours) < mean(pow2):
        return Grade(task, None, f"{text}, on the mean of ten traces.")
    worst = max(range(10), key=lambda seed: yours[seed] - pow2[seed])
    shown = f"It does worst on waste.trace({worst}): {yours[worst]:.1f}% and {pow2[worst]:.1f}%."
    return Grade(task, "waste", f"{text}, on the mean of ten traces.", shown)
