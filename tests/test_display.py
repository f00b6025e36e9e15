"""What a notebook shows of each kind of thing: a table that is escaped and bounded; and the same rows for pandas."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cells import Cells

import repro
from repro import display
from repro.engine.events import Event
from repro.engine.loop import Outcome
from repro.engine.memory import KVCacheManager, PagedKVCacheManager
from repro.engine.sequence import Request, SamplingParams, SequenceGroup
from repro.errors import UserError
from repro.harness.tables import Rows, to_frame
from repro.report import claims
from repro.setup.environment import ROOT
from repro.simulate.serve import Served

WICKED = "<script>alert('&')</script>"


def test_everything_is_escaped() -> None:
    text = display.table(f"{WICKED}\nand more", [{WICKED: WICKED}, {"b": None, "c": math.nan}])
    assert "<script" not in text and "&lt;script&gt;" in text
    assert Cells(text).lines == [[WICKED, "b", "c"], [WICKED, "", ""], ["", "", ""]]


def test_a_long_table_shows_its_head_and_its_tail_and_makes_no_other_rows() -> None:
    made: list[int] = []

    def row(number: int) -> dict[str, Any]:
        made.append(number)
        return {"number": number, "text": "x" * 1000}

    lines = Cells(display.indexed("", 1_000_000, row, most=5)).lines
    assert made == [0, 1, 2, 999_998, 999_999]
    assert [line[0] for line in lines[1:]] == ["0", "1", "2", "… 999,995 more …", "999998", "999999"]
    assert max(len(cell) for line in lines for cell in line) == display.LONGEST


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 2), (20, 21), (21, 22)])
def test_a_table_that_is_not_too_long_is_whole(count: int, lines: int) -> None:
    text = display.indexed("", count, lambda number: {"number": number})
    assert len(Cells(text).lines) == lines and ("1 more" in text) == (count == 21)


def test_values_are_written_for_people() -> None:
    values = [1.23456, 12345.6, np.float64("nan"), np.int64(7), True, repro.PreemptionMode.SWAP, sum, [1, 2]]
    cells = [line[0] for line in Cells(display.table("", [{"value": one} for one in values])).lines[1:]]
    assert cells == ["1.235", "12,346", "", "7", "True", "swap", "sum", "[1, 2]"]


def test_block_numbers_in_a_row_are_a_range() -> None:
    assert display.ranges([7, 8, 9, 3, 5, 4]) == "7-9, 3, 5, 4" and display.ranges([]) == ""


@pytest.fixture(scope="module")
def watched() -> tuple[Served, repro.Receipts, repro.MemoryMap]:
    receipts, memory = repro.Receipts(), repro.MemoryMap()
    trace = repro.make_trace("sharegpt", rate=2.0, duration_s=30.0, seed=0)
    return repro.serve("vllm", "opt-13b", trace, log=[], observers=(receipts, memory)), receipts, memory


def manager() -> KVCacheManager:
    memory = PagedKVCacheManager(100, 4, watermark=0.0)
    memory.allocate(SequenceGroup(Request(3, 0.0, 10, 5, SamplingParams(n=2))), 10)
    return memory


def things(watched: tuple[Served, repro.Receipts, repro.MemoryMap]) -> dict[str, Any]:
    served, receipts, memory = watched
    return {
        "trace": repro.make_trace("sharegpt", rate=2.0, duration_s=30.0, seed=0),
        "served": served,
        "outcome": served.outcomes[0],
        "request": Request(1, 0.0, 5, 6, SamplingParams(), prefix_id=WICKED),
        "event": Event(3, WICKED, 1, {"blocks": [1]}),
        "receipts": receipts,
        "receipt": receipts.of(0),
        "nothing yet": repro.Receipts(),
        "moment": memory.at(100),
        "manager": manager(),
        "system": repro.contiguous_system(WICKED, lambda request, longest: request.output_tokens),
        "systems": repro.SYSTEMS,
        "deployments": repro.DEPLOYMENTS,
        "rows": Rows({"table": pd.DataFrame({"a": range(1000), WICKED: WICKED})}, {"table": ("a",)}),
        "claims": claims.read(ROOT / "figures"),
    }


KINDS = "trace served outcome request event receipts receipt moment manager system systems deployments"


@pytest.mark.parametrize("name", [*KINDS.split(), "nothing yet", "rows", "claims"])
def test_each_kind_is_a_bounded_escaped_table(name: str, watched: Any) -> None:
    text = things(watched)[name]._repr_html_()
    lines = Cells(text).lines
    assert len(text) < 30_000 and len(lines) <= max(display.MOST + 2, 30)
    assert lines or name == "nothing yet"


def test_what_tables_show_is_what_is_there(watched: Any) -> None:
    found = things(watched)
    assert ["3.0", "3", "0-2"] in Cells(found["manager"]._repr_html_()).lines
    assert "100 blocks of 4 slots, 97 free; 2 block tables" in found["manager"]._repr_html_()
    count = len(found["trace"])
    assert [f"… {count - 20:,} more …"] in Cells(found["trace"]._repr_html_()).lines
    assert f"{count} receipts; on average: queued" in found["receipts"]._repr_html_()
    assert "102 claims: 66 reproduced" in re.sub("<[^>]*>", "", found["claims"]._repr_html_())


def test_rows_for_pandas_are_those_of_the_things_themselves(watched: Any) -> None:
    served, receipts, memory = watched
    trace, frame = things(watched)["trace"], served.to_frame()
    assert list(frame.request_id) == list(trace.to_frame().request_id) == list(range(len(trace)))
    assert (trace.to_frame().output_tokens == trace.output_tokens).all()
    assert frame.normalized_latency_s.mean() == pytest.approx(served.latency_s_per_token)
    events = served.to_frame("events")
    assert len(events) == len(served.events) and (events.kind == "finish").sum() == len(trace)
    assert list(to_frame(served.log).kind) == list(events.kind)
    bills = to_frame(memory)
    pool = memory.num_blocks * memory.block_size * (memory.times_s[-1][1] - memory.times_s[0][0])
    assert bills.slot_s.sum() == pytest.approx(pool)
    causes = to_frame(receipts)
    assert causes.filter(regex=r"^(queued|prompt|own_steps|others_prompts|stalled)_s$").sum(axis=1).tolist() == (
        pytest.approx(causes.latency_s.tolist())
    )
    tables = to_frame(memory.at(100))
    assert tables.block_table.map(len).tolist() == tables.blocks.tolist()
    assert len(claims.read(ROOT / "figures").to_frame()) > 300
    assert to_frame(Outcome(Request(1, 0.0, 5, 6, SamplingParams()))).request_id.tolist() == [1]


@pytest.mark.parametrize("thing", [3, "text", [1], {}, None])
def test_what_has_no_rows_is_refused(thing: object) -> None:
    with pytest.raises(UserError, match="has no rows; give a trace"):
        to_frame(thing)


def test_a_table_that_is_not_there_is_named(watched: Any) -> None:
    with pytest.raises(UserError, match="unknown table 'gaps'; known: events, requests"):
        watched[0].to_frame("gaps")
