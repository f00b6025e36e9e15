"""Memory maps: rebuilt tables against the manager's own, rent against a bill of every slot, on random runs."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from fuzz import draw
from watching import Watched

import repro
from repro.engine.chunked import ChunkedPrefillConfig
from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine
from repro.engine.memory import ContiguousKVCacheManager, PagedKVCacheManager, reserve_max
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.explore import map_page, tables
from repro.explore.memory_map import MemoryMap
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor

#: an iteration takes 1 s, and 0.5 s for each token of a prompt
COSTS = CostModel("test", 1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0)
SEEN = ("swapped", "recomputed", "copied", "beams", "parts of prompts", "contiguous", "cached", "prefix used")


def watched(manager: object, config: SchedulerConfig, *asked: tuple[float, int, int, int]) -> MemoryMap:
    """The map of requests that arrive (s) with a prompt and an output of so many tokens, and so many samples."""
    memory = MemoryMap()
    engine = Engine(Scheduler(manager, config), SimulatedExecutor(COSTS), observers=(memory,))
    requests = [
        Request(number, at, prompt, output, SamplingParams(n=n)) for number, (at, prompt, output, n) in enumerate(asked)
    ]
    engine.run(requests)
    return memory


# Random runs


@pytest.fixture(scope="module")
def maps() -> list[tuple[MemoryMap, Watched]]:
    """Maps with a keyframe in every seventh frame, so that most frames are made from changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "KEYFRAME_EVERY", 7)
        made = []
        for seed in range(300):
            engine = Watched(draw(seed), memory := MemoryMap())
            engine.run(engine.requests)
            if len(memory):
                made.append((memory, engine))
    return made


def test_random_runs_have_everything(maps: list[tuple[MemoryMap, Watched]]) -> None:
    seen = sum((engine.looker.seen for _, engine in maps), Counter())
    assert min(seen[what] for what in (*SEEN, "shared by requests")) > 20, seen
    chunked = [isinstance(engine.scheduler.config, ChunkedPrefillConfig) for _, engine in maps]
    assert 20 < sum(chunked) < len(chunked) - 20


def test_rebuilt_tables_are_the_managers_own_in_every_iteration(maps: list[tuple[MemoryMap, Watched]]) -> None:
    for memory, engine in maps:
        looker = engine.looker
        assert len(memory) == len(looker.tables)
        for frame, (here, there) in enumerate(looker.tables):
            moment = memory.at(frame)
            assert (moment.tables, moment.swapped, moment.cached) == (here, there, looker.cached[frame])
            assert {request: moment.stored[request] for request in looker.stored[frame]} == looker.stored[frame]


def test_changes_alone_give_every_keyframe(maps: list[tuple[MemoryMap, Watched]]) -> None:
    """Keyframes are read from the manager; what is between two of them leads from one to the next."""
    count = 0
    for memory, _ in maps:
        log = memory.tables
        for index in range(1, len(log.keyframes)):
            frame, there = log.keyframes[index]
            without = tables.TableLog()
            without.keyframes, without.deltas = log.keyframes[:1], log.deltas
            assert without.at(frame) == there
            count += 1
    assert count > 500


def test_what_is_held_makes_up_the_usage(maps: list[tuple[MemoryMap, Watched]]) -> None:
    for memory, engine in maps:
        size = memory.block_size
        for frame, (tokens, free) in enumerate(engine.looker.usage):
            moment = memory.at(frame)
            filled = dict.fromkeys(memory.prefix, size)
            for request, sequences in moment.tables.items():
                for table in sequences.values():
                    for index, block in enumerate(table):
                        slots = max(0, min(size, moment.stored.get(request, 0) - index * size))
                        filled[block] = max(slots, filled.get(block, 0))
            assert (sum(filled.values()), (memory.num_blocks - len(filled)) * size) == (tokens, free)


def test_rent_is_that_of_every_slot_and_adds_up(maps: list[tuple[MemoryMap, Watched]]) -> None:
    for memory, engine in maps:
        looker, rows = engine.looker, memory.rent()
        whole = memory.num_blocks * memory.block_size * (memory.times_s[-1][1] - memory.times_s[0][0])
        assert math.fsum(row["slot_s"] for row in rows) == pytest.approx(whole, rel=1e-9)
        for row in rows:
            name = row["billed_to"] if row["request_id"] is None else row["request_id"]
            assert row["slot_s"] == pytest.approx(looker.slot_s[name], rel=1e-9, abs=1e-9)
            assert row["token_slot_s"] + row["empty_slot_s"] == pytest.approx(row["slot_s"])
            if row["request_id"] is not None:
                assert row["token_slot_s"] == pytest.approx(looker.token_slot_s[name], rel=1e-9, abs=1e-9)
        assert {row["request_id"] for row in rows} - {None} == {one for one in looker.slot_s if isinstance(one, int)}


def test_watching_changes_no_decision_and_no_time() -> None:
    """Against the same runs with iterations advanced together."""
    for seed in range(100):
        case = draw(seed)
        alone, watching = Watched(case, None, together=True), Watched(case, MemoryMap(), together=True)
        assert [one.finish_s for one in alone.run(alone.requests)] == [
            one.finish_s for one in watching.run(watching.requests)
        ]
        decided = [[event for event in engine.log if event.kind != "arrive"] for engine in (alone, watching)]
        assert decided[0] == decided[1]


def test_the_happenings_are_those_of_the_event_log(maps: list[tuple[MemoryMap, Watched]]) -> None:
    names = {"start": "admit", "resume": "resume", "recompute": "preempt", "swap": "preempt"}
    for memory, engine in maps:
        told = Counter((one.frame, names[one.kind], one.request) for one in memory.happenings if one.kind in names)
        # An iteration may come to nothing: what has started is taken back before it runs.
        log = Counter(
            (event.iteration, event.kind, event.request_id) for event in engine.log if event.kind in names.values()
        )
        assert told == log


def test_a_page_of_any_window_has_what_the_map_has(maps: list[tuple[MemoryMap, Watched]]) -> None:
    for memory, _ in maps[::10]:
        first, last = len(memory) // 3, len(memory) // 3 + len(memory) // 2
        content = json.loads(json.dumps(map_page.content(memory, first, min(last, len(memory) - 1))))
        log = tables.TableLog()
        log.keyframes = [(at, dict(all_)) for at, all_ in content["keyframes"][:1]]
        log.deltas = content["deltas"]
        for frame in range(len(content["start_s"])):
            assert log.at(frame) == memory.tables.at(first + frame)
            cached = Counter(block for at, block in content["cached"] if at <= frame)
            assert {block for block, count in cached.items() if count % 2} == memory.at(first + frame).cached
