"""The shadow store: a K/V pool that holds, instead of keys and values, a note of which token each slot belongs to.

It drives a scheduler over paged memory. Each token that an iteration computes is written to the slot that the block
table names, each CacheOp is applied, and after every step each live token must lie where its block table says. What a
token's K and V are depends on all tokens before it, so a note stands for a token with everything before it: the same
token behind another beginning is another note. Free blocks are wiped, so that stale data is never right by luck.

What is wrong is raised as a `Fault`: the rule that is broken, and a sentence with the iteration, the request, the
block. The project's own tests use a stricter one (tests/shadow.py), over the same pool."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from repro.engine.memory import CacheOp, OpKind, PagedKVCacheManager
from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.scheduler import Prefill, Scheduler, SchedulerOutput
from repro.engine.sequence import Request, Sequence, SequenceGroup
from repro.errors import UserError
from repro.words import count

WIPED = -1
Blocks = list[list[int]]


class Fault(AssertionError):
    """A broken rule, named by `rule` (a word or two), with a sentence for the student."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(text)
        self.rule = rule


class TokenPool:
    """Blocks of notes (whole numbers) on the GPU and in CPU memory."""

    def __init__(self, num_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.empty = [WIPED] * block_size
        self.gpu: Blocks = [list(self.empty) for _ in range(num_blocks)]
        self.cpu: Blocks = [list(self.empty) for _ in range(num_cpu_blocks)]

    def apply(self, op: CacheOp) -> None:
        source = self.cpu if op.kind is OpKind.SWAP_IN else self.gpu
        target = self.cpu if op.kind is OpKind.SWAP_OUT else self.gpu
        target[op.dst] = list(source[op.src])


class Shadow:
    """Drives `scheduler` step by step. Beams get random parents (`seed`).

    `apply`, if given, moves the blocks in place of `TokenPool.apply`: it gets the operations of an iteration, and the
    blocks on the GPU and in CPU memory. `ids` has the token ids of each request, its output included, by its number:
    what a prefix cache hashes. Tokens that nobody chose are all different."""

    def __init__(
        self,
        scheduler: Scheduler,
        seed: int = 0,
        apply: Callable[[Items[CacheOp], Blocks, Blocks], None] | None = None,
        ids: dict[int, list[int]] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.manager: PagedKVCacheManager = scheduler.manager
        self.size = self.manager.block_size
        self.pool = TokenPool(self.manager.num_blocks, self.manager.cpu.num_blocks, self.size)
        self.ids = {} if ids is None else ids
        self.notes: dict[Sequence, list[int]] = {}  # what each live sequence must find, token by token
        self.emitted: dict[SequenceGroup, int] = {}  # output tokens of each unfinished group
        self.under_way: dict[SequenceGroup, int] = {}  # prompts cut into chunks, and how far they are computed
        self._apply = apply
        self._random = random.Random(seed)
        self._fresh = itertools.count(1000)  # token ids that nobody chose
        self._known: dict[tuple[int, int], int] = {}  # (note of the token before, token id) -> note
        self._names: list[str] = []  # of each note: whose token it was first

    # What an engine and an executor do

    def add(self, request: Request, prompt: Items[int] | None = None) -> None:
        """Queue a request, with these token ids as its prompt. UserError if the engine refuses it."""
        tokens = list(itertools.islice(self._fresh, request.prompt_tokens) if prompt is None else prompt)
        self.ids[request.request_id] = []
        group = self.scheduler.add(request)
        self.emitted[group] = 0
        for seq in group.seqs:
            self.notes[seq] = []
            for token in tokens:
                self._grow(group, seq, token)

    def step(self) -> SchedulerOutput:
        """One iteration, checked. Fault if anything is wrong."""
        output = self.scheduler.schedule()
        self._now = f"Iteration {output.iteration}"
        self._check_decisions(output)
        if self._apply is None:
            for op in output.cache_ops:
                self.pool.apply(op)
        else:
            self._apply(list(output.cache_ops), self.pool.gpu, self.pool.cpu)
        self._compute(output)
        self._check_tokens()
        running = list(self.scheduler.running)
        parents = self._choose_parents(running)
        for group in running:
            self.emitted[group] += 1
            for seq in group.seqs:
                self._grow(group, seq, next(self._fresh))
        for group in self.scheduler.update(output, parents):
            if (got := self.emitted.pop(group)) != group.request.output_tokens:
                raise self._fault("length", f"{_name(group)} ends after {got} of {group.request.output_tokens} tokens")
            for seq in group.seqs:
                del self.notes[seq]
        self._check_blocks()
        return output

    def _grow(self, group: SequenceGroup, seq: Sequence, token: int) -> None:
        """One more token of a sequence, with the note that stands for it and all before it."""
        mine = self.notes[seq]
        key = (mine[-1] if mine else WIPED, token)
        if key not in self._known:
            self._known[key] = len(self._names)
            self._names.append(f"token number {len(mine) + 1} of {_name(group, seq)}")
        mine.append(self._known[key])
        if seq is group.seqs[0]:
            self.ids[group.request.request_id].append(token)

    def _compute(self, output: SchedulerOutput) -> None:
        for group in output.preempted:
            self.under_way.pop(group, None)
        for group in output.decodes:
            for seq in group.seqs:
                block = self._write(group, seq, len(self.notes[seq]) - 1)
                if (holders := self.manager.gpu.ref_counts[block]) > 1:
                    text = f"{_name(group, seq)} writes into block {block}, which {holders} sequences share, without"
                    raise self._fault("shared write", f"{text} a copy of its own")
        for part in (*output.prefills, *output.chunks):
            self._compute_prompt(part)
        for chunk in output.chunks:
            self.under_way[chunk.group] = chunk.num_tokens

    def _compute_prompt(self, part: Prefill) -> None:
        group, known = part.group, len(self.notes[part.group.seqs[0]])
        self.under_way.pop(group, None)
        if part.num_tokens > known:
            text = f"{_name(group)} is computed up to token number {part.num_tokens}, and has {known}"
            raise self._fault("beyond", text)
        if part.num_cached >= part.num_tokens:
            text = f"all {known} tokens of {_name(group)} are found, and none is left to compute"
            if part.num_tokens < known:
                text = f"{_name(group)} computes a part of its prompt that has no token"
            raise self._fault("nothing to compute", f"{text}: without a forward pass there is no next token")
        for seq in group.seqs:
            for position in range(part.num_cached, part.num_tokens):
                self._write(group, seq, position)

    def _write(self, group: SequenceGroup, seq: Sequence, position: int) -> int:
        table, index = self.manager.block_table(seq), position // self.size
        if index >= len(table):
            text = f"token number {position + 1} of {_name(group, seq)} belongs into logical block {index}, but its"
            raise self._fault("no slot", f"{text} block table has {count(len(table), 'block')}")
        self.pool.gpu[table[index]][position % self.size] = self.notes[seq][position]
        return table[index]

    def _choose_parents(self, running: list[SequenceGroup]) -> dict[SequenceGroup, list[int]]:
        """A random beam step: some beams survive in place, the others continue these."""
        choices = {}
        for group in running:
            if group.is_beam and self._random.random() < 0.8:
                indices = range(len(group.seqs))
                survivors = self._random.sample(indices, self._random.randint(1, len(indices)))
                parents = [i if i in survivors else self._random.choice(survivors) for i in indices]
                choices[group] = parents
                self.notes.update(zip(group.seqs, [list(self.notes[group.seqs[parent]]) for parent in parents]))
        return choices

    # Rules

    def _fault(self, rule: str, text: str) -> Fault:
        return Fault(rule, f"{self._now}: {text}")

    def _check_decisions(self, output: SchedulerOutput) -> None:
        """Somebody runs, nobody has lost a token, the budget is kept, the latest is the one driven out."""
        scheduler, parts = self.scheduler, (*output.prefills, *output.chunks)
        for group in (*scheduler.running, *scheduler.swapped, *scheduler.waiting):
            says, has = group.num_generated(output.iteration), self.emitted[group]
            if says != has:
                text = f"the scheduler counts {count(says, 'output token')} of {_name(group)}, which has {has}"
                raise self._fault("lost token", text)
        if not (output.decodes or parts or output.preempted):
            left = ", ".join(map(_name, [*scheduler.swapped, *scheduler.waiting]))
            raise self._fault("standstill", f"nothing runs, and nothing ever will: {left} can never go on")
        for victim in output.preempted:
            later = [group for group in scheduler.running if group.rank > victim.rank]
            if later:
                text = f"{_name(victim)} is driven out, though {_name(later[0])} came later and still runs"
                raise self._fault("order", text)
        limit, num_tokens = scheduler.config.max_num_batched_tokens, output.num_decode_seqs + output.num_prefill_tokens
        if limit is not None and num_tokens > limit:
            raise self._fault("budget", f"a batch of {num_tokens} tokens, where max_num_batched_tokens = {limit}")

    def _check_tokens(self) -> None:
        """Each live token is where its block table says, on the GPU or in swap space."""
        for group in self.scheduler.running:
            for seq in group.seqs:
                notes, table = self.notes[seq], self.manager.block_table(seq)
                if len(table) != (right := self.manager.cdiv(len(notes))):
                    text = f"the block table of {_name(group, seq)} has {count(len(table), 'block')}, though its"
                    raise self._fault("table", f"{text} {len(notes)} tokens lie in {right}")
                self._read(self.pool.gpu, group, seq, notes)
        for group, stored in self.under_way.items():
            self._read(self.pool.gpu, group, group.seqs[0], self.notes[group.seqs[0]][:stored])
        for group in self.scheduler.swapped:
            for seq in group.seqs:  # the newest token has not been an input yet
                self._read(self.pool.cpu, group, seq, self.notes[seq][:-1])

    def _read(self, pool: Blocks, group: SequenceGroup, seq: Sequence, notes: list[int]) -> None:
        table = self.manager.block_table(seq)
        for position, note in enumerate(notes):
            block, slot = table[position // self.size], position % self.size
            if (found := pool[block][slot]) != note:
                there = "nothing" if found == WIPED else self._names[found]
                place = f"block {block}{' in CPU memory' if pool is self.pool.cpu else ''}, slot {slot}"
                text = f"token number {position + 1} of {_name(group, seq)} should be in {place}, but there is {there}"
                raise self._fault("contents", text)

    def _check_blocks(self) -> None:
        """References = holders, free = not held, no block of two requests; what is free is wiped."""
        scheduler, gpu, cpu = self.scheduler, self.manager.gpu, self.manager.cpu
        found = set(getattr(gpu, "found", {}).values())  # what a prefix cache may find again
        owners: dict[int, SequenceGroup] = {}
        on_gpu, on_cpu = Counter(), Counter()
        for group in (*scheduler.running, *self.under_way):
            for seq in group.seqs:
                for block in self.manager.block_table(seq):
                    on_gpu[block] += 1
                    if owners.setdefault(block, group) is not group and block not in found:
                        text = f"block {block} is in the block tables of {_name(owners[block])} and {_name(group)}"
                        raise self._fault("two owners", text)
        for group in scheduler.swapped:
            on_cpu.update(block for seq in group.seqs for block in self.manager.block_table(seq))
        self._check_counts(gpu, on_gpu, "block")
        self._check_counts(cpu, on_cpu, "CPU block")
        needed = {op.src for op in scheduler._pending_ops}
        for pool, held in ((self.pool.gpu, {*on_gpu, *found, *needed}), (self.pool.cpu, on_cpu)):
            for block in range(len(pool)):
                if block not in held:
                    pool[block] = list(self.pool.empty)

    def _check_counts(self, allocator: BlockAllocator, holders: Counter[int], kind: str) -> None:
        free = Counter(list(allocator._free))
        for block, references in enumerate(allocator.ref_counts):
            if references != holders[block]:
                text = (
                    f"{kind} {block} has a reference count of {references}, but {count(holders[block], 'block table')}"
                )
                then = "it will never be free again" if references > holders[block] else "it may be given to another"
                names = "names" if holders[block] == 1 else "name"
                raise self._fault("references", f"{text} {names} it: {then}")
            if free[block] != (not references):
                text = (
                    f"{kind} {block} has a reference count of {references} and is {free[block]} times in the free list"
                )
                raise self._fault("references", text)


def run(shadow: Shadow, requests: Iterable[tuple[Request, Items[int] | None]]) -> None:
    """Requests with their prompts, by arrival (in iterations), to the end of the last one; a request that the engine
    refuses is left out. Fault if anything is wrong, or if it takes longer than any schedule that makes progress."""
    upcoming = list(requests)
    lengths = [one.prompt_tokens + one.output_tokens for one, _ in upcoming]
    now, bound = 0, (1 + len(lengths)) * (sum(lengths) + 1)
    for _ in range(bound):
        while upcoming and upcoming[0][0].arrival_s <= now:
            try:
                shadow.add(*upcoming.pop(0))
            except UserError:
                continue
        if not shadow.scheduler.has_work and not upcoming:
            return
        if shadow.scheduler.has_work:
            shadow.step()
            now += 1
        else:
            now = int(upcoming[0][0].arrival_s)
    text = f"After {bound} iterations {', '.join(map(_name, shadow.emitted))} still run: they drive each other out"
    raise Fault("standstill", f"{text} for ever")


def _name(group: SequenceGroup, seq: Sequence | None = None) -> str:
    """A group, or one of its sequences, as messages name it."""
    if seq is None or group.request.sampling.n == 1:
        return f"request {group.request.request_id}"
    return f"sequence {seq.seq_id}"
