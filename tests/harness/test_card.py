"""What a run shows in a notebook: its card, its plan, its claims beside the paper's, and a sketch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fake_project import FakeProject

import repro
from repro.report import claims
from repro.report.claims import Judgement
from repro.report.claims.compare import COLOR

JUDGED = [Judgement("waste-under-4-percent", 3.2, "replayed", [3.1, 3.4]), Judgement("waste-60-80", [10, 20], "exact")]
JUDGING = "from repro.report.claims import Judgement\n\ndef judge(rows, params):\n    return "


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeProject:
    return FakeProject(tmp_path, monkeypatch)


def text_of(card: str) -> str:
    return " ".join(re.sub(r"<style.*?</style>|<[^>]*>", " ", card, flags=re.DOTALL).replace("&nbsp;", " ").split())


def test_the_card_says_what_the_parameters_mean_and_which_are_not_the_files(project: FakeProject) -> None:
    card = project.open(rates=[2.0, 4.5])._repr_html_()
    assert "A tiny thing tiny , paper scale" in text_of(card)
    assert "rates [2.0, 4.5] [3.0, 1.0, 2.0] req/s" in text_of(card)
    for meaning in ("req/s", "one trace each", "what goes wrong", "seconds that each point takes"):
        assert meaning in card
    assert "seeds [0, 1] one trace each fault null what" in text_of(card)  # as in the file: said once
    assert "no verdicts: rates is [2, 4.5] instead of [3, 1, 2]" in card


def test_the_card_counts_points_and_says_how_long_they_took_and_will_take(project: FakeProject) -> None:
    run = project.open()
    assert "6 points, 0 kept, 6 missing: how long they take is not known yet" in text_of(run._repr_html_())
    project.open(rates=[1], sleep=0.0).rows()
    assert re.search(r"6 points, 2 kept \(they took [^)]* s\), 4 missing: about [\d.]+ s", text_of(run._repr_html_()))
    run.rows()
    assert re.search(r"6 points, 6 kept \(they took [^)]* s\) table function", text_of(run._repr_html_()))
    assert project.calls()


def test_the_card_lists_the_verdicts_of_the_ledger(project: FakeProject) -> None:
    run = project.open()
    assert "No claim is judged yet" in run._repr_html_()
    claims.record(JUDGED, "tiny", run.folders.figures)
    claims.record([Judgement("fig16-shared-prefix", {"1-shot-80": 1.5}, "modelled")], "other", run.folders.figures)
    card = run._repr_html_()
    assert "Claims: 1 reproduced, 1 differs" in text_of(card)
    assert "waste-under-4-percent" in card and "fig16-shared-prefix" not in card


def test_only_verdicts_bring_colours_and_each_with_its_own_background(project: FakeProject) -> None:
    """So that the card, which stands on the page's own background, can be read in a dark theme."""
    run = project.open()
    claims.record(JUDGED, "tiny", run.folders.figures)
    styles = re.findall(r"{([^}]*)}", run._repr_html_())
    coloured = [style.split() for style in styles if "color" in style]
    assert all(style[0] == "background-color:" and style[2:4] == ["color:", "white;"] for style in coloured)
    assert {style[1] for style in coloured} == {
        f"{COLOR[verdict]};" for verdict in ("reproduced", "differs", "not run")
    }
    assert "color" not in re.sub(r"{[^}]*}", "", run._repr_html_())
    assert all(contrast_with_white(colour) >= 3 for colour in COLOR.values())


def contrast_with_white(colour: str) -> float:
    """The contrast ratio of the Web Content Accessibility Guidelines."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_text_of_the_parameters_is_escaped(project: FakeProject) -> None:
    project.parameter_file.write_text(
        project.parameter_file.read_text().replace("A tiny thing", "A <tiny> thing").replace("# a file", "# a <b> file")
    )
    card = project.open(fault="<script>")._repr_html_()
    assert "&lt;tiny&gt;" in card and "&lt;script&gt;" in card and "a &lt;b&gt; file" in card
    assert "<script>" not in card


def test_the_plan_has_a_line_a_point_with_what_tells_points_apart(project: FakeProject) -> None:
    project.open(rates=[1], seeds=[1]).rows()
    plan = project.open().plan()
    assert list(plan.columns) == ["table", "function", "work (%)", "kept", "rate", "seed"]
    assert list(zip(plan["rate"], plan["seed"], plan["kept"], strict=True))[2:4] == [
        ("1.0", "0", False),
        ("1.0", "1", True),
    ]
    assert plan["work (%)"].sum() == pytest.approx(100, abs=0.1)
    assert set(plan["table"]) == {"runs"} and set(plan["function"]) == {"one"}


def test_the_comparison_of_other_parameters_says_that_nothing_is_judged(project: FakeProject) -> None:
    project.edit_study(
        "def judge(rows, params):\n    return ", f"{JUDGING}[Judgement('waste-under-4-percent', 3.2, 'exact')] or "
    )
    run = project.open("smoke", rates=[1])
    shown = run.compare(run.rows())
    assert not len(shown.data) and "no verdicts: rates is [1] instead of [3, 1, 2]" in shown.to_html()
    run = project.open()
    shown = run.compare(run.rows())
    assert list(shown.data["ours"]) == [3.2] and "<caption" not in shown.to_html()
    assert f"background-color: {COLOR['reproduced']}" in shown.to_html()


def test_a_sketch_gives_the_figures_and_writes_only_points(project: FakeProject) -> None:
    run = project.open(rates=[7])
    run.draw(run.rows())
    results = project.folder / "results"
    before = {path: path.read_bytes() for path in results.rglob("*") if path.is_file() and "points" not in path.parts}
    assert list(project.open(rates=[8]).sketch()) == ["tiny"]
    after = {path: path.read_bytes() for path in results.rglob("*") if path.is_file() and "points" not in path.parts}
    assert before == after and "8.0 0" in project.calls()
    assert json.loads(run.manifest_path.read_text())["parameters"]["rates"] == [7.0]


def test_one_run_and_its_events_display_in_lines() -> None:
    trace = repro.make_trace("sharegpt", rate=2.0, duration_s=5.0, seed=0)
    served = repro.serve("vllm", "opt-13b", trace, log=[], usage_every_s=1.0)
    assert re.fullmatch(
        r"\d+ requests, finished after \d+ s: mean normalized latency 0\.\d+ s/token, 0 preemptions", repr(served)
    )
    assert len(served.outcomes) == len(trace) == int(repr(served).split()[0])
    lines = [str(event) for event in served.events]
    assert lines[0] == "iteration    0  arrive   request   0"
    assert any(re.fullmatch(r"iteration +\d+  admit    request +\d+  tokens \d+", line) for line in lines)
    assert all("{" not in line for line in lines)


def test_the_pool_over_time_is_drawn_to_the_end_of_the_run() -> None:
    from repro.report import plotting

    trace = repro.make_trace("sharegpt", rate=2.0, duration_s=5.0, seed=0)
    usage = repro.serve("orca-pow2", "opt-13b", trace, usage_every_s=1.0).usage
    (axis,) = plotting.pool_timeline(usage, "Orca").axes
    assert axis.get_xlim() == (usage.index[0], usage.index[-1]) and axis.get_title() == "Orca"
    assert len(axis.collections) == len(plotting.PIECES)
    top = axis.collections[-1].get_paths()[0].vertices[:, 1].max()
    assert top == usage["total"].max() == usage[list(plotting.PIECES)].sum(axis=1).max()
