"""What a server's log says is what the simulator decides from it, event for event; and a log keeps nobody's words."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import threading
from collections import Counter
from dataclasses import replace

import pytest

WHY = "the extra `server` is not installed"
for package in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(package, reason=WHY)

from serving import FAST, is_whole, served, simulated, until
from wire import Wire

from repro.cli import main
from repro.engine.systems import SYSTEMS, System, paged_system, register
from repro.errors import UserError
from repro.server import replay
from repro.server.backend import RealBackend
from repro.server.log import RequestLog
from repro.simulate.cost_model import CostModel
from repro.workloads.public import read_trace

pytestmark = pytest.mark.usefixtures("one_thread")
SOME = CostModel("some", 0.002, 1e-5, 0.0, 1e-7, 1e-6, 0.0, 1e-6, 1e-6)


def asked(dice: random.Random, longest: int, beams: bool) -> dict:
    """A request that may share its beginning with others, have several prompts or samples, or end by itself."""
    prompt = [9] * dice.choice([0, 4, 16, longest // 2])
    prompts = [
        prompt + [dice.randrange(5, 90) for _ in range(dice.randrange(1, 8))] for _ in range(dice.choice([1, 2]))
    ]
    body = {"prompt": prompts, "max_tokens": dice.randrange(2, longest // 2 - 8), "n": dice.choice([1, 1, 2, 3])}
    body |= {"seed": dice.randrange(99), "stream": dice.random() < 0.8, "ignore_eos": dice.random() < 0.7}
    if beams and dice.random() < 0.2:
        body |= {"use_beam_search": True, "n": dice.choice([2, 3])}
    elif dice.random() < 0.3:
        body |= {"stop_token_ids": list(range(40, 50)), "stop": ["ab", "time"]}
    return body


def talk(address: str, count: int, longest: int, beams: bool = False) -> None:
    """Requests that come over time, a quarter of which leave before their end."""
    dice = random.Random(11)

    async def one(body: dict, after_s: float, leaves: bool) -> None:
        await asyncio.sleep(after_s)
        async with Wire(address) as wire:
            wire.send("/v1/completions", body)
            if leaves:
                await asyncio.sleep(0.03)
                return
            status, headers = await wire.head()
            assert status == 200
            await wire.reader.readuntil(b"[DONE]\n\n" if body["stream"] else b'"usage"')

    async def all_of_them() -> None:
        plan = [(asked(dice, longest, beams), dice.random() * 0.5, dice.random() < 0.25) for _ in range(count)]
        await asyncio.gather(*[one(*each) for each in plan])

    asyncio.run(all_of_them())


def check(path, kinds: set[str]) -> replay.Logged:
    """The simulator decides the same, and such things have happened. The log."""
    logged = replay.Logged.read(str(path))
    seen = Counter(event.kind for event in logged.events)
    assert kinds <= set(seen), seen
    assert seen["arrive"] == seen["finish"] + seen["abort"] == len(logged.requests) and logged.is_whole
    assert replay.difference(replay.decided(logged), logged.events) is None
    return logged


@pytest.mark.parametrize("name", ["vllm-v1", "vllm", "orca-max", "orca-oracle", "faster-transformer"])
def test_a_simulated_server_and_the_simulator_decide_the_same(tmp_path, name):
    slots = {"orca-max": 8192, "orca-oracle": 2048, "faster-transformer": 16_384}.get(name, 512)
    with RequestLog(str(tmp_path / "log")) as log:
        backend = simulated(name, slots, SOME, log=log)
        with served(backend) as address:
            talk(address, 60, 200)
            until(lambda: not backend.feed.handles)
    logged = check(tmp_path / "log", {"abort", "preempt"} if name.startswith("vllm") else {"abort"})
    assert Counter(line["ended"] for line in logged.lines) == backend.metrics.success
    assert all(backend.metrics.success.values())
    manager = backend.feed.engine.scheduler.manager
    assert (manager.num_hit > 0) == (name == "vllm-v1")
    ours = replay.timed(logged, logged.cost_model)
    assert logged.cost_model == SOME and set(ours) == {request.request_id for request in logged.requests}
    assert all(ours[number].finish_s > ours[number].request.arrival_s for number in logged.latency_s)


@pytest.mark.parametrize("name", ["vllm-v1", "vllm", "orca-max"])
def test_a_real_server_and_the_simulator_decide_the_same(tmp_path, name):
    pytest.importorskip("torch")
    from talking import talking
    from tiny import llm

    from repro.llm.pool import PoolSize

    small = {"max_num_batched_tokens": 24, "max_num_seqs": 8} if name == "vllm-v1" else {}
    blocks = 400 if name == "orca-max" else 30
    with RequestLog(str(tmp_path / "log")) as log:
        engine = llm(talking(), system=name, pool=PoolSize(num_blocks=blocks), **small)
        backend = RealBackend(engine, log=log)
        with served(backend) as address:
            talk(address, 60, 44, beams=name == "vllm")
            until(lambda: not backend.feed.handles)
    more = {"vllm-v1": {"preempt"}, "vllm": {"preempt", "fork", "copy", "resume"}, "orca-max": set()}[name]
    logged = check(tmp_path / "log", {"abort"} | more)
    assert {line["beams"] for line in logged.lines} == {False, name == "vllm"}
    assert any(any(line["stopped"]) for line in logged.lines)
    assert (backend.feed.engine.scheduler.manager.num_hit > 0) == (name == "vllm-v1")
    assert logged.cost_model is None


@pytest.fixture
def log(tmp_path):
    """A small log, and its lines."""
    path = tmp_path / "small.log"
    with RequestLog(str(path)) as log:
        backend = simulated("vllm-v1", 512, SOME, log=log)
        with served(backend) as address:
            talk(address, 30, 200)
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_another_story_is_another_run(log):
    """Each thing that a log says counts."""
    path, lines = log
    victim = next(place for place, line in enumerate(lines) if place and line["ended"] == "length")
    shared = max(range(1, len(lines)), key=lambda place: len(lines[place]["hash_ids"]))
    for place, changes in (
        (victim, {"output_lengths": [1], "stopped": [True]}),
        (victim, {"max_tokens": lines[victim]["max_tokens"] + 20}),
        (victim, {"input_length": 1}),
        (victim, {"timestamp": 1e9}),
        (shared, {"hash_ids": lines[victim]["hash_ids"][::-1]}),
        (0, {"served": lines[0]["served"] | {"num_blocks": 31}}),
        (0, {"served": lines[0]["served"] | {"scheduler": lines[0]["served"]["scheduler"] | {"max_num_seqs": 2}}}),
    ):
        changed = [line | changes if place == number else line for number, line in enumerate(lines)]
        logged = replay.Logged.read(write(path, changed))
        first = replay.difference(replay.decided(logged), logged.events)
        if "timestamp" not in changes and "hash_ids" not in changes:
            assert first is not None, changes


def test_the_command_says_whether_it_is_so(log, capsys):
    path, lines = log
    assert main(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "simulated (some): vLLM V1, 32 blocks of 16 tokens" in said
    assert (
        f"{len(lines) - 1} requests" in said and "equal, event for event" in said and "ms apart in the median" in said
    )
    lines[1]["output_lengths"], lines[1]["stopped"] = [1], [True]
    assert main(["replay", write(path, lines)]) == 1
    assert "the server has iteration" in capsys.readouterr().out


def test_a_log_is_a_trace_too(log):
    """In the order of arrival; of each request as many tokens as came."""
    path, lines = log
    trace = read_trace(path)
    came = [(line["timestamp"] / 1000, line["input_length"], line["output_length"]) for line in lines[1:]]
    read = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    assert len(trace) > 20 and sorted(read) == [pytest.approx(one) for one in sorted(came) if one[2]]


def test_a_log_keeps_nobodys_words(tmp_path):
    """No text, no token; and the same prompt has other numbers in another log."""
    found = []
    for number in range(2):
        with RequestLog(str(tmp_path / str(number))) as log:
            backend = simulated(log=log)
            with served(backend) as address:

                async def ask(address: str = address) -> None:
                    async with Wire(address) as wire:
                        await wire.ask(
                            "/v1/completions", {"prompt": [31999] * 40, "max_tokens": 40, "user": "somebody"}
                        )

                asyncio.run(ask())
        text = (tmp_path / str(number)).read_text()
        assert "31999" not in text and "somebody" not in text
        found.append(json.loads(text.splitlines()[1])["hash_ids"])
    assert len(found[0]) == len(found[1]) == 2 and not set(found[0]) & set(found[1])


def test_who_waits_for_an_iteration_has_arrived_already():
    """An arrival is when a request was handed in, not when the engine had time for it."""
    backend = simulated(cost_model=replace(FAST, fixed_s=0.2))

    async def main(address: str) -> None:
        async with Wire(address) as first, Wire(address) as second:
            first.send("/v1/completions", {"prompt": [5], "max_tokens": 9, "stream": True, "ignore_eos": True})
            await first.reader.readuntil(b"\n\n")
            engine = backend.feed.engine
            await first.reader.readuntil(b'"text"')  # the second iteration has begun, or is about to
            now_s = engine.clock.now
            second.send("/v1/completions", {"prompt": [6], "max_tokens": 1})
            await asyncio.to_thread(until, lambda: len(backend.feed.handles) == 2)
            (handle,) = [one for one in backend.feed.handles.values() if one.requests[0].output_tokens == 1]
            assert now_s <= handle.requests[0].arrival_s < now_s + 0.1 < engine.clock.now
            await second.head()

    with served(backend) as address:
        asyncio.run(main(address))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no log of `repro serve --log`"),
        ("{", "is no JSON, a line a request"),
        ("[1]\n", "is no log"),
        ('{"served": {"format": 7}}\n', "has format 7; this version reads 1"),
        ('{"served": {"format": 1}}\n{"events": [[0, 0, "arrive", {}]]}\n', "is no whole log .*KeyError: 'n'"),
        ("\u00e4", "cannot read the log .*: it is no text"),
    ],
)
def test_what_is_no_log_is_one_line(tmp_path, text, said):
    path = tmp_path / "log"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        replay.Logged.read(str(path))
    with pytest.raises(UserError, match="cannot read the log .*No such file"):
        replay.Logged.read(str(tmp_path / "none"))


def test_a_log_that_cannot_be_written_is_one_line(tmp_path, capsys):
    where = str(tmp_path / "none" / "log")
    assert main(["serve", "opt-13b", "--simulated", "datasheet", "--port", "0", "--log", where]) == 2
    assert f"repro: --log: cannot write {where!r}: No such file or directory" in capsys.readouterr().err


def test_a_full_disk_ends_the_log_and_not_the_server(tmp_path, capsys):
    with RequestLog(str(tmp_path / "log")) as log:
        backend = simulated(log=log)

        def full(text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        log._file.close()
        log._file = type("Full", (), {"write": staticmethod(full)})()
        with served(backend) as address:
            talk(address, 5, 100)
        assert is_whole(backend)
    assert capsys.readouterr().err.count("ends here: No space left on device") == 1


def test_an_engine_that_fails_leaves_a_log_of_what_was(tmp_path):
    """What had happened is decided again."""
    path = tmp_path / "log"
    with RequestLog(str(path)) as log:
        backend = simulated("vllm-v1", 512, SOME, log=log)
        with served(backend, whole=False) as address:

            async def ask() -> None:
                async with Wire(address) as wire:
                    assert (await wire.ask("/v1/completions", {"prompt": [7] * 9, "max_tokens": 9})).status == 200
                    wire.send("/v1/completions", {"prompt": [8], "max_tokens": 99, "stream": True, "ignore_eos": True})
                    await wire.reader.readuntil(b'"text"')
                    backend.feed.executor.cost_model = None
                    await wire.reader.readuntil(b"the engine has failed: AttributeError")

            asyncio.run(ask())
    logged = replay.Logged.read(str(path))
    assert [line["ended"] for line in logged.lines] == ["length", None] and not logged.is_whole
    assert len(logged.events) >= 5 and replay.difference(replay.decided(logged), logged.events) is None


def test_a_policy_without_a_name_cannot_be_logged(tmp_path):
    mine: System = register(paged_system("mine", victim=lambda groups: groups[0]))
    try:
        with (
            RequestLog(str(tmp_path / "log")) as log,
            pytest.raises(UserError, match="victim of system 'mine' is a func"),
        ):
            simulated(mine.name, log=log)
        assert not [thread for thread in threading.enumerate() if thread.name == "engine"]
    finally:
        del SYSTEMS["mine"]
