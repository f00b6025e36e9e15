"""What a generation shows in a notebook, and its rows for pandas."""

import pytest
from cells import Cells

pytest.importorskip("torch")

from repro.engine.systems import system
from repro.harness.tables import to_frame
from repro.history.recipe import Setup
from repro.history.recorded import Recorded
from repro.llm.results import Generation, RequestResult, Sample, Statistics

WICKED = "<script>alert('&')</script>"


def made_of(results: list[RequestResult]) -> Generation:
    recorded = Recorded(Setup(system("vllm"), 100, 16, 2048, 0), [], [], {})
    return Generation(results, Statistics(*[1] * 17), [], 0, recorded)


def generation() -> Generation:
    sample = Sample(WICKED, [1, 2], [-0.5, -1.5], "length")
    results = [RequestResult(WICKED, [3], [sample]), RequestResult(None, [3, 4], [], error="too long")]
    return made_of(results)


def test_a_generation_is_a_table_of_its_samples() -> None:
    _, sample, refused = Cells(generation()._repr_html_()).lines
    assert sample[:5] == ["0", WICKED, WICKED, "2", "-1"] and "length" in sample
    assert refused[:3] == ["1", "2 token ids", ""] and refused[-1] == "too long"
    assert "<script" not in generation()._repr_html_()


def test_so_is_one_of_its_results() -> None:
    assert Cells(generation()[0]._repr_html_()).lines[1][:2] == [WICKED, WICKED]


def test_a_long_generation_shows_its_first_and_last_samples() -> None:
    made = made_of(generation().results * 500)
    lines = Cells(made._repr_html_()).lines
    assert ["… 980 more …"] in lines and len(lines) == 22


def test_its_rows_come_for_pandas() -> None:
    frame = to_frame(generation())
    assert list(frame.text.fillna("none")) == [WICKED, "none"]
    assert list(frame.number) == [0, 1] and frame.mean_logprob[0] == -1.0
