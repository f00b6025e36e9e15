"""Lesson 6: prefix caching (§4.4's shared prefix, found by itself). Blocks are found again by what they hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Any

from repro.course.grading import Ask, Case, Grade, ask_all, grade
from repro.course.shadow import Fault, Shadow, run
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager, block_hashes
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import SequenceGroup
from repro.words import count

#: (token ids, block size) -> the hash of each full block, in order
Hashing = Callable[[list[int], int], Items[Any]]
#: (hash of each full block, hash -> block that holds it, number of tokens, block size) -> the blocks to take over
Find = Callable[[Items[Any], Mapping[Any, int], int, int], list[int]]
#: (new blocks that are needed, blocks to take over, reference count of each block, free blocks) -> may it start?
CanStart = Callable[[int, list[int], list[int], int], bool]

CONFIG = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE)


class _Manager(PrefixCachingKVCacheManager):
    """The engine's prefix cache; what the student gives takes the place of its own."""

    def __init__(self, case: Case, shadow_ids: dict[int, list[int]], hashing: Hashing, find: Find | None) -> None:
        super().__init__(
            case.num_blocks,
            case.block_size,
            0.0,
            hashes=lambda request: hashing(list(shadow_ids[request.request_id]), case.block_size),
        )
        self.find = find

    def match(self, group: SequenceGroup) -> list[int]:
        if self.find is None:
            return super().match(group)
        num_tokens = group.num_stored(0)
        return self.find(list(self.contents(group, num_tokens)), dict(self.gpu.found), num_tokens, self.block_size)


class _Starting(_Manager):
    """Asks the student who may start, and says what came of it."""

    can_start: CanStart

    def can_allocate(self, group: SequenceGroup, num_tokens: int) -> bool:
        found, name = self.match(group), f"Request {group.request.request_id}"
        needed, free = self.blocks_needed(group, num_tokens), self.gpu.num_free
        said = self.can_start(needed, list(found), list(self.gpu.ref_counts), free)
        right = super().can_allocate(group, num_tokens)
        if said != right:
            revived = sum(not self.gpu.ref_counts[block] for block in found)
            text = f"{name} needs {count(needed, 'new block')} and takes over {len(found)} ({revived} of them free); "
            rule, end = ("no block", "it cannot start") if said else ("waits in vain", "it could start")
            raise Fault(rule, f"{text}the pool has {count(free, 'free block')}, so {end}")
        return said


def drawn(seed: int, tight: bool = False) -> Case:
    """A random trace whose prompts begin alike, and have equal blocks at different places."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 4))
    pieces = [tuple(rng.randint(1, 9) for _ in range(size)) for _ in range(3)]
    asks, prompts = [], [()]
    for _ in range(rng.randint(2, 5)):
        prompt = rng.choice(prompts) + sum((rng.choice(pieces) for _ in range(rng.randint(0, 2))), ())
        prompt += tuple(rng.randint(1, 9) for _ in range(rng.choice((0, 0, 1, size - 1))))
        prompts.append(prompt := prompt or pieces[0])
        asks.append(Ask(prompt, rng.randint(1, 2 * size), arrival=rng.randint(0, 6)))
    most = max(-(-(len(ask.prompt) + ask.output) // size) for ask in asks)
    return Case(tuple(asks), most + rng.randint(0, 2) if tight else 4 * most, size, seed=seed)


def _cases(example: Case) -> list[Case]:
    return [example, *map(drawn, range(100)), *(drawn(seed, tight=True) for seed in range(100))]


def _play(kind: type[_Manager], case: Case, hashing: Hashing = block_hashes, find: Find | None = None) -> None:
    ids: dict[int, list[int]] = {}
    run(Shadow(Scheduler(kind(case, ids, hashing, find), CONFIG), case.seed, ids=ids), case.requests())


def grade_block_hashes(hashing: Hashing) -> Grade:
    """Let a prefix cache find blocks by the student's hashes."""

    def play(case: Case) -> None:
        _play(_Manager, case, hashing)
        _look_for_hits(case, hashing)

    example = Case((Ask((5, 6, 7, 8, 1), 4), Ask((7, 8, 5, 6, 1), 2, arrival=1)), 16, 2)
    return grade("block_hashes", play, _cases(example))


def _look_for_hits(case: Case, hashing: Hashing) -> None:
    """Fault if equal beginnings do not have equal hashes, or if there is not one for each full block."""
    for ask in case.asks:
        said = list(hashing(list(ask.prompt), case.block_size))
        if len(said) != len(ask.prompt) // case.block_size:
            text = f"{list(ask.prompt)} has {len(ask.prompt) // case.block_size} full blocks of {case.block_size}"
            raise Fault("full blocks", f"{text}, and {len(said)} hashes")
        if said != list(hashing([*ask.prompt, 0, 0, 0, 0], case.block_size))[: len(said)]:
            raise Fault("never found", f"{list(ask.prompt)} has other hashes when more tokens follow")


def grade_find(find: Find) -> Grade:
    """Let the student choose the blocks that a request takes over."""

    def play(case: Case) -> None:
        _play(_Manager, case, find=find)

    example = Case((Ask((5, 6, 7, 8), 4), Ask((5, 6, 7, 8), 2, arrival=1)), 16, 2)
    graded = grade("what is found", play, _cases(example))
    if not graded.passed:
        return graded
    # A shadow store is silent, too, when nothing is ever found; and the engine frees a prompt's end first, so that it
    # has no gaps.
    asked = []
    for there in itertools.product((True, False), repeat=3):
        found = {content: block for content, block, here in zip("abc", (7, 3, 5), there) if here}
        for num_tokens in (12, 13):
            right = [found[content] for content in itertools.takewhile(found.get, "abc"[: (num_tokens - 1) // 4])]
            words = f"blocks of 4 tokens with the hashes 'a', 'b', 'c'; found: {found}; {num_tokens} tokens in all"
            asked.append((("abc", found, num_tokens, 4), right, words))
    answers = ask_all("what is found", "hits", find, asked)
    return graded if answers.passed else answers


def grade_can_start(can_start: CanStart) -> Grade:
    """Let the student say who may start, where some of the blocks to take over count as free."""
    kind = type("Manager", (_Starting,), {"can_start": staticmethod(can_start)})

    def play(case: Case) -> None:
        _play(kind, case)

    example = Case((Ask((5, 6, 7, 8), 1), Ask((9,), 4, arrival=1), Ask((5, 6, 7, 8, 1, 2), 1, arrival=1)), 3, 2)
    return grade("who may start", play, _cases(example))
