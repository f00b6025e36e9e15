"""What tests run: random requests in each other's way in pools of few blocks, for the tests of scheduler and memory; an
experiment's parameters and rows, for the tests of the studies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hypothesis import strategies as st

from repro.engine.events import Event
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, Reservation
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError

MAX_MODEL_LEN = 72  # more than the longest request of 24 + 40 tokens, and no power of two

DECODINGS = ("single", "parallel", "beam", "mixed", "prefix")

Build = Callable[["Load", int], KVCacheManager]


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

    def scheduler(self, build: Build, config: SchedulerConfig, log: list[Event] | None = None) -> Scheduler:
        """With the smallest pool that takes every request alone, plus some spare blocks where sequences grow, else some
        spare halves of that pool; stores no prefixes yet."""
        num_blocks = 1
        while not self.takes_all(build, num_blocks, config):
            num_blocks += 1
        spare = self.spare_blocks if build(self, num_blocks).grows else num_blocks * self.spare_blocks // 2
        return Scheduler(build(self, num_blocks + spare), config, log)

    def takes_all(self, build: Build, num_blocks: int, config: SchedulerConfig) -> bool:
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


def contiguous(reservation: Reservation) -> Build:
    def build(load: Load, num_blocks: int) -> KVCacheManager:
        return ContiguousKVCacheManager(
            num_blocks, load.block_size, reservation=reservation, max_model_len=MAX_MODEL_LEN
        )

    return build


@st.composite
def loads(draw: st.DrawFn, decoding: str) -> Load:
    """How scarce memory is and in which blocks is drawn, so that it shrinks; the requests come from a seed, because
    hypothesis on its own tries mostly short lists of small ones, which never meet."""
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
        requests.append(
            Request(
                number,
                float(arrival),
                rng.randint(1, longest_prompt),
                output,
                SamplingParams(n=width, use_beam_search=kind == "beam"),
                prefix_id,
            )
        )
    prefixes = {"short": rng.randint(0, 6), "long": rng.randint(7, 20)} if decoding == "prefix" else {}
    return Load(
        tuple(requests),
        draw(st.sampled_from((4, 1, 2, 16))),
        draw(st.integers(0, 6)),
        rng.choice((200, 20, 3, 0)),
        rng.choice((0.0, 0.01, 0.2)),
        prefixes,
        rng.choice((None, 0, 3)),
        rng.choice((None, 0, 10)),
        seed,
        rng.choice((0.0, 0.02)),
        rng.choice((1, 4, 1000)),
    )


def parameters(stem: str, scale: str = "paper", **overrides: Any) -> Any:
    """An experiment's parameters from its file, with some of them changed."""
    from repro.harness import experiment

    return experiment.open(stem, scale, overrides).params


def rows_of(study: ModuleType, params: Any) -> Any:
    """A study's rows for these parameters, computed here and kept nowhere."""
    from repro.harness.store import check_tables
    from repro.harness.tables import Rows

    contents = [check_tables(point.function(**point.arguments), point.table) for point in study.points(params)]
    return Rows.collect(contents, study.TABLES)
