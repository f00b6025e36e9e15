"""What a real model's run was is decided again in the simulator: its memory map, and what if."""

from __future__ import annotations

import pytest

import repro
from repro.engine.sequence import SamplingParams
from repro.errors import UserError
from repro.history.recipe import decisions

pytest.importorskip("torch")
from tiny import llm  # noqa: E402

from repro.llm.pool import PoolSize  # noqa: E402

PROMPTS = [[1 + number, *range(20, 20 + 3 * number)] for number in range(1, 8)]


def sampling(beams: bool) -> list[SamplingParams]:
    """Samples, some with tokens that end them early, and a beam search."""
    some = [SamplingParams(n=1 + number % 2, max_tokens=9 + number, temperature=0.9) for number in range(7)]
    some[2] = SamplingParams(max_tokens=20, temperature=1.0, stop_token_ids=list(range(0, 101, 4)))
    if beams:
        some[4] = SamplingParams(n=3, max_tokens=12, use_beam_search=True, temperature=0.0)
    return some


@pytest.mark.parametrize(
    ("system", "blocks", "more"),
    [
        ("vllm", 24, {"preemption": "swap"}),
        ("vllm", 24, {}),
        ("vllm-v1", 20, {"max_num_batched_tokens": 16, "max_num_seqs": 6}),
        ("orca-pow2", 64, {}),
    ],
)
def test_its_map_is_that_of_an_observer(tiny, system: str, blocks: int, more: dict) -> None:
    engine = llm(tiny, system=system, pool=PoolSize(num_blocks=blocks), **more)
    live = repro.MemoryMap()
    options = {"arrival_s": [0, 0, 0, 0, 0.02, 0.02, 0.02], "seed": 3, "progress": False, "observers": (live,)}
    made = engine.generate(PROMPTS, sampling(system == "vllm"), **options)
    assert any(sample.finish_reason == "stop" for one in made for sample in one.samples)
    kinds = {event.kind for event in made.events}
    if system.startswith("vllm"):
        assert "preempt" in kinds
    if more.get("preemption") == "swap":
        assert {"resume", "fork"} <= kinds
    again = made.memory_map()
    assert again.tables.deltas == live.tables.deltas and again.happenings == live.happenings
    assert [end for _, end in again.times_s] == pytest.approx([end for _, end in made.recorded.times_s], rel=1e-9)
    assert [start for start, _ in again.times_s] == pytest.approx([start for start, _ in live.times_s], rel=1e-9)
    assert repro.memory_map(made).tables.deltas == live.tables.deltas and again.unit == "s"

    same = repro.what_if(made)
    assert same.first is None and same.requests == [] and same.unit == "iterations"
    assert decisions(same.before.events) == decisions(made.events)
    more_room = repro.what_if(made, num_blocks=200)
    assert (more_room.first is not None) == ("preempt" in kinds or system == "orca-pow2")
    costs = {row["cost"]: row for row in more_room.costs()}
    assert costs["preemptions"]["before"] == made.statistics.num_preemptions and costs["preemptions"]["after"] == 0
    assert costs["latency"]["difference"] <= 0 and costs["latency"]["unit"] == "iterations"
    assert costs["throughput"]["before"] * costs["duration"]["before"] == pytest.approx(made.statistics.output_tokens)
    assert "slot-iterations" in more_room.html() or more_room.maps[0].unit == "iterations"


def test_blocks_of_another_size_find_other_prefixes(tiny) -> None:
    """What blocks hold follows from the tokens, for any size."""
    engine = llm(tiny, system="vllm-v1", pool=PoolSize(num_blocks=40))
    shared = [[5] * 14 + [number] for number in range(6)]
    arrivals = [0.0, *[0.05] * 5]
    made = engine.generate(shared, SamplingParams(max_tokens=3, temperature=0.0), arrival_s=arrivals, progress=False)
    parted = repro.what_if(made, block_size=8)
    found = [event.detail["tokens"] for event in parted.before.events if event.kind == "admit"]
    now = [event.detail["tokens"] for event in parted.after.events if event.kind == "admit"]
    assert found[0] == now[0] == 15 and set(found[1:]) == {3} and set(now[1:]) == {7}
    with pytest.raises(UserError, match=r"came out otherwise.* A prefix cache that knew earlier prompts does so"):
        engine.generate(shared, SamplingParams(max_tokens=3, temperature=0.0), progress=False).memory_map()
