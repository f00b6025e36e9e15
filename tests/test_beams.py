"""Replayed beams: what a recording must hold, how it is replayed, and how parents are read from an engine's log."""

import json
from pathlib import Path

import pytest

import repro.beams
from repro.beams import FORMAT, WIDTHS, Recording, Turnover, recording
from repro.beams.record import parents_of, prompts
from repro.errors import UserError
from repro.events import Event
from repro.executor.profiles import cost_model
from repro.provenance import sha256_file
from repro.sequence import SamplingParams
from repro.simulation import serve
from repro.studies.common import deployment_of, trace_of
from repro.systems import system


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


def test_what_an_engine_replays_is_what_is_read_from_its_log():
    trace = trace_of("alpaca", 2.0, 10.0, 0, None)
    log, beams, longest = [], Turnover(0.5), int(trace.output_tokens.max())
    deployment = deployment_of("opt-13b")
    serve(system("vllm"), deployment, trace, cost_model("a100-2023", deployment), log=log, beams=beams,
          sampling=SamplingParams(n=4, use_beam_search=True))
    read = parents_of(log, len(trace), 4, longest)
    for request, output in enumerate(trace.output_tokens.tolist()):
        # The first token comes with the prompt, and after the last one nothing is forked.
        for step in range(output - 2):
            replayed = beams.parents(request, 4, step) or [0, 1, 2, 3]
            assert read[request][4 * step:4 * step + 4] == "".join(map(str, replayed))


def test_the_packages_own_recording_is_whole():
    for kind, texts in prompts().items():
        ours = recording(kind)
        assert ours.manifest["prompts_sha256"] == sha256_file(Path(repro.beams.__file__).with_name("prompts.json"))
        assert len(ours.manifest["prompt_tokens"][kind]) == len(texts)
        for width in WIDTHS:
            assert [len(text) for text in ours.texts[width]] == [width * ours.manifest["num_steps"][kind]] * len(texts)
            assert 0.05 < ours.replaced_share(width) < 0.9


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
