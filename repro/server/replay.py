"""A server's log (`repro.server.log`) in the simulator: whether it decides the same, and how long it says that it took.

Decisions do not depend on time: requests join, and are taken back, in the iteration in which they did so at the server;
outputs are as long as they were; beams continue where they did. Whatever served, the scheduler and the memory must then
decide the same, event for event. Times can be compared where a cost model made them: the same arrivals in virtual time,
under the server's own cost model."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median, quantiles
from typing import Any

from repro.checks import lookup
from repro.engine.events import Event
from repro.engine.executor import Executor
from repro.engine.loop import Engine, Outcome
from repro.engine.memory.prefix_cache import Hashes
from repro.engine.sequence import Request
from repro.engine.systems import system
from repro.errors import UserError
from repro.history.recipe import Setup
from repro.history.recorded import ByIteration, Ends
from repro.sampling_params import SamplingParams
from repro.server.log import lines_of
from repro.simulate.cost_model import CostModel, PaddedCostModel
from repro.simulate.executor import SimulatedExecutor

_COSTS = {kind.__name__: kind for kind in (CostModel, PaddedCostModel)}


@dataclass(frozen=True)
class Logged:
    """A log. `events` are all of its scheduler's, in order; `latency_s` is from arrival to the end, of those that have
    come to one."""

    head: dict[str, Any]
    requests: list[Request]
    lines: list[dict[str, Any]]
    events: list[Event]

    @classmethod
    def read(cls, path: str) -> Logged:
        """UserError for what is no log."""
        head, lines = lines_of(path)
        try:
            requests = [_request(line) for line in lines]
            events = [(*event, line["request"]) for line in lines for event in line["events"]]
            events.sort(key=itemgetter(0))
        except (KeyError, TypeError, UserError) as error:
            raise UserError(
                f"{path} is no whole log of `repro serve --log` ({type(error).__name__}: {error})"
            ) from None
        found = [Event(iteration, kind, of, _detail(said)) for _, iteration, kind, said, of in events]
        return cls(head, requests, lines, found)

    @property
    def is_whole(self) -> bool:
        """Whether all had ended before the server did."""
        return all(line["ended"] for line in self.lines)

    @property
    def latency_s(self) -> dict[int, float]:
        ended = [line for line in self.lines if line["ended"] in ("stop", "length")]
        return {line["request"]: (line["end_ms"] - line["timestamp"]) / 1000 for line in ended}

    @property
    def setup(self) -> Setup:
        """What served, as far as decisions follow from it."""
        head = self.head
        contents = {line["request"]: [str(one).encode() for one in line["hash_ids"]] for line in self.lines}
        chosen = replace(system(head["system"]), watermark=head["watermark"]).with_scheduler(**head["scheduler"])
        sizes = head["num_blocks"], head["block_size"], head["max_model_len"], head["num_cpu_blocks"]
        hashes: Hashes | None = (lambda request: contents[request.request_id]) if chosen.prefix_caching else None
        return Setup(chosen, *sizes, hashes)

    @property
    def ends(self) -> dict[int, Ends]:
        return {line["request"]: Ends(line["output_lengths"], line["stopped"]) for line in self.lines}

    @property
    def cost_model(self) -> CostModel | None:
        """The server's own; None if it was real."""
        given = self.head["cost_model"]
        if given is None:
            return None
        settings = {name: value for name, value in given.items() if name != "kind"}
        settings["prefill_shape"] = tuple(map(tuple, settings["prefill_shape"]))
        return lookup("cost model", _COSTS, given["kind"])(**settings)


def _detail(said: dict[str, Any]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}


def _request(line: dict[str, Any]) -> Request:
    sampling = SamplingParams(n=line["n"], use_beam_search=line["beams"], max_tokens=line["max_tokens"])
    lengths = line["input_length"], line["max_tokens"]
    return Request(line["request"], line["timestamp"] / 1000, *lengths, sampling, None, line["priority"])


def _engine(logged: Logged, events: list[Event] | None, timing: Executor | None = None) -> Engine:
    """Steps one iteration at a time, as at a server, where a request may come at any time."""
    return Engine(logged.setup.scheduler(events), ByIteration(logged.ends, logged.events, timing))


def decided(logged: Logged) -> list[Event]:
    """What the simulator decides, if requests join and are taken back in the iterations in which they were."""
    events: list[Event] = []
    engine = _engine(logged, events)
    scheduler, by_id = engine.scheduler, {request.request_id: request for request in logged.requests}
    try:
        for event in logged.events:
            if event.kind not in ("arrive", "abort"):
                continue
            while scheduler.iteration < event.iteration and scheduler.has_work:
                engine.step()
            if event.kind == "arrive":
                engine.add(by_id[event.request_id])
            else:
                engine.abort(event.request_id)
        while scheduler.has_work and (logged.is_whole or len(events) < len(logged.events)):
            engine.step()
    except (UserError, RuntimeError):  # it has taken another way, and the comparison says where
        pass
    return events if logged.is_whole else events[: len(logged.events)]


def difference(ours: Items[Event], theirs: Items[Event]) -> str | None:
    """The first of the simulator's events that is not the server's, in one line; None if there is none."""
    for place, (one, other) in enumerate(zip([*ours, None], [*theirs, None])):
        if one != other:
            return f"event {place}: the server has {other or 'no more'}; the simulator has {one or 'no more'}"
    return None


def timed(logged: Logged, cost_model: CostModel) -> dict[int, Outcome]:
    """What comes of each request in virtual time, if they arrive, and are taken back, at the seconds at which they did
    at the server."""
    engine = _engine(logged, None, SimulatedExecutor(cost_model))
    clock, scheduler = engine.clock, engine.scheduler
    arriving = [(request.arrival_s, request.request_id, request) for request in logged.requests]
    leaving = [(line["end_ms"] / 1000, line["request"], None) for line in logged.lines if line["ended"] == "abort"]
    outcomes: dict[int, Outcome] = {}
    for moment, request_id, request in sorted([*arriving, *leaving], key=lambda one: one[:2]):
        while clock.now < moment:
            engine.step(moment) if scheduler.has_work else clock.wait_until(moment)
        if request is not None:
            outcomes[request_id] = engine.add(request)
        elif math.isnan(outcomes[request_id].finish_s):  # here it may have ended before it was taken back
            engine.abort(request_id)
    while scheduler.has_work:
        engine.step()
    return outcomes


def main(path: str) -> int:
    """`repro replay`: the exit code, 1 if the simulator decides otherwise."""
    logged = Logged.read(path)
    print(f"{logged.head['about']}")
    first = difference(decided(logged), logged.events)
    print(f"{len(logged.requests):,} requests, {len(logged.events):,} events: {first or 'equal, event for event'}")
    if logged.cost_model is None:
        print("latencies are a real machine's, and no cost model's: they are not compared")
    elif len(logged.latency_s) > 1:
        ours, theirs = timed(logged, logged.cost_model), logged.latency_s
        virtual_s = {number: ours[number].finish_s - ours[number].request.arrival_s for number in theirs}
        apart = [1000 * abs(virtual_s[number] - seconds) for number, seconds in theirs.items()]
        typical = 1000 * median(theirs.values())
        print(
            f"latency from arrival to end, of {len(apart):,} requests: {typical:,.1f} ms in the median at the server; "
            f"the simulator's is {median(apart):.2f} ms apart in the median, {quantiles(apart, n=100)[-1]:.2f} in 99 %"
        )
    return int(first is not None)
