"""Who pays for the pool: its slots times the time, billed to whoever holds them.

A block is billed to the requests that hold it, to each by its share of the references. A declared prefix pays for its
own blocks, whoever uses them. Free blocks that a prefix cache can still find are the cache's; all others are nobody's.
So all bills add up to slots x seconds. A request's bill is divided into slots that hold a token, and empty ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

PREFIX, CACHE, NOBODY = "prefix", "cache", "nobody"


@dataclass
class _Account:
    """A request's bill so far (slot-seconds), and what it holds now: by logical index its share of the block there
    (several, where its sequences have different ones), and the sums of these shares before each index."""

    slot_s: float = 0.0
    token_slot_s: float = 0.0
    blocks: Counter[int] = field(default_factory=Counter)  # block -> references
    index: dict[int, int] = field(default_factory=dict)  # block -> logical index
    shares: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=lambda: [0.0])


class Rent:
    """`hold` says what a request holds from now on, `spend` that time passes. `owners` has of each block the requests
    that hold it, with the number of their references."""

    def __init__(self, num_blocks: int, block_size: int, prefix: Collection[int]) -> None:
        self.num_blocks, self.block_size, self.prefix = num_blocks, block_size, frozenset(prefix)
        self.owners: dict[int, Counter[int]] = {}
        self.seconds = 0.0
        self._accounts: dict[int, _Account] = {}
        self._holding: dict[int, _Account] = {}
        self._others = dict.fromkeys((PREFIX, CACHE, NOBODY), 0.0)

    def hold(self, request: int, tables: Iterable[list[int]]) -> None:
        """Its sequences' block tables on the GPU; none if it holds nothing any more."""
        account = self._accounts.setdefault(request, _Account())
        tables, affected = list(tables), {request}
        blocks = Counter(block for table in tables for block in table)
        account.index = {block: index for table in tables for index, block in enumerate(table)}
        for block in blocks.keys() | account.blocks.keys():
            if blocks[block] == account.blocks[block]:
                continue
            owners = self.owners.setdefault(block, Counter())
            affected.update(owners)
            owners[request] = blocks[block]
            if not blocks[block]:
                del owners[request]
            if not owners:
                del self.owners[block]
        account.blocks = blocks
        if blocks:
            self._holding[request] = account
        else:
            self._holding.pop(request, None)
        for one in affected:
            self._share(self._accounts[one], one)

    def _share(self, account: _Account, request: int) -> None:
        account.shares = [0.0] * (1 + max(account.index.values(), default=-1))
        for block, index in account.index.items():
            if block not in self.prefix:
                owners = self.owners[block]
                account.shares[index] += 1.0 if len(owners) == 1 else owners[request] / owners.total()
        account.before = [0.0, *accumulate(account.shares)]

    def spend(self, seconds: float, stored: Mapping[int, int], num_cached: int) -> None:
        """So much time passes; `stored` are the tokens of each sequence of a request that holds memory."""
        size = self.block_size
        for request, account in self._holding.items():
            full, rest = divmod(stored.get(request, 0), size)
            tokens = account.before[min(full, len(account.shares))] * size
            tokens += account.shares[full] * rest if full < len(account.shares) else 0.0
            account.slot_s += account.before[-1] * size * seconds
            account.token_slot_s += tokens * seconds
        self.seconds += seconds
        held = len(self.owners) + sum(block not in self.owners for block in self.prefix)
        for name, blocks in ((PREFIX, len(self.prefix)), (CACHE, num_cached)):
            self._others[name] += blocks * size * seconds
        self._others[NOBODY] += (self.num_blocks - held - num_cached) * size * seconds

    def rows(self) -> list[dict[str, Any]]:
        """A row for each request, in slot-seconds, then for the prefix, the cache and nobody."""
        return [
            {
                "request_id": request,
                "billed_to": "request",
                "slot_s": account.slot_s,
                "token_slot_s": account.token_slot_s,
                "empty_slot_s": account.slot_s - account.token_slot_s,
            }
            for request, account in sorted(self._accounts.items())
        ] + [
            {
                "request_id": None,
                "billed_to": name,
                "slot_s": slot_s,
                "token_slot_s": 0.0 if name == NOBODY else slot_s,
                "empty_slot_s": slot_s if name == NOBODY else 0.0,
            }
            for name, slot_s in self._others.items()
        ]
