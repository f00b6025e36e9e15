"""Threads on a CPU: one where more are slower, and never more than the cores there are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from repro.llm import pace
from repro.llm.pace import Pace, settle


class Clock:
    """Time that passes only in iterations, `seconds[threads]` in each; `threads` stands in for torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, seconds: dict[int, float]) -> None:
        self.now, self.threads, self.seconds, self.count = 0.0, threads, seconds, 0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(pace, "cpu_count", lambda: cores)
        monkeypatch.setattr(pace.torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(pace.torch, "set_num_threads", lambda count: setattr(self, "threads", count))

    def iteration(self) -> None:
        self.count += 1
        self.now += self.seconds[self.threads]


@pytest.mark.parametrize(
    "cores, threads, seconds, best",
    [
        (4, 4, {1: 0.3, 4: 0.1}, 4),
        (4, 4, {1: 0.1, 4: 1.4}, 1),
        (2, 16, {1: 0.3, 2: 0.2, 16: 0.1}, 2),  # a quota of two cores, however many there are
        (4, 1, {1: 0.2}, 1),
    ],
)
def test_the_faster_of_one_thread_and_all_is_kept(monkeypatch, cores, threads, seconds, best):
    clock = Clock(monkeypatch, cores, threads, seconds)
    found = settle(clock.iteration)
    assert found.num_threads == clock.threads == best and found.seconds == pytest.approx(seconds[best])
    made = clock.count
    assert settle(clock.iteration, found) is found and clock.count == made
    clock.threads = 1 if best > 1 else cores  # by the user
    clock.seconds.setdefault(cores, 1.0)
    assert settle(clock.iteration, found) is not found


def test_long_iterations_are_timed_once(monkeypatch):
    clock = Clock(monkeypatch, 2, 2, {1: 30.0, 2: 20.0})
    assert settle(clock.iteration) == Pace(2, 20.0) and clock.count == 3


def test_a_pace_reads_as_threads_and_time():
    assert str(Pace(1, 0.0123)) == "1 thread, 12.3 ms an iteration"
    assert str(Pace(8, 0.5)) == "8 threads, 500 ms an iteration"
