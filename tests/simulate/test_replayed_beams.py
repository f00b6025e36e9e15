"""Replayed beams: what a recording must hold, how it is replayed, and how parents are read from an engine's log."""

import dataclasses
import json
import random
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny import TINY

import repro.simulate.beams
from repro.bench.beams import Beams, batches, parents_of, prompts, prompts_hash
from repro.bench.rows import Recording as Rows
from repro.bench.run import work_through
from repro.engine.events import Event
from repro.engine.sequence import SamplingParams
from repro.engine.systems import system
from repro.errors import UserError
from repro.llm import LLM, models
from repro.llm.pool import PoolSize
from repro.simulate.beams import FILE, FORMAT, WIDTHS, Recording, Turnover, recording
from repro.simulate.profiles import cost_model
from repro.simulate.serve import serve
from repro.studies.common import deployment_of, trace_of


def test_a_recording_is_replayed_step_by_step_and_then_its_later_half():
    replay = Recording("instruction", {2: ["01001101"]}, {})
    assert [replay.parents(0, 2, step) for step in range(8)] == [None, [0, 0], [1, 1], None, [1, 1], None, [1, 1], None]
    assert replay.replaced_share(2) == pytest.approx(2 / 8)


def test_requests_replay_all_prompts_about_equally_often():
    replay = Recording("chat", {2: ["01", "00", "11"]}, {})
    chosen = [str(replay.parents(request, 2, 0)) for request in range(3000)]
    assert all(800 < chosen.count(kind) < 1200 for kind in ("None", "[0, 0]", "[1, 1]"))


@pytest.mark.parametrize(
    "texts, match",
    [
        ({2: ["10"]}, "moves a beam that survives"),
        ({2: ["02"]}, "moves a beam"),
        ({2: ["010"]}, "no steps of 2 digits"),
        ({2: [""]}, "no steps"),
        ({4: ["0a23"]}, "no steps"),
    ],
)
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


def test_a_recording_is_parsed_once_and_anew_when_its_file_changes(tmp_path):
    path = tmp_path / FILE
    for text, parents in (("01", None), ("00", [0, 0]), ("11", [1, 1]), ("00", [0, 0])):  # equally long, at once
        path.write_text(json.dumps({"format": FORMAT, "manifest": {}, "parents": {"chat": {"2": [text]}}}))
        found = recording("chat", path)
        assert found.parents(0, 2, 0) == parents and recording("chat", path) is found
        with pytest.raises(UserError, match="no recording of the beams of 'text'"):
            recording("text", path)
    path.unlink()
    with pytest.raises(UserError, match=FILE):
        recording("chat", path)


def test_parents_are_read_from_the_log_of_an_engine():
    """Admitted in iteration 5: first tokens after it, the first decoding step is iteration 6, whose fork is logged at
    7."""
    events = [
        Event(5, "admit", 0, {}),
        Event(7, "fork", 0, {"parents": (0, 0)}),
        Event(9, "fork", 0, {"parents": (1, 1)}),
        Event(6, "admit", 1, {}),
        Event(9, "append", 1, {}),
    ]
    assert parents_of(events, 2, 2, 4) == ["00011101", "01" * 4]


def test_what_an_engine_replays_is_what_is_read_from_its_log():
    trace = trace_of("alpaca", 2.0, 10.0, 0, None)
    log, beams, longest = [], Turnover(0.5), int(trace.output_tokens.max())
    deployment = deployment_of("opt-13b")
    serve(
        system("vllm"),
        deployment,
        trace,
        cost_model("a100-2023", deployment),
        log=log,
        beams=beams,
        sampling=SamplingParams(n=4, use_beam_search=True),
    )
    read = parents_of(log, len(trace), 4, longest)
    for request, output in enumerate(trace.output_tokens.tolist()):
        # The first token comes with the prompt, and after the last one nothing is forked.
        for step in range(output - 2):
            replayed = beams.parents(request, 4, step) or [0, 1, 2, 3]
            assert read[request][4 * step : 4 * step + 4] == "".join(map(str, replayed))


def test_the_packages_own_recording_is_whole():
    """It may be of fewer prompts than the file has by now, but of the first ones."""
    manifest = recording("chat").manifest
    recorded = {kind: texts[: len(manifest["prompt_tokens"][kind])] for kind, texts in prompts().items()}
    assert manifest["prompts_sha256"] == prompts_hash(recorded)
    for kind, texts in recorded.items():
        ours = recording(kind)
        assert len(ours.manifest["prompt_tokens"][kind]) == len(texts) >= 16
        for width in WIDTHS:
            assert [len(text) for text in ours.texts[width]] == [width * manifest["num_steps"][kind]] * len(texts)
            assert 0.05 < ours.replaced_share(width) < 0.9
    assert Path(repro.simulate.beams.__file__).with_name(FILE).stat().st_size < 3e6  # it travels with the package


def test_a_recording_of_300_prompts_is_read_in_no_time(tmp_path):
    chance = random.Random(0)
    steps = [
        ["".join(map(str, Turnover(0.3).parents(request, 6, step) or range(6))) for step in range(20)]
        for request in range(30)
    ]
    texts = ["".join(chance.choice(chance.choice(steps)) for _ in range(200)) for _ in range(300)]
    path = tmp_path / FILE
    path.write_text(json.dumps({"format": FORMAT, "manifest": {}, "parents": {"chat": {"6": texts}}}))
    start = time.process_time()
    read = recording("chat", path)
    assert time.process_time() - start < 1.0  # 0.1 s; studies read it for every run
    assert len({str(read.parents(request, 6, 0)) for request in range(300)}) > 20


@pytest.mark.parametrize("width", WIDTHS)
def test_batches_hold_every_prompt_once_and_fit_into_the_pool(width):
    chance = random.Random(width)
    lengths = [chance.randint(1, 600) for _ in range(150)]
    slices = list(batches(lengths, 258, width, 3000, 16))
    assert [tokens for batch in slices for tokens in lengths[batch]] == lengths
    for batch in slices:
        assert 0 < len(lengths[batch]) * width <= 256
        assert sum(width * -(-(tokens + 258) // 16) for tokens in lengths[batch]) <= 0.98 * 3000
    with pytest.raises(UserError, match="--kv-gib"):
        list(batches([5, 9000], 258, width, 1000, 16))


class _Letters:
    """A tokenizer in miniature: a prompt's first letters, at most twenty."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 101 for letter in text[:20]]}

    def decode(self, tokens: list[int], **unused: object) -> str:
        return str(tokens)


def _tiny(num_blocks: int) -> LLM:
    model = dataclasses.replace(models.from_config(TINY, "tiny"), tokenizer=_Letters())
    return LLM(model, pool=PoolSize(num_blocks=num_blocks), block_size=4, quiet=True)


def test_a_model_is_recorded_in_batches(tmp_path, capsys):
    """A pool for a few prompts at a time and one for all of them: the same choices, and a file that is read back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = []
    for num_blocks in (60, 2000):
        search = Beams(SimpleNamespace(budget="1h", kv_gib=4.0, prompts=5, model="", dtype="", device=""))
        search.prepare(_tiny(num_blocks), {"instruction": 9, "chat": 12})
        rows = Rows(tmp_path, f"beams {num_blocks}", "c")
        assert work_through(partial(search.steps, rows), rows, 1e9, {}) == (0, 0)
        made.append(search.content(Rows(tmp_path, f"beams {num_blocks}", "c")))
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and all(" points to measure, about " in line for line in printed)
    assert made[0] == made[1]
    path = tmp_path / FILE
    path.write_text(json.dumps(made[0]))
    for kind, steps in {"instruction": 9, "chat": 12}.items():
        read = recording(kind, path)
        assert all(len(text) == steps * width for width in WIDTHS for text in read.texts[width])
        assert all(read.replaced_share(width) > 0 for width in WIDTHS)
    assert read.manifest["prompts_sha256"] == prompts_hash(
        {kind: prompts()[kind][:5] for kind in ("instruction", "chat")}
    )
    assert read.manifest["prompt_tokens"]["chat"] == [2, 20, 20, 20, 20]
    assert read.manifest["dtype"] == "torch.float32" and read.manifest["device"].startswith("cpu")


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_made_up_beams_keep_survivors_in_place_and_are_replaced_as_often_as_asked(share):
    moved = 0
    for step in range(500):
        parents = Turnover(share).parents(7, 4, step) or [0, 1, 2, 3]
        assert all(parents[parent] == parent for parent in parents)
        moved += sum(parent != beam for beam, parent in enumerate(parents))
    assert moved / (500 * 3) == pytest.approx(share, abs=0.05)
    assert Turnover(share).parents(7, 4, 3) == Turnover(share).parents(7, 4, 3)


def test_prompts_differ_and_are_of_three_kinds():
    kinds = prompts()
    assert {kind: len(texts) >= 140 for kind, texts in kinds.items()} == {
        "instruction": True,
        "chat": True,
        "text": False,
    }
    for texts in kinds.values():
        assert len(set(texts)) == len(texts) >= 40
        words = [set(text.lower().split()) for text in texts]
        for index, one in enumerate(words):  # no near duplicates
            assert all(len(one & other) <= 0.5 * len(one | other) for other in words[:index])
    assert WIDTHS == (2, 4, 6)
