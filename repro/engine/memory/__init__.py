"""K/V memory: one interface, a paged manager (PagedAttention) and a contiguous one (the Orca baselines)."""

from repro.engine.memory.contiguous import ContiguousKVCacheManager as ContiguousKVCacheManager
from repro.engine.memory.contiguous import Reservation as Reservation
from repro.engine.memory.contiguous import reserve_max as reserve_max
from repro.engine.memory.contiguous import reserve_oracle as reserve_oracle
from repro.engine.memory.contiguous import reserve_pow2 as reserve_pow2
from repro.engine.memory.interface import CacheOp as CacheOp
from repro.engine.memory.interface import KVCacheManager as KVCacheManager
from repro.engine.memory.interface import MemoryUsage as MemoryUsage
from repro.engine.memory.interface import OpKind as OpKind
from repro.engine.memory.paged import PagedKVCacheManager as PagedKVCacheManager
