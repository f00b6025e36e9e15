"""Memory managers and scheduler under any sequence of calls that their contracts allow.

Hypothesis chooses the calls one by one and shrinks what fails to the shortest sequence. Each manager is driven
directly, in orders that no scheduler would choose, against a pool that holds token ids; the scheduler is driven by
arrivals and steps, checked by the shadow store.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress

import pytest
from event_log import check_log
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from loads import MAX_MODEL_LEN
from shadow import Shadow, TokenPool

from repro.engine.events import Event
from repro.engine.memory import (
    ContiguousKVCacheManager,
    KVCacheManager,
    PagedKVCacheManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams, Sequence, SequenceGroup
from repro.errors import UserError

block_sizes = st.sampled_from((1, 2, 4, 16))
pools = st.integers(1, 4) | st.integers(5, 40)
prompts = st.integers(1, 12)
outputs = st.integers(1, 20)
widths = st.integers(1, 4)
which = st.integers(0, 99)


class ManagerMachine(RuleBasedStateMachine):
    """What both managers promise. A group is `on_gpu`, or `waiting` to be computed again."""

    manager: KVCacheManager
    pool: TokenPool

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.tokens: dict[Sequence, list[int]] = {}  # what each sequence has stored
        self.on_gpu: list[SequenceGroup] = []
        self.waiting: list[SequenceGroup] = []

    @rule(prompt=prompts, output=outputs, width=widths, prefix_id=st.sampled_from((None, "p")))
    def start(self, prompt: int, output: int, width: int, prefix_id: str | None) -> None:
        beam = width > 1
        sampling = SamplingParams(n=width, use_beam_search=beam)
        group = SequenceGroup(Request(next(self.numbers), 0.0, prompt, output, sampling, prefix_id))
        if not self.manager.fits(group):
            return
        tokens = self.prefix(group) + [next(self.numbers) for _ in range(prompt - len(self.prefix(group)))]
        self.tokens |= {seq: list(tokens) for seq in group.seqs}
        self.waiting.append(group)
        self.admit(len(self.waiting) - 1)

    def prefix(self, group: SequenceGroup) -> list[int]:
        """The tokens of the group's stored prefix, the whole blocks only."""
        return []

    @precondition(lambda self: self.waiting)
    @rule(index=which)
    def admit(self, index: int) -> None:
        group = self.waiting[index % len(self.waiting)]
        length = len(self.tokens[group.seqs[0]])
        if not self.manager.can_allocate(group, length):
            assert self.on_gpu or self.elsewhere(), "an empty pool refuses what fits"
            return
        free = self.manager.num_free_blocks
        self.manager.allocate(group, length)
        assert free - self.manager.num_free_blocks == self.expected_blocks(group, length)
        assert self.manager.num_free_blocks >= getattr(self.manager, "watermark_blocks", 0)
        self.waiting.remove(group)
        self.on_gpu.append(group)
        spread = self.manager.spread_prompt(group, length) if len(set(map(tuple, self.of(group)))) == 1 else None
        for seq in group.seqs if spread is None or self.manager.shares else group.seqs[:1]:
            self.write(seq, 0, self.tokens[seq])
        for op in spread or ():
            self.pool.apply(op)

    def expected_blocks(self, group: SequenceGroup, length: int) -> int:
        raise NotImplementedError

    def elsewhere(self) -> bool:
        """Whether anything but the groups on the GPU takes memory there."""
        return False

    def of(self, group: SequenceGroup) -> list[list[int]]:
        return [self.tokens[seq] for seq in group.seqs]

    def write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        table, size = self.manager.block_table(seq), self.manager.block_size
        for position, token in enumerate(tokens, start):
            self.pool.gpu[table[position // size]][position % size] = token

    @precondition(lambda self: self.on_gpu)
    @rule(index=which, steps=st.integers(1, 5))
    def grow(self, index: int, steps: int) -> None:
        group = self.on_gpu[index % len(self.on_gpu)]
        request = group.request
        for _ in range(steps):
            length = len(self.tokens[group.seqs[0]]) + 1
            if length >= request.prompt_tokens + request.output_tokens:
                return self.end(self.on_gpu.index(group))
            if not self.manager.can_append_slots(group, length):
                return None
            for op in self.manager.append_slots(group, length):
                self.pool.apply(op)
            for seq in group.seqs:
                self.tokens[seq].append(next(self.numbers))
                self.write(seq, length - 1, self.tokens[seq][-1:])
        return None

    @precondition(lambda self: any(len(group.seqs) > 1 for group in self.on_gpu))
    @rule(index=which, data=st.data())
    def fork(self, index: int, data: st.DataObject) -> None:
        groups = [group for group in self.on_gpu if len(group.seqs) > 1]
        group = groups[index % len(groups)]
        beams = range(len(group.seqs))
        survivors = data.draw(st.lists(st.sampled_from(beams), min_size=1, unique=True))
        parents = [beam if beam in survivors else data.draw(st.sampled_from(survivors)) for beam in beams]
        ops = self.manager.fork(group, parents, len(self.tokens[group.seqs[0]]))
        for op in ops:
            self.pool.apply(op)
        contents = [list(self.tokens[group.seqs[parent]]) for parent in parents]
        self.tokens |= dict(zip(group.seqs, contents))

    @precondition(lambda self: self.on_gpu)
    @rule(index=which)
    def end(self, index: int) -> None:
        group = self.on_gpu.pop(index % len(self.on_gpu))
        self.manager.free(group)
        for seq in group.seqs:
            del self.tokens[seq]

    @precondition(lambda self: any(len(group.seqs) > 1 for group in self.on_gpu))
    @rule(index=which, seq=which)
    def stop_one(self, index: int, seq: int) -> None:
        groups = [group for group in self.on_gpu if len(group.seqs) > 1]
        group = groups[index % len(groups)]
        stopped = group.seqs.pop(seq % len(group.seqs))
        self.manager.free_sequence(stopped)
        del self.tokens[stopped]

    @precondition(lambda self: self.on_gpu)
    @rule(index=which)
    def drive_out(self, index: int) -> None:
        """To be computed again."""
        group = self.on_gpu.pop(index % len(self.on_gpu))
        self.manager.free(group)
        self.waiting.append(group)

    @invariant()
    def what_is_stored_is_where_the_tables_say(self) -> None:
        for group in self.on_gpu:
            for seq in group.seqs:
                assert self.read(self.pool.gpu, seq) == self.tokens[seq]

    def read(self, blocks: list[list[int]], seq: Sequence, start: int = 0) -> list[int]:
        """What the blocks of a sequence hold, up to its length; from block number `start` on."""
        found = [token for block in self.manager.block_table(seq)[start:] for token in blocks[block]]
        return found[: len(self.tokens[seq]) - start * self.manager.block_size]

    def held(self) -> Counter[int]:
        """How many sequences refer to each block on the GPU."""
        return Counter(block for group in self.on_gpu for seq in group.seqs for block in self.manager.block_table(seq))

    @invariant()
    def no_block_is_lost(self) -> None:
        held = self.held()
        assert set(held) <= set(range(self.manager.num_blocks))
        assert len(held) + self.manager.num_free_blocks == self.manager.num_blocks
        for block in set(range(self.manager.num_blocks)) - set(held):
            self.pool.gpu[block] = list(self.pool.empty)


class PagedMachine(ManagerMachine):
    """Block tables, sharing, copy-on-write, swapping, a stored prefix."""

    manager: PagedKVCacheManager

    @initialize(
        size=block_sizes,
        num_blocks=pools,
        cpu_blocks=st.integers(0, 40),
        watermark=st.sampled_from((0.0, 0.1)),
        stored=st.integers(0, 12),
    )
    def make(self, size: int, num_blocks: int, cpu_blocks: int, watermark: float, stored: int) -> None:
        self.manager = PagedKVCacheManager(num_blocks, size, watermark, cpu_blocks)
        self.pool = TokenPool(num_blocks, cpu_blocks, size)
        self.swapped: list[SequenceGroup] = []
        self.stored = [next(self.numbers) for _ in range(stored // size * size)]
        try:
            self.manager.store_prefix("p", stored)
        except UserError:
            self.stored = []
        self.prefix_blocks = list(self.manager._prefixes.get("p", ()))
        for index, block in enumerate(self.prefix_blocks):
            self.pool.gpu[block] = self.stored[index * size : (index + 1) * size]

    def prefix(self, group: SequenceGroup) -> list[int]:
        return self.stored[: self.manager.prefix_tokens(group)]

    def write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        before = [self.pool.gpu[block] for block in self.prefix_blocks]
        contents = [list(block) for block in before]
        super().write(seq, start, tokens)
        assert before == contents, "a stored prefix is written to"
        if start:
            assert self.manager.gpu.ref_counts[self.manager.block_table(seq)[-1]] == 1

    def expected_blocks(self, group: SequenceGroup, length: int) -> int:
        return len({block for seq in group.seqs for block in self.manager.block_table(seq)} - set(self.prefix_blocks))

    def elsewhere(self) -> bool:
        return bool(self.swapped)  # their prefix, which stays on the GPU

    def unfinished(self) -> list[SequenceGroup]:
        """Those on the GPU that go on: a group at its end is freed, never swapped."""
        return [
            group
            for group in self.on_gpu
            if len(self.tokens[group.seqs[0]]) + 1 < group.request.prompt_tokens + group.request.output_tokens
        ]

    @precondition(lambda self: self.unfinished())
    @rule(index=which)
    def swap_out(self, index: int) -> None:
        groups = self.unfinished()
        group = groups[index % len(groups)]
        distinct = {block for seq in group.seqs for block in self.manager.block_table(seq)} - set(self.prefix_blocks)
        assert self.manager.can_swap_out(group) == (len(distinct) <= self.manager.cpu.num_free)
        if self.manager.can_swap_out(group):
            ops = self.manager.swap_out(group)
            assert {op.src for op in ops} == distinct and len(ops) == len(distinct)
            for op in ops:
                self.pool.apply(op)
            self.on_gpu.remove(group)
            self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(index=which)
    def swap_in(self, index: int) -> None:
        group = self.swapped[index % len(self.swapped)]
        if self.manager.can_swap_in(group, len(self.tokens[group.seqs[0]]) + 1):
            for op in self.manager.swap_in(group):
                self.pool.apply(op)
            self.swapped.remove(group)
            self.on_gpu.append(group)
            assert self.manager.can_append_slots(group, len(self.tokens[group.seqs[0]]) + 1)
        else:
            assert self.on_gpu or len(self.swapped) > 1, "an empty pool does not take back what it gave"

    def held(self) -> Counter[int]:
        held = super().held() + Counter(self.prefix_blocks)
        for group in self.swapped:
            prefix = self.manager.prefix_tokens(group) // self.manager.block_size
            held.update(block for seq in group.seqs for block in self.manager.block_table(seq)[:prefix])
        return held

    @invariant()
    def references_are_counted(self) -> None:
        held, swapped = self.held(), Counter()
        for group in self.swapped:
            prefix = self.manager.prefix_tokens(group) // self.manager.block_size
            for seq in group.seqs:
                swapped.update(self.manager.block_table(seq)[prefix:])
                expected = self.tokens[seq][prefix * self.manager.block_size :]
                assert self.read(self.pool.cpu, seq, prefix) == expected
        for allocator, holders in ((self.manager.gpu, held), (self.manager.cpu, swapped)):
            assert allocator.ref_counts == [holders[block] for block in range(allocator.num_blocks)]
        assert len(swapped) + self.manager.cpu.num_free == self.manager.cpu.num_blocks
        for block in self.manager.cpu._free:
            self.pool.cpu[block] = list(self.pool.empty)


class ContiguousMachine(ManagerMachine):
    """Chunks of a buddy allocator, one a sequence."""

    manager: ContiguousKVCacheManager

    @initialize(
        size=block_sizes,
        num_blocks=pools | st.integers(50, 120),
        reservation=st.sampled_from((reserve_max, reserve_pow2, reserve_oracle)),
    )
    def make(self, size: int, num_blocks: int, reservation: object) -> None:
        self.manager = ContiguousKVCacheManager(num_blocks, size, reservation=reservation, max_model_len=MAX_MODEL_LEN)
        self.pool = TokenPool(num_blocks, 0, size)

    def expected_blocks(self, group: SequenceGroup, length: int) -> int:
        chunk = 1
        while chunk * self.manager.block_size < self.manager.reserved_tokens(group):
            chunk *= 2
        return chunk * len(group.seqs)

    @invariant()
    def chunks_are_runs_of_their_own(self) -> None:
        assert all(count == 1 for count in self.held().values())
        for group in self.on_gpu:
            for seq in group.seqs:
                table = self.manager.block_table(seq)
                assert table == list(range(table[0], table[0] + len(table)))
                assert len(table) & (len(table) - 1) == 0 and table[0] % len(table) == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive and steps are made in any order; the shadow store looks after each step."""

    @initialize(
        size=block_sizes,
        num_blocks=pools,
        system=st.sampled_from(("paged", "paged", "pow2", "max")),
        cpu_blocks=st.sampled_from((0, 3, 100)),
        preemption=st.sampled_from(PreemptionMode),
        batching=st.sampled_from(Batching),
        seqs=st.sampled_from((256, 4)),
        tokens=st.sampled_from((None, 256)),
        seed=st.integers(0, 2**16),
    )
    def make(self, size, num_blocks, system, cpu_blocks, preemption, batching, seqs, tokens, seed) -> None:
        if system == "paged":
            manager = PagedKVCacheManager(num_blocks, size, num_cpu_blocks=cpu_blocks)
            batching = Batching.ITERATION
        else:
            reservation = reserve_pow2 if system == "pow2" else reserve_max
            manager = ContiguousKVCacheManager(num_blocks, size, reservation=reservation, max_model_len=32)
        self.log: list[Event] = []
        self.requests: list[Request] = []
        scheduler = Scheduler(manager, SchedulerConfig(batching, preemption, seqs, tokens), self.log)
        self.shadow = Shadow(scheduler, seed, stop_rate=0.01, lookahead=8)
        self.arrivals = itertools.count()
        self.owed = 0

    @rule(prompt=prompts, output=outputs, width=widths, beam=st.booleans())
    def arrive(self, prompt: int, output: int, width: int, beam: bool) -> None:
        number = next(self.arrivals)
        sampling = SamplingParams(n=width, use_beam_search=beam and width > 1)
        with suppress(UserError):  # it can never fit
            self.requests.append(self.shadow.add(Request(number, float(number), prompt, output, sampling)).request)
            self.owed += output

    @precondition(lambda self: self.shadow.scheduler.has_work)
    @rule(limit=st.sampled_from((1, 1, 8)))
    def step(self, limit: int) -> None:
        self.owed -= self.shadow.step(limit).num_iterations
        assert self.owed >= 0, "livelock: an iteration gave nobody a token"

    def teardown(self) -> None:
        if hasattr(self, "shadow"):
            while self.shadow.scheduler.has_work:
                self.step(8)
            self.shadow._check_everything_is_returned()
            check_log(self.log, self.requests, self.shadow.scheduler.config, exact_lengths=False)


@pytest.mark.parametrize("machine", [PagedMachine, ContiguousMachine, SchedulerMachine])
def test_any_sequence_of_calls(machine: type[RuleBasedStateMachine]) -> None:
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40)
    case("runTest").runTest()
