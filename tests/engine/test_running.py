"""The running set against a recomputation from the groups alone, after every operation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from shadow import nothing_is_left

from repro.engine.running import RunningSet
from repro.engine.sequence import Request, SamplingParams, SequenceGroup, Status


def group_of(number: int, prompt: int, output: int, n: int = 1, beam: bool = False, arrival: float = 0.0):
    return SequenceGroup(Request(number, arrival, prompt, output, SamplingParams(n=n, use_beam_search=beam)))


class Member:
    """What a group in the set must be, kept by hand: how long its sequences are, and whether it needs more tokens."""

    def __init__(self, stored: int, remaining: int) -> None:
        self.stored, self.remaining, self.complete = stored, remaining, False


class RunningSetMachine(RuleBasedStateMachine):
    """Groups enter, leave, come back, lose sequences and complete in any order, while iterations pass."""

    @initialize(size=st.sampled_from((None, 1, 2, 4, 16)))
    def make(self, size: int | None) -> None:
        self.size, self.running, self.iteration, self.count = size, RunningSet(size), 0, 0
        self.members: dict[SequenceGroup, Member] = {}  # in the order in which they entered
        self.outside: list[SequenceGroup] = []
        self.left: dict[SequenceGroup, tuple[int, int]] = {}  # stored and remaining tokens when they left

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 30),
        n=st.integers(1, 3),
        beam=st.booleans(),
        arrival=st.integers(0, 3),
    )
    def create(self, prompt: int, output: int, n: int, beam: bool, arrival: int) -> None:
        group = group_of(self.count, prompt, output, n, beam and n > 1, float(arrival))
        self.count += 1
        self.outside.append(group)
        self.left[group] = (prompt, output)

    @precondition(lambda self: self.outside)
    @rule(index=st.integers(0, 10**6))
    def enter(self, index: int) -> None:
        group = self.outside.pop(index % len(self.outside))
        self.running.enter(group, self.iteration)
        self.members[group] = Member(*self.left[group])

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 10**6), status=st.sampled_from((Status.WAITING, Status.SWAPPED, Status.FINISHED)))
    def leave(self, index: int, status: Status) -> None:
        group = list(self.members)[index % len(self.members)]
        member = self.members.pop(group)
        self.running.leave(group, self.iteration, status)
        assert group.status is status and group.running_since is None
        if status is not Status.FINISHED and member.remaining > 0:
            self.left[group] = (member.stored, member.remaining)
            self.outside.append(group)

    @precondition(lambda self: any(len(group.seqs) > 1 for group in self.members))
    @rule(index=st.integers(0, 10**6), which=st.integers(0, 10**6))
    def drop(self, index: int, which: int) -> None:
        groups = [group for group in self.members if len(group.seqs) > 1]
        group = groups[index % len(groups)]
        seq = group.seqs[which % len(group.seqs)]
        self.running.drop(group, seq)
        assert seq not in group.seqs

    @precondition(lambda self: self.members)
    @rule(index=st.integers(0, 10**6))
    def complete(self, index: int) -> None:
        group = list(self.members)[index % len(self.members)]
        self.running.complete(group)
        self.members[group].complete = True

    @rule(count=st.integers(1, 5))
    def advance(self, count: int) -> None:
        """Iterations run, at most to the next one that begins with a group at its full length; then these complete."""
        if self.running.next_end is not None:
            count = min(count, self.running.next_end - self.iteration)
        self.iteration += count
        for member in self.members.values():
            member.stored += count
            member.remaining -= count
        for group in self.running.ending(self.iteration):
            self.running.complete(group)
            self.members[group].complete = True

    @invariant()
    def everything_agrees_with_a_recount(self) -> None:
        if not hasattr(self, "running"):
            return
        running, members, now = self.running, self.members, self.iteration
        assert list(running) == list(members) and len(running) == len(members)
        assert all(group in running for group in members) and not any(group in running for group in self.outside)
        assert all(group.status is Status.RUNNING for group in members)
        assert running.num_seqs == sum(len(group.seqs) for group in members)
        assert list(running.beams) == [group for group in members if group.is_beam]
        for group, member in members.items():
            assert group.num_stored(now) == member.stored
        for later in range(3):
            expected = sum((member.stored + later) * len(group.seqs) for group, member in members.items())
            assert running.context_tokens(now + later) == expected
        ends = [now + member.remaining for member in members.values() if not member.complete]
        assert running.next_end == min(ends, default=None)

    @invariant()
    def who_needs_blocks_agrees_with_the_lengths(self) -> None:
        if not hasattr(self, "running"):
            return
        stop = self.iteration + 20
        found = dict(self.running.openings(self.iteration, stop))
        for iteration in range(self.iteration, stop):
            opening = [group for group in self.members if self.opens(group, iteration)]
            in_order = sorted(opening, key=lambda group: (group.request.arrival_s, group.request.request_id))
            assert found.pop(iteration, []) == in_order
            writers = self.running.writers(iteration)
            assert set(writers) == {*opening, *(group for group in self.members if group.is_beam)}
            arrivals = [(group.request.arrival_s, group.request.request_id) for group in writers]
            assert arrivals == sorted(arrivals)
        assert not found
        fresh = [*list(self.members)[:2], *self.outside]  # those that have gone in the meantime are left out
        assert set(self.running.writers(stop, fresh)) == {*self.running.writers(stop), *list(self.members)[:2]}

    def opens(self, group: SequenceGroup, iteration: int) -> bool:
        """Whether the token that `iteration` stores is the first of a block."""
        stored = self.members[group].stored + iteration - self.iteration
        return self.size is not None and (stored - 1) % self.size == 0

    def teardown(self) -> None:
        if hasattr(self, "running"):
            for group in list(self.running):
                self.running.leave(group, self.iteration, Status.FINISHED)
            assert nothing_is_left(self.running)


def test_any_sequence_of_operations() -> None:
    case = RunningSetMachine.TestCase
    case.settings = settings(max_examples=80, stateful_step_count=40)
    case("runTest").runTest()


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from((None, 1, 4, 16)))
def test_groups_end_exactly_at_their_length_whatever_interrupts_them(seed: int, size: int | None) -> None:
    rng = random.Random(seed)
    running, waiting = RunningSet(size), [group_of(i, rng.randint(1, 9), rng.randint(1, 20)) for i in range(8)]
    owed = {group: group.request.output_tokens for group in waiting}
    iteration = 0
    while owed:
        for group in [group for group in waiting if rng.random() < 0.5]:
            waiting.remove(group)
            running.enter(group, iteration)
        if running.next_end is not None:
            iteration += 1
            for group in running:
                owed[group] -= 1
                assert group.num_generated(iteration) == group.request.output_tokens - owed[group]
            assert set(running.ending(iteration)) == {group for group in running if owed[group] == 0}
            for group in running.ending(iteration):
                running.leave(group, iteration, Status.FINISHED)
                assert owed.pop(group) == 0 and group.generated_before == group.request.output_tokens
        for group in [group for group in running if rng.random() < 0.1]:
            running.leave(group, iteration, Status.WAITING)
            waiting.append(group)
    assert nothing_is_left(running) and not waiting


def test_groups_that_end_together_end_in_the_order_in_which_they_entered() -> None:
    running, groups = RunningSet(4), [group_of(number, 3, 5) for number in (2, 0, 1)]
    for group in groups:
        running.enter(group, 10)
    assert running.next_end == 15 and running.ending(14) == [] and running.ending(15) == groups == list(running)
    running.complete(groups[0])
    running.complete(groups[0])  # said twice is said once
    assert running.ending(15) == groups[1:] and list(running) == groups  # it stays until it leaves


def test_a_sequence_that_drops_out_changes_neither_order_nor_end() -> None:
    running, first, second = RunningSet(4), group_of(0, 3, 5, n=3), group_of(1, 3, 5)
    running.enter(first, 0)
    running.enter(second, 0)
    running.drop(first, first.seqs[1])
    assert [seq.seq_id for seq in first.seqs] == ["0.0", "0.2"]
    assert list(running) == running.ending(5) == [first, second] and running.num_seqs == 3
    assert running.context_tokens(1) == 3 * 4


def test_memory_that_does_not_grow_opens_no_blocks() -> None:
    running = RunningSet(None)
    running.enter(group_of(0, 3, 100), 0)
    assert list(running.openings(0, 50)) == [] and running.writers(7) == []


@pytest.mark.parametrize("size", (None, 4))
def test_an_empty_set(size: int | None) -> None:
    running = RunningSet(size)
    assert nothing_is_left(running) and running.next_end is None and running.ending(10**9) == []
    assert running.writers(3, [group_of(0, 1, 1)]) == [] and list(running.openings(0, 9)) == []
