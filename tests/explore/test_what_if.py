"""What if: no difference where nothing is changed, the known first difference where something is, costs of two plain
runs, and memory in order in what comes of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fuzz import RESERVATIONS, Case, CheckedEngine, draw
from shadow import CachingShadow, Shadow

import repro
from repro.engine.config import DEPLOYMENTS, Deployment
from repro.engine.events import Event
from repro.engine.loop import Engine, Observer
from repro.engine.memory import OpKind
from repro.engine.scheduler import SchedulerOutput
from repro.engine.scheduler_config import PreemptionMode
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.engine.systems import SYSTEMS, System
from repro.errors import UserError
from repro.explore.decision import Deciding, Decision
from repro.explore.difference import Difference
from repro.history.recipe import Setup, decisions
from repro.simulate.cost_model import CostModel
from repro.simulate.serve import Served
from repro.workloads import Trace

COSTS = CostModel("test", 0.02, 0.0004, 0.0, 1e-6, 1e-4, 0.0, 0.001, 0.002)
PAPER = DEPLOYMENTS["opt-13b"]
#: of 512 slots, or of as many as the longest chunk takes three times
SMALL = Deployment(replace(PAPER.model, max_model_len=256), PAPER.device, 1, 512)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """Short requests that come much faster than they are served."""
    lengths = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    dice = random.Random(7)
    pairs = [f"{dice.randint(3, 60)},{dice.randint(2, 90)}" for _ in range(60)]
    lengths.write_text("prompt_tokens,output_tokens\n" + "\n".join(pairs) + "\n")
    return [repro.make_trace("sharegpt", rate=12.0, duration_s=4.0, seed=seed, lengths=lengths) for seed in range(3)]


def run(system: str | System, trace: Trace, **more: Any) -> Served:
    return repro.serve(system, SMALL, trace, COSTS, log=[], **more)


@pytest.fixture(scope="module")
def scarce(traces: list[Trace]) -> Served:
    """A run of vLLM that drives many out."""
    return run("vllm", traces[0])


@pytest.mark.parametrize(
    ("system", "n"), [*((name, 1) for name in SYSTEMS), ("vllm", 2), ("vllm-v1", 2), ("orca-max", 2)]
)
def test_with_nothing_changed_there_is_no_difference(system: str, n: int, traces: list[Trace]) -> None:
    preempted = 0
    for trace in traces:
        served = run(system, trace, sampling=SamplingParams(n=n), shared_prefix_tokens=16 if n == 2 else 0)
        same = repro.what_if(served)
        assert same.first is None and same.requests == [] and len(same.before.events) >= 3 * len(trace)
        assert same.num_decisions["before"] == same.num_decisions["after"] == 0 < same.num_decisions["both"]
        assert all(row["difference"] == 0 for row in same.costs())
        assert repr(same) == "What if nothing is changed? Every decision is the same, and every time."
        preempted += same.costs()[5]["before"]
        # A setting that is what it was is no change, either; single iterations are those that were merged.
        usual = SYSTEMS[system].scheduler.order
        assert repro.what_if(served, order=usual, num_blocks=served.engine.scheduler.manager.num_blocks).first is None
    assert (preempted > 0) == (system in ("vllm", "vllm-v1"))


# Settings


class Counted(Observer):
    """Blocks moved, by kind, and tokens computed again, in single iterations."""

    next_s = 0.0

    def __init__(self) -> None:
        self.moved: Counter[OpKind] = Counter()
        self.stored: Counter[SequenceGroup] = Counter()
        self.again = 0

    def observe(self, engine: Engine, output: SchedulerOutput, start_s: float) -> None:
        self.moved.update(op.kind for op in output.cache_ops)
        for part in (*output.prefills, *output.chunks):
            self.again += max(0, min(part.num_tokens, self.stored[part.group]) - part.num_cached)
        for group, tokens in engine.scheduler.stored_lengths(output.iteration):
            self.stored[group] = max(self.stored[group], tokens)


def plain(system: System | str, deployment: Deployment, trace: Trace, **more: Any) -> dict[str, float]:
    """The costs of a run, from what the public function returns and an observer sees."""
    counted = Counted()
    served = repro.serve(system, deployment, trace, COSTS, observers=(counted,), **more)
    outcomes, manager = served.outcomes, served.engine.scheduler
    lasted = max(one.finish_s for one in outcomes) - outcomes[0].request.arrival_s
    width = outcomes[0].request.sampling.n
    return {
        "iterations": manager.iteration,
        "duration": lasted,
        "throughput": sum(one.request.output_tokens for one in outcomes) * width / lasted,
        "latency": math.fsum(one.finish_s - one.request.arrival_s for one in outcomes) / len(outcomes),
        "normalized_latency": served.latency_s_per_token,
        "preemptions": manager.num_preemptions,
        "tokens_recomputed": counted.again,
        "blocks_swapped_out": counted.moved[OpKind.SWAP_OUT],
        "blocks_swapped_in": counted.moved[OpKind.SWAP_IN],
        "blocks_copied": counted.moved[OpKind.COPY],
    }


VLLM, V1 = SYSTEMS["vllm"], SYSTEMS["vllm-v1"]
LARGER = replace(SMALL, kv_slots=640)
CHANGES: list[tuple[System, dict[str, Any], System, Deployment, dict[str, Any]]] = [
    # what ran, what is changed, and the same said to `serve`
    (VLLM, {"preemption": "swap"}, VLLM.with_scheduler(preemption="swap"), SMALL, {}),
    (VLLM, {"num_blocks": 40}, VLLM, LARGER, {}),
    (VLLM, {"max_num_seqs": 5}, VLLM.with_scheduler(max_num_seqs=5), SMALL, {}),
    (VLLM, {"watermark": 0.2}, replace(VLLM, watermark=0.2), SMALL, {}),
    (VLLM, {"block_size": 4}, VLLM, SMALL, {"block_size": 4}),
    (VLLM, {"order": "shortest_prompt"}, VLLM.with_scheduler(order="shortest_prompt"), SMALL, {}),
    (VLLM, {"reservation": "oracle"}, replace(VLLM, reservation=SYSTEMS["orca-oracle"].reservation), SMALL, {}),
    (VLLM, {"prefix_caching": True}, replace(VLLM, prefix_caching=True), SMALL, {}),
    (VLLM, {"system": "vllm-v1"}, V1, SMALL, {}),
    (
        V1,
        {"max_num_batched_tokens": 20, "max_num_seqs": 20},
        V1.with_scheduler(max_num_batched_tokens=20, max_num_seqs=20),
        SMALL,
        {},
    ),
    (
        V1,
        {"prefix_caching": False, "max_num_seqs": 7},
        replace(V1.with_scheduler(max_num_seqs=7), prefix_caching=False),
        SMALL,
        {},
    ),
]


@pytest.mark.parametrize(("was", "changes", "system", "deployment", "more"), CHANGES, ids=lambda one: str(one)[:40])
def test_a_setting_changed_is_the_run_with_this_setting(
    was: System, changes: dict, system: System, deployment: Deployment, more: dict, traces: list[Trace]
) -> None:
    parted = repro.what_if(run(was, traces[1], shared_prefix_tokens=20), **changes)
    other = repro.serve(system, deployment, traces[1], COSTS, log=[], shared_prefix_tokens=20, **more)
    before, after = run(was, traces[1], shared_prefix_tokens=20).events, other.events
    assert decisions(parted.before.events) == decisions(before) and decisions(parted.after.events) == decisions(after)
    known = next(pair for pair in zip(decisions(before), decisions(after)) if pair[0] != pair[1])
    assert (parted.first.before, parted.first.after) == known
    assert parted.first.iteration == min(event.iteration for event in known)
    same(
        parted,
        plain(was, SMALL, traces[1], shared_prefix_tokens=20),
        plain(system, deployment, traces[1], shared_prefix_tokens=20, **more),
    )
    assert {one.request.request_id for one in other.outcomes} >= set(parted.requests) != set()


def same(parted: Difference, before: dict[str, float], after: dict[str, float]) -> None:
    """The costs of two plain runs; the sums and means of the requests' own are these, too."""
    costs, frame = {row["cost"]: row for row in parted.costs()}, parted.to_frame()
    assert costs.keys() == before.keys()
    for name, row in costs.items():
        assert row["before"] == pytest.approx(before[name], rel=1e-9), name
        assert row["after"] == pytest.approx(after[name], rel=1e-9), name
        assert row["difference"] == row["after"] - row["before"]
        if f"{name}_before" in frame:
            of_all = frame.mean() if row["unit"].startswith("s") else frame.sum()
            for when in ("before", "after", "difference"):
                assert of_all[f"{name}_{when}"] == pytest.approx(row[when], rel=1e-9, abs=1e-9)
    causes = [name for name in frame if name.endswith("_difference") and f"{name[:-11]}_before" not in frame]
    assert len(causes) == 8
    assert frame[causes].sum(axis=1).to_numpy() == pytest.approx(frame["latency_difference"].to_numpy(), abs=1e-9)


def test_swapping_recomputes_nothing_and_moves_what_it_takes_back(scarce: Served) -> None:
    costs = {row["cost"]: row for row in repro.what_if(scarce, preemption="swap").costs()}
    assert costs["tokens_recomputed"]["before"] > 0 == costs["tokens_recomputed"]["after"]
    assert costs["blocks_swapped_out"]["after"] == costs["blocks_swapped_in"]["after"] > 0


# Single decisions


@pytest.mark.parametrize("system", ["vllm", "vllm-v1"])
def test_one_decision_changed_parts_the_runs_there(system: str, traces: list[Trace]) -> None:
    served = run(system, traces[0])
    events = decisions(served.events)
    preempted = [event for event in events if event.kind == "preempt"]
    firsts = {event.iteration: event for event in reversed(preempted)}
    planted = 0
    for at, event in list(firsts.items())[::5]:
        holders = candidates(served, at)
        assert event.request_id == holders[-1]
        for victim in {holders[0], holders[len(holders) // 2]} - {event.request_id}:
            parted = repro.what_if(served, at=at, victim=victim)
            parts_at(parted, events, event)
            now = parted.first.after
            assert (now.kind, now.request_id) == ("preempt", victim)
            assert f"request {event.request_id} is driven out for " in str(parted.first)
            assert f"Now: request {victim} is driven out for " in str(parted.first)
            planted += 1
        assert repro.what_if(served, at=at, victim=event.request_id).first is None
    assert planted > 5


def candidates(served: Served, at: int) -> list[int]:
    """Who could be driven out first in an iteration, as the message says that refuses another."""
    with pytest.raises(
        UserError, match=f"victim = 99999 cannot be driven out in iteration {at}; choose from"
    ) as refused:
        repro.what_if(served, at=at, victim=99_999)
    return [int(one) for one in str(refused.value).rpartition("choose from ")[2].removesuffix(" ...").split(", ")]


def parts_at(parted: Difference, events: list[Event], event: Event) -> None:
    """The first difference is this event, and nothing before it has changed."""
    assert parted.first is not None and parted.first.before == event
    place = events.index(event)
    assert decisions(parted.before.events) == events
    assert decisions(parted.after.events)[:place] == events[:place]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_one_preemption_by_the_other_way(mode: str, traces: list[Trace]) -> None:
    usual = "recompute" if mode == "swap" else "swap"
    served = run(VLLM.with_scheduler(preemption=usual), traces[0])
    events = decisions(served.events)
    for event in [event for event in events if event.kind == "preempt"][::7]:
        first = next(one for one in events if one.kind == "preempt" and one.iteration == event.iteration)
        parted = repro.what_if(served, at=event.iteration, preemption=mode)
        parts_at(parted, events, first)
        assert parted.first.after.detail["mode"] == mode and parted.first.after.request_id == first.request_id
        others = [one for one in parted.after.events if one.kind == "preempt" and one.detail["mode"] == mode]
        assert others == [parted.first.after]


@pytest.mark.parametrize("system", ["vllm", "vllm-v1", "orca-pow2"])
def test_a_request_that_is_held_back_starts_later(system: str, traces: list[Trace]) -> None:
    served = run(system, traces[2])
    events, held = decisions(served.events), 0
    for event in [event for event in events if event.kind == "admit"][3::6]:
        try:
            parted = repro.what_if(served, at=event.iteration, hold=event.request_id)
        except UserError as error:
            assert "nothing else runs in iteration" in str(error)
            continue
        parts_at(parted, events, event)
        later = [one for one in parted.after.events if (one.kind, one.request_id) == ("admit", event.request_id)]
        was = [one for one in events if (one.kind, one.request_id) == ("admit", event.request_id)]
        assert later[was.index(event)].iteration > event.iteration
        held += 1
    assert held > 2


def test_who_is_held_back_waits_for_that_reason(scarce: Served) -> None:
    event = [event for event in scarce.events if event.kind == "admit"][8]
    _, after = repro.what_if(scarce, at=event.iteration, hold=event.request_id).maps
    said = [one.sentence for one in after.happenings if one.frame == event.iteration]
    assert f"Request {event.request_id} waits: it is held back." in said


def test_the_maps_are_those_of_the_two_runs(scarce: Served, traces: list[Trace]) -> None:
    parted = repro.what_if(scarce, num_blocks=40)
    for memory, deployment in zip(parted.maps, (SMALL, LARGER)):
        live = repro.MemoryMap()
        repro.serve("vllm", deployment, traces[0], COSTS, observers=(live,))
        assert memory.tables.deltas == live.tables.deltas and memory.times_s == live.times_s
    assert parted.maps[0].at(parted.first.iteration - 1).tables == parted.maps[1].at(parted.first.iteration - 1).tables
    assert scarce.memory_map().tables.deltas == parted.maps[0].tables.deltas


# Memory and scheduler in the changed run


def setup_of(case: Case) -> Setup:
    system = System("fuzz", "fuzz", case.config(), RESERVATIONS.get(case.system), case.caching, case.watermark)
    sizes = case.num_blocks, case.block_size, case.max_model_len, case.cpu_blocks
    return Setup(system, *sizes, lambda request: ())


class Alike(CachingShadow):
    """The same prompts begin as the same earlier ones do, whatever else is drawn."""

    def register(self, group: SequenceGroup) -> None:
        kept, self.random = self.random, random.Random(f"{group.request.request_id}")
        super().register(group)
        self.random = kept


def checked(case: Case, deciding: Deciding, requests: list[Request], lookahead: int) -> tuple[list[Event], Shadow]:
    """A run that takes the decision, looked at by the shadow store in every iteration."""
    log: list[Event] = []
    kind = Alike if case.caching else Shadow
    shadow = kind(deciding.scheduler(setup_of(case), log), case.seed, lookahead=lookahead)
    shadow.rank = case.rank
    engine = CheckedEngine(shadow)
    engine.observers, engine.most_iterations = (deciding,), 10**6
    engine.run(requests)
    shadow._check_everything_is_returned()
    return log, shadow


def planted(event: Event, victims: list[int], dice: random.Random) -> list[Decision]:
    """Decisions that differ from this one."""
    at = event.iteration
    if event.kind == "admit":
        return [Decision(at, hold=event.request_id)]
    other = PreemptionMode.RECOMPUTE if event.detail["mode"] == "swap" else PreemptionMode.SWAP
    others = [Decision(at, victim=dice.choice(victims))] if victims else []
    return [*others, Decision(at, preemption=other)]


def test_memory_is_in_order_after_a_planted_decision() -> None:
    """Random runs of both schedulers, over paged and contiguous memory, with and without a prefix cache."""
    seen: Counter[str] = Counter()
    for seed in range(160):
        case, dice = draw(seed), random.Random(seed)
        case = replace(case, asks=tuple(replace(ask, beam=False, prefix=None) for ask in case.asks), prefixes=())
        case = replace(case, lookahead=1) if case.caching else case  # an output that is known later is found later
        if case.system == "paged" and not case.chunked:
            case = replace(case, cpu_blocks=max(case.cpu_blocks, case.num_blocks))
        trial = case.scheduler()
        requests = [request for request in case.requests() if taken(trial, request)]
        before, _ = checked(case, Deciding(10**9), requests, case.lookahead)
        preempted = [event for event in before if event.kind == "preempt"]
        there = preempted or [event for event in before if event.kind == "admit"]
        if not there or (not preempted and dice.random() < 0.7):
            continue
        event = dice.choice(there)
        event = next(one for one in there if one.iteration == event.iteration)
        probe = Deciding(event.iteration)
        log, _ = checked(case, probe, requests, 1)
        assert decisions(log) == decisions(before)  # merged or not, watched or not
        for decision in planted(event, [one for one in probe.candidates if one != event.request_id], dice):
            if decision.preemption is not None and case.chunked:
                continue
            try:
                decision.check(log, probe.candidates)
            except UserError as error:
                assert "nothing else runs" in str(error)
                continue
            after, _ = checked(case, Deciding(event.iteration, decision), requests, case.lookahead)
            ended = [[one.request_id for one in events if one.kind == "finish"] for events in (before, after)]
            assert sorted(ended[0]) == sorted(ended[1]) == [request.request_id for request in requests]
            parted = decisions(before) != decisions(after)
            name = "hold" if decision.hold is not None else "victim" if decision.victim is not None else "mode"
            seen[name] += parted
            seen["chunked"] += parted and case.chunked
            seen["cached"] += parted and case.caching
            seen["contiguous"] += parted and case.system != "paged"
    assert min(seen[name] for name in ("hold", "victim", "mode", "chunked", "cached", "contiguous")) >= 1, seen


def taken(scheduler: Any, request: Request) -> bool:
    try:
        scheduler.add(request)
    except UserError:
        return False
    scheduler.waiting.clear()
    return True


# What cannot be


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"preemptoin": "swap"}, r"what_if takes no 'preemptoin' \(did you mean preemption\?\)"),
        ({"preemption": "none"}, "preemption = 'none' cannot be used; give one of 'recompute', 'swap', 'by_group'"),
        ({"num_blocks": 0}, "num_blocks = 0 must be a whole number of at least 1"),
        ({"num_blocks": 3}, "does not fit into an empty pool of 3 blocks of 16"),
        ({"block_size": 5}, "block_size = 5 is not supported"),
        ({"watermark": 2}, "watermark = 2: the share"),
        ({"reservation": "half"}, "unknown reservation 'half'; known: max, oracle, pow2"),
        ({"reservation": "max", "num_blocks": 9}, "does not fit into an empty pool"),
        ({"system": "vlm"}, "unknown system 'vlm'"),
        ({"system": 3}, "system = 3 cannot be used"),
        ({"max_num_seqs": 3000}, "max_num_seqs = 3000 is more than max_num_batched_tokens"),
        ({"at": 5}, "at = 5 changes one decision .* give one of victim, preemption, hold, not nothing"),
        ({"at": 5, "num_blocks": 9}, "give one of victim, preemption, hold, not num_blocks"),
        ({"at": 5, "victim": 1, "hold": 2}, "not victim, hold"),
        ({"at": -1, "victim": 1}, "at = -1 must be a whole number"),
        ({"at": 5, "victim": "last"}, "victim .a request's number. = 'last' must be a whole number"),
        ({"at": 5, "preemption": "by_group"}, "is a rule, not a decision"),
        ({"at": 10**6, "victim": 1}, "at = 1000000 is beyond the end: the run's iterations are 0 to"),
        ({"at": 1, "victim": 1}, "at = 1: this iteration drives nobody out; iterations that do: "),
        ({"at": 1, "preemption": "swap"}, "at = 1: this iteration drives nobody out"),
        ({"at": 1, "hold": 9}, "hold = 9: iteration 1 does not start this request; iterations that do: "),
        ({"at": 0, "hold": 0}, "hold = 0: nothing else runs in iteration 0"),
        ({"hold": 3}, "what_if takes no 'hold'"),
    ],
)
def test_what_cannot_be_is_one_line(asked: dict[str, Any], said: str, scarce: Served) -> None:
    with pytest.raises(UserError, match=said) as refused:
        repro.what_if(scarce, **asked)
    assert "\n" not in str(refused.value)


def test_what_is_no_run_and_what_cannot_be_compared(traces: list[Trace], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run = 3 cannot be used; give what repro.serve"):
        repro.what_if(3)
    with pytest.raises(UserError, match="cannot read the log"):
        repro.what_if(tmp_path / "none")
    with pytest.raises(UserError, match="knows only batching by iteration and preemption by recomputation"):
        repro.what_if(run("vllm-v1", traces[0]), at=1, preemption="swap")
    several = run("vllm", traces[0], sampling=SamplingParams(n=2))
    with pytest.raises(UserError, match="'vllm-v1' runs n samples as other requests than 'vllm'; take n = 1"):
        repro.what_if(several, system="vllm-v1")
    hashed = run("vllm-v1", traces[0], hashes=lambda request: ())
    with pytest.raises(UserError, match="block_size = 8: the run was given hashes of blocks of 16 tokens"):
        repro.what_if(hashed, block_size=8)
    empty = repro.what_if(replace(run("vllm", traces[0]).recipe, turns=[], events=None, outcomes=None))
    assert empty.first is None and empty.costs() == [] and empty.to_frame().empty
    with pytest.raises(UserError, match="nothing has run"):
        empty.html()
    coin = random.Random(1)
    moody = repro.paged_system("moody", victim=lambda groups: coin.choice(groups))
    with pytest.raises(UserError, match="came out otherwise when it was run again"):
        repro.what_if(run(moody, traces[0]))
