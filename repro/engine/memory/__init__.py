"""K/V memory: one interface, a paged manager (PagedAttention) and a contiguous one (the Orca baselines)."""

from repro.engine.memory.contiguous import (
    ContiguousKVCacheManager,
    Reservation,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from repro.engine.memory.interface import CacheOp, KVCacheManager, MemoryUsage, OpKind
from repro.engine.memory.paged import PagedKVCacheManager

__all__ = [
    "CacheOp",
    "ContiguousKVCacheManager",
    "KVCacheManager",
    "MemoryUsage",
    "OpKind",
    "PagedKVCacheManager",
    "Reservation",
    "reserve_max",
    "reserve_oracle",
    "reserve_pow2",
]
