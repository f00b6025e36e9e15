"""vLLM 0.1.7 (September 2023, the release nearest to the paper) as a side: its block manager, scheduler and engine.

What its engine does with sampled tokens is part of the comparison: it forks samples and beams, and frees what ends.
Tokens are invented so that the run's random choices come about.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz import Case

from published.fetch import fetched, modules
from published.rules2023 import NO_LIMIT, ONE_LEFT, SWAP_SPACE_FULL
from published.same import Difference, Ends, Memory, Move
from published.trials import Decision, Outcome
from repro.engine.sequence import Request

VERSION = "0.1.7"
#: they import what reads models or starts workers, and decide nothing here
LEFT_OUT = [
    "psutil",
    "ray",
    "torch",
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.engine.ray_utils",
    "vllm.transformers_utils",
]
END_OF_SEQUENCE = 0


class Published:
    """The modules of 0.1.7 that are compared."""

    def __init__(self, folder: Path) -> None:
        names = ["core.block_manager", "core.scheduler", "engine.llm_engine", "sampling_params", "sequence"]
        found = modules("vllm", folder, [f"vllm.{name}" for name in names], LEFT_OUT)
        self.block_manager, self.scheduler, self.llm_engine, self.sampling_params, self.sequence = found
        logging.getLogger("vllm").setLevel(logging.ERROR)


def published() -> Published:
    return Published(fetched("vllm", VERSION, "3.10", "manylinux1_x86_64"))


def _memory(manager: Any, sequences: Mapping[tuple[int, int], Any], standing_for: Mapping[int, int]) -> Memory:
    """What these sequences hold. `standing_for`: a sequence (by seq_id) that n - 1 others will share all blocks of."""
    tables, held = {}, {"gpu": {}, "cpu": {}}
    for key, seq in sequences.items():
        blocks = manager.block_tables[seq.seq_id]
        place = blocks[0].device.name.lower()
        tables[key] = place, [block.block_number for block in blocks]
        held[place].update({block.block_number: block.ref_count + standing_for.get(seq.seq_id, 0) for block in blocks})
    free = {"gpu": manager.get_num_free_gpu_blocks(), "cpu": manager.get_num_free_cpu_blocks()}
    for place, total in (("gpu", manager.num_total_gpu_blocks), ("cpu", manager.num_total_cpu_blocks)):
        if len(held[place]) + free[place] != total:
            raise Difference(f"of their {total} {place} blocks {free[place]} are free and {len(held[place])} held")
    return Memory(tables, held, free)


def _swaps(kind: str, mapping: Mapping[int, int]) -> list[Move]:
    return [Move(kind, source, target) for source, target in mapping.items()]


class TheirManager:
    """BlockSpaceManager."""

    def __init__(self, modules: Published, case: Case) -> None:
        self.modules = modules
        self.manager = modules.block_manager.BlockSpaceManager(
            case.block_size, case.num_blocks, case.cpu_blocks, case.watermark
        )
        self.block_size = case.block_size
        self.groups: dict[int, Any] = {}
        self.sequences: dict[int, dict[int, Any]] = {}
        self._ids = itertools.count()

    def new(self, number: int, prompt: int, width: int) -> None:
        sequence = self.modules.sequence
        seqs = [sequence.Sequence(next(self._ids), "", [1] * prompt, self.block_size) for _ in range(width)]
        self.sequences[number] = dict(enumerate(seqs))
        parameters = self.modules.sampling_params.SamplingParams(n=width)
        self.groups[number] = sequence.SequenceGroup(str(number), seqs, parameters, float(number))

    def _set_status(self, number: int, name: str) -> None:
        for seq in self.sequences[number].values():
            seq.status = self.modules.sequence.SequenceStatus[name]

    def ask(self, number: int, tokens: int, state: str) -> dict[str, bool]:
        group = self.groups[number]
        if state == "waiting":
            return {"start": self.manager.can_allocate(group)}
        if state == "swapped":
            return {"resume": self.manager.can_swap_in(group)}
        return {"append": self.manager.can_append_slot(group), "swap out": self.manager.can_swap_out(group)}

    def allocate(self, number: int, tokens: int) -> None:
        self.manager.allocate(self.groups[number])
        self._set_status(number, "RUNNING")

    def append(self, number: int, tokens: int) -> list[Move]:
        copies = []
        for seq in self.sequences[number].values():
            seq.append_token_id(1, {1: 0.0})
            copied = self.manager.append_slot(seq)
            copies += [Move("copy", *copied)] if copied else []
        return copies

    def fork(self, number: int, parents: list[int], tokens: int) -> None:
        group, before = self.groups[number], self.sequences[number]
        after = dict(before)
        for index, parent in zip(before, parents):
            if index != parent:
                after[index] = before[parent].fork(next(self._ids))
                self.manager.fork(before[parent], after[index])
        for index, seq in before.items():
            if after[index] is not seq:
                self.manager.free(seq)
        self.sequences[number] = after
        group.seqs_dict = {seq.seq_id: seq for seq in after.values()}

    def swap_out(self, number: int) -> list[Move]:
        moved = self.manager.swap_out(self.groups[number])
        self._set_status(number, "SWAPPED")
        return _swaps("swap out", moved)

    def swap_in(self, number: int) -> list[Move]:
        moved = self.manager.swap_in(self.groups[number])
        self._set_status(number, "RUNNING")
        return _swaps("swap in", moved)

    def free_sequence(self, number: int, index: int) -> None:
        seq = self.sequences[number].pop(index)
        self.manager.free(seq)
        self.groups[number].remove(seq.seq_id)

    def free(self, number: int) -> None:
        for seq in self.sequences[number].values():
            self.manager.free(seq)

    def memory(self) -> Memory:
        held = {
            (number, index): seq
            for number, seqs in self.sequences.items()
            for index, seq in seqs.items()
            if seq.seq_id in self.manager.block_tables
        }
        return _memory(self.manager, held, {})


class TheirScheduler:
    """Scheduler, with what LLMEngine does after a step."""

    def __init__(self, modules: Published, case: Case) -> None:
        self.modules = modules
        self.block_size = case.block_size
        config = SimpleNamespace(
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.max_num_batched_tokens or NO_LIMIT,
            max_model_len=NO_LIMIT,
        )
        pools = SimpleNamespace(
            block_size=case.block_size, num_gpu_blocks=case.num_blocks, num_cpu_blocks=case.cpu_blocks
        )
        self.scheduler = modules.scheduler.Scheduler(config, pools)
        # Its own has the default watermark, which is none in a small pool.
        self.scheduler.block_manager = modules.block_manager.BlockSpaceManager(
            case.block_size, case.num_blocks, case.cpu_blocks, case.watermark
        )
        self.always_swap = case.preemption == "swap"
        self.engine = modules.llm_engine.LLMEngine.__new__(modules.llm_engine.LLMEngine)
        self.engine.scheduler, self.engine.scheduler_config = self.scheduler, config
        self.engine.seq_counter = itertools.count()
        self.engine.tokenizer = SimpleNamespace(eos_token_id=END_OF_SEQUENCE)
        self.engine.log_stats = False
        self.engine._decode_sequence = lambda seq: None  # there is no text
        self.groups: dict[int, Any] = {}
        self.sequences: dict[int, dict[int, Any]] = {}  # the live ones of a group, by our index
        self._tokens = itertools.count(END_OF_SEQUENCE + 1)
        self._random = random.Random(case.seed)
        self._output: Any = None
        self._forked: dict[int, int] = {}  # a sequence forked in this step -> its parent
        self._victims: list[int] = []  # of this step
        self._note_what_it_does_not_say()

    def _note_what_it_does_not_say(self) -> None:
        """Which sequence is forked from which, and the order of victims."""
        fork, preempt = self.scheduler.fork_seq, self.scheduler._preempt
        modes = self.modules.scheduler.PreemptionMode

        def forked(parent: Any, child: Any) -> None:
            self._forked[child.seq_id] = parent.seq_id
            fork(parent, child)

        def preempted(group: Any, swaps: dict[int, int]) -> None:
            self._victims.append(int(group.request_id))
            preempt(group, swaps, modes.SWAP if self.always_swap else None)

        self.scheduler.fork_seq, self.scheduler._preempt = forked, preempted

    def add(self, request: Request) -> None:
        number, sampling = request.request_id, request.sampling
        seq = self.modules.sequence.Sequence(
            next(self.engine.seq_counter), "", [1] * request.prompt_tokens, self.block_size
        )
        parameters = self.modules.sampling_params.SamplingParams(
            n=sampling.n,
            use_beam_search=sampling.use_beam_search,
            temperature=0.0 if sampling.use_beam_search else 1.0,
            max_tokens=request.output_tokens,
        )
        # Real arrivals are never equal; ours are told apart by their numbers.
        arrival = request.arrival_s + number / 1000
        self.groups[number] = self.modules.sequence.SequenceGroup(str(number), [seq], parameters, arrival)
        self.sequences[number] = {0: seq}
        self.scheduler.add_seq_group(self.groups[number])

    def schedule(self) -> Decision:
        scheduler = self.scheduler
        waited, was_swapped, self._victims = _numbers(scheduler.waiting), _numbers(scheduler.swapped), []
        with _failures():
            self._output = output = scheduler.schedule()[1]
        waiting, running, swapped = (_numbers(q) for q in (scheduler.waiting, scheduler.running, scheduler.swapped))
        scheduled = _numbers(output.scheduled_seq_groups)
        lengths = {number: self.groups[number].get_seqs()[0].get_len() for number in scheduled}
        copies = [Move("copy", source, target) for source, all_of in output.blocks_to_copy.items() for target in all_of]
        decision = Decision(
            prompts=[(number, lengths[number]) for number in scheduled] if output.prompt_run else [],
            decodes=[] if output.prompt_run else sorted(scheduled),
            resumed=[number for number in sorted(was_swapped, key=self._arrival) if number in running],
            preempted=[(number, "swap" if number in swapped else "recompute") for number in self._victims],
            dropped=[number for number in waited if number not in waiting + running],
            running={number: self._live(number) for number in sorted(running)},
            waiting=waiting,
            swapped=sorted(swapped, key=self._arrival),
            moves=_swaps("swap in", output.blocks_to_swap_in) + _swaps("swap out", output.blocks_to_swap_out) + copies,
        )
        for number in decision.dropped:
            del self.sequences[number]
        return decision

    def _arrival(self, number: int) -> float:
        return self.groups[number].arrival_time

    def _not_forked(self, number: int) -> bool:
        """Whether its prompt has not run: then one sequence stands for all."""
        group = self.groups[number]
        return group.num_seqs() < group.sampling_params.best_of

    def _live(self, number: int) -> list[int]:
        if self._not_forked(number):
            return list(range(self.groups[number].sampling_params.best_of))
        return list(self.sequences[number])

    def finish(self, outcomes: Mapping[int, Outcome]) -> list[int]:
        scheduled = list(self._output.scheduled_seq_groups)
        fresh = {number for number in outcomes if self._not_forked(number)}
        drawn = [self._samples(int(group.request_id), outcomes[int(group.request_id)]) for group in scheduled]
        self._forked = {}
        self.engine._process_model_outputs([samples for samples, _ in drawn], self._output)
        finished = []
        for group, (_, parents) in zip(scheduled, drawn):
            number = int(group.request_id)
            if group.is_finished():
                finished.append(number)
                del self.sequences[number]
            else:
                self._match(number, parents, number in fresh)
        return sorted(finished)

    def _samples(self, number: int, outcome: Outcome) -> tuple[list[Any], dict[int, list[int]]]:
        """Tokens that bring an outcome about, and each parent's (by seq_id) children by our index."""
        group, seqs = self.groups[number], self.sequences[number]
        width = group.sampling_params.best_of
        fresh = self._not_forked(number)
        live = list(range(width)) if fresh else list(seqs)
        parents = [0] * width if fresh else (outcome.parents or live)
        children: dict[int, list[int]] = {}
        for index, parent in zip(live, parents):
            children.setdefault(seqs[parent].seq_id, []).append(index)
        samples = []
        for parent in dict.fromkeys(parents):
            # A parent goes on as its last sample, and it is the first of the group's sequences afterwards.
            indices = children[seqs[parent].seq_id]
            for index in [*indices[1:], indices[0]]:
                token = END_OF_SEQUENCE if index in outcome.stopped else next(self._tokens)
                samples.append(self._sample(seqs[parent], token, -seqs[parent].get_cumulative_logprob()))
        if group.sampling_params.use_beam_search:  # candidates that are not chosen
            some = [self._random.choice(list(seqs.values())) for _ in range(width)]
            samples += [self._sample(seq, next(self._tokens), -1e9) for seq in some]
            self._random.shuffle(samples)
        return samples, children

    def _sample(self, parent: Any, token: int, logprob: float) -> Any:
        return self.modules.sequence.SequenceOutputs(parent.seq_id, token, {token: logprob})

    def _match(self, number: int, children: Mapping[int, list[int]], fresh: bool) -> None:
        """Which of their sequences is which of ours: children of one parent are alike, so both go by their order."""
        before = self.sequences[number]
        if fresh:
            matched = dict(enumerate(self.groups[number].get_seqs()))
        elif self.groups[number].sampling_params.use_beam_search:
            left = {parent: iter(indices) for parent, indices in children.items()}
            matched = {}
            for seq in self.groups[number].get_seqs():
                matched[next(left[self._forked.get(seq.seq_id, seq.seq_id)])] = seq
        else:
            matched = before
        self.sequences[number] = {
            index: matched[index] for index in sorted(matched) if not matched[index].is_finished()
        }

    def memory(self) -> Memory:
        manager = self.scheduler.block_manager
        held, standing_for = {}, {}
        for number, seqs in self.sequences.items():
            for index, seq in seqs.items():
                if seq.seq_id in manager.block_tables:
                    held[number, index] = seq
                    if self._not_forked(number):
                        others = self.groups[number].sampling_params.best_of - 1
                        standing_for[seq.seq_id] = others
                        held |= {(number, other + 1): seq for other in range(others)}
        return _memory(manager, held, standing_for)


def _numbers(groups: list[Any]) -> list[int]:
    return [int(group.request_id) for group in groups]


@contextmanager
def _failures() -> Iterator[None]:
    """Their two ways to fail, named."""
    try:
        yield
    except RuntimeError as error:
        if "swap space" not in str(error):
            raise
        raise Ends(SWAP_SPACE_FULL) from None
    except AssertionError as error:
        if "only one prompt" not in str(error):
            raise
        raise Ends(ONE_LEFT) from None
