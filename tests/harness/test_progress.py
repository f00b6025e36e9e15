"""The progress line: what it says, and how often."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest

from repro.harness import notebook, progress
from repro.harness.progress import Progress, duration


class Stream(io.StringIO):
    def __init__(self, live: bool) -> None:
        super().__init__()
        self._live = live

    def isatty(self) -> bool:
        return self._live


class KernelStream(Stream):
    """Stands for a kernel's own, which the module of its class gives away."""


KernelStream.__module__ = "ipykernel.iostream"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def wait(line: Progress, clock: list[float], seconds: float) -> None:
    for _ in range(round(4 * seconds)):
        clock[0] += 0.25
        line.show()


def test_in_a_notebook_one_line_is_redrawn_and_time_left_follows_the_costs(clock: list[float]) -> None:
    stream = KernelStream(live=False)
    line = Progress("fig", [("run", cost) for cost in (10.0, 5.0, 4.0, 1.0)], [("other", 1.0, 1.0)] * 6, stream=stream)
    for key, cost, seconds in (("a", 10.0, 4.0), ("b", 5.0, 4.0), ("c", 4.0, 4.0), ("d", 1.0, 0.0)):
        line.start(key, "run", cost, label=f"run({key})")
        wait(line, clock, seconds)
        line.finish(key)
    line.close()
    start, *lines = re.split("[\r\n]+", stream.getvalue())
    assert start == "" and [line.rstrip() for line in lines] == [
        "fig: 6/10 points, 3.0 s elapsed, time left not known yet; at work: run(a)",
        "fig: 7/10 points, 6.0 s elapsed, a few seconds left",
        "fig: 8/10 points, 9.0 s elapsed, a few seconds left",
        "fig: 8/10 points, 12 s elapsed, a few seconds left",
        "fig: 10/10 points, 4 computed in 12 s",
        "",
    ]
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")  # one line, redrawn


def test_a_terminal_line_is_redrawn_in_place_and_messages_stand_above_it(clock: list[float]) -> None:
    stream = Stream(live=True)
    line = Progress("fig", [("run", 1.0)] * 2, stream=stream)
    wait(line, clock, 1.25)
    line.say("a word")
    line.close()
    *redrawn, said, last = stream.getvalue().split("\r")[1:]
    assert len(redrawn) == 5 and not any("\n" in text for text in redrawn)
    assert re.fullmatch("a word +\n", said) and len(said) > len(redrawn[-1])
    assert last == "fig: 0/2 points, 2 missing\n"


def test_a_log_has_a_line_a_minute(clock: list[float]) -> None:
    stream = Stream(live=False)
    line = Progress("fig", [("run", 1.0)] * 4, stream=stream)
    line.start("a", "run", 1.0)
    wait(line, clock, 130)
    line.finish("a")
    line.say("a word")
    line.close()
    assert stream.getvalue().splitlines() == [
        "fig: 0/4 points, 1 min 0 s elapsed, time left not known yet; at work: a",
        "fig: 0/4 points, 2 min 0 s elapsed, time left not known yet; at work: a",
        "a word",
        "fig: 1/4 points, 1 computed in 2 min 10 s, 3 missing",
    ]


def test_time_left_is_never_told_from_another_kind_of_work(clock: list[float]) -> None:
    """400 short points, then two of a minute each: what the short ones took says nothing."""
    todo = [("short", 1.0)] * 400 + [("long", 600.0)] * 2
    line = Progress("fig", todo, workers=2, stream=Stream(live=False))
    for number in range(400):
        line.start(str(number), "short", 1.0)
        line.finish(str(number), 0.01)
    assert "time left not known yet" in str(line)
    for name in "ab":
        line.start(name, "long", 600.0)
    clock[0] += 60
    line.finish("a")
    assert "a few seconds left" in str(line)
    again = Progress("fig", todo, [("short", 0.01, 1.0), ("long", 60.0, 600.0)], workers=2, stream=Stream(live=False))
    assert "about 1 min left" in str(again)  # from kept points, before any is computed
    for name in "ab":
        again.start(name, "long", 600.0)
    clock[0] += 40
    assert "about 20 s left" in str(again)


def test_what_ended_without_a_result_is_missing(clock: list[float]) -> None:
    line = Progress("fig", [("run", 1.0)] * 3, stream=Stream(live=False))
    for name in "abc":
        line.start(name, "run", 1.0)
    line.give_up("a")
    line.finish("b", 2.0)
    line.give_up()
    line.close()
    assert str(line) == "fig: 1/3 points, 1 computed in 0.0 s, 2 missing"


def test_a_terminal_without_a_size_has_the_line_too() -> None:
    program = (
        "from repro.harness.progress import Progress\n"
        "line = Progress('fig', [('run', 1.0)])\nline.start('a', 'run', 1.0)\nline.finish('a')\nline.close()"
    )
    ours, theirs = pty.openpty()
    size = {"COLUMNS": "0", "LINES": "0"}
    subprocess.run([sys.executable, "-c", program], stdout=theirs, stderr=theirs, env=os.environ | size, check=True)
    assert b"fig: 1/1 points, 1 computed in" in os.read(ours, 1000)
    os.close(ours)
    os.close(theirs)


TEXTS = ("\rfig: 1/3 points", "\rfig: 2/3 points  ", "\ra table\n", "\rfig: 3/3 points", "\n", "another line\n")


def test_a_log_has_whole_lines_and_one_a_minute_of_a_line_that_is_redrawn(clock: list[float]) -> None:
    stream = Stream(live=False)
    echo = notebook._Echo("fig: ", stream)
    for text in TEXTS:
        echo.write(text)
    assert stream.getvalue() == "fig: 3/3 points\n"
    clock[0] += 61
    echo.write("\rfig: 4/9 points")
    echo.write("\rfig: 5/9 points")
    assert stream.getvalue() == "fig: 3/3 points\nfig: 4/9 points\n"


def test_a_terminal_shows_what_the_notebook_says_at_once() -> None:
    stream = Stream(live=True)
    echo = notebook._Echo("fig: ", stream)
    for text in TEXTS:
        echo.write(text)
    lines = [f"\rfig: {number}/3 points\x1b[K" for number in (1, 2, 3)]
    assert stream.getvalue() == "".join(lines) + lines[-1] + "\n"


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (12, "12 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
