"""Two memory maps one above the other, in a browser: scrubbed together, each says what its own map says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from browser import Tab
from test_map_page import SETTLED, scrub

import repro
from repro.engine.config import DEPLOYMENTS, Deployment
from repro.explore.difference import Difference
from repro.history import map_page
from repro.history.memory_map import MemoryMap
from repro.simulate.cost_model import CostModel

COSTS = CostModel("test", 0.02, 0.0004, 0.0, 1e-6, 1e-4, 0.0, 0.001, 0.002)
PAPER = DEPLOYMENTS["opt-13b"]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Difference:
    """A pool that was too small, and a larger one, in which the run ends earlier."""
    lengths = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n9,80\n40,60\n25,30\n60,90\n")
    trace = repro.make_trace("sharegpt", rate=12.0, duration_s=3.0, seed=0, lengths=lengths)
    small = Deployment(replace(PAPER.model, max_model_len=256), PAPER.device, 1, 320)
    return repro.what_if(repro.serve("vllm", small, trace, COSTS), num_blocks=40, preemption="swap")


def states(tab: Tab, name: str) -> dict[str, str]:
    rows = f"[...document.querySelectorAll('[data-map={name}] .state tr')]"
    return dict(tab.evaluate(f"{rows}.map((row) => [...row.cells].map((one) => one.textContent))"))


def holds(memory: MemoryMap, frame: int) -> str:
    """What a page says of the blocks held; of a run that is over, in its last iteration."""
    moment = memory.at(min(frame, len(memory) - 1))
    held = {block for one in moment.tables.values() for table in one.values() for block in table}
    return f"{len(held)} of {memory.num_blocks}, "


def test_both_maps_are_scrubbed_together(parted: Difference, tab: Tab, tmp_path: Path) -> None:
    tab.look(1400, 1600)
    tab.open(parted.save(tmp_path / "pair.html").as_uri())
    tab.wait_for(SETTLED)
    before, after = parted.maps
    at, longest = parted.first.iteration, max(len(before), len(after))
    assert len(before) > len(after) > at > 0
    where = "Number(document.querySelector('input[name=step]').value)"
    assert tab.evaluate(where) == at and tab.evaluate("document.querySelector('.said').textContent").startswith(
        str(parted.first)
    )
    for frame in (0, at - 1, at, at + 20, len(after) - 1, len(after) + 5, longest - 1):
        scrub(tab, frame)
        assert states(tab, "before")["blocks held"].startswith(holds(before, frame))
        assert states(tab, "after")["blocks held"].startswith(holds(after, frame))
        if frame < at:
            assert states(tab, "before")["running"] == states(tab, "after")["running"]
        shown = tab.evaluate("[...document.querySelectorAll('.pool figcaption')].map((one) => one.textContent)")
        assert shown == ["The pool at this iteration", "The pool at its end" if frame >= len(after) else shown[0]]
    tab.click("[data-map=after] [name=before-parting]")
    assert tab.evaluate(where) == at
    for name, memory in (("before", before), ("after", after)):
        log = f"[...document.querySelectorAll('[data-map={name}] .log .now span')].map((one) => one.textContent)"
        assert tab.evaluate(log) == [one.sentence for one in memory.happenings if one.frame == at][::-1]
    # Whoever is followed is followed in both.
    row = tab.evaluate("document.querySelector('[data-map=after] .bills tbody tr').dataset.request")
    tab.click("[data-map=after] .bills tbody tr")
    assert f"request {row}" in states(tab, "before") and f"request {row}" in states(tab, "after")
    costs = tab.evaluate(
        "[...document.querySelectorAll('.column table')[0].querySelectorAll('tbody th')].map((one) => one.textContent)"
    )
    assert costs[:4] == ["iterations", "duration, s", "throughput, tokens/s", "latency, s"]
    assert len(costs) == len(parted.costs())
    assert tab.complaints == []


def test_where_they_part_is_drawn_in_both(parted: Difference, tab: Tab, tmp_path: Path) -> None:
    """A line through each map in the colour of the parting, and none where nothing parts."""
    tab.look(1400, 1600)
    for one, drawn in ((parted, True), (repro.what_if(parted.before.recipe), False)):
        tab.open(one.save(tmp_path / "pair.html").as_uri())
        tab.wait_for(SETTLED)
        scrub(tab, 0)
        for name in ("before", "after"):
            found = tab.evaluate(
                f"""(() => {{
                const canvas = document.querySelector('[data-map={name}] .history canvas');
                const bad = numbers(styleOf(document.body)("--bad")), columns = new Map();
                const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                for (let at = 0; at < data.length; at += 4) {{
                  if (bad.every((value, i) => Math.abs(value - data[at + i]) < 3)) {{
                    const x = (at / 4) % canvas.width;
                    columns.set(x, (columns.get(x) || 0) + 1);
                  }}
                }}
                const most = [...columns].sort((a, b) => b[1] - a[1]).slice(0, 1);
                return most.map(([x]) => (x - 78) / (canvas.width - 88));
                }})()"""
            )
            longest = max(map(len, one.maps))
            assert found == ([pytest.approx(one.first.iteration / longest, abs=0.004)] if drawn else [])
        assert tab.complaints == []


def test_a_page_of_two_long_maps_shows_where_they_part(parted: Difference, monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"heading": "", "said": "", "what": "", "costs": ""}
    before, after = parted.maps
    whole = map_page.render_pair(before, after, parted.first.iteration, **words)
    assert "the whole run" in whole and f"{len(before):,} iterations before, {len(after):,} after." in whole
    monkeypatch.setattr(map_page, "MOST_CELLS", (before.num_blocks + after.num_blocks) * 40)
    part = map_page.render_pair(before, after, parted.first.iteration, **words)
    first = parted.first.iteration - 10
    assert f"Here are {first} to {first + 39}." in part and "all of these" in part


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (900, False), (400, False)])
def test_it_fits_the_window_and_a_notebook(
    parted: Difference, tab: Tab, tmp_path: Path, width: int, dark: bool
) -> None:
    tab.look(width=width, height=900, dark=dark)
    tab.open(parted.save(tmp_path / "pair.html").as_uri())
    tab.wait_for(SETTLED)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    cell = f"<!doctype html><link rel=icon href='data:,'>{parted._repr_html_()}"
    (tmp_path / "cell.html").write_text(cell, encoding="utf-8")
    tab.open((tmp_path / "cell.html").as_uri())
    tab.wait_for("document.querySelector('iframe').contentDocument.body.dataset.state === 'settled'")
    assert tab.complaints == []
