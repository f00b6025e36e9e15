"""What if, of a server's log: the decisions are the server's own until they part."""

from __future__ import annotations

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

from serving import served, simulated, until  # noqa: E402
from test_log_and_replay import SOME, talk, write  # noqa: E402

import repro  # noqa: E402
from repro.errors import UserError  # noqa: E402
from repro.history.recipe import decisions  # noqa: E402
from repro.server.log import RequestLog, lines_of  # noqa: E402
from repro.server.replay import Logged  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["vllm", "vllm-v1"])
def test_a_simulated_servers_log_with_something_changed(tmp_path, name):
    path = str(tmp_path / "log")
    with RequestLog(path) as log:
        backend = simulated(name, 512, SOME, log=log)
        with served(backend) as address:
            talk(address, 60, 200)
            until(lambda: not backend.feed.handles)
    logged = Logged.read(path)
    same = repro.what_if(path)
    assert same.first is None and same.requests == [] and same.unit == "s"
    assert decisions(same.before.events) == decisions(logged.events)
    ended = {line["request"] for line in logged.lines if line["ended"] in ("stop", "length")}
    assert set(same.before.ends) == ended and len(ended) < len(logged.lines)  # the others left
    latency = [row["latency_after"] for row in same.rows()]
    assert len(latency) == len(ended) and min(latency) > 0

    preempted = next(event for event in decisions(logged.events) if event.kind == "preempt")
    parted = repro.what_if(path, num_blocks=64)
    place = next(i for i, event in enumerate(decisions(logged.events)) if event == parted.first.before)
    assert decisions(parted.after.events)[:place] == decisions(logged.events)[:place]
    costs = {row["cost"]: row for row in parted.costs()}
    assert costs["preemptions"]["after"] < costs["preemptions"]["before"]
    with pytest.raises(UserError, match="cannot be driven out in iteration"):
        repro.what_if(path, at=preempted.iteration, victim=9999)
    held = next(event for event in decisions(logged.events) if event.kind == "admit" and event.iteration > 3)
    once = repro.what_if(path, at=held.iteration, hold=held.request_id)
    assert once.first.before == held
    assert repro.memory_map(path).tables.deltas == once.maps[0].tables.deltas
    with pytest.raises(UserError, match="block_size = 8: this run is known in blocks of 16 tokens only"):
        repro.what_if(path, block_size=8)
    if name == "vllm":
        with pytest.raises(UserError, match="this run does not know what its blocks hold"):
            repro.what_if(path, prefix_caching=True)

    head, lines = lines_of(path)
    cut = write(tmp_path / "cut", [{"served": head}, *({**line, "ended": None} for line in lines)])
    with pytest.raises(UserError, match="the server has ended before all of its requests did"):
        repro.what_if(cut)
    for line in lines:
        line["output_lengths"], line["stopped"] = [1] * line["n"], [True] * line["n"]
    with pytest.raises(UserError, match="came out otherwise when it was run again"):
        repro.what_if(write(tmp_path / "other", [{"served": head}, *lines]))


def test_a_real_servers_log_counts_in_iterations(tmp_path):
    pytest.importorskip("torch")
    from talking import talking
    from tiny import llm

    from repro.llm.pool import PoolSize
    from repro.server.backend import RealBackend

    path = str(tmp_path / "log")
    with RequestLog(path) as log:
        backend = RealBackend(llm(talking(), system="vllm", pool=PoolSize(num_blocks=30)), log=log)
        with served(backend) as address:
            talk(address, 40, 44, beams=True)
            until(lambda: not backend.feed.handles)
    events = decisions(Logged.read(path).events)
    assert {"fork", "preempt"} <= {event.kind for event in events}
    same = repro.what_if(path)
    assert same.first is None and same.requests == [] and same.unit == "iterations"
    assert decisions(same.before.events) == events
    more = repro.what_if(path, num_blocks=200)
    costs = {row["cost"]: row for row in more.costs()}
    assert costs["preemptions"]["before"] > 0 == costs["preemptions"]["after"]
    assert costs["iterations"]["difference"] <= 0 and "seconds" not in str(more)
