"""Servers with everything switched on, and the same with one thing switched off.

The base is V1: chunks, a prefix cache, n samples that find their prompt in it, preemption, first come first served,
iterations. Two of these come from one piece of code, so each is switched off where the other stays: a prompt that is
found only after its request has ended leaves samples of one request alone, and a salt for each request leaves prompts
of different requests alone."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.config import DEPLOYMENTS, Deployment
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager, block_hashes
from repro.engine.policies import Seen
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import SequenceGroup
from repro.engine.systems import System, system
from repro.server.backend import SimulatedBackend
from repro.simulate.cost_model import CostModel

#: Prompts of some hundred tokens cost several iterations.
COSTS = CostModel("virtual", 0.010, 0.0002, 0.0, 0.0, 0.0001, 0.0, 0.0, 0.0)
MAX_LEN, KV_SLOTS, BUDGET = 1024, 2048, 256


def last_come(group: Seen) -> int:
    return -group.request_id


def shortest_prompt(group: Seen) -> int:
    return group.prompt_tokens


class FoundAfterTheEnd(PrefixCachingKVCacheManager):
    """Blocks are found once their request has ended, so samples that run at the same time share none."""

    def _keep(self, group: SequenceGroup, first: int, num_tokens: int) -> None:
        pass

    def free(self, group: SequenceGroup) -> None:
        table = self._tables[group.seqs[0]]
        super()._keep(group, 0, len(table) * self.block_size)
        super().free(group)


class WholeOrNot(PrefixCachingKVCacheManager):
    """Who starts is sure of all the blocks that it will ever take, so nobody is driven out."""

    def __init__(self, *sizes: object, hashes: object) -> None:
        super().__init__(*sizes, hashes=hashes)
        self._final: dict[SequenceGroup, int] = {}

    def _last(self, group: SequenceGroup) -> int:
        return group.request.prompt_tokens + group.request.output_tokens - 1

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        promised = sum(final - len(self._tables[one.seqs[0]]) for one, final in self._final.items())
        revived = sum(not self.gpu.ref_counts[block] for block in self._match(group))
        return self.blocks_needed(group, self._last(group)) + revived + promised <= self.gpu.num_free

    def allocate(self, group: SequenceGroup, num_tokens: int) -> None:
        super().allocate(group, num_tokens)
        self._final[group] = self.cdiv(self._last(group))

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
        return super().decide(manager, log) if self.scheduling is None else self.scheduling(manager, self.scheduler, log)


class WithMemory(Switched):
    pass


def base(kind: type = Switched, **scheduler: object) -> System:
    v1 = system("vllm-v1")
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": BUDGET, "max_model_len": MAX_LEN} | scheduler
    return kind("v1", "V1", ChunkedPrefillConfig(**settings), None, v1.prefix_caching, v1.watermark)


def with_parts(memory: type | None = None, scheduling: type | None = None) -> System:
    return base(type("Parts", (Switched,), {"memory": memory, "scheduling": scheduling}))


def backend_of(chosen: System, salted: bool = False) -> SimulatedBackend:
    paper = DEPLOYMENTS["opt-13b"]
    deployment = Deployment(replace(paper.model, max_model_len=MAX_LEN), paper.device, 1, KV_SLOTS)
    backend = SimulatedBackend(deployment, chosen, COSTS, seed=0)
    if salted:
        feed, submit = backend.feed, backend.feed.submit

        def submit_salted(handle, request, sample):
            if handle.hashes is None:
                salt = handle.name.encode()
                handle.hashes = block_hashes(handle.prompt_ids, feed.manager.block_size, salt)
            submit(handle, request, sample)

        feed.submit = submit_salted
    return backend


SWITCHED = {
    "all on": lambda: backend_of(base()),
    "no sharing by n": lambda: backend_of(with_parts(memory=FoundAfterTheEnd)),
    "no prefix cache": lambda: backend_of(base(), salted=True),
    "no preemption": lambda: backend_of(with_parts(memory=WholeOrNot)),
    "no chunks": lambda: backend_of(base(enable_chunked_prefill=False, max_num_batched_tokens=MAX_LEN + 1)),
    "last come first": lambda: backend_of(base(order=last_come)),
    "shortest first": lambda: backend_of(base(order=shortest_prompt)),
    "batches": lambda: backend_of(with_parts(scheduling=OneBatchAtATime)),
}
