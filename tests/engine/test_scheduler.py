"""The rules of scheduling (§4.5), each on a small case and all of them on random runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from event_log import check_log
from hypothesis import given, settings
from loads import DECODINGS, Build, Load, contiguous, loads, paged
from shadow import Shadow

from repro.engine.events import Event
from repro.engine.memory import (
    ContiguousKVCacheManager,
    KVCacheManager,
    PagedKVCacheManager,
    Reservation,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from repro.engine.scheduler import Batching, PreemptionMode, Scheduler, SchedulerConfig, SchedulerOutput
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError


def request(
    number: int, prompt: int, output: int, n: int = 1, beam: bool = False, arrival: float | None = None
) -> Request:
    return Request(
        number, float(number) if arrival is None else arrival, prompt, output, SamplingParams(n=n, use_beam_search=beam)
    )


class Case:
    """A scheduler whose iterations are written down as who decoded, who started, and who was driven out."""

    def __init__(
        self,
        *requests: Request,
        blocks: int = 1000,
        size: int = 4,
        cpu: int = 0,
        watermark: float = 0.0,
        manager: KVCacheManager | None = None,
        **config: object,
    ) -> None:
        self.log: list[Event] = []
        manager = manager or PagedKVCacheManager(blocks, size, watermark, cpu)
        self.scheduler = Scheduler(manager, SchedulerConfig(**config), self.log)
        self.groups = [self.scheduler.add(one) for one in requests]

    def step(self) -> tuple[str, str, str]:
        output = self.scheduler.schedule()
        self.output = output
        self.ended = self.numbers(self.scheduler.update(output))
        return (
            self.numbers(output.decodes),
            self.numbers([prefill.group for prefill in output.prefills]),
            self.numbers(output.preempted),
        )

    def steps(self, count: int) -> list[tuple[str, str, str]]:
        return [self.step() for _ in range(count)]

    def run(self) -> list[str]:
        """To the end: in each iteration, who runs."""
        lines = []
        while self.scheduler.has_work:
            decodes, starts, _ = self.step()
            lines.append(decodes + starts)
            assert decodes + starts
        return lines

    @staticmethod
    def numbers(groups: list[SequenceGroup]) -> str:
        return "".join(str(group.request.request_id) for group in groups)


# First come, first served


def test_requests_join_and_leave_between_any_two_iterations() -> None:
    case = Case(request(0, 3, 3), request(1, 3, 1))
    assert case.step() == ("", "01", "") and case.ended == "1"
    case.scheduler.add(request(2, 3, 2))
    assert case.step() == ("0", "2", "")
    assert case.step() == ("02", "", "") and case.ended == "20" or case.ended == "02"
    assert not case.scheduler.has_work


def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    case = Case(request(0, 16, 5), request(1, 24, 2), request(2, 1, 1), blocks=8)
    assert case.run() == ["0"] * 5 + ["12", "1"]


def test_a_request_emits_exactly_its_length() -> None:
    for output_tokens in (1, 2, 17):
        assert Case(request(0, 5, output_tokens)).run() == ["0"] * output_tokens


# Preemption


def test_the_latest_arrival_makes_room_and_comes_back_by_recomputation() -> None:
    # Two blocks each; in iteration 1 request 0 needs a third one and takes both of request 1's.
    case = Case(request(0, 8, 6), request(1, 8, 3), blocks=4)
    assert case.step() == ("", "01", "")
    assert case.step() == ("0", "", "1")
    assert case.groups[1].num_preemptions == 1 and case.scheduler.num_preemptions == 1
    assert case.steps(4) == [("0", "", "")] * 4 and case.ended == "0"
    assert case.step() == ("", "1", "")
    assert case.output.num_prefill_tokens == 9  # the token that it had generated, too
    assert case.step() == ("1", "", "") and case.ended == "1"
    (event,) = [event for event in case.log if event.kind == "preempt"]
    assert event == Event(1, "preempt", 1, {"requester": 0, "mode": "recompute", "tokens": 8})


def test_the_requester_itself_is_driven_out_when_it_came_last() -> None:
    case = Case(request(0, 7, 4), request(1, 8, 3), blocks=4)
    assert case.steps(2) == [("", "01", ""), ("0", "", "1")]
    (event,) = [event for event in case.log if event.kind == "preempt"]
    assert event.detail["requester"] == 1


def test_arrival_decides_not_the_order_of_submission() -> None:
    case = Case(request(0, 4, 9, arrival=5.0), request(1, 4, 9, arrival=5.0), request(2, 4, 9, arrival=1.0), blocks=3)
    case.step()
    assert case.output.prefills[0].group is case.groups[2]
    case.scheduler.add(request(3, 1, 1, arrival=6.0))
    assert case.step()[2] == "10"  # equal arrivals: the higher number; the earliest stays
    assert case.numbers(list(case.scheduler.waiting)) == "013"  # back in their places


def test_all_sequences_of_a_group_are_driven_out_and_resumed_together() -> None:
    case = Case(request(0, 8, 6), request(1, 8, 3, n=2), blocks=5, cpu=8)
    assert case.steps(2) == [("", "01", ""), ("0", "", "1")]
    assert [op.kind.value for op in case.output.cache_ops] == ["swap_out"] * 2
    assert case.numbers(case.scheduler.swapped) == "1" and len(case.groups[1].seqs) == 2
    case.steps(4)
    assert case.step() == ("1", "", "")
    assert [op.kind.value for op in case.output.cache_ops] == ["swap_in"] * 2
    assert case.output.num_decode_seqs == 2 and case.output.context_tokens == 2 * 9


@pytest.mark.parametrize(
    "mode, n, cpu, expected",
    (
        (PreemptionMode.BY_GROUP, 1, 99, "recompute"),
        (PreemptionMode.BY_GROUP, 2, 99, "swap"),
        (PreemptionMode.RECOMPUTE, 2, 99, "recompute"),
        (PreemptionMode.SWAP, 1, 99, "swap"),
        (PreemptionMode.SWAP, 1, 1, "recompute"),
    ),
)  # too little swap space
def test_preemption_modes(mode: PreemptionMode, n: int, cpu: int, expected: str) -> None:
    case = (
        Case(request(0, 8, 6), request(1, 8, 3, n=n), blocks=4, cpu=cpu, preemption=mode)
        if n == 1
        else Case(request(0, 8, 6), request(1, 8, 3, n=n), blocks=5, cpu=cpu, preemption=mode)
    )
    case.run()
    assert [event.detail["mode"] for event in case.log if event.kind == "preempt"] == [expected]
    check_log(case.log, [group.request for group in case.groups], case.scheduler.config)


def test_nothing_starts_in_an_iteration_that_preempted() -> None:
    """Request 1 leaves 5 blocks, of which 0 takes one: request 2 would fit at once, but must wait."""
    case = Case(request(0, 8, 12), request(1, 20, 3), blocks=7)
    assert case.step() == ("", "01", "")
    case.scheduler.waiting.append(SequenceGroup(request(2, 1, 1, arrival=0.5)))  # as if it had been driven out earlier
    assert case.step() == ("0", "", "1")
    assert case.step() == ("0", "2", "")


def test_swapped_requests_go_strictly_before_waiting_ones() -> None:
    """Request 2 would fit into the free block all the time while 1 is out."""
    case = Case(request(0, 8, 6), request(1, 8, 3, n=2), request(2, 1, 1), blocks=4, cpu=8)
    assert case.steps(2) == [("", "01", ""), ("0", "", "1")]
    assert case.steps(3) == [("0", "", "")] * 3 and case.scheduler.manager.num_free_blocks == 1
    assert case.step() == ("0", "", "") and case.ended == "0"
    assert case.steps(2) == [("1", "", "")] * 2 and case.ended == "1"
    assert case.step() == ("", "2", "")
    check_log(case.log, [group.request for group in case.groups], case.scheduler.config)


def test_swap_space_can_outgrow_the_gpu_pool() -> None:
    """§4.5 says that swapped blocks never outnumber the GPU's. They can: what the swapped ones leave is filled by those
    that still run, which are swapped in turn, each with more than the one before."""
    requests = [request(number, 1, 22) for number in range(8)]
    for cpu, expected in ((1000, 40), (24, 23)):
        config = SchedulerConfig(preemption=PreemptionMode.SWAP)
        shadow = Shadow(Scheduler(PagedKVCacheManager(24, 1, 0.0, cpu), config), seed=0)
        shadow.run([replace(one, arrival_s=0.0) for one in requests])
        assert shadow.max_swapped_blocks == expected  # bounded only by recomputing what finds no swap space


# Admission


def test_the_watermark_stays_free_at_admission() -> None:
    case = Case(request(0, 36, 4), request(1, 5, 1), blocks=11, watermark=0.1)
    assert case.run() == ["0", "0", "0", "0", "1"]
    case = Case(request(0, 36, 4), request(1, 4, 1), blocks=11, watermark=0.1)
    assert case.run() == ["01", "0", "0", "0"]
    case = Case(request(0, 40, 3), blocks=12, watermark=0.1)
    case.run()
    assert case.scheduler.num_preemptions == 0  # the 41st token takes the block that admission had to leave


def test_sequences_are_capped() -> None:
    case = Case(*(request(number, 2, 2, n=2) for number in range(3)), request(3, 2, 2), max_num_seqs=5)
    assert case.run() == ["01", "01", "23", "23"]


def test_a_running_group_counts_once_where_the_artifact_counts_so() -> None:
    """1 + 2 sequences pass the cap of 3, and so would any number of groups but for the newcomer's own."""
    requests = [*(request(number, 2, 2, n=2) for number in range(3)), request(3, 2, 2)]
    case = Case(*requests, max_num_seqs=3, groups_count_once=True)
    assert case.run() == ["01", "01", "23", "23"]
    assert Case(*requests, max_num_seqs=3).run()[0] == "0"


def test_prompts_and_decoding_sequences_share_the_token_cap() -> None:
    case = Case(request(0, 6, 3), request(1, 5, 1), request(2, 5, 1), max_num_seqs=4, max_num_batched_tokens=10)
    assert case.step() == ("", "0", "")  # 6 + 5 > 10
    assert case.step() == ("0", "1", "")  # 1 + 5 + 5 > 10
    assert case.step() == ("0", "2", "")
    case = Case(request(0, 6, 3), request(1, 5, 1), request(2, 4, 1), max_num_seqs=4, max_num_batched_tokens=10)
    assert case.steps(2) == [("", "0", ""), ("0", "12", "")]


def test_a_preempted_request_that_outgrew_the_token_cap_returns_alone() -> None:
    case = Case(
        request(0, 4, 13), request(1, 4, 13), request(2, 7, 1), blocks=5, max_num_seqs=3, max_num_batched_tokens=8
    )
    assert case.steps(6)[-1] == ("0", "", "1")  # with its 9 tokens it needs 3 blocks, and 2 are free
    assert case.steps(7) == [("0", "", "")] * 7 and case.ended == "0"
    assert case.step() == ("", "1", "") and case.output.num_prefill_tokens == 9
    assert case.step() == ("1", "2", "")
    case.run()
    check_log(case.log, [group.request for group in case.groups], case.scheduler.config)


def test_parallel_samples_of_one_prompt_cost_one_prompt() -> None:
    case = Case(request(0, 10, 2, n=3), size=4)
    case.step()
    assert case.output.num_prefill_tokens == 10 and case.output.num_decode_seqs == 0
    case.step()
    assert case.output.num_decode_seqs == 3 and case.output.context_tokens == 33


# Request-level batching


def reserving(blocks: int = 64) -> ContiguousKVCacheManager:
    return ContiguousKVCacheManager(blocks, 4, reservation=reserve_oracle, max_model_len=64)


def test_a_static_batch_is_cut_before_it_would_be_padded_too_far() -> None:
    """Longest prompt + longest output of 0 and 1 are 9 + 20, with 2 they would be 11 + 20. Alone each may start."""
    requests = request(0, 2, 20), request(1, 9, 3), request(2, 11, 1), request(3, 2, 30)
    static = {"batching": Batching.REQUEST, "max_num_seqs": 8, "max_num_batched_tokens": None}
    case = Case(*requests, manager=reserving(), **static, max_padded_len=30)
    assert case.step() == ("", "01", "")
    assert case.steps(19)[-1] == ("01", "", "") and case.ended == "01"
    assert case.step() == ("", "2", "") and case.ended == "2"
    assert case.step() == ("", "3", "")
    assert Case(*requests, manager=reserving(), **static).step() == ("", "0123", "")


def test_a_static_batch_forms_runs_and_returns_together() -> None:
    case = Case(
        request(0, 4, 2),
        request(1, 4, 5),
        request(2, 4, 1),
        request(3, 4, 1),
        manager=reserving(),
        batching=Batching.REQUEST,
        max_num_seqs=3,
        max_num_batched_tokens=None,
    )
    assert case.step() == ("", "012", "") and case.ended == ""
    assert case.steps(3) == [("012", "", "")] * 3 and case.ended == ""  # 2 and 0 are done, but computed along
    assert case.step() == ("012", "", "") and case.ended == "012"
    assert case.step() == ("", "3", "") and case.ended == "3"
    assert [event.detail["tokens"] for event in case.log if event.kind == "finish"] == [2, 5, 1, 1]


def test_iteration_level_batching_fills_the_gaps_of_the_same_requests() -> None:
    case = Case(
        request(0, 4, 2),
        request(1, 4, 5),
        request(2, 4, 1),
        request(3, 4, 1),
        manager=reserving(),
        max_num_seqs=3,
        max_num_batched_tokens=None,
    )
    assert case.run() == ["012", "013", "1", "1", "1"]


# Early stops


def test_a_sequence_that_stops_frees_its_blocks_and_the_last_one_ends_the_group() -> None:
    case = Case(request(0, 4, 50, n=3), request(1, 4, 2), blocks=64)
    case.step()
    scheduler, group = case.scheduler, case.groups[0]
    first, second, third = group.seqs
    assert scheduler.update(scheduler.schedule(), stopped=[(group, second)]) == [case.groups[1]]
    assert (
        scheduler.manager.num_free_blocks == 64 - 1 - 2
        and scheduler.running.num_seqs == 2
        and group.seqs == [first, third]
    )
    output = scheduler.schedule()
    assert output.context_tokens == 2 * 6
    assert scheduler.update(output, stopped=[(group, first), (group, third)]) == [group]
    assert not scheduler.has_work and scheduler.manager.num_free_blocks == 64
    assert case.log[-1] == Event(3, "finish", 0, {"tokens": 3})


def test_nothing_is_copied_for_a_group_that_has_ended() -> None:
    beams = request(0, 4, 2, n=3, beam=True)
    case = Case(request(1, 4, 1, n=3), beams, manager=reserving(), max_num_batched_tokens=None)
    scheduler = case.scheduler
    assert scheduler.update(scheduler.schedule(), {case.groups[1]: [0, 0, 0]}) == [case.groups[0]]
    output = scheduler.schedule()
    assert len(output.cache_ops) == 2 + 2  # the prompt for two more beams, then a beam step; nothing of the other
    assert scheduler.update(output, {case.groups[1]: [1, 1, 1]}) == [case.groups[1]]
    assert scheduler.schedule().cache_ops == []


# Bad input


@pytest.mark.parametrize(
    "one, manager, message",
    (
        (request(0, 21, 1), PagedKVCacheManager(99, 4), "prompt of 21 tokens.*max_num_batched_tokens = 20"),
        (request(0, 2, 1, n=5), PagedKVCacheManager(99, 4), "5 sequences.*max_num_seqs = 4"),
        (request(0, 16, 6), PagedKVCacheManager(5, 4), "does not fit into an empty pool of 5 blocks"),
        (request(0, 8, 9, n=4), PagedKVCacheManager(9, 4), "8 \\+ 9 tokens x 4 sequences"),
        (request(0, 16, 8), reserving(5), "does not fit into an empty pool"),
        (request(0, 16, 50), reserving(), "too short"),
    ),
)
def test_a_request_that_can_never_run_is_refused_when_it_is_added(
    one: Request, manager: KVCacheManager, message: str
) -> None:
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=20))
    with pytest.raises(UserError, match=message):
        scheduler.add(one)
    assert not scheduler.has_work


@pytest.mark.parametrize(
    "one, manager",
    (
        (request(0, 20, 1), PagedKVCacheManager(99, 4)),
        (request(0, 2, 1, n=4), PagedKVCacheManager(99, 4)),
        (request(0, 16, 5), PagedKVCacheManager(5, 4, watermark=0)),
        (request(0, 8, 5, n=4), PagedKVCacheManager(6, 4, watermark=0)),
        (request(0, 16, 16), reserving(8)),
    ),
)
def test_the_largest_request_that_can_run_does(one: Request, manager: KVCacheManager) -> None:
    case = Case(one, manager=manager, max_num_seqs=4, max_num_batched_tokens=20)
    assert len(case.run()) == one.output_tokens and not case.scheduler.num_preemptions


@pytest.mark.parametrize(
    "config, message",
    (
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_padded_len": 2040}, "max_padded_len = 2040 is for static batches"),
        ({"batching": Batching.REQUEST, "max_padded_len": 0}, "max_padded_len = 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens = 0"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_seqs = 9 is more than max_num_batched_tokens = 8"),
    ),
)
def test_caps_that_cannot_work(config: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        SchedulerConfig(**config)


def test_request_level_batching_needs_reserved_memory() -> None:
    with pytest.raises(UserError, match="reserves everything"):
        Scheduler(PagedKVCacheManager(9, 4), SchedulerConfig(batching=Batching.REQUEST))


# All rules on random runs


class Watchful(Shadow):
    """Also checks that nobody waits or is driven out without a reason."""

    def __init__(self, scheduler: Scheduler, *arguments: object) -> None:
        super().__init__(scheduler, *arguments)
        self.refusals = 0
        can_append_slots = scheduler.manager.can_append_slots

        def counted(group: SequenceGroup, num_tokens: int) -> bool:
            answer = can_append_slots(group, num_tokens)
            self.refusals += not answer
            return answer

        scheduler.manager.can_append_slots = counted

    def _check_contents(self, output: SchedulerOutput) -> None:
        super()._check_contents(output)
        assert len(output.preempted) == self.refusals, "driven out although there was room"
        self.refusals = 0
        scheduler = self.scheduler
        if output.preempted:
            assert not output.prefills
        elif scheduler.swapped:
            head = scheduler.swapped[0]
            assert not self.manager.can_swap_in(head, head.num_stored(output.iteration))
        elif scheduler.waiting:
            head = scheduler.waiting[0]
            length = head.request.prompt_tokens + self.emitted[head]
            limit, used = (scheduler.config.max_num_batched_tokens, output.num_decode_seqs + output.num_prefill_tokens)
            exhausted = limit is not None and used + self._cost(head, length) > limit
            self.seen["exhausted"] += exhausted
            in_batch = scheduler.config.batching is Batching.REQUEST and output.decodes
            too_many = scheduler.running.num_seqs + len(head.seqs) > scheduler.config.max_num_seqs
            assert in_batch or too_many or exhausted or not self.manager.can_allocate(head, length)

    def _cost(self, group: SequenceGroup, length: int) -> int:
        """The prompt once; of a diverged group, all but the prompt's full blocks once per sequence."""
        common = length if not self.emitted[group] else group.request.prompt_tokens // self.size * self.size
        alone = len(group.seqs) == 1 or not self.manager.shares
        return length if alone else common + (length - common) * len(group.seqs)


def obey(build: Build, decoding: str, examples: int, *configs: tuple) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples)
    @given(loads(decoding))
    def check(load: Load) -> None:
        for arguments in configs:
            log: list[Event] = []
            scheduler = load.scheduler(build, load.config(*arguments), log)
            seen.update(Watchful(scheduler, load.seed, load.stop_rate).run(load.requests))
            check_log(log, load.requests, scheduler.config, exact_lengths=not load.stop_rate)
            seen.update(event.kind for event in log)

    check()
    return seen


@pytest.mark.parametrize("decoding", [decoding for decoding in DECODINGS if decoding != "prefix"])
@pytest.mark.parametrize("mode", PreemptionMode)
def test_paged_runs_obey_every_rule(mode: PreemptionMode, decoding: str) -> None:
    seen = obey(paged, decoding, 50, (mode,))
    assert seen["preempt"] and seen["append"] and seen["exhausted"]
    assert bool(seen["resume"]) == (
        mode is PreemptionMode.SWAP or (mode is PreemptionMode.BY_GROUP and decoding != "single")
    )


@pytest.mark.parametrize("reservation", (reserve_max, reserve_pow2, reserve_oracle))
def test_contiguous_runs_obey_every_rule(reservation: Reservation) -> None:
    seen = obey(contiguous(reservation), "mixed", 40, *((PreemptionMode.BY_GROUP, batching) for batching in Batching))
    assert seen["held"] and seen["fork"] and not seen["preempt"] and not seen["append"]
