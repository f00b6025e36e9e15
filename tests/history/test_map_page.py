"""A memory map in a browser: scrubbed, pointed at and followed, it says what the map in Python says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Tab
from test_memory_map import COSTS, watched

from repro.engine.chunked import ChunkedPrefillConfig, ChunkedPrefillScheduler
from repro.engine.loop import Engine
from repro.engine.memory import ContiguousKVCacheManager, PagedKVCacheManager, reserve_max
from repro.engine.memory.prefix_cache import PrefixCachingKVCacheManager, block_hashes
from repro.engine.scheduler import PreemptionMode, SchedulerConfig
from repro.engine.sequence import Request, SamplingParams
from repro.history.memory_map import MemoryMap
from repro.simulate.executor import SimulatedExecutor

SETTLED = "document.body.dataset.state === 'settled'"


def swapping() -> MemoryMap:
    """Requests of two samples that share, copy and swap, in a pool that is too small; keyframes in the middle."""
    asked = [(3.0 * number, 9 + number % 4, 40 + 7 * (number % 5), 1 + number % 2) for number in range(30)]
    manager = PagedKVCacheManager(40, 4, 0.0, num_cpu_blocks=80)
    return watched(manager, SchedulerConfig(preemption=PreemptionMode.SWAP), *asked)


def chunked() -> MemoryMap:
    """V1: parts of prompts, and prompts that begin alike."""
    manager = PrefixCachingKVCacheManager(
        30,
        4,
        0.0,
        hashes=lambda request: block_hashes(range(request.prompt_tokens), 4, salt=bytes([request.request_id % 3])),
    )
    config = ChunkedPrefillConfig(max_num_seqs=8, max_num_batched_tokens=16, max_model_len=100)
    memory = MemoryMap()
    requests = [Request(number, 9.0 * number, 21 + number % 7, 20, SamplingParams()) for number in range(20)]
    Engine(ChunkedPrefillScheduler(manager, config), SimulatedExecutor(COSTS), observers=(memory,)).run(requests)
    return memory


def contiguous() -> MemoryMap:
    manager = ContiguousKVCacheManager(40, 4, reservation=reserve_max, max_model_len=60)
    return watched(manager, SchedulerConfig(), *((4.0 * number, 5 + number % 6, 30, 1) for number in range(10)))


def shown(tab: Tab, memory: MemoryMap, path: Path, first: int = 0, last: int | None = None) -> None:
    tab.open(memory.save(path, first, last).as_uri())
    tab.wait_for(SETTLED)


def scrub(tab: Tab, frame: int) -> None:
    tab.evaluate(
        f"(() => {{ const one = document.querySelector('input[name=step]'); one.value = {frame};"
        "one.dispatchEvent(new Event('input')); })()"
    )


def state(tab: Tab) -> dict[str, str]:
    return dict(
        tab.evaluate(
            "[...document.querySelectorAll('.state tr')].map((row) => [...row.cells].map((one) => one.textContent))"
        )
    )


def point(tab: Tab, canvas: str, x: float, y: float, press: bool = False) -> str:
    """Point at a place of a canvas, in CSS pixels; what is said of it."""
    box = tab.evaluate(f"document.querySelector('{canvas} canvas').getBoundingClientRect().toJSON()")
    at: dict[str, Any] = {"x": box["x"] + x, "y": box["y"] + y}
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
    for kind in ("mousePressed", "mouseReleased") if press else ():
        tab.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
    return tab.evaluate("document.querySelector('.readout').textContent")


def expected(memory: MemoryMap, frame: int, block: int) -> str:
    """The beginning of what is said of a block."""
    moment, size = memory.at(frame), memory.block_size
    name = f"block {block}"
    holders = [
        (request, table)
        for request, sequences in moment.tables.items()
        for table in sequences.values()
        if block in table
    ]
    if not holders:
        return f"{name} is free{', and the prefix cache finds it' if block in moment.cached else ''}."
    said = []
    for request, table in holders:
        index = table.index(block)
        filled = max(0, min(size, moment.stored[request] - index * size))
        said.append(
            f"{name} is logical block {index} of {len(table)} of request {request} .*: "
            f"{filled} of {size} slots filled, reference count {len(holders)}"
        )
    return f"({'|'.join(said)})"


@pytest.mark.parametrize("make", [swapping, chunked, contiguous])
def test_what_it_says_is_what_the_map_has(make: Any, tab: Tab, tmp_path: Path) -> None:
    memory = make()
    tab.look(1400, 1400)
    first = len(memory) // 5
    shown(tab, memory, tmp_path / "map.html", first)
    side = tab.evaluate("document.querySelector('.pool canvas').width")
    for frame in range(first, len(memory), len(memory) // 7):
        scrub(tab, frame - first)
        moment, said = memory.at(frame), state(tab)
        held = {block for one in moment.tables.values() for table in one.values() for block in table}
        moved = {block for one in moment.swapped.values() for table in one.values() for block in table}
        assert said["blocks held"].startswith(f"{len(held)} of {memory.num_blocks}, ")
        assert said["running"].startswith(f"{memory.counts[frame][0]} request")
        assert said["waiting"].startswith(f"{memory.counts[frame][1]} request")
        assert said["swapped"].startswith(f"{memory.counts[frame][2]} request")
        assert said.get("in CPU memory", "0 blocks").startswith(f"{len(moved)} block")
        assert said.get("free, in the cache", "0 blocks").startswith(f"{len(moment.cached)} block")
        columns = 282 // 22
        assert side == columns * 22
        for block in range(0, memory.num_blocks, 3):
            told = point(tab, ".pool", (block % columns + 0.5) * 22, (block // columns + 0.5) * 22)
            assert re.match(f"Iteration {frame:,}, .* s: {expected(memory, frame, block)}", told), told
    assert tab.complaints == []


def test_a_reader_jumps_follows_and_plays(tab: Tab, tmp_path: Path) -> None:
    memory = swapping()
    tab.look(1400, 1400)
    shown(tab, memory, tmp_path / "map.html")
    where = "Number(document.querySelector('input[name=step]').value)"
    for kind, kinds in {"preemption": {"swap"}, "swap": {"swap", "resume"}, "copy": {"copy"}}.items():
        scrub(tab, 0)
        frames = sorted({one.frame for one in memory.happenings if one.kind in kinds} - {0})
        for frame in frames[:3]:
            tab.click(f"[name=next-{kind}]")
            assert tab.evaluate(where) == frame
            sentences = [one.sentence for one in memory.happenings if one.frame == frame]
            log = "[...document.querySelectorAll('.log .now span')].map((one) => one.textContent)"
            assert tab.evaluate(log) == sentences[::-1]
        tab.click(f"[name=before-{kind}]")
        assert tab.evaluate(where) == frames[1]
    stalled = memory.happenings.stalled
    scrub(tab, 0)
    tab.click("[name=next-stall]")
    assert tab.evaluate(where) == stalled.index(True)

    # Follow the one in a block of the history, by a click on it.
    frame = len(memory) // 2
    block, request = next(
        (table[0], one) for one, tables in memory.at(frame).tables.items() for table in tables.values()
    )
    width, height = tab.evaluate(
        "(({ clientWidth, clientHeight }) => [clientWidth, clientHeight])(document.querySelector('.history canvas'))"
    )
    top, bottom, left, right = 6 + 14 * 4, 38, 78, 10
    x = left + (frame + 0.5) / len(memory) * (width - left - right)
    y = top + (1 - (block + 0.5) / memory.num_blocks) * (height - top - bottom)
    assert re.match(
        f"Iteration {frame:,}, .* s: {expected(memory, frame, block)}", point(tab, ".history", x, y, press=True)
    )
    assert tab.evaluate("document.querySelector('.followed').textContent").startswith(f"Following request {request} ")
    sentences = [one.sentence for one in memory.happenings if one.request == request and one.frame <= frame]
    assert (
        tab.evaluate("[...document.querySelectorAll('.log span')].map((one) => one.textContent)")
        == sentences[-14:][::-1]
    )
    assert f"request {request}" in state(tab)
    tab.click("[name=unfollow]")
    assert f"request {request}" not in state(tab)

    # Rent, the keys, and playing.
    rows = sorted((row for row in memory.rent() if row["billed_to"] == "request"), key=lambda row: -row["slot_s"])
    bills = tab.evaluate("[...document.querySelectorAll('.bills tbody tr')].map((row) => row.cells[1].textContent)")
    assert bills == [f"{row['slot_s']:,.0f}" for row in rows]
    scrub(tab, 10)
    key = json.dumps({"key": "ArrowRight", "shiftKey": True, "bubbles": True, "cancelable": True})
    tab.evaluate(f"document.body.dispatchEvent(new KeyboardEvent('keydown', {key})) || true")
    assert tab.evaluate(where) == 20
    tab.evaluate("document.querySelector('[name=speed]').value = 600")
    tab.click("[name=play]")
    tab.wait_for(f"{where} === {len(memory) - 1} && document.querySelector('[name=play]').textContent === '▶'")
    assert tab.complaints == []


def test_changes_that_do_not_give_a_keyframe_are_not_shown(tab: Tab, tmp_path: Path) -> None:
    memory = swapping()
    (_, _), (at, there), *_ = memory.tables.keyframes
    deltas = [one for one in memory.tables.deltas if one[0] <= at and one[1] in there]
    last = next(one for one in reversed(deltas) if there[one[1]][one[2] :] == one[3:] and one[3:])
    last[3] ^= 1
    tab.open(memory.save(tmp_path / "map.html").as_uri())
    said = "This map cannot be shown: the changes do not give the block tables of iteration"
    tab.wait_for(f"document.querySelector('.readout').textContent.startsWith('{said}')")
    assert not tab.evaluate(SETTLED) and len(tab.complaints) == 1


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (920, False), (400, False)])
def test_it_fits_the_window_and_a_notebook(tab: Tab, tmp_path: Path, width: int, dark: bool) -> None:
    tab.look(width=width, height=900, dark=dark)
    memory = contiguous()
    shown(tab, memory, tmp_path / "map.html")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    (tmp_path / "cell.html").write_text(
        f"<!doctype html><link rel=icon href='data:,'>{memory._repr_html_()}", encoding="utf-8"
    )
    tab.open((tmp_path / "cell.html").as_uri())
    tab.wait_for("document.querySelector('iframe').contentDocument.body.dataset.state === 'settled'")
    assert tab.complaints == []
