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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_every_few_seconds_and_time_left_follows_the_costs(clock: list[float]) -> None:
    stream = Stream(live=False)
    line = Progress("fig", total=10, kept=6, weight=20.0, stream=stream)
    for weight in (10.0, 5.0, 4.0):
        for _ in range(16):
            clock[0] += 0.25
            line.show()
        line.advance(weight)
    line.advance(1.0)
    line.show()
    line.close()
    start, *lines = re.split("[\r\n]+", stream.getvalue())
    assert start == "" and [line.rstrip() for line in lines] == [
        "fig: 6/10 points, 3.0 s elapsed, time left not known yet",
        "fig: 7/10 points, 6.0 s elapsed, about 6.0 s left",
        "fig: 8/10 points, 9.0 s elapsed, about 3.0 s left",
        "fig: 8/10 points, 12 s elapsed, about 4.0 s left",
        "fig: 10/10 points, 4 computed in 12 s",
        "",
    ]
    assert stream.getvalue().count("\n") == 1 and stream.getvalue().endswith("\n")  # one line, redrawn


def test_a_terminal_line_is_redrawn_in_place(clock: list[float]) -> None:
    stream = Stream(live=True)
    line = Progress("fig", total=2, kept=0, weight=2.0, stream=stream)
    for _ in range(10):
        clock[0] += 0.125
        line.show()
    line.close()
    *redrawn, last = stream.getvalue().split("\r")[1:]
    assert len(redrawn) == 5 and not any("\n" in text for text in redrawn)
    assert re.fullmatch(r"fig: 0/2 points, 2 missing +\n", last) and len(last) > len(max(redrawn, key=len))


def test_a_terminal_without_a_size_has_the_line_too() -> None:
    program = (
        "from repro.harness.progress import Progress\n"
        "line = Progress('fig', total=1, kept=0, weight=1.0)\nline.advance(1.0)\nline.close()"
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
