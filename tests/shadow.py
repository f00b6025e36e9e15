"""The shadow store: a K/V pool that holds token ids instead of keys and values.

It runs the real scheduler on real managers, "writes" every token's id into the slot that the block tables name, applies
every CacheOp in the order issued, and after every iteration looks whether each live token is where its table says. What
a sequence ought to contain is known from its own history alone, which swaps and recomputations cannot disturb. Free
blocks are wiped after every step, so that data read after its block was freed is never right by luck. The pool is the
course's (repro/course/shadow.py), whose shadow store is a smaller one that explains what it finds.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from repro.course.shadow import TokenPool
from repro.engine.memory import KVCacheManager, OpKind, PagedKVCacheManager
from repro.engine.memory.prefix_cache import block_hashes
from repro.engine.running import RunningSet
from repro.engine.scheduler import Batching, Prefill, Scheduler, SchedulerOutput
from repro.engine.sequence import Request, Sequence, SequenceGroup, Status


class Shadow:
    """Drives `scheduler` as an engine and an executor would, and checks it at every step.

    Beams get random parents, sequences stop early with probability `stop_rate`, and up to `lookahead` iterations are
    advanced together. `seen` counts what happened, so that a test can tell whether it has tested anything. Arrival
    times are in iterations; idle time is skipped.
    """

    def __init__(self, scheduler: Scheduler, seed: int, stop_rate: float = 0.0, lookahead: int = 1) -> None:
        self.scheduler = scheduler
        self.manager: KVCacheManager = scheduler.manager
        self.paged = isinstance(self.manager, PagedKVCacheManager)
        self.size = self.manager.block_size
        num_cpu_blocks = self.manager.cpu.num_blocks if self.paged else 0
        self.pool = TokenPool(self.manager.num_blocks, num_cpu_blocks, self.size)
        self.random = random.Random(seed)
        self.stop_rate, self.lookahead = stop_rate, lookahead
        self.rank: Callable[[Request], tuple[float, ...]] = arrival  # the order of the queue
        self.seen: Counter[str] = Counter()
        self.history: dict[Sequence, list[int]] = {}
        self.emitted: dict[
            SequenceGroup, int
        ] = {}  # tokens that each live sequence of an unfinished group has generated
        self.done: set[SequenceGroup] = set()  # finished, but held until their static batch returns
        self.under_way: dict[SequenceGroup, int] = {}  # prompts cut into chunks, and how far they are computed
        self.max_swapped_blocks = 0
        self._ids = itertools.count()
        self._prefixes: dict[str, list[int]] = {}
        self._prefix_blocks: set[int] = set()

    # Input

    def store_prefix(self, prefix_id: str, num_tokens: int) -> None:
        self.manager.store_prefix(prefix_id, num_tokens)
        self._prefixes[prefix_id] = tokens = self._new_tokens(num_tokens)
        for index, block in enumerate(self.manager.prefix_blocks(prefix_id)):
            self.pool.gpu[block] = tokens[index * self.size : (index + 1) * self.size]
            self._prefix_blocks.add(block)

    def add(self, request: Request) -> SequenceGroup:
        group = self.scheduler.add(request)
        self.register(group)
        return group

    def register(self, group: SequenceGroup) -> None:
        """Invent the prompt of a group that has just been added to the scheduler."""
        request = group.request
        prompt = self._prefixes.get(request.prefix_id, [])[: request.prompt_tokens]
        prompt = prompt + self._new_tokens(request.prompt_tokens - len(prompt))
        for seq in group.seqs:
            self.history[seq] = list(prompt)
        self.emitted[group] = 0

    def abort(self, group: SequenceGroup, abort: Callable[[], None]) -> None:
        """Take a request back with `abort`."""
        self.seen["abort of a prompt under way"] += group in self.under_way
        if group.status is Status.SWAPPED:
            self.seen["abort swapped"] += 1
            prefix = self._cached_tokens(group) // self.size
            self.seen["dropped"] += len({*self._blocks(group, prefix, None)})
        abort()
        returned = {one for one in self.done if one.status is Status.FINISHED}  # a batch that waited for it alone
        assert not returned or self.scheduler.config.batching is Batching.REQUEST
        self.done -= returned | {group}
        self.under_way.pop(group, None)
        for one in returned | {group}:
            del self.emitted[one]
        self.seen["finish"] += len(returned - {group})
        self._forget_histories()
        self.seen["abort"] += 1
        self._check_conservation()

    def _new_tokens(self, count: int) -> list[int]:
        return list(itertools.islice(self._ids, count))

    # The loop

    def run(self, requests: Items[Request]) -> Counter[str]:
        """Everything to the end. Fails if it takes longer than any schedule that makes progress could."""
        upcoming = deque(requests)
        # Every iteration lets somebody advance; recomputation loses no tokens, only iterations.
        bound = (1 + len(requests)) * (sum(request.output_tokens + 1 for request in requests) + 1)
        now, worked = 0, 0
        while upcoming or self.scheduler.has_work:
            while upcoming and upcoming[0].arrival_s <= now:
                self.add(upcoming.popleft())
            if not self.scheduler.has_work:
                now = int(upcoming[0].arrival_s)
                continue
            limit = self.random.randint(1, self.lookahead)
            if upcoming and self.scheduler.admits_on_arrival:
                limit = min(limit, int(upcoming[0].arrival_s) - now)
            output = self.step(limit)
            now += output.num_iterations
            worked += output.num_iterations
            assert worked <= bound, "livelock: the requests should have ended long ago"
        self._check_everything_is_returned()
        return self.seen

    def step(self, limit: int = 1) -> SchedulerOutput:
        output = self.scheduler.schedule()
        if self.scheduler.can_repeat(output):
            self.scheduler.extend(output, limit)
        parents, stopped = self.execute(output)
        self.account(output, self.scheduler.update(output, parents, stopped))
        return output

    def execute(
        self, output: SchedulerOutput
    ) -> tuple[dict[SequenceGroup, list[int]], list[tuple[SequenceGroup, Sequence]]]:
        """Run an output; the parents of beams and the sequences that stop, both chosen at random."""
        if output.num_iterations > 1:
            # Beams may be re-parented after any iteration.
            assert not any(group.is_beam for group in output.decodes)
        for group in output.preempted:
            self.seen["prompt preempted"] += self.under_way.pop(group, None) is not None
        self._check_accounts(output)
        for op in output.cache_ops:
            self.pool.apply(op)
            self.seen[op.kind.value] += 1
        self._execute(output)
        self._check_contents(output)
        running = [group for group in self.scheduler.running if group not in self.done]
        parents = self._choose_parents(running)
        self._emit(running)
        stopped = [(group, seq) for group in running for seq in group.seqs if self.random.random() < self.stop_rate]
        stops = Counter(group for group, _ in stopped)
        self.done.update(
            group
            for group in running
            if stops[group] == len(group.seqs) or self.emitted[group] == group.request.output_tokens
        )
        self.seen["stop"] += len(stopped)
        self._held = set(self.scheduler.running)
        return parents, stopped

    def account(self, output: SchedulerOutput, ended: list[SequenceGroup]) -> None:
        """After the scheduler has accounted for an output that `execute` ran."""
        self._check_ended(self._held, ended)
        self._check_conservation()
        self.seen["preempt"] += len(output.preempted)
        self.seen["together"] += output.num_iterations > 1

    # What an executor does

    def _execute(self, output: SchedulerOutput) -> None:
        self._written: dict[tuple[int, int], int] = {}
        decodes = [group for group in output.decodes if group not in self.done]
        for iteration in range(output.num_iterations):
            if iteration:
                self._emit(decodes)
            for group in decodes:
                for seq in group.seqs:
                    tokens = self.history[seq]
                    block = self._write(seq, len(tokens) - 1)
                    if self.paged:
                        assert self.manager.gpu.ref_counts[block] == 1, "a shared block is written to without a copy"
        self._written.clear()
        for prefill in output.prefills:
            group = prefill.group
            num_tokens = group.request.prompt_tokens + self.emitted[group]
            assert prefill.num_tokens == num_tokens
            self._prefill(prefill)
            self.seen["recompute"] += self.emitted[group] > 0
        for chunk in output.chunks:
            assert chunk.num_tokens < chunk.group.request.prompt_tokens + self.emitted[chunk.group]
            self._prefill(chunk)
            self.under_way[chunk.group] = chunk.num_tokens
            self.seen["cut"] += 1
        self.seen["several cut"] += len(output.chunks) > 1
        # Whatever sequences share is computed once, everything else once per sequence.
        assert len(self._written) == output.num_prefill_tokens

    def _prefill(self, part: Prefill) -> None:
        """A prompt goes on where it was left, or begins behind what is cached."""
        group = part.group
        before = self.under_way.pop(group, None)
        threshold = getattr(self.scheduler.config, "long_prefill_token_threshold", 0)
        assert not threshold or part.num_tokens - part.num_cached <= threshold
        if before is None:
            self.seen["cached"] += part.num_cached
        assert part.num_cached == (self._cached_tokens(group) if before is None else before) < part.num_tokens
        # Contiguous sequences share nothing: the first computes the prompt, and spread_prompt copies it.
        for seq in group.seqs if self.manager.shares else group.seqs[:1]:
            for position in range(part.num_cached, part.num_tokens):
                self._write(seq, position)

    def _write(self, seq: Sequence, position: int) -> int:
        token = self.history[seq][position]
        block, slot = self.manager.block_table(seq)[position // self.size], position % self.size
        assert block not in self._prefix_blocks, "a stored prefix is written to"
        assert self._written.setdefault((block, slot), token) == token, "two sequences write to one slot"
        self.pool.gpu[block][slot] = token
        return block

    def _cached_tokens(self, group: SequenceGroup) -> int:
        """Whole blocks of the stored prefix, never the entire prompt: its last token's output is needed."""
        request = group.request
        stored = len(self._prefixes.get(request.prefix_id, ()))
        return min(stored // self.size, (request.prompt_tokens - 1) // self.size) * self.size

    def _common_blocks(self) -> set[int]:
        """What unrelated requests may share."""
        return self._prefix_blocks

    def _choose_parents(self, running: list[SequenceGroup]) -> dict[SequenceGroup, list[int]]:
        """A random beam step: any non-empty set of beams survives in place, the others continue these."""
        choices = {}
        for group in running:
            if group.is_beam and self.random.random() < 0.8:
                indices = range(len(group.seqs))
                survivors = self.random.sample(indices, self.random.randint(1, len(group.seqs)))
                parents = [i if i in survivors else self.random.choice(survivors) for i in indices]
                choices[group] = parents
                histories = [list(self.history[group.seqs[parent]]) for parent in parents]
                self.history.update(zip(group.seqs, histories))
                self.seen["fork"] += len(set(parents)) < len(parents)
        return choices

    def _emit(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            self.emitted[group] += 1
            for seq in group.seqs:
                self.history[seq].append(next(self._ids))

    # Checks

    def _check_contents(self, output: SchedulerOutput) -> None:
        """Each live token is where its block table says, on the GPU or in swap space."""
        not_spread = {prefill.group for prefill in output.prefills} if not self.manager.shares else ()
        for group in self.scheduler.running:
            if group in self.done:  # held by its static batch, but read no more
                continue
            for seq in group.seqs[:1] if group in not_spread else group.seqs:
                tokens = self.history[seq]
                assert self._read(self.pool.gpu, seq, len(tokens)) == tokens
                if self.paged:
                    assert len(self.manager.block_table(seq)) == -(-len(tokens) // self.size)
        for group, stored in self.under_way.items():
            (seq,) = group.seqs
            assert self._read(self.pool.gpu, seq, stored) == self.history[seq][:stored]
        for group in self.scheduler.swapped:
            cached = self._cached_tokens(group)  # stays on the GPU
            for seq in group.seqs:  # the newest token has not been an input yet
                tokens = self.history[seq][:-1]
                assert self._read(self.pool.gpu, seq, cached) == tokens[:cached]
                assert self._read(self.pool.cpu, seq, len(tokens), cached) == tokens[cached:]
        for prefix_id, tokens in self._prefixes.items():
            blocks = self.manager.prefix_blocks(prefix_id)
            assert [token for block in blocks for token in self.pool.gpu[block]] == tokens[: len(blocks) * self.size]

    def _read(self, pool: list[list[int]], seq: Sequence, stop: int, start: int = 0) -> list[int]:
        """The tokens of a sequence from position `start`, a multiple of the block size, up to `stop`."""
        table = self.manager.block_table(seq)[start // self.size : -(-stop // self.size)]
        return [token for block in table for token in pool[block]][: stop - start]

    def _check_accounts(self, output: SchedulerOutput) -> None:
        """The scheduler's running totals against a recount."""
        scheduler, config = self.scheduler, self.scheduler.config
        started = [prefill.group for prefill in output.prefills]
        parts = [part.group for part in (*output.prefills, *output.chunks)]
        assert output.decodes + parts or output.preempted
        assert list(scheduler.running) == output.decodes + started
        assert output.num_decode_seqs == sum(len(group.seqs) for group in output.decodes)
        for group in scheduler.running:
            if group not in self.done:
                assert group.num_generated(output.iteration) == self.emitted[group]
        for group in itertools.chain(scheduler.waiting, scheduler.swapped):
            assert group.num_generated(output.iteration) == self.emitted[group]
        if not self.done:  # a static batch computes finished members along; their length means nothing
            assert output.context_tokens == sum(
                len(self.history[seq]) for group in output.decodes for seq in group.seqs
            )
        num_seqs = sum(len(group.seqs) for group in scheduler.running)
        num_swapped = sum(len(group.seqs) for group in scheduler.swapped)
        assert scheduler.running.num_seqs == num_seqs
        under_way = {*self._prefilling()} | {chunk.group for chunk in output.chunks}
        assert num_seqs + num_swapped + len(under_way) <= config.max_num_seqs  # so the swapped ones can always return
        if config.max_num_batched_tokens is not None:
            # One that has outgrown the cap must be able to return.
            alone = len(started) == 1 and started[0].num_preemptions
            num_tokens = output.num_decode_seqs + output.num_prefill_tokens
            assert num_tokens <= config.max_num_batched_tokens or alone
        fresh = [group for group in parts if group not in self.under_way]
        if fresh and self.paged:
            assert self.manager.num_free_blocks >= self.manager.watermark_blocks
        out = [self.rank(group.request) for group in itertools.chain(scheduler.waiting, scheduler.swapped)]
        for group in fresh:  # first come, first served, or as the queue's order says
            mine = self.rank(group.request)
            assert group.num_preemptions or all(mine < other for other in out), "somebody is overtaken"

    def _prefilling(self) -> Iterable[SequenceGroup]:
        """Groups whose prompts are under way, as the scheduler says."""
        return getattr(self.scheduler, "prefilling", ())

    def _check_ended(self, held: set[SequenceGroup], ended: list[SequenceGroup]) -> None:
        """What returns is what is done, exactly at its length; a static batch returns together."""
        if self.scheduler.config.batching is Batching.REQUEST:
            returned = held if held <= self.done else set()
            self.seen["held"] += bool(held & self.done and not returned)
        else:
            returned = held & self.done
        assert set(ended) == returned and len(ended) == len(returned)
        assert all(group.status is Status.FINISHED for group in ended)
        assert all(self.emitted[group] == group.request.output_tokens or self.stop_rate for group in ended)
        self.done -= returned
        for group in ended:
            del self.emitted[group]
        self.seen["finish"] += len(ended)
        self._forget_histories()

    def _forget_histories(self) -> None:
        live = {seq for group in self.emitted for seq in group.seqs}
        self.history = {seq: tokens for seq, tokens in self.history.items() if seq in live}

    def _check_conservation(self) -> None:
        """free + held = total, references = holders, nothing shared between strangers; wipes what is free."""
        scheduler, manager = self.scheduler, self.manager
        assert all(group.status is Status.RUNNING for group in scheduler.running)
        assert all(group.status is Status.SWAPPED for group in scheduler.swapped)
        assert all(group.status is Status.WAITING for group in (*scheduler.waiting, *self._prefilling()))
        assert dict.fromkeys(self._prefilling()) == dict.fromkeys(self.under_way)
        on_card = [*scheduler.running, *self.under_way]
        resident = [seq for group in (*on_card, *scheduler.swapped) for seq in group.seqs]
        assert set(manager._tables) == set(resident)
        if self.paged:
            # A table is on the GPU, except for what of a swapped group's lies behind the stored prefix.
            on_gpu = [(group, block) for group in on_card for block in self._blocks(group, 0, None)]
            on_cpu = []
            for group in scheduler.swapped:
                prefix = self._cached_tokens(group) // self.size
                on_gpu += [(group, block) for block in self._blocks(group, 0, prefix)]
                on_cpu += [(group, block) for block in self._blocks(group, prefix, None)]
            for places in (on_gpu, on_cpu):
                owned = {pair for pair in places if places is on_cpu or pair[1] not in self._common_blocks()}
                assert len(owned) == len({block for _, block in owned})
            held = Counter(block for _, block in on_gpu) + Counter(self._prefix_blocks)
            self._check_allocator(manager.gpu, held)
            swapped = Counter(block for _, block in on_cpu)
            self._check_allocator(manager.cpu, swapped)
            self.max_swapped_blocks = max(self.max_swapped_blocks, len(swapped))
            moved = self.seen[OpKind.SWAP_OUT.value] - self.seen[OpKind.SWAP_IN.value] - self.seen["dropped"]
            assert len(swapped) == moved <= manager.cpu.num_blocks, "swap space does not add up"
            self.seen["share"] += any(count > 1 for count in held.values())
            for block in manager.cpu._free:
                self.pool.cpu[block] = list(self.pool.empty)
        else:
            held = Counter(block for seq in resident for block in manager.block_table(seq))
            assert all(count == 1 for count in held.values())
            assert len(held) + manager.num_free_blocks == manager.num_blocks
        # A copy that waits for the next iteration may start from a block whose holder has just ended.
        needed = {op.src for op in scheduler._pending_ops}
        for block in range(manager.num_blocks):
            if block not in held and block not in needed and block not in self._common_blocks():
                self.pool.gpu[block] = list(self.pool.empty)

    def _blocks(self, group: SequenceGroup, start: int, stop: int | None) -> list[int]:
        return [block for seq in group.seqs for block in self.manager.block_table(seq)[start:stop]]

    @staticmethod
    def _check_allocator(allocator: object, held: Counter[int]) -> None:
        assert [held[block] for block in range(allocator.num_blocks)] == allocator.ref_counts
        assert sorted(allocator._free) == [block for block in range(allocator.num_blocks) if not held[block]]

    def _check_everything_is_returned(self) -> None:
        scheduler = self.scheduler
        assert not self.emitted and not self.history and not self.done
        assert nothing_is_left(scheduler.running)
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(self._prefix_blocks)


def nothing_is_left(running: RunningSet) -> bool:
    """Whether a set that has been emptied holds nothing of the groups that were in it."""
    counts = running.num_seqs, running.context_tokens(0), running.context_tokens(1)
    kept = running, running._calendar, running.beams, *running._opening
    return not (len(running) or any(counts) or any(kept))


def arrival(request: Request) -> tuple[float, ...]:
    return request.arrival_s, request.request_id


class CachingShadow(Shadow):
    """Over a prefix cache: prompts often begin as earlier ones do; free blocks that may still be found are not
    wiped."""

    def __init__(self, scheduler: Scheduler, seed: int, stop_rate: float = 0.0, lookahead: int = 1) -> None:
        super().__init__(scheduler, seed, stop_rate, lookahead)
        self.prompts: dict[int, list[int]] = {}  # and the outputs of those of one sequence
        self.manager.hashes = lambda request: block_hashes(self.prompts[request.request_id], self.size)

    def register(self, group: SequenceGroup) -> None:
        length, earlier = group.request.prompt_tokens, [[], *self.prompts.values()]
        like = self.random.choice(earlier)[: self.random.choice((length, length, self.random.randint(0, length)))]
        self.prompts[group.request.request_id] = prompt = like + self._new_tokens(length - len(like))
        for seq in group.seqs:
            self.history[seq] = list(prompt)
        self.emitted[group] = 0

    def _emit(self, groups: list[SequenceGroup]) -> None:
        super()._emit(groups)
        for group in groups:
            if group.request.sampling.n == 1:
                self.prompts[group.request.request_id] = list(self.history[group.seqs[0]])

    def _cached_tokens(self, group: SequenceGroup) -> int:
        cached = self.manager.prefix_tokens(group)
        most = group.request.prompt_tokens
        if group.request.sampling.n == 1:
            most += self.emitted[group]
        assert cached < most and cached % self.size == 0
        return cached

    def _common_blocks(self) -> set[int]:
        return set(self.manager.gpu.found.values())

    def _check_conservation(self) -> None:
        super()._check_conservation()
        scheduler, gpu = self.scheduler, self.manager.gpu
        assert {content: block for block, content in gpu._holds.items()} == gpu.found
        running = list(scheduler.stored_lengths(scheduler.iteration - 1))
        usage = self.manager.usage(running)  # adds up, or raises
        assert usage.physical_blocks == len({block for group, _ in running for block in self._blocks(group, 0, None)})
        for content, block in gpu.found.items():
            tokens = self.pool.gpu[block]
            assert any(
                content in block_hashes(prompt, self.size)
                and tokens in [prompt[at : at + self.size] for at in range(0, len(prompt), self.size)]
                for prompt in self.prompts.values()
            ), "a block is found by what it does not hold"
