"""The memory map of a run in virtual time that nobody watched: it is run again."""

from __future__ import annotations

from repro.checks import instance, user_facing
from repro.engine.events import Event
from repro.engine.loop import Engine
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.explore.memory_map import MemoryMap
from repro.simulate.serve import Served


@user_facing
def memory_map(served: Served) -> MemoryMap:
    """The same requests through the same system, watched. `served` is what `repro.serve` returned.

    UserError if the run comes out otherwise (its times, or its events if it has them): a policy of its own then does
    not decide the same for the same requests."""
    instance("served", served, Served, "what repro.serve(...) returned")
    requests, scheduler = [outcome.request for outcome in served.outcomes], served.engine.scheduler
    log: list[Event] = []
    again = type(scheduler)(_fresh(scheduler.manager, requests), scheduler.config, log)
    memory = MemoryMap()
    outcomes = Engine(again, served.engine.executor, observers=(memory,)).run(requests)
    if outcomes != served.outcomes or (served.log is not None and _decisions(log) != _decisions(served.log)):
        raise UserError("the run came out otherwise when it was run again; give a MemoryMap() to serve as an observer")
    return memory


def _decisions(log: list[Event]) -> list[Event]:
    """Without arrivals, which decide nothing: one that cannot start may be noted later where iterations are merged."""
    return [event for event in log if event.kind != "arrive"]


def _fresh(manager: KVCacheManager, requests: list[Request]) -> KVCacheManager:
    """A memory like this one that has stored nothing but its prefixes."""
    sizes = manager.num_blocks, manager.block_size
    if isinstance(manager, ContiguousKVCacheManager):
        limits = {"reservation": manager.reservation, "max_model_len": manager.max_model_len}
        return ContiguousKVCacheManager(*sizes, **limits)
    swap_space = {"watermark": 0.0, "num_cpu_blocks": manager.cpu.num_blocks}
    caching = isinstance(manager, PrefixCachingKVCacheManager)
    fresh = (
        PrefixCachingKVCacheManager(*sizes, **swap_space, hashes=manager._hashes)
        if caching
        else PagedKVCacheManager(*sizes, **swap_space)
    )
    fresh.watermark_blocks = manager.watermark_blocks
    names = {request.prefix_id for request in requests} - {None}  # serve stores one at most; a prefix cache, none
    for prefix_id in () if caching else names:
        fresh.store_prefix(prefix_id, len(manager.prefix_blocks(prefix_id)) * manager.block_size)
    return fresh
