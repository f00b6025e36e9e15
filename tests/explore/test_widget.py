"""The explorer in a notebook, without a browser: a notebook's policies in its runs, and what it answers.

tests/test_jupyterlab.py drives it in JupyterLab."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from test_explore import SHORT, TIGHT, made

import repro
from repro.engine.policies import Seen
from repro.engine.sequence import Request
from repro.errors import UserError
from repro.explore.rules import text_of
from repro.explore.run import answer, run
from repro.explore.settings import Settings
from repro.hashing import canonical_json
from repro.studies import explorer
from repro.studies.first_fit import FirstFitAllocator

FACTOR = 3


def half_again(request: Request, max_model_len: int) -> int:
    return request.output_tokens * FACTOR // 2


def first(groups: Iterable[Seen]) -> Seen:
    return list(groups)[0]


def breaks_late(request: Request, max_model_len: int) -> int:
    return request.output_tokens if request.request_id < 3 else request.no


def yours(policy: Any, rule: str, code: str | None = None) -> dict[str, Any]:
    """A run with a notebook's policy, or with code that a reader has put in its place."""
    base = SHORT if rule == "reservation" else TIGHT
    settings = replace(base, policy="yours", rule=rule, code=text_of(policy) if code is None else code)
    return json.loads(answer(canonical_json(vars(settings)), FirstFitAllocator, {}, {rule: policy}))


def test_a_notebooks_policy_runs_as_its_code_would() -> None:
    code = "def reserve(request, max_model_len):\n    return request.output_tokens * 3 // 2\n"
    settings = replace(SHORT, policy="yours", code=code)
    assert yours(half_again, "reservation")["counters"] == run(settings, FirstFitAllocator)["counters"]
    code = "def victim(running):\n    return running[0]\n"
    settings = replace(TIGHT, policy="yours", rule="preemption", code=code)
    assert (
        yours(first, "preemption")["counters"]
        == run(settings, FirstFitAllocator)["counters"]
        != made(TIGHT)["counters"]
    )


def test_what_the_box_shows_is_the_functions_source() -> None:
    assert text_of(first) == "def first(groups: Iterable[Seen]) -> Seen:\n    return list(groups)[0]\n"
    for one, name in ((lambda groups: groups[0], "<lambda>"), (max, "max")):
        assert text_of(one) == f"# {name}, as its cell has it\n"
    assert yours(lambda groups: groups[0], "preemption")["counters"] == yours(first, "preemption")["counters"]


def test_changed_code_runs_in_its_place_and_finds_the_notebooks_names() -> None:
    same = "def {}(request, longest):\n    return request.output_tokens * FACTOR // 2\n"
    for name in ("half_again", "reserve"):
        assert yours(half_again, "reservation", same.format(name)) == {
            **(whole := yours(half_again, "reservation")),
            "settings": whole["settings"] | {"code": same.format(name)},
        }
    assert "defines no function reserve" in yours(half_again, "reservation", "x = 1\n")["error"]


def test_a_policy_that_breaks_in_a_run_is_one_line_with_its_own() -> None:
    error = yours(breaks_late, "reservation")["error"]
    assert "your rule raised AttributeError: 'Request' object has no attribute 'no'" in error and "\n" not in error
    assert "`return request.output_tokens if request.request_id < 3 else request.no`" in error


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"victim": 3}, "victim = 3 cannot be used; give a function"),
        ({"reservation": "max"}, "reservation = 'max' cannot be used"),
        ({"reservation": lambda request: 1}, "must return for how many output tokens"),
        ({"kv_slot": 1}, "takes no 'kv_slot' (did you mean kv_slots?)"),
        ({"kv_slots": -1}, "kv_slots = -1 must be a whole number"),
        ({"policy": "paged"}, "policy is chosen in the explorer itself"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        repro.explorer(**wrong)
    assert said in str(refused.value)


def test_without_anywidget_one_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "repro.explore.widget", raising=False)
    with pytest.raises(UserError, match="needs anywidget, which is not installed; run `make setup`, which adds it"):
        repro.explorer()


# With anywidget


@pytest.fixture
def widget() -> Any:
    pytest.importorskip("anywidget")
    return repro.explorer(victim=first, kv_slots=4000, shortest_prompt=100, longest_prompt=200, steps=200)


def test_it_begins_with_the_settings_given_and_the_policy_in_the_box(widget: Any) -> None:
    start = widget.about["start"]
    assert start["differs"] == {
        **dict(kv_slots=4000, shortest_prompt=100, longest_prompt=200, steps=200),
        "rule": "preemption",
    }
    assert start["shown"] == ["paged", "yours"] and widget.about["examples"]["preemption"] == text_of(first)
    assert repro.explorer().about["start"]["differs"]["kv_slots"] == 15_728  # Fig. 2
    assert repro.explorer(reservation=half_again).about["start"]["shown"] == ["max", "paged", "yours"]


def test_it_answers_as_the_page_does_and_keeps_the_counters(widget: Any) -> None:
    sent: list[dict[str, Any]] = []
    widget.send = sent.append
    settings = replace(TIGHT, steps=200)
    for one in (settings, replace(settings, policy="yours", rule="preemption", code=text_of(first))):
        widget._hear(widget, {"key": canonical_json(vars(one))}, [])
        assert sent[-1]["key"] == canonical_json(vars(one))
        drawn = explorer.given()[1]
        assert sent[-1]["text"] == answer(sent[-1]["key"], FirstFitAllocator, drawn, {"preemption": first})
    frame = widget.to_frame()
    assert list(frame.policy) == ["paged", "yours"] and frame.preemptions[0] > 0
    assert frame.tokens_per_step[1] == json.loads(sent[-1]["text"])["counters"]["tokens_per_step"]


def test_a_policy_that_does_not_end_is_stopped_and_the_next_run_is_made(
    widget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["repro.explore.widget"], "SECONDS", 0.3)
    stubborn = "        try:\n            pass\n        except Exception:\n            pass\n"
    endless = f"def victim(running):\n    while True:\n{stubborn}"
    settings = replace(TIGHT, policy="yours", rule="preemption", code=endless)
    began = time.monotonic()
    assert "no end after 0 s; change the rule" in widget.run(canonical_json(vars(settings)))["text"]
    assert time.monotonic() - began < 60
    monkeypatch.setattr(sys.modules["repro.explore.widget"], "SECONDS", 60)
    assert "counters" in json.loads(widget.run(canonical_json(vars(replace(TIGHT, steps=20))))["text"])


def test_a_fault_of_ours_is_answered_too(widget: Any) -> None:
    assert widget.run("[]")["failure"].startswith("TypeError: ")


def test_its_runs_are_refused_in_one_line_where_settings_cannot_be(widget: Any) -> None:
    text = widget.run(canonical_json(vars(Settings()) | {"kv_slots": 0}))["text"]
    assert "kv_slots = 0 must be a whole number" in json.loads(text)["error"] and len(widget.to_frame()) == 0
