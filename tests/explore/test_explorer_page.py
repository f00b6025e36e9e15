"""figures/explorer.html: it runs the sources of this checkout, holds its first runs, and works without a network."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Tab

from repro.cli import main
from repro.explore import page, queue
from repro.explore.run import run
from repro.explore.settings import Settings
from repro.hashing import canonical_json, sha256_json
from repro.setup.environment import ROOT
from repro.studies import first_fit, saturated

FILE = ROOT / "figures" / page.FILE_NAME
REMEDY = "figures/explorer.html runs other sources than this checkout has; build it again: python -m repro explore"


@pytest.fixture(scope="module")
def text() -> str:
    return FILE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def about(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', text)
    assert found is not None
    return json.loads(found[1])


def test_it_runs_the_sources_of_this_checkout_and_says_their_hash(text: str) -> None:
    code = json.loads(page.part(text, "sources"))
    assert code == page.sources(first_fit), REMEDY
    assert sha256_json(code) in text
    assert {path for path in code if path.startswith("repro/engine/")} == {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "repro" / "engine").rglob("*.py")
    }


def test_what_it_runs_needs_the_standard_library_only(text: str) -> None:
    """It imports none but the modules that the page has: those of this package by their files."""
    code = json.loads(page.part(text, "sources"))
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in code}
    imported = re.findall(r"^from (repro\S*) import|^import (repro\S*)", "\n".join(code.values()), re.MULTILINE)
    assert {one or other for one, other in imported} <= modules
    assert "numpy" not in "".join(code.values())


def test_its_sources_give_what_the_package_gives(text: str, tmp_path: Path) -> None:
    """In a process that has the page's files and the standard library only."""
    for path, content in json.loads(page.part(text, "sources")).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    settings = Settings(kv_slots=30_000, steps=300, seed=5, arrivals=20, system_prompt=500)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from repro.explore.run import answer; "
        "from repro.studies.first_fit import FirstFitAllocator; print(answer(sys.argv[1], FirstFitAllocator, {}))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, canonical_json(vars(settings))]
    there = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert there == json.loads(canonical_json(run(settings, first_fit.FirstFitAllocator)))


def test_its_first_runs_are_what_these_sources_give(text: str, about: dict[str, Any]) -> None:
    lengths = json.loads(page.part(text, "drawn"))
    assert sorted(about["runs"]) == sorted(canonical_json(vars(one)) for one in page.first_runs())
    for one in page.first_runs()[:4]:
        kept = json.loads(page.part(text, about["runs"][canonical_json(vars(one))]))
        assert kept == json.loads(canonical_json(run(one, first_fit.FirstFitAllocator, lengths))), REMEDY


def test_its_lengths_are_those_of_the_committed_rows(text: str) -> None:
    lengths = json.loads(page.part(text, "drawn"))
    with open(ROOT / "figures" / "saturated_queue.replay.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        setup = saturated.SETUPS[row["setup"]]
        one = Settings(declared=setup.declared, spread=setup.spread, seed=int(row["seed"]))
        assert queue.queue(one, lengths)[1:] == (row["trace_hash"], "NumPy")
    assert len({row["seed"] for row in rows}) == 5


def test_the_interpreter_is_pyodide_unchanged(text: str) -> None:
    for name, expected in page.SHOWN["interpreter"]["files"].items():
        assert hashlib.sha256(page.part(text, name)).hexdigest() == expected
    notice = (ROOT / "figures" / "explorer.licences.txt").read_text(encoding="utf-8")
    assert f"Pyodide {page.SHOWN['interpreter']['version']}" in notice and "Mozilla Public License" in notice
    assert f"pyodide@{page.SHOWN['interpreter']['version']} " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_without_an_interpreter_one_line_says_where_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPRO_FIGURES_DIR", str(tmp_path))
    damaged = tmp_path / page.FILE_NAME
    damaged.write_bytes(b'\xff<script type="text/plain" id="pyodide.js">AAAA</script>')
    for more in ([], ["--interpreter", str(tmp_path)], ["--interpreter", "none"]):
        assert main(["explore", *more]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all("run `make explorer`, which fetches it from npm" in line for line in lines)


# In a browser

SETTLED = "document.body.dataset.state === 'settled'"


def put(tab: Tab, name: str, value: object) -> None:
    """Set a control as a reader's hand does, and wait for what follows."""
    tab.evaluate(
        f"(() => {{ const one = document.querySelector('form [name={name}]'); one.value = {json.dumps(value)};"
        "one.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    tab.wait_for(SETTLED)


def shown(tab: Tab, policy: str, line: str, column: int = 2) -> str:
    """A number of a card's table: 1 this step, 2 the mean, 3 what is printed."""
    return tab.evaluate(
        f"[...document.querySelectorAll('[data-policy={policy}] tbody tr')].find((row) => row.cells[0].textContent"
        f".startsWith({json.dumps(line)})).cells[{column}].textContent"
    )


def test_a_reader_changes_everything_and_sees_it_run(tab: Tab, text: str) -> None:
    began = time.monotonic()
    tab.open(FILE.as_uri())
    tab.wait_for(SETTLED)
    assert tab.evaluate("performance.getEntriesByName('first picture')[0].startTime") < 5000  # some 700 ms when alone
    assert tab.evaluate("document.querySelector('.hash').textContent") == sha256_json(page.sources(first_fit))
    assert (shown(tab, "max", "sequences"), shown(tab, "max", "sequences", 3)) == ("7.00", "7.00")
    assert tab.evaluate("document.body.dataset.live") is None  # nothing has run yet

    put(tab, "preset", "2,048 tokens declared")
    assert shown(tab, "paged", "sequences") == "95.47" and tab.evaluate("document.body.dataset.live") is None

    # Scrubbing moves the map, the counters and the log.
    log = "document.querySelector('[data-policy=paged] .log').textContent"
    before = tab.evaluate(log), shown(tab, "paged", "sequences", 1)
    tab.evaluate("document.querySelector('.time input').value = 77")
    tab.evaluate("document.querySelector('.time input').dispatchEvent(new Event('input'))")
    assert (tab.evaluate(log), shown(tab, "paged", "sequences", 1)) != before
    assert tab.evaluate("document.querySelector('output[name=step]').textContent") == "step 77 / 2,511"

    # The block under the pointer.
    tab.evaluate("document.querySelector('[data-policy=paged] canvas').scrollIntoView({ block: 'center' })")
    box = tab.evaluate("document.querySelector('[data-policy=paged] canvas').getBoundingClientRect().toJSON()")
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 3, y=box["y"] + 100)
    readout = "document.querySelector('[data-policy=paged] .readout').textContent"
    tab.wait_for(f"{readout}.includes('reference count 1')")
    assert re.match(r"Block [\d,]+ is logical block [\d,]+ of [\d,]+: 16 of 16 slots filled", tab.evaluate(readout))

    # The first live run: a seed of the reader's own, and a smaller pool.
    put(tab, "seed", "77")
    assert time.monotonic() - began < 60  # some 10 s when alone
    ours = run(Settings(seed=77), first_fit.FirstFitAllocator, {})
    assert shown(tab, "paged", "sequences") == f"{ours['counters']['tokens_per_step']:.2f}"
    assert ours["trace_hash"][:12] in tab.evaluate("document.querySelector('figcaption').textContent")
    sentences = [text for step, text in ours["sentences"] if step <= 77][-30:]
    entries = "[...document.querySelectorAll('[data-policy=paged] .log li span')].map((one) => one.textContent)"
    assert tab.evaluate(entries) == sentences[::-1]
    assert "random.Random" in tab.evaluate("document.querySelector('figcaption').textContent")

    # Its random numbers are CPython's, those of arrivals too.
    put(tab, "arrivals", 3)  # the slider's fourth stop
    ours = run(Settings(seed=77, arrivals=20), first_fit.FirstFitAllocator, {})
    assert shown(tab, "paged", "sequences") == f"{ours['counters']['tokens_per_step']:.2f}"
    assert shown(tab, "paged", "waiting", 1) == f"{ours['waiting'][77]:,}"

    # A rule of the reader's own, and one that does not work.
    put(tab, "code", "def reserve(request, max_model_len):\n    return request.output_tokens + 100\n")
    tab.click("[name=try]")
    tab.wait_for(f"{SETTLED} && document.querySelector('[data-policy=yours] tbody')")
    assert float(shown(tab, "yours", "% never used")) > 0
    put(tab, "code", "def reserve(request, max_model_len):\n    return request.no\n")
    tab.click("[name=try]")
    tab.wait_for("!document.querySelector('.rule .error').hidden")
    assert "has no attribute 'no', line 2: `return request.no`" in tab.evaluate(
        "document.querySelector('.rule .error').textContent"
    )
    assert tab.complaints == []


#: a stop of each slider, other than where it begins
STOPS = {
    "kv_slots": 32768,
    "block_size": 32,
    "max_num_seqs": 64,
    "max_model_len": 8192,
    "declared": 512,
    "mean_output": 128,
    "spread": 50,
    "shortest_prompt": 128,
    "longest_prompt": 1000,
    "system_prompt": 64,
    "arrivals": 40,
}


def test_every_control_reaches_the_runs(tab: Tab) -> None:
    sliders = {name: stops for group in page.SHOWN["sliders"].values() for name, _, _, stops in group}
    assert sliders.keys() == STOPS.keys()
    ours = Settings(**STOPS, seed=5, chunks="exact", policy="pow2")
    assert all(vars(ours)[name] != vars(Settings())[name] for name in STOPS)
    tab.open(FILE.as_uri())
    tab.wait_for(SETTLED)
    put(tab, "preset", "2,048 tokens declared")
    for policy in ("max", "oracle", "pow2"):
        tab.evaluate(f"document.querySelector('[name=policy][value={policy}]').click()")
    chosen = {name: sliders[name].index(stop) for name, stop in STOPS.items()} | {"seed": "5", "chunks": "exact"}
    for name, value in chosen.items():
        put(tab, name, value)
    cards = "[...document.querySelectorAll('.card')].map((card) => card.dataset.policy)"
    assert tab.evaluate(cards) == ["pow2", "paged"]
    for policy in ("pow2", "paged"):
        made = run(replace(ours, policy=policy).relevant, first_fit.FirstFitAllocator, {})
        assert shown(tab, policy, "sequences, tokens a step") == f"{made['counters']['tokens_per_step']:.2f}"
        assert shown(tab, policy, "% with a token") == f"{made['counters']['token_states']:.1f}"
        assert shown(tab, policy, "% never used") == f"{made['counters']['internal']:.1f}"
        assert shown(tab, policy, "waiting", 1) == f"{made['waiting'][1000]:,}"
    assert shown(tab, "paged", "preemptions") == f"{made['counters']['preemptions']:,}"

    # The kernel's penalty, which needs no run.
    put(tab, "penalty", "20")
    assert shown(tab, "paged", "tokens ÷ penalty") == f"{made['counters']['tokens_per_step'] / 1.2:.2f}"

    # One colour a request, and a block that all of them share.
    colors = (
        "(() => { const one = document.querySelector('[data-policy=paged] canvas'); const data = new Uint32Array(one"
        ".getContext('2d').getImageData(0, 0, one.width, one.height).data.buffer); return new Set(data).size; })()"
    )
    assert tab.evaluate(colors) >= made["sequences"][1000]
    key = "new KeyboardEvent('keydown', { key: 'ArrowRight' })"
    tab.evaluate(f"document.querySelector('[data-policy=paged] canvas').dispatchEvent({key})")
    told = tab.evaluate("document.querySelector('[data-policy=paged] .readout').textContent")
    count = made["sequences"][1000] + 1  # all that run, and the declared prefix itself
    assert told == f"Block 0 is full. It is block 0 of the system prompt, reference count {count}."
    assert tab.complaints == []


@pytest.mark.parametrize(("width", "dark"), [(1400, True), (400, False)])
def test_it_fits_the_window(tab: Tab, width: int, dark: bool) -> None:
    tab.look(width=width, height=900, dark=dark)
    tab.open(FILE.as_uri())
    tab.wait_for(SETTLED)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
