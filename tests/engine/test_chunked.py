"""Chunked prefill: the rules on small cases, and on random runs in pools that are too small, token by token."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import TokenPool

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.memory import ContiguousKVCacheManager, KVCacheManager, PagedKVCacheManager, reserve_oracle
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.simulate.cost_model import CostModel
from repro.simulate.executor import SimulatedExecutor
from repro.simulate.metrics import UsageSamples

MAX_MODEL_LEN = 64
COSTS = CostModel("test", 1.0, 0.1, 0.0, 0.01, 0.5, 2.0, 0.0, 0.0)


def request(
    number: int, prompt: int, output: int, arrival: float = 0.0, prefix_id: str | None = None, n: int = 1
) -> Request:
    return Request(number, arrival, prompt, output, SamplingParams(n=n), prefix_id)


def scheduler_of(
    *requests: Request, blocks: int = 1000, size: int = 4, manager: KVCacheManager | None = None, **config: object
) -> ChunkedPrefillScheduler:
    manager = manager or PagedKVCacheManager(blocks, size, watermark=0.0)
    scheduler = ChunkedPrefillScheduler(
        manager, ChunkedPrefillConfig(**{"max_num_seqs": 8, "max_model_len": MAX_MODEL_LEN} | config)
    )
    for one in requests:
        scheduler.add(one)
    return scheduler


def step(scheduler: ChunkedPrefillScheduler) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """Who decoded; (who, from, to) of prompts; who was driven out."""
    output = scheduler.schedule()
    scheduler.update(output)
    return (
        [group.request.request_id for group in output.decodes],
        [(part.group.request.request_id, part.num_cached, part.num_tokens) for part in output.prefills + output.chunks],
        [group.request.request_id for group in output.preempted],
    )


# Small cases


def test_decodes_come_first_and_prompts_are_cut_to_what_is_left():
    scheduler = scheduler_of(request(0, 3, 5), request(1, 20, 2), request(2, 2, 9), max_num_batched_tokens=10)
    assert [step(scheduler) for _ in range(4)] == [
        ([], [(0, 0, 3), (1, 0, 7)], []),
        ([0], [(1, 7, 16)], []),
        ([0], [(1, 16, 20), (2, 0, 2)], []),
        ([0, 1, 2], [], []),
    ]


def test_paged_blocks_follow_the_chunks_and_a_contiguous_chunk_is_there_at_once():
    scheduler = scheduler_of(request(0, 30, 2), max_num_batched_tokens=10)
    assert [(step(scheduler), 1000 - scheduler.manager.num_free_blocks)[1] for _ in range(3)] == [3, 5, 8]
    manager = ContiguousKVCacheManager(64, 4, reservation=reserve_oracle, max_model_len=MAX_MODEL_LEN)
    scheduler = scheduler_of(request(0, 30, 2), manager=manager, max_num_batched_tokens=10)
    assert [(step(scheduler), 64 - manager.num_free_blocks)[1] for _ in range(3)] == [8, 8, 8]


def test_a_prompt_that_finds_no_block_for_its_next_part_is_driven_out_and_starts_again_when_all_of_it_fits():
    scheduler = scheduler_of(request(0, 4, 9), request(1, 12, 1), blocks=4, max_num_seqs=2, max_num_batched_tokens=5)
    assert [step(scheduler) for _ in range(9)] == [
        ([], [(0, 0, 4), (1, 0, 1)], []),
        ([0], [(1, 1, 5)], []),
        ([0], [], [1]),
        *[([0], [], [])] * 6,
    ]
    assert step(scheduler) == ([], [(1, 0, 5)], []) and scheduler.num_preemptions == 1


def test_the_last_prompt_under_way_makes_room_for_those_before_it():
    long = [request(number, 16, 1) for number in range(2)]
    scheduler = scheduler_of(*long, blocks=6, max_num_batched_tokens=8, long_prefill_token_threshold=4, max_num_seqs=2)
    assert [step(scheduler) for _ in range(4)] == [
        *[([], [(0, start, start + 4), (1, start, start + 4)], []) for start in (0, 4, 8)],
        ([], [(0, 12, 16)], [1]),
    ]
    assert [step(scheduler)[1] for _ in range(2)] == [[(1, 0, 4)], [(1, 4, 8)]]


def test_a_running_sequence_drives_out_a_prompt_under_way_before_any_that_runs():
    asks = [request(0, 3, 12), request(1, 3, 12), request(2, 20, 1)]
    scheduler = scheduler_of(*asks, blocks=8, max_num_batched_tokens=9, max_num_seqs=3)
    seen = [step(scheduler) for _ in range(12)]
    driven_out = [number for _, _, preempted in seen for number in preempted]
    assert driven_out[0] == 2


def test_a_stored_prefix_is_not_computed_again():
    manager = PagedKVCacheManager(100, 4, watermark=0.0)
    manager.store_prefix("system", 11)
    scheduler = scheduler_of(request(0, 20, 2, prefix_id="system"), manager=manager, max_num_batched_tokens=8)
    assert [step(scheduler)[1] for _ in range(2)] == [[(0, 8, 16)], [(0, 16, 20)]]


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    scheduler = scheduler_of(
        request(0, 60, 3), request(1, 6, 2), max_num_batched_tokens=65, enable_chunked_prefill=False
    )
    assert [step(scheduler)[:2] for _ in range(2)] == [([], [(0, 0, 60)]), ([0], [(1, 0, 6)])]


def test_the_first_token_comes_with_the_end_of_the_prompt_and_usage_counts_what_is_under_way():
    samples = UsageSamples(0.0, 100.0, interval_s=0.5)
    engine = Engine(scheduler_of(max_num_batched_tokens=10), SimulatedExecutor(COSTS), observers=(samples,))
    (outcome,) = engine.run([request(0, 30, 3)])
    chunk = 1.0 + 10 * 0.5 - 2.0  # fixed + tokens - what hides behind the weights
    assert outcome.first_token_s == pytest.approx(3 * chunk + 0.1)  # the last chunk samples a sequence
    assert outcome.finish_s - outcome.first_token_s == pytest.approx(2 * 1.1 + 0.01 * (31 + 32))
    assert [sample.token_states for sample in samples.samples] == [10, 20, 30, 31, 32]


@pytest.mark.parametrize(
    "config, match",
    [
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}, "not greater than max_model_len = 2048"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, "enable_chunked_prefill"),
        ({"max_num_batched_tokens": None}, "token budget"),
        ({"max_num_seqs": 512, "max_num_batched_tokens": 256}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"preemption": PreemptionMode.SWAP}, "swap"),
        ({"batching": Batching.REQUEST}, "request"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_construction(config, match):
    with pytest.raises(UserError, match=match):
        ChunkedPrefillConfig(**config)


def test_a_budget_above_the_maximum_length_needs_no_chunking():
    assert not ChunkedPrefillConfig(enable_chunked_prefill=False, max_num_batched_tokens=2049).enable_chunked_prefill


@pytest.mark.parametrize(
    "wrong, match",
    [
        (request(0, 60, 5), "longer than max_model_len"),
        (request(0, 30, 11), "does not fit"),
        (request(0, 3, 3, n=2), "submit 2 requests"),
    ],
)
def test_requests_that_cannot_run_are_refused(wrong, match):
    with pytest.raises(UserError, match=match):
        scheduler_of(blocks=8).add(wrong)


# Random runs


@dataclass(frozen=True)
class Run:
    """Requests that get in each other's way: a pool for the largest of them and little more, a small budget, few
    seats."""

    requests: tuple[Request, ...]
    size: int
    spare_blocks: int
    watermark: float
    prefix_tokens: int
    config: ChunkedPrefillConfig
    seed: int
    stop_rate: float
    lookahead: int

    def paged(self) -> KVCacheManager:
        longest = max(one.prompt_tokens + one.output_tokens for one in self.requests)
        blocks = -(-longest // self.size) + self.prefix_tokens // self.size + self.spare_blocks
        manager = PagedKVCacheManager(2 * blocks, self.size, self.watermark)
        manager = PagedKVCacheManager(blocks + manager.watermark_blocks + 1, self.size, self.watermark)
        manager.store_prefix("system", self.prefix_tokens)
        return manager

    def contiguous(self) -> KVCacheManager:
        return ContiguousKVCacheManager(
            MAX_MODEL_LEN // self.size * (1 + self.spare_blocks % 3),
            self.size,
            reservation=reserve_oracle,
            max_model_len=MAX_MODEL_LEN,
        )


@st.composite
def runs(draw: st.DrawFn) -> Run:
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    requests, arrival = [], 0
    longest_prompt, longest_output = rng.choice(((40, 8), (8, 40), (30, 24)))
    for number in range(rng.randint(3, 12)):
        arrival += rng.choice((0, 0, 0, 1, 3, 9))
        requests.append(
            request(
                number,
                rng.randint(1, longest_prompt),
                rng.choice((1, 2, rng.randint(1, longest_output))),
                float(arrival),
                rng.choice((None, "system")),
            )
        )
    seats = draw(st.integers(1, 8))
    config = ChunkedPrefillConfig(
        max_num_seqs=seats,
        max_num_batched_tokens=seats + draw(st.sampled_from((0, 1, 3, 7, 20, 100))),
        max_model_len=MAX_MODEL_LEN,
    )
    if config.max_num_batched_tokens > MAX_MODEL_LEN and rng.random() < 0.5:
        config = replace(config, enable_chunked_prefill=False)
    return Run(
        tuple(requests),
        draw(st.sampled_from((4, 1, 2, 8))),
        draw(st.integers(0, 8)),
        rng.choice((0.0, 0.1)),
        rng.choice((0, 9)),
        config,
        seed,
        rng.choice((0.0, 0.02)),
        rng.choice((1, 5, 1000)),
    )


class Replay:
    """Runs a scheduler as an engine and an executor would, with token ids in place of K and V.

    Knows the requests and what each has generated; from this alone it says who must decode, what must be computed and
    what each slot must hold. `seen` counts what happened."""

    def __init__(self, run: Run, manager: KVCacheManager) -> None:
        self.run, self.manager = run, manager
        self.scheduler = ChunkedPrefillScheduler(manager, run.config)
        self.random = random.Random(run.seed)
        self.ids = count()
        self.pool = TokenPool(manager.num_blocks, 0, manager.block_size)
        self.history: dict[SequenceGroup, list[int]] = {}
        self.stored: dict[SequenceGroup, int] = {}  # 0: waits and holds nothing
        self.running: set[SequenceGroup] = set()
        self.seen: Counter[str] = Counter()
        self.prefix = [next(self.ids) for _ in range(run.prefix_tokens)]
        self.prefix_blocks = manager.prefix_blocks("system") if manager.shares else []
        for index, block in enumerate(self.prefix_blocks):
            self.pool.gpu[block] = self.prefix[index * manager.block_size : (index + 1) * manager.block_size]

    def to_the_end(self) -> Counter[str]:
        upcoming, now, worked = deque(self.run.requests), 0, 0
        # Each iteration gives the oldest a token or computes some of its prompt; a few are spent on waiting for memory.
        bound = (1 + len(upcoming)) * sum(2 * one.output_tokens + one.prompt_tokens + 2 for one in upcoming)
        while upcoming or self.scheduler.has_work:
            while upcoming and upcoming[0].arrival_s <= now:
                one = upcoming.popleft()
                group = self.scheduler.add(one)
                prompt = self.prefix[: one.prompt_tokens] if one.prefix_id else []
                self.history[group] = prompt + [next(self.ids) for _ in range(one.prompt_tokens - len(prompt))]
                self.stored[group] = 0
            if not self.scheduler.has_work:
                now = int(upcoming[0].arrival_s)
                continue
            limit = self.run.lookahead
            if upcoming and self.scheduler.admits_on_arrival:
                limit = min(limit, int(upcoming[0].arrival_s) - now)
            num_iterations = self.step(limit)
            now += num_iterations
            worked += num_iterations
            assert worked <= bound, "livelock"
        assert not self.history and self.manager.num_free_blocks == self.manager.num_blocks - len(self.prefix_blocks)
        return self.seen

    def step(self, limit: int) -> int:
        scheduler = self.scheduler
        output = scheduler.schedule()
        if scheduler.can_repeat(output):
            scheduler.extend(output, limit)
        self.seen["together"] += output.num_iterations > 1
        for group in output.preempted:
            self.seen["decode preempted" if group in self.running else "prompt preempted"] += 1
            self.running.discard(group)
            self.stored[group] = 0
        self.check_batch(output)
        for iteration in range(output.num_iterations):
            for group in output.decodes:
                if iteration:
                    self.history[group].append(next(self.ids))
                self.stored[group] = len(self.history[group])
                self.write(group, self.stored[group] - 1)
        for part in output.prefills + output.chunks:
            self.seen["recompute"] += len(self.history[part.group]) > part.group.request.prompt_tokens
            for position in range(part.num_cached, part.num_tokens):
                self.write(part.group, position)
            self.stored[part.group] = part.num_tokens
        last = output.iteration + output.num_iterations - 1
        self.check_memory(dict(scheduler.stored_lengths(last)))
        self.running.update(part.group for part in output.prefills)
        for group in self.running:
            self.history[group].append(next(self.ids))
        stopped = [
            (group, group.seqs[0])
            for group in sorted(self.running, key=lambda group: group.request.request_id)
            if self.random.random() < self.run.stop_rate
        ]
        ended = {group for group in self.running if self.generated(group) == group.request.output_tokens} | {
            group for group, _ in stopped
        }
        assert set(scheduler.update(output, None, stopped)) == ended
        for group in ended:
            self.running.remove(group)
            del self.history[group], self.stored[group]
        self.seen["finish"] += len(ended)
        return output.num_iterations

    def generated(self, group: SequenceGroup) -> int:
        return len(self.history[group]) - group.request.prompt_tokens

    def write(self, group: SequenceGroup, position: int) -> None:
        block, slot = divmod(position, self.manager.block_size)
        block = self.manager.block_table(group.seqs[0])[block]
        assert block not in self.prefix_blocks
        self.pool.gpu[block][slot] = self.history[group][position]

    def check_batch(self, output: SchedulerOutput) -> None:
        """Decodes first, the budget, the order of the queue, and prompts computed once and without gaps."""
        config, parts = self.run.config, output.prefills + output.chunks
        assert set(output.decodes) == self.running and output.num_decode_seqs == len(self.running)
        assert output.context_tokens == sum(len(self.history[group]) for group in output.decodes)
        assert output.num_prefill_tokens == sum(part.num_tokens - part.num_cached for part in parts)
        num_tokens = len(self.running) + output.num_prefill_tokens
        assert 0 < num_tokens <= config.max_num_batched_tokens
        assert not (output.preempted and parts)
        for part in parts:
            group = part.group
            whole = (group.request.prompt_tokens - 1) // self.manager.block_size * self.manager.block_size
            cached = min(len(self.prefix_blocks) * self.manager.block_size, whole) if group.request.prefix_id else 0
            assert part.num_cached == (self.stored[group] or cached) < part.num_tokens
            assert (part.num_tokens == len(self.history[group])) == (part in output.prefills)
            self.seen["cached"] += bool(cached)
        if output.chunks:  # cut only by the budget, and only the last one
            assert (
                len(output.chunks) == 1
                and num_tokens == config.max_num_batched_tokens
                and config.enable_chunked_prefill
            )
            self.seen["cut"] += 1
        started = [part.group.request.request_id for part in parts]
        assert started == sorted(started)
        waiting = [group.request.request_id for group in self.scheduler.waiting]
        holders = [group.request.request_id for group in self.running] + started
        assert waiting == sorted(waiting) and (not waiting or not holders or max(holders) < waiting[0])
        held = {*holders, *(group.request.request_id for group in self.scheduler.prefilling)}
        assert len(held) <= config.max_num_seqs

    def check_memory(self, told: dict[SequenceGroup, int]) -> None:
        """Every stored token is in its slot; free + held = total; the manager is told the lengths that are true."""
        manager, size = self.manager, self.manager.block_size
        live = {group: stored for group, stored in self.stored.items() if stored}
        assert told == live
        held: Counter[int] = Counter(self.prefix_blocks)
        for group, stored in live.items():
            table = manager.block_table(group.seqs[0])
            held.update(table)
            tokens = [token for block in table for token in self.pool.gpu[block]]
            assert tokens[:stored] == self.history[group][:stored]
            assert not manager.grows or len(table) == -(-stored // size)
        assert len(held) + manager.num_free_blocks == manager.num_blocks
        assert all(holders == 1 or block in self.prefix_blocks for block, holders in held.items())
        usage = manager.usage(told.items())  # adds up, or raises
        assert usage.free == manager.num_free_blocks * size
        for block in set(range(manager.num_blocks)) - set(held):
            self.pool.gpu[block] = list(self.pool.empty)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_every_rule_holds_and_every_token_is_in_its_slot_on_random_runs(layout):
    seen: Counter[str] = Counter()

    @settings(max_examples=250)
    @given(runs())
    def check(run: Run) -> None:
        seen.update(Replay(run, getattr(run, layout)()).to_the_end())

    check()
    assert seen["finish"] and seen["cut"] and seen["together"]
    paged = ("decode preempted", "prompt preempted", "recompute", "cached")
    assert all(bool(seen[kind]) == (layout == "paged") for kind in paged)


@settings(max_examples=100)
@given(runs())
def test_with_room_for_every_prompt_it_decides_like_the_plain_scheduler(run):
    logs: list[list[Event]] = [[], []]
    config = {
        "max_num_seqs": run.config.max_num_seqs,
        "max_num_batched_tokens": 10_000,
        "preemption": PreemptionMode.RECOMPUTE,
    }
    chunked = ChunkedPrefillScheduler(run.paged(), ChunkedPrefillConfig(max_model_len=MAX_MODEL_LEN, **config), logs[0])
    outcomes = [
        Engine(scheduler, SimulatedExecutor(COSTS)).run(run.requests)
        for scheduler in (chunked, Scheduler(run.paged(), SchedulerConfig(**config), logs[1]))
    ]
    assert logs[0] == logs[1]
    assert [(one.first_token_s, one.finish_s) for one in outcomes[0]] == [
        (one.first_token_s, one.finish_s) for one in outcomes[1]
    ]


class EachIteration(Observer):
    """Lets no two iterations be advanced together."""

    next_s = 0.0

    def observe(self, engine, output, start_s):
        assert output.num_iterations == 1


@settings(max_examples=100)
@given(runs())
def test_iterations_advanced_together_are_those_of_single_steps(run):
    def outcomes(*observers: Observer) -> list[tuple[float, float, int]]:
        engine = Engine(ChunkedPrefillScheduler(run.paged(), run.config), SimulatedExecutor(COSTS), observers=observers)
        return [(one.first_token_s, one.finish_s, one.num_preemptions) for one in engine.run(run.requests)]

    assert outcomes() == outcomes(EachIteration())
