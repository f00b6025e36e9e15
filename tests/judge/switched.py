"""Servers with everything switched on, and the same with one thing switched off.

The base is V1: chunks, a prefix cache, n samples that find their prompt in it, preemption, first come first served,
iterations. Two of these come from one piece of code, so each is switched off where the other stays: a prompt that is
found only after its request has ended leaves samples of one request alone, and a salt for each request leaves prompts
of different requests alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from repro.engine.chunked import ChunkedPrefillScheduler
from repro.engine.config import DEPLOYMENTS, Deployment
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager, block_hashes
from repro.engine.policies import Seen
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.engine.systems import System, system
from repro.judge.suite import PROBES
from repro.server.backend import SimulatedBackend
from repro.simulate.cost_model import CostModel

MAX_LEN = 512
#: claims that have a verdict, in their order
JUDGED = [name for name in PROBES if name != "throughput"]


class Noisy(CostModel):
    """Iterations that take up to a third more or less, and every fortieth three times as long."""

    noise = random.Random(0)

    def constant_s(self, output: SchedulerOutput) -> float:
        times = 3.0 if self.noise.random() < 0.025 else self.noise.uniform(0.75, 1.3)
        return times * super().constant_s(output)


def costs(seed: int) -> CostModel:
    """An iteration takes 10 ms and a prompt of 128 tokens 50 more."""
    made = Noisy("virtual", 0.010, 0.0002, 0.0, 0.0, 0.0004, 0.0, 0.0, 0.0)
    object.__setattr__(made, "noise", random.Random(seed))
    return made


def last_come(group: Seen) -> int:
    return -group.request_id


class FoundAfterTheEnd(PrefixCachingKVCacheManager):
    """Blocks are found once their request has ended, so samples that run at the same time share none."""

    def __init__(self, *sizes: object, hashes: object) -> None:
        super().__init__(*sizes, hashes=hashes)
        self._later: dict[SequenceGroup, list[bytes]] = {}

    def _keep(self, group: SequenceGroup, first: int, num_tokens: int) -> None:
        self._later[group] = list(self.contents(group, num_tokens))

    def free(self, group: SequenceGroup) -> None:
        for block, content in zip(self._tables[group.seqs[0]], self._later.pop(group)):
            self.gpu.keep(block, content)
        super().free(group)


class WholeOrNot(PrefixCachingKVCacheManager):
    """Who starts is sure of all the blocks that it will ever take, so nobody is driven out."""

    def __init__(self, *sizes: object, hashes: object) -> None:
        super().__init__(*sizes, hashes=hashes)
        self._final: dict[SequenceGroup, int] = {}

    def _last_tokens(self, group: SequenceGroup) -> int:
        return group.request.prompt_tokens + group.request.output_tokens - 1

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        promised = sum(final - len(self._tables[one.seqs[0]]) for one, final in self._final.items())
        revived = sum(not self.gpu.ref_counts[block] for block in self.match(group))
        return self.blocks_needed(group, self._last_tokens(group)) + revived + promised <= self.gpu.num_free

    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        super().allocate(group, num_tokens)
        self._final[group] = self.cdiv(self._last_tokens(group))

    def free(self, group: SequenceGroup) -> None:
        self._final.pop(group)
        super().free(group)


class OneBatchAtATime(ChunkedPrefillScheduler):
    """Who comes while a batch runs waits until all of it has ended."""

    _batch: frozenset[SequenceGroup] = frozenset()

    def _start(self, output: SchedulerOutput, budget: int) -> None:
        if not self.running and not self.prefilling and not any(group in self._batch for group in self.waiting):
            self._batch = frozenset(self.waiting)
        later = [group for group in self.waiting if group not in self._batch]
        self.waiting = deque(group for group in self.waiting if group in self._batch)
        super()._start(output, budget)
        self.waiting.extend(later)


class Switched(System):
    """A system with other parts: `memory` and `scheduling` are classes, None for its own."""

    memory: type | None = None
    scheduling: type | None = None

    def manager(self, num_blocks, block_size, max_model_len, num_cpu_blocks=0, hashes=lambda request: ()):
        if self.memory is None:
            return super().manager(num_blocks, block_size, max_model_len, num_cpu_blocks, hashes)
        return self.memory(num_blocks, block_size, self.watermark, num_cpu_blocks, hashes=hashes)

    def decide(self, manager, log=None):
        return (
            super().decide(manager, log) if self.scheduling is None else self.scheduling(manager, self.scheduler, log)
        )


def v1(seed: int, **scheduler: object) -> System:
    """V1 with a small token budget."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 48 + 8 * (seed % 5), "max_model_len": MAX_LEN}
    return system("vllm-v1").with_scheduler(**settings | scheduler)


def with_parts(seed: int, memory: type | None = None, scheduling: type | None = None) -> System:
    """V1 with another memory or scheduler."""
    kind, one = type("Parts", (Switched,), {"memory": memory, "scheduling": scheduling}), v1(seed)
    return kind(one.name, one.label, one.scheduler, None, one.prefix_caching, one.watermark)


def salted(backend: SimulatedBackend) -> SimulatedBackend:
    """Prompts of other requests are never found, for each request has a salt; its samples have the same."""
    feed, submit = backend.feed, backend.feed.submit

    def submit_salted(handle, request, sample):
        if handle.hashes is None:
            handle.hashes = block_hashes(handle.prompt_ids, feed.manager.block_size, handle.name.encode())
        submit(handle, request, sample)

    feed.submit = submit_salted
    return backend


def simulated(chosen: System, seed: int, kv_slots: int | None = None) -> SimulatedBackend:
    """Seeds have pools and blocks of different sizes, and other noise."""
    paper, drawn = DEPLOYMENTS["opt-13b"], random.Random(seed)
    slots = kv_slots or 32 * drawn.randint(32, 48)
    deployment = Deployment(replace(paper.model, max_model_len=MAX_LEN), paper.device, 1, slots)
    return SimulatedBackend(deployment, chosen, costs(seed), drawn.choice([8, 16, 32]), seed=seed)


#: what is switched off -> the server without it, and the claims that are about it
SWITCHED: dict[str, tuple[Callable[[int], SimulatedBackend], set[str]]] = {
    "nothing": (lambda seed: simulated(v1(seed), seed), set()),
    "sharing by n": (
        lambda seed: simulated(with_parts(seed, memory=FoundAfterTheEnd), seed),
        {"samples_computed_once", "samples_stored_once"},
    ),
    "prefix cache": (lambda seed: salted(simulated(v1(seed), seed)), {"prefix_reuse"}),
    "preemption": (lambda seed: simulated(with_parts(seed, memory=WholeOrNot), seed), {"full_pool_preempts"}),
    "chunks": (
        lambda seed: simulated(v1(seed, enable_chunked_prefill=False, max_num_batched_tokens=MAX_LEN + 1), seed),
        {"chunked_prefill"},
    ),
    "first come, for last come": (lambda seed: simulated(v1(seed, order=last_come), seed), {"first_come_order"}),
    "first come, for shortest": (lambda seed: simulated(v1(seed, order="shortest_prompt"), seed), {"first_come_order"}),
    "iterations": (lambda seed: simulated(with_parts(seed, scheduling=OneBatchAtATime), seed), {"iteration_batching"}),
}
