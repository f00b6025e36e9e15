"""Replayed beams: what a recording must hold, how it is replayed, and how parents are read from an engine's log."""

import json

import pytest

from repro.beams import FORMAT, WIDTHS, Recording, Turnover, recording
from repro.beams.record import parents_of, prompts
from repro.errors import UserError
from repro.events import Event


def test_a_recording_is_replayed_step_by_step_and_then_its_later_half():
    replay = Recording("instruction", {2: ["01" "00" "11" "01"]}, {})
    assert [replay.parents(0, 2, step) for step in range(8)] == [
        None, [0, 0], [1, 1], None, [1, 1], None, [1, 1], None]
    assert replay.replaced_share(2) == pytest.approx(2 / 8)


def test_requests_replay_all_prompts_about_equally_often():
    replay = Recording("chat", {2: ["01", "00", "11"]}, {})
    chosen = [str(replay.parents(request, 2, 0)) for request in range(3000)]
    assert all(800 < chosen.count(kind) < 1200 for kind in ("None", "[0, 0]", "[1, 1]"))


@pytest.mark.parametrize("texts, match", [
    ({2: ["10"]}, "moves a beam that survives"), ({2: ["02"]}, "moves a beam"), ({2: ["010"]}, "no steps of 2 digits"),
    ({2: [""]}, "no steps"), ({4: ["0a23"]}, "no steps")])
def test_a_recording_that_cannot_be_is_refused(texts, match):
    with pytest.raises(UserError, match=match):
        Recording("instruction", texts, {})


def test_files_that_are_no_recordings_are_refused_by_name(tmp_path):
    path = tmp_path / "beams.json"
    with pytest.raises(UserError, match="beams.json"):
        recording("instruction", path)
    for text in ("{", "[]", json.dumps({"format": "other"}), json.dumps({"format": FORMAT, "parents": {}})):
        path.write_text(text)
        with pytest.raises(UserError, match="beams.json"):
            recording("instruction", path)
    path.write_text(json.dumps({"format": FORMAT, "manifest": {}, "parents": {"chat": {"2": ["01"]}}}))
    with pytest.raises(UserError, match="no recording of 4 beams"):
        recording("chat", path).parents(0, 4, 0)


def test_parents_are_read_from_the_log_of_an_engine():
    """Admitted in iteration 5: first tokens after it, the first decoding step is iteration 6, whose fork is logged at 7."""
    events = [Event(5, "admit", 0, {}), Event(7, "fork", 0, {"parents": (0, 0)}), Event(9, "fork", 0, {"parents": (1, 1)}),
              Event(6, "admit", 1, {}), Event(9, "append", 1, {})]
    assert parents_of(events, 2, 2, 4) == ["00" "01" "11" "01", "01" * 4]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_made_up_beams_keep_survivors_in_place_and_are_replaced_as_often_as_asked(share):
    moved = 0
    for step in range(500):
        parents = Turnover(share).parents(7, 4, step) or [0, 1, 2, 3]
        assert all(parents[parent] == parent for parent in parents)
        moved += sum(parent != beam for beam, parent in enumerate(parents))
    assert moved / (500 * 3) == pytest.approx(share, abs=0.05)
    assert Turnover(share).parents(7, 4, 3) == Turnover(share).parents(7, 4, 3)


def test_prompts_differ_and_are_of_two_kinds():
    kinds = prompts()
    assert set(kinds) == {"instruction", "chat"}
    for texts in kinds.values():
        assert len(set(texts)) == len(texts) >= 16
    assert WIDTHS == (2, 4, 6)
