"""JupyterLab as a newcomer meets it, in headless Chromium: `make lab`, a notebook, Run All.

It runs in a checkout of its own under git, so that what JupyterLab leaves behind can be seen.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from browser import Tab
from committed import committed

from repro.explore import page
from repro.explore import run as explored
from repro.explore.settings import Settings
from repro.hashing import canonical_json, sha256_json
from repro.setup.environment import ROOT
from repro.studies import first_fit
from repro.studies.first_fit import FirstFitAllocator

pytest.importorskip("jupyterlab")
pytest.importorskip("torch")
if shutil.which("git") is None:
    pytest.skip("git is needed to see what JupyterLab changes", allow_module_level=True)

START = (
    "import sys; from pathlib import Path; from repro.setup import lab; "
    "sys.exit(lab.run(Path(sys.executable), ['--no-browser', '--expose-app-in-browser']))"
)
PATIENCE = 500  # seconds: other work can keep all cores busy
#: how many threads a notebook's model may use beside this test and Chromium
QUIET = dict.fromkeys(("OMP_NUM_THREADS", "JOBS"), "1")


@dataclass
class Lab:
    """A running JupyterLab."""

    checkout: Path
    address: str  # where `make lab` sends the reader
    said: list[str]  # what it printed

    def open(self, tab: Tab, path: str = "") -> None:
        """Open a notebook as a reader does; without a path, what `make lab` opens, the quickstart."""
        tab.open(self.address.replace("?", f"lab/tree/{path}?") if path else self.address)
        path = path or "work/quickstart.ipynb"
        opened = f"[...(window.jupyterapp?.shell.widgets('main') ?? [])].find(one => one.context?.path === '{path}')"
        tab.wait_for(f"(window.opened = {opened})", PATIENCE)
        tab.wait_for("opened.sessionContext.session?.kernel?.status === 'idle'", PATIENCE)
        tab.evaluate("jupyterapp.shell.activateById(opened.id)")

    def run_all(self, tab: Tab) -> list[dict[str, Any]]:
        """Run all cells and save; returns the outputs as the file has them then."""
        self.run(tab, "run-all-cells")
        return self.outputs(tab)

    def run(self, tab: Tab, what: str) -> None:
        """Run cells to their end: a command of JupyterLab's notebooks."""
        ended = ".then(() => { window.ended = true })"
        tab.evaluate(f"window.ended = false; void jupyterapp.commands.execute('notebook:{what}'){ended}")
        tab.wait_for("window.ended", PATIENCE)

    def outputs(self, tab: Tab) -> list[dict[str, Any]]:
        """Save; the outputs of all cells, each of which has run once, in their order."""
        tab.evaluate("opened.context.save()")
        path = self.checkout / tab.evaluate("opened.context.path")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code" and cell["source"]]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        return [output for cell in code for output in cell["outputs"]]

    def changes(self) -> str:
        """What git sees."""
        return git(self.checkout, "status", "--porcelain")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a reader", "-c", "user.email=reader@example.org", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    checkout = tmp_path_factory.mktemp("a reader's") / "checkout"
    shutil.copytree(committed(), checkout)
    shutil.copy(ROOT / ".gitignore", checkout)
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "as it comes"]):
        git(checkout, *step)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("REPRO_", "TRITON_INTERPRET"))}
    environ |= {**QUIET, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, env=environ, cwd=checkout, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(3)]
        found = re.match(r"JupyterLab: (http://\S+\?token=\w+)\n", said[0])
        assert found, said
        yield Lab(checkout, found[1], said)
        process.terminate()


def check_outputs(outputs: list[dict[str, Any]]) -> None:
    """No error, and no warning of whatever library."""
    assert [output for output in outputs if output["output_type"] == "error"] == []
    text = "\n".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    assert "arning" not in text and "Traceback" not in text, text
    assert any("image/png" in output.get("data", {}) for output in outputs)


def check_page(tab: Tab) -> None:
    """No news, no notice, no dialog."""
    assert tab.evaluate("document.querySelectorAll('.Toastify__toast, .jp-Dialog').length") == 0


def test_it_opens_on_the_quickstart_which_runs_to_its_end(lab: Lab, tab: Tab) -> None:
    lab.open(tab)
    check_outputs(lab.run_all(tab))
    check_page(tab)
    assert lab.changes() == ""


def test_an_experiment_is_changed_and_run(lab: Lab, tab: Tab) -> None:
    copy = lab.checkout / "work" / "fig02_memory_waste.ipynb"
    copy.write_text(
        copy.read_text(encoding="utf-8").replace('scale = \\"paper\\"', 'scale = \\"smoke\\"'), encoding="utf-8"
    )
    lab.open(tab, "work/fig02_memory_waste.ipynb")
    check_outputs(lab.run_all(tab))
    check_page(tab)
    assert lab.changes() == ""
    assert list((lab.checkout / "results" / "smoke" / "figures").glob("fig02_memory_waste.png"))


def notebook_of(path: Path, cells: list[str]) -> None:
    """Write a notebook of these cells."""
    base = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}}
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": [base | {"source": cell} for cell in cells], "metadata": kernel}
    content |= {"nbformat": 4, "nbformat_minor": 4}
    path.write_text(json.dumps(content), encoding="utf-8")


def test_a_new_experiment_from_the_command_to_its_figure(lab: Lab, tab: Tab) -> None:
    command = [sys.executable, "-m", "repro", "new", "mine"]
    told = subprocess.run(
        command, cwd=lab.checkout, env={**os.environ, "PYTHONPATH": str(lab.checkout)}, check=True, capture_output=True
    )
    assert b"mine.ipynb" in told.stdout
    written = lab.changes()
    assert written.count("\n") == 3 and written.count("?? ") == 3
    source = (lab.checkout / "notebooks" / "mine.ipynb").read_text(encoding="utf-8")
    work = source.replace('scale = \\"paper\\"', 'scale = \\"smoke\\"')
    (lab.checkout / "work" / "mine.ipynb").write_text(work, encoding="utf-8")
    lab.open(tab, "work/mine.ipynb")
    check_outputs(lab.run_all(tab))
    check_page(tab)
    assert lab.changes() == written
    git(lab.checkout, "clean", "-fdq", "--", "experiments", "repro", "notebooks")


MISTAKES = {
    "import repro\nrepro.open('fig02')": "fig02_memory_waste",
    "repro.open('fig02_memory_waste', overrides={'kv_slot': 1})": "kv_slots",
    "repro.serve('vlm', 'opt-13b', repro.make_trace('sharegpt', 2.0, 10.0, 0))": "unknown system 'vlm'",
    "repro.SYSTEMS['vllm'].with_scheduler(preemption='swop')": "preemption = 'swop'",
    "repro.contiguous_system('mine', lambda request: 1)": "must return for how many output tokens",
    "repro.LLM('opt-126m')": "opt-126m",
    "repro.SamplingParams(temperature=-1)": "temperature = -1",
}


def test_a_mistake_shows_one_line(lab: Lab, tab: Tab) -> None:
    notebook_of(lab.checkout / "work" / "mistakes.ipynb", list(MISTAKES))
    lab.open(tab, "work/mistakes.ipynb")
    for index in range(len(MISTAKES)):
        tab.evaluate(f"opened.content.activeCellIndex = {index}")
        lab.run(tab, "run-cell")
    outputs = lab.outputs(tab)
    assert [output["output_type"] for output in outputs] == ["error"] * len(MISTAKES)
    rendered = (
        "[...opened.node.querySelectorAll('.jp-OutputArea-output')].map(one => one.innerText.trim().split('\\n'))"
    )
    lines = tab.evaluate(rendered)
    assert [len(one) for one in lines] == [1] * len(MISTAKES), lines
    for (line,), said in zip(lines, MISTAKES.values()):
        assert line.startswith("UserError: ") and said in line
    assert lab.changes() == ""


def test_the_address_and_the_tunnel_are_said_once(lab: Lab) -> None:
    port = re.findall(r":(\d+)/", lab.address)[0]
    assert re.fullmatch(rf"From another machine, first: ssh -N -L {port}:localhost:{port} \S+@\S+\n", lab.said[1])
    assert lab.said[2] == "Ctrl+C, twice, stops it.\n"


def test_a_memory_map_is_seen_in_a_cell(lab: Lab, tab: Tab) -> None:
    watched = [
        "import repro",
        "memory = repro.MemoryMap()",
        "trace = repro.make_trace('sharegpt', rate=2.0, duration_s=20.0, seed=0)",
        "served = repro.serve('vllm', 'opt-13b', trace, observers=(memory,))",
        "memory",
    ]
    notebook_of(lab.checkout / "work" / "memory.ipynb", ["\n".join(watched)])
    lab.open(tab, "work/memory.ipynb")
    lab.run_all(tab)
    frame = "document.querySelector('.jp-OutputArea iframe').contentDocument"
    tab.wait_for(f"{frame}?.body.dataset.state === 'settled'", PATIENCE)
    assert tab.evaluate(f"{frame}.querySelectorAll('.bills tbody tr').length") > 10
    tab.screenshot(lab.checkout.parent / "memory.png")
    check_page(tab)


EXPLORED = """import repro


def longest(groups):
    return max(groups, key=size)


def size(group):
    return group.prompt_tokens + group.num_generated


explorer = repro.explorer(victim=longest, kv_slots=4_000, shortest_prompt=100, longest_prompt=200, steps=500)
explorer"""
SEEN = "print(explorer.to_frame().set_index('policy').tokens_per_step.to_json(orient='split'))"
HOST = "document.querySelector('.repro-explorer')"
SETTLED = f"{HOST}?.dataset.state === 'settled'"
OURS = Settings(kv_slots=4_000, shortest_prompt=100, longest_prompt=200, steps=500)


def find(selector: str) -> str:
    return f"{HOST}.shadowRoot.querySelector({json.dumps(selector)})"


def put(tab: Tab, name: str, value: object) -> None:
    """Set one of the explorer's controls as a reader's hand does, and wait for what follows."""
    tab.evaluate(
        f"(() => {{ const one = {find(f'form [name={name}]')}; one.value = {json.dumps(value)};"
        "one.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    tab.wait_for(SETTLED, PATIENCE)


def try_rule(tab: Tab, code: str) -> None:
    put(tab, "code", code)
    tab.evaluate(f"{find('[name=try]')}.click()")
    tab.wait_for(SETTLED, PATIENCE)


def mean_of(tab: Tab, policy: str) -> str:
    """The sequences that run, on average, as a card's table has them."""
    return tab.evaluate(f"{find(f'[data-policy={policy}] tbody tr')}.cells[2].textContent")


def expected(settings: Settings, victim: str) -> str:
    """The same number, of the same run in this process."""
    yours = replace(settings, policy="yours", rule="preemption", code=f"def victim(groups):\n    return {victim}\n")
    return f"{explored.run(yours, FirstFitAllocator)['counters']['tokens_per_step']:.2f}"


def explore(lab: Lab, tab: Tab, name: str) -> None:
    """Open a notebook, and run its first cell, which shows the explorer with a policy of its own."""
    notebook_of(lab.checkout / "work" / f"{name}.ipynb", [EXPLORED, SEEN])
    lab.open(tab, f"work/{name}.ipynb")
    tab.evaluate("opened.content.activeCellIndex = 0")
    tab.complaints.clear()  # what starting JupyterLab brought
    lab.run(tab, "run-cell")
    tab.wait_for(SETTLED, PATIENCE)


def test_the_explorer_runs_in_the_kernel_with_a_policy_of_a_cell(lab: Lab, tab: Tab) -> None:
    pytest.importorskip("anywidget")
    explore(lab, tab, "explorer")
    by_size = "max(groups, key=lambda group: group.prompt_tokens + group.num_generated)"
    usual = f"{explored.run(OURS, FirstFitAllocator)['counters']['tokens_per_step']:.2f}"
    assert (mean_of(tab, "paged"), mean_of(tab, "yours")) == (usual, expected(OURS, by_size))
    assert mean_of(tab, "yours") != usual

    # A slider.
    put(tab, "block_size", 5)  # the sixth stop
    assert mean_of(tab, "yours") == expected(replace(OURS, block_size=32), by_size)
    put(tab, "block_size", 4)

    # The box shows the policy. A changed one runs, and finds the notebook's names.
    assert tab.evaluate(f"{find('textarea')}.value") == "def longest(groups):\n    return max(groups, key=size)\n"
    try_rule(tab, "def longest(groups):\n    return min(groups, key=size)\n")
    assert mean_of(tab, "yours") == expected(OURS, by_size.replace("max", "min"))
    try_rule(tab, "def longest(groups):\n    return groups.no\n")
    assert "'list' object has no attribute 'no', line 2" in tab.evaluate(f"{find('.rule .error')}.textContent")

    # The block under the pointer, in the middle of the map's second line.
    canvas = find("[data-policy=paged] canvas")
    tab.evaluate(f"{canvas}.scrollIntoView({{ block: 'center' }})")
    box = tab.evaluate(f"{canvas}.getBoundingClientRect().toJSON()")
    tab.send("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2, y=box["y"] + 30)
    told = f"{find('[data-policy=paged] .readout')}.textContent"
    tab.wait_for(f"{told}.includes('reference count 1')")
    assert re.match(
        r"Block \d+ is logical block \d+ of \d+: \d+ of 16 slots filled, .* Request \d+", tab.evaluate(told)
    )

    # Outside an editor, a, b, d d and x are JupyterLab's shortcuts that add and remove cells.
    tab.evaluate(f"{find('textarea')}.focus()")
    for key in "abddx":
        for kind in ("keyDown", "keyUp"):
            tab.send("Input.dispatchKeyEvent", type=kind, key=key, text=key, code=f"Key{key.upper()}")
    assert "abddx" in tab.evaluate(f"{find('textarea')}.value")
    assert tab.evaluate("opened.content.widgets.length") == 2

    # It is as dark as JupyterLab.
    ground = f"getComputedStyle({HOST}).backgroundColor"
    light = tab.evaluate(ground)
    tab.evaluate("document.body.dataset.jpThemeLight = 'false'")
    tab.wait_for(f"{ground} !== '{light}'")
    tab.screenshot(lab.checkout.parent / "explorer.png")
    # JupyterLab itself asks for notebooks that were open when it last ran, and says when it is slow to start.
    others = ("/api/", "is taking too long to activate")
    assert [one for one in tab.complaints if not any(text in one for text in others)] == []


def test_the_explorers_numbers_are_the_pages_and_the_experiments(lab: Lab, tab: Tab) -> None:
    pytest.importorskip("anywidget")
    explore(lab, tab, "numbers")
    put(tab, "preset", "2,048 tokens declared")
    with open(ROOT / "figures" / "saturated_queue.replay.csv", encoding="utf-8") as file:
        rows = {row["setup"]: row for row in csv.DictReader(file) if row["seed"] == "0"}
    assert mean_of(tab, "paged") == f"{float(rows['paged']['tokens_per_step']):.2f}"
    text = (ROOT / "figures" / "explorer.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="about">(.*?)</script>', text)
    kept = json.loads(page.part(text, json.loads(found[1])["runs"][canonical_json(vars(Settings()))]))
    tab.evaluate("opened.content.activeCellIndex = 1")
    lab.run(tab, "run-cell")
    seen = json.loads("".join(lab.outputs(tab)[-1]["text"]))
    assert (seen["index"][-2:], seen["data"][-2]) == (["paged", "yours"], kept["counters"]["tokens_per_step"])
    assert tab.evaluate(f"{find('.hash')}.textContent") == sha256_json(page.sources(first_fit))
