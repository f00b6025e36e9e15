"""Verdicts from values, stalls from the times of tokens, and the ledger's file."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pandas as pd
import pytest

from repro.errors import UserError
from repro.judge import ledger, pool
from repro.judge.claims import CLAIMS, Claim, Trial, Verdict
from repro.judge.client import Stream
from repro.judge.queues import mixed

BELOW = Claim("below", "", "", "", holds=0.5, fails=0.7, share=1.0)
ABOVE = Claim("above", "", "", "", holds=10, fails=3, share=1.0)


@pytest.mark.parametrize(
    ("claim", "values", "verdict"),
    [
        (BELOW, [0.5, 0.1, 0.2], "holds"),
        (BELOW, [0.7, 1.0, 3.0], "does not hold"),
        (BELOW, [0.6, 0.6, 0.6], "undecided"),
        (BELOW, [0.1, 0.1, 0.9], "undecided"),  # few must agree
        (BELOW, [0.1, 0.1, 0.1, 0.1, 0.9, 0.9], "holds"),  # two thirds
        (BELOW, [0.1, 0.1, 0.1, 0.9, 0.9], "undecided"),  # less than that
        (BELOW, [0.1, 0.9, 0.6], "undecided"),
        (BELOW, [], "undecided"),
        (ABOVE, [10, 40, 11], "holds"),
        (ABOVE, [3, 0, 0], "does not hold"),
        (ABOVE, [5, 5, 5], "undecided"),
    ],
)
def test_a_verdict_follows_from_the_median_if_enough_agree(claim, values, verdict):
    assert claim.decide(values) == verdict


def test_what_decides_nothing_is_repeated_and_no_more_often_than_that():
    trial = Trial(BELOW)
    for value, is_over in ((0.6, False), (0.6, False), (0.1, False), (0.1, False), (0.1, False), (0.1, True)):
        trial.add(value)
        assert trial.is_over is is_over
    trial = Trial(BELOW)
    for count in range(1, 10):
        trial.add(0.6)
        assert trial.is_over is (count == 9)


def test_too_few_repeats_decide_nothing():
    trial = Trial(BELOW)
    trial.add(0.1)
    found = trial.finding("a", "m", "u", 0)
    assert (found.verdict, found.value, found.repeats) == ("undecided", 0.1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_mixed_lengths_neither_rise_nor_fall(seed):
    lengths = mixed(random.Random(seed), 10, 400)
    falling = sum(early > late for early, late in itertools.combinations(lengths, 2))
    assert sorted(lengths)[0] == 100 and max(lengths) == 400 and 18 <= falling <= 27


def stream(*times: float) -> Stream:
    return Stream(list(times), "length")


def test_a_stall_is_counted_in_tokens_of_others():
    steady = stream(*range(1, 41))
    driven_out = stream(1, 2, 3, 23, 24)
    assert pool.longest_stall(driven_out, [steady, driven_out], 1.0) == (19, 3)
    assert pool.longest_stall(steady, [steady, driven_out], 1.0)[0] == 0


def test_an_iteration_that_holds_up_all_is_no_stall():
    slow = [1, 2, 3, 50, 51, 52]
    assert pool.longest_stall(stream(*slow), [stream(*slow), stream(*slow)], 1.0)[0] == 0


def test_tokens_that_were_held_back_on_their_way_are_no_stall():
    """Both were made at the same times, and passed on one after the other."""
    first = stream(1, 2, *(40 + place / 100 for place in range(20)), 41.3)
    second = stream(1, 2, *(41 + place / 100 for place in range(20)), 42.3)
    assert pool.longest_stall(second, [first, second], 1.0)[0] <= 1


def test_how_many_run_at_once_and_begin_before_any_ends():
    streams = [stream(1, 2, 3), stream(1, 2, 3), stream(3, 4), stream(4, 5)]
    assert pool.most_at_once(streams) == 3 and pool.together(streams) == 2


def finding(server: str, claim: str, value: float | None = 0.25, verdict: Verdict | None = None, note: str = ""):
    trial = Trial(replace(CLAIMS[claim], least=1), note=note, verdict=verdict)
    if value is not None:
        trial.add(value, fresh_s=1.0)
    return trial.finding(server, "model", "http://x", 3)


def test_servers_are_columns_whoever_wrote_them(tmp_path):
    ledger.record(tmp_path, "b", [finding("b", "first_come_order", 0.0), finding("b", "prefix_reuse", 1.0)])
    ledger.record(tmp_path, "a", [finding("a", "prefix_reuse"), finding("a", "throughput", 812.34)])
    ledger.record(tmp_path, "b", [finding("b", "prefix_reuse", None, note='too slow, "by far"')])
    rows = ledger.read(tmp_path / "ledger.csv")
    assert list(rows["server"]) == ["a", "a", "b"] and list(rows.columns) == ledger.COLUMNS
    wide = ledger.table(rows)
    assert list(wide.columns) == ["a", "b"] and list(wide.index) == ["prefix_reuse", "throughput"]
    assert list(wide["a"]) == ["holds (0.25)", "812.3 tokens/s"] and list(wide["b"]) == ["undecided", ""]
    said = ledger.in_words(rows)
    assert 'b, prefix_reuse: too slow, "by far"' in said and CLAIMS["prefix_reuse"].says in said


def test_a_ledger_is_read_as_it_was_written(tmp_path):
    made = [finding("1", claim, None if claim == "throughput" else 0.25) for claim in CLAIMS]
    ledger.record(tmp_path / "x.csv", "1", made)
    read = ledger.read(tmp_path / "x.csv")
    pd.testing.assert_frame_equal(read, pd.DataFrame([one.row() for one in made]), check_dtype=False)
    before = (tmp_path / "x.csv").read_bytes()
    ledger.write(tmp_path / "x.csv", read)
    assert (tmp_path / "x.csv").read_bytes() == before


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "", "\x00\xff", "server,claim\n"])
def test_another_file_is_not_taken_for_a_ledger(content, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="mine.csv.*; name another file with --out"):
        ledger.read(path)
    assert path.read_text(encoding="utf-8") == content
