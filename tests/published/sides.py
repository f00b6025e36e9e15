"""Our memory manager and our scheduler as sides of a comparison."""

from __future__ import annotations

from collections.abc import Mapping

from published.rules2023 import OURS, Manager2023, Rules2023, Scheduler2023
from published.same import Memory, Move
from published.trials import Decision, Outcome
from repro.engine.memory import CacheOp, PagedKVCacheManager
from repro.engine.memory.block_allocator import BlockAllocator
from repro.engine.scheduler import SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, Sequence, SequenceGroup, Status

#: 0.1.7's answers to what a manager is asked
ANSWERS = Rules2023().without("full_swap_fails")


def moves(ops: list[CacheOp]) -> list[Move]:
    return [Move(op.kind.value.replace("_", " "), op.src, op.dst) for op in ops]


def index_of(seq: Sequence) -> int:
    return int(seq.seq_id.partition(".")[2])


def memory_of(manager: PagedKVCacheManager, places: Mapping[SequenceGroup, str]) -> Memory:
    """What the groups hold, which lie in these places."""
    tables = {
        (group.request.request_id, index_of(seq)): (place, manager.block_table(seq))
        for group, place in places.items()
        for seq in group.seqs
    }
    return Memory(
        tables,
        {"gpu": _references(manager.gpu), "cpu": _references(manager.cpu)},
        {"gpu": manager.gpu.num_free, "cpu": manager.cpu.num_free},
    )


def _references(allocator: BlockAllocator) -> dict[int, int]:
    return {block: count for block, count in enumerate(allocator.ref_counts) if count}


class OurManager:
    """Our manager. `rules` are those by which it answers when nothing else is said."""

    def __init__(self, manager: Manager2023, rules: Rules2023 = OURS) -> None:
        self.manager = manager
        self.manager.rules = rules
        self.groups: dict[int, SequenceGroup] = {}
        self.places: dict[SequenceGroup, str] = {}

    def new(self, number: int, prompt: int, width: int) -> None:
        # Nobody asks here for how long it runs.
        self.groups[number] = SequenceGroup(Request(number, float(number), prompt, 1, SamplingParams(n=width)))

    def ask(self, number: int, tokens: int, state: str) -> dict[str, bool]:
        group = self.groups[number]
        if state == "waiting":
            return {"start": self.manager.can_allocate(group, tokens)}
        if state == "swapped":
            return {"resume": self.manager.can_swap_in(group, tokens + 1)}
        return {
            "append": self.manager.can_append_slots(group, tokens + 1),
            "swap out": self.manager.can_swap_out(group),
        }

    def ask_by_rules(self, number: int, tokens: int, state: str) -> dict[str, bool]:
        before, self.manager.rules = self.manager.rules, ANSWERS
        answers = self.ask(number, tokens, state)
        self.manager.rules = before
        return answers

    def allocate(self, number: int, tokens: int) -> None:
        self.manager.allocate(self.groups[number], tokens)
        self.places[self.groups[number]] = "gpu"

    def append(self, number: int, tokens: int) -> list[Move]:
        return moves(self.manager.append_slots(self.groups[number], tokens))

    def fork(self, number: int, parents: list[int], tokens: int) -> None:
        group = self.groups[number]
        live = [index_of(seq) for seq in group.seqs]
        self.manager.fork(group, [live.index(parent) for parent in parents], tokens)

    def swap_out(self, number: int) -> list[Move]:
        self.places[self.groups[number]] = "cpu"
        return moves(self.manager.swap_out(self.groups[number]))

    def swap_in(self, number: int) -> list[Move]:
        self.places[self.groups[number]] = "gpu"
        return moves(self.manager.swap_in(self.groups[number]))

    def free_sequence(self, number: int, index: int) -> None:
        group = self.groups[number]
        seq = next(seq for seq in group.seqs if index_of(seq) == index)
        self.manager.free_sequence(seq)
        group.seqs.remove(seq)

    def free(self, number: int) -> None:
        self.manager.free(self.groups[number])
        del self.places[self.groups[number]]

    def memory(self) -> Memory:
        return memory_of(self.manager, self.places)


class OurScheduler:
    """Our scheduler with as many of 0.1.7's rules as are asked for."""

    def __init__(self, scheduler: Scheduler2023) -> None:
        self.scheduler = scheduler
        self._groups: dict[int, SequenceGroup] = {}
        self._output = SchedulerOutput(0)

    def add(self, request: Request) -> None:
        self._groups[request.request_id] = self.scheduler.add(request)

    def schedule(self) -> Decision:
        scheduler = self.scheduler
        swapped_before = list(scheduler.swapped)
        dropped_before = len(scheduler.dropped)
        output = self._output = scheduler.schedule()
        preempted = [(group, "swap" if group.status is Status.SWAPPED else "recompute") for group in output.preempted]
        return Decision(
            prompts=[(prefill.group.request.request_id, prefill.num_tokens) for prefill in output.prefills],
            decodes=sorted(numbers(output.decodes)),
            resumed=numbers([group for group in swapped_before if group.status is Status.RUNNING]),
            preempted=[(group.request.request_id, way) for group, way in preempted],
            dropped=numbers(scheduler.dropped[dropped_before:]),
            running={
                number: [index_of(seq) for seq in self._groups[number].seqs]
                for number in sorted(numbers(self._running()))
            },
            waiting=numbers(scheduler.waiting),
            swapped=numbers(scheduler.swapped),
            moves=moves(output.cache_ops),
        )

    def _running(self) -> list[SequenceGroup]:
        return [*self.scheduler.running, *self.scheduler.held_back]

    def finish(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        parents, stopped = {}, []
        for number, outcome in outcomes.items():
            group = self._groups[number]
            live = {index_of(seq): seq for seq in group.seqs}
            stopped += [(group, live[index]) for index in outcome.stopped]
            if outcome.parents is not None:
                parents[group] = [list(live).index(parent) for parent in outcome.parents]
        return sorted(numbers(self.scheduler.update(self._output, parents, stopped)))

    def memory(self) -> Memory:
        places = dict.fromkeys(self._running(), "gpu") | dict.fromkeys(self.scheduler.swapped, "cpu")
        return memory_of(self.scheduler.manager, places)


def numbers(groups: object) -> list[int]:
    return [group.request.request_id for group in groups]
