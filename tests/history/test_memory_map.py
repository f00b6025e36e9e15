"""Memory maps: rebuilt tables against the manager's own, rent against a bill of every slot, on random runs."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from fuzz import draw
from watching import Watched

import repro
from repro.engine.chunked import ChunkedPrefillConfig
from repro.engine.clock import VirtualClock
from repro.engine.loop import Engine
from repro.engine.memory import ContiguousKVCacheManager, PagedKVCacheManager, reserve_max
from repro.engine.scheduler import PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams
from repro.errors import UserError
from repro.history import map_page, tables
from repro.history.memory_map import MemoryMap
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
        for seed in range(200):
            engine = Watched(draw(seed), memory := MemoryMap())
            engine.run(engine.requests)
            if len(memory):
                made.append((memory, engine))
    return made


def test_random_runs_have_everything(maps: list[tuple[MemoryMap, Watched]]) -> None:
    seen = sum((engine.looker.seen for _, engine in maps), Counter())
    assert min(seen[what] for what in (*SEEN, "shared by requests")) >= 10, seen
    chunked = [isinstance(engine.scheduler.config, ChunkedPrefillConfig) for _, engine in maps]
    assert 10 < sum(chunked) < len(chunked) - 10


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


# By hand


def test_rent_by_hand() -> None:
    """Two samples share their prompt's blocks; a block of 4 slots; an iteration takes 1 s, the prompt 3 s more."""
    memory = watched(PagedKVCacheManager(8, 4, watermark=0.0), SchedulerConfig(), (0.0, 6, 3, 2))
    # Iteration 0, 4 s: 2 blocks of 8 slots, 6 tokens. 1: the second block is copied, 3 blocks, 4 + 3 + 3. 2: 4 + 4 + 4.
    first, *others = memory.rent()
    assert first == {
        "request_id": 0,
        "billed_to": "request",
        "slot_s": 4 * 8 + 12 + 12,
        "token_slot_s": 4 * 6 + 10 + 12,
        "empty_slot_s": 4 * 2 + 2,
    }
    assert [(row["billed_to"], row["slot_s"]) for row in others] == [
        ("prefix", 0),
        ("cache", 0),
        ("nobody", 6 * 32 - 56),
    ]
    assert memory.at(1).tables == {0: {0: [0, 2], 1: [0, 1]}} and memory.at(2).stored == {0: 8}


class Ticking(VirtualClock):
    """Time passes by itself, too: whenever somebody looks."""

    _now = 0.0

    @property
    def now(self) -> float:
        self._now += 0.125
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        self._now = value


def test_rent_adds_up_where_time_passes_by_itself() -> None:
    memory = MemoryMap()
    manager = PagedKVCacheManager(8, 4, watermark=0.0)
    engine = Engine(Scheduler(manager), SimulatedExecutor(COSTS), Ticking(), observers=(memory,))
    engine.run([Request(number, 3.0 * number, 6, 3, SamplingParams()) for number in range(3)])
    whole = 32 * (memory.times_s[-1][1] - memory.times_s[0][0])
    assert math.fsum(row["slot_s"] for row in memory.rent()) == pytest.approx(whole, rel=1e-9)
    assert any(end < start for (_, end), (start, _) in zip(memory.times_s, memory.times_s[1:]))


def said(memory: MemoryMap) -> list[tuple[int, str]]:
    return [(one.frame, one.sentence) for one in memory.happenings]


def test_sentences_of_a_run_that_swaps() -> None:
    config = SchedulerConfig(preemption=PreemptionMode.SWAP)
    memory = watched(PagedKVCacheManager(4, 2, 0.0, num_cpu_blocks=4), config, (0.0, 3, 6, 1), (0.0, 2, 4, 1))
    assert said(memory) == [
        (0, "Request 0 starts: 2 blocks for 3 tokens."),
        (0, "Request 1 starts: 1 block for 2 tokens."),
        (2, "No block is free for the next token of request 0. Request 1 is driven out: 2 blocks move to CPU memory."),
        (3, "Request 1 waits: it is in CPU memory, and of the pool's blocks 1 are free."),
        (5, "Request 0 is done after 6 tokens: 4 blocks are freed."),
        (6, "Request 1 returns from CPU memory: 2 blocks for 4 tokens."),
        (7, "Request 1 is done after 4 tokens: 3 blocks are freed."),
    ]
    assert [frame for frame, stalls in enumerate(memory.happenings.stalled) if stalls] == [2, 3, 4, 5]
    assert memory.at(4).swapped.keys() == {1} and memory.at(4).tables.keys() == {0} and memory.counts[4] == (1, 0, 1)


def test_sentences_of_contiguous_memory_and_of_recomputation() -> None:
    manager = ContiguousKVCacheManager(8, 2, reservation=reserve_max, max_model_len=6)
    one = "3 blocks for a prompt of 3 and its output, rounded up to 4, from block 4 on"
    assert said(watched(manager, SchedulerConfig(), (0.0, 3, 3, 2), (0.0, 2, 1, 1)))[:3] == [
        (0, f"Request 0 starts: {one}; so for each of its 2 sequences."),
        (1, "Request 0 has 2 blocks copied (4 to 0, 5 to 1): its sequences share nothing."),
        (1, "Request 1 waits: it needs 4 blocks, and 0 are free."),
    ]
    config = SchedulerConfig(preemption=PreemptionMode.RECOMPUTE, max_num_seqs=2)
    paged = watched(PagedKVCacheManager(4, 2, 0.0), config, (0.0, 3, 6, 1), (0.0, 2, 4, 1), (0.0, 2, 1, 1))
    texts = [text for _, text in said(paged)]
    assert "Request 2 waits: 2 sequences run, and no more may." in texts
    asked = "No block is free for the next token of request 0. "
    assert f"{asked}Request 1 is driven out: 2 blocks are freed, 3 tokens must be computed again." in texts
    assert "Request 1 starts again: 2 blocks for 4 tokens." in texts


@pytest.mark.parametrize(
    ("system", "more"),
    [
        ("vllm", {}),
        ("vllm", {"shared_prefix_tokens": 16, "sampling": SamplingParams(n=3)}),
        ("vllm-v1", {"shared_prefix_tokens": 16}),
        ("orca-pow2", {}),
        ("faster-transformer", {"log": []}),
    ],
)
def test_a_run_that_nobody_watched_is_run_again(system: str, more: dict, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n40,30\n300,80\n17,25\n1000,90\n")
    trace = repro.make_trace("sharegpt", rate=5.0, duration_s=20.0, seed=0, lengths=lengths)
    live = MemoryMap()
    served = repro.serve(system, "opt-13b", trace, **more)
    repro.serve(system, "opt-13b", trace, **{**more, "log": None}, observers=(live,))
    again = repro.memory_map(served)
    assert again.tables.deltas == live.tables.deltas and again.rent() == live.rent()
    assert (again.prefix, again.happenings) == (live.prefix, live.happenings)


def test_what_cannot_be_is_said_in_one_line() -> None:
    memory, trace = MemoryMap(), repro.make_trace("sharegpt", rate=5.0, duration_s=1.0, seed=0)
    assert memory._repr_html_() == "a memory map that has seen no iteration yet"
    for ask in (memory.rent, memory.html, lambda: memory.at(0)):
        with pytest.raises(UserError, match=r"has seen no iteration; give it to a run: observers=\(memory,\)"):
            ask()
    served = repro.serve("vllm", "opt-13b", trace, observers=(memory,))
    with pytest.raises(UserError, match="has watched another run"):
        repro.serve("vllm", "opt-13b", trace, observers=(memory,))
    with pytest.raises(UserError, match="this engine has run before"):
        served.engine.observers = (MemoryMap(),)
        served.engine.run([Request(10**6, 0.0, 5, 5, SamplingParams())])
    with pytest.raises(UserError, match="iteration = 100000 must be a whole number from 0 to"):
        memory.at(100_000)
    with pytest.raises(UserError, match="last = 3 must be a whole number from 4 to"):
        memory.html(4, 3)
    with pytest.raises(UserError, match="run = .* cannot be used; give what repro.serve"):
        repro.memory_map(memory)
    served.outcomes[0].finish_s += 1.0
    with pytest.raises(UserError, match="came out otherwise when it was run again"):
        repro.memory_map(served)


class Hasty(SimulatedExecutor):
    """Advances iterations together, whatever an observer asks for."""

    def lookahead(self, output: SchedulerOutput, now_s: float, until_s: float) -> int:
        return 1000


def test_an_executor_that_skips_iterations_is_refused() -> None:
    engine = Engine(Scheduler(PagedKVCacheManager(8, 4)), Hasty(COSTS), observers=(MemoryMap(),))
    with pytest.raises(UserError, match="must see each iteration; .* were advanced together"):
        engine.run([Request(0, 0.0, 2, 12, SamplingParams())])


def test_a_page_takes_so_many_iterations_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = watched(PagedKVCacheManager(8, 4, 0.0), SchedulerConfig(), (0.0, 6, 20, 1))
    assert "20 iterations, 8 blocks of 4 slots" in memory.html() and "left out" not in memory.html()
    assert "Iterations 5 to 9 of 20" in memory.html(5, 9)
    monkeypatch.setattr(map_page, "MOST_CELLS", 80)
    assert "Iterations 2 to 11 of 20" in memory.html(2) and "left out" in memory.html(2)
    assert memory._repr_html_().startswith("<iframe srcdoc=") and "<script" not in memory._repr_html_()
