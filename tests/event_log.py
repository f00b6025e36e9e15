"""Replays a scheduler's event log and checks each decision, knowing only the requests and the rules."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from repro.engine.events import Event
from repro.engine.scheduler import Batching, PreemptionMode, SchedulerConfig
from repro.engine.sequence import Request


def check_log(
    events: Items[Event],
    requests: Items[Request],
    config: SchedulerConfig,
    exact_lengths: bool = True,
    order: Mapping[int, tuple[float, ...]] | None = None,
    last_goes: bool = True,
) -> None:
    """`exact_lengths`: nothing stopped early, so every request must run exactly as long as the trace says. `order`: the
    places of the requests in the queue (first come, first served); `last_goes`: whether its last one is driven out."""
    by_id = {request.request_id: request for request in requests}
    order = order or {request.request_id: (request.arrival_s, request.request_id) for request in requests}
    state: dict[int, str] = {}
    entered: dict[int, int] = {}  # iteration in which a running request entered
    generated = dict.fromkeys(by_id, 0)
    now, phase, preempting = -1, 0, -1
    phases = {"append": 0, "preempt": 0, "resume": 1, "admit": 2}

    def those(name: str) -> list[int]:
        return [number for number, value in state.items() if value == name]

    for iteration, kind, number, detail in events:
        request = by_id[number]
        assert iteration >= now, "the log goes back in time"
        if iteration > now:
            now, phase = iteration, 0
        if kind in phases:  # running requests first, then swapped ones, then waiting ones
            assert phases[kind] >= phase or (kind == "append" and detail and phase == 1)
            phase = max(phase, phases[kind])
        if kind == "arrive":
            assert number not in state
            state[number] = "waiting"
        elif kind in ("append", "copy"):
            assert state[number] == "running" and detail["blocks"] > 0
        elif kind == "admit":
            assert state[number] == "waiting" and now != preempting
            assert not those("swapped"), "a swapped request was passed over by a waiting one"
            assert order[number] == min(order[other] for other in those("waiting")), "somebody was overtaken"
            if config.batching is Batching.REQUEST:
                assert all(entered[other] == now for other in those("running")), "joined a batch that was under way"
            state[number], entered[number] = "running", now
        elif kind == "resume":
            assert state[number] == "swapped" and now != preempting
            assert order[number] == min(order[other] for other in those("swapped"))
            state[number], entered[number] = "running", now
        elif kind == "preempt":
            preempting = now
            running = those("running")
            assert detail["requester"] in running
            is_last = order[number] == max(order[other] for other in running)
            assert is_last or not last_goes, "the victim is not the latest arrival"
            may_swap = config.preemption is PreemptionMode.SWAP or (
                config.preemption is PreemptionMode.BY_GROUP and request.sampling.n > 1
            )
            assert detail["mode"] == "recompute" or may_swap
            generated[number] += now - entered.pop(number)
            if detail["mode"] == "recompute":
                assert detail["tokens"] == request.prompt_tokens + generated[number] - 1
            state[number] = "swapped" if detail["mode"] == "swap" else "waiting"
        elif kind == "abort":
            assert state[number] != "finished"
            state[number] = "finished"
        elif kind == "fork":
            assert state[number] == "running" and request.sampling.use_beam_search
        elif kind == "finish":
            assert state[number] == "running"
            generated[number] += now - entered.pop(number)
            assert detail["tokens"] == min(generated[number], request.output_tokens)
            if exact_lengths:
                assert detail["tokens"] == request.output_tokens
                assert generated[number] == request.output_tokens or config.batching is Batching.REQUEST
            state[number] = "finished"
        else:
            raise AssertionError(f"unknown event {kind}")
    assert state == dict.fromkeys(by_id, "finished")
