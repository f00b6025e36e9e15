"""A few hundred random runs of the whole engine (fuzz.py; `make fuzz` makes many more), and that the search finds and
shrinks."""

from __future__ import annotations

from collections import Counter

import pytest
from fuzz import Ask, Case, draw, fault, first_failure, main, run, smallest

from repro.engine.memory import PagedKVCacheManager

RUNS = 800


def test_random_runs_of_the_whole_engine() -> None:
    seen: Counter[str] = Counter()
    failing = first_failure(range(RUNS), seen.update)
    if failing is not None:
        least = smallest(failing)
        raise AssertionError(f"run {failing.seed}, as small as it gets: {least}") from fault(least)
    for what in (
        "preempt",
        "recompute",
        "swap_in",
        "copy",
        "fork",
        "share",
        "cached",
        "stop",
        "held",
        "together",
        "one block",
        "cut",
        "several cut",
        "abort",
    ):
        assert seen[what] >= 50, f"hardly any {what}: these runs test less than they should"
    assert seen["refused"] < seen["finish"] / 2


def test_a_number_is_a_run() -> None:
    assert draw(7) == draw(7) != draw(8)
    assert run(draw(7)) == run(draw(7))
    assert eval(repr(draw(7))) == draw(7)


def test_swap_space_may_hold_more_than_the_pool_itself() -> None:
    """Eight requests that grow together on 24 one-slot blocks: those driven out take 40 blocks of CPU memory, in turn
    admitted because they were short. So swap space is bounded by what is configured, not by the pool."""
    asks = (Ask(1, 22),) * 8
    assert run(Case(asks, num_blocks=24, cpu_blocks=200, preemption="swap"))["swapped above the pool"]
    little = run(Case(asks, num_blocks=24, cpu_blocks=10, preemption="swap"))
    assert little["swap_out"] and little["recompute"]  # what does not fit is computed again


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--runs", "3", "--seed", "5"]) == 0
    output = capsys.readouterr().out
    assert "fuzz: 3/3 points" in output and "what happened:" in output


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(PagedKVCacheManager, "can_append_slots", lambda self, group, num_tokens: True)
    assert main(["--runs", "200"]) == 1
    output = capsys.readouterr()
    assert "again: python tests/fuzz.py --runs 1 --seed" in output.out and "Traceback" in output.err
    least = eval(output.out.splitlines()[-1])
    assert fault(least) is not None
    assert len(least.asks) <= 2 and sum(ask.prompt + ask.output for ask in least.asks) <= 24
