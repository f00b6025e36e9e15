"""The walk through the paper's block-manager figures, and that a wrong manager would be caught."""

import pytest
from loads import parameters, rows_of

from repro.errors import UserError
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.studies import fig05_block_tables as study

RUN = experiment.open("fig05_block_tables")


@pytest.fixture
def rows():
    return rows_of(study, RUN.params)["states"]


def verdicts(rows):
    return {judged.claim_id: judged.ours for judged in RUN.judgements(Rows({"states": rows}, study.TABLES))}


def test_the_manager_passes_through_the_drawn_states(rows):
    assert verdicts(rows) == dict.fromkeys(("fig5-7-block-tables", "fig8-parallel-cow", "fig9-beam-sharing"), 0)


@pytest.mark.parametrize("walk", study.DRAWN)
def test_each_state_of_a_walk_is_the_one_written_down(rows, walk):
    """Fig. 10 among them, which no claim judges: the paper draws its words, not its blocks."""
    walked = rows[rows["walk"] == walk]
    assert set(walked["step"]) == set(study.DRAWN[walk])
    for step, drawn in study.DRAWN[walk].items():
        assert study.same_state(walked[walked["step"] == step], drawn), step


def test_a_shared_prefix_is_stored_once_and_outlives_its_requests(rows):
    prefix = rows[(rows["walk"] == "shared prefix") & (rows["sequence"] == "prefix")]
    assert set(prefix["physical"]) == {0, 1, 2, 3, 4} and set(prefix["filled"]) == {4}
    assert prefix.groupby("step", sort=False)["ref_count"].unique().map(list).tolist() == [[1], [3], [3], [2]]


@pytest.mark.parametrize("column", ["physical", "filled", "ref_count", "blocks_in_use", "blocks_copied"])
@pytest.mark.parametrize(
    "walk, claim_id",
    [("one request", "fig5-7-block-tables"), ("two samples", "fig8-parallel-cow"), ("four beams", "fig9-beam-sharing")],
)
def test_any_other_state_is_noticed(rows, walk, claim_id, column):
    last = rows.index[rows["walk"] == walk][-1]
    # The last block of a walk becomes its first one, or a count is one more.
    rows.loc[last, column] = (
        rows.loc[rows["walk"] == walk, column].iloc[0] if column == "physical" else rows.loc[last, column] + 1
    )
    assert verdicts(rows)[claim_id] > 0


def test_a_state_that_is_missing_is_no_success(rows):
    rows = rows[rows["step"] != "new words"]
    assert verdicts(rows)["fig9-beam-sharing"] == 1


def test_the_names_of_blocks_do_not_matter(rows):
    rows["physical"] = 31 - rows["physical"]
    assert not any(verdicts(rows).values())


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_other_block_sizes_run_and_are_not_judged(block_size):
    run = experiment.open("fig05_block_tables", overrides={"block_size": block_size})
    rows = rows_of(study, run.params)
    assert run.judgements(rows) == []
    filled = rows["states"]["filled"]
    assert (filled <= block_size).all() and (filled > 0).all()
    assert set(study.draw(rows, run.params)) == set(run.file.captions)


def test_a_block_size_that_is_none_is_refused():
    with pytest.raises(UserError, match="block_size"):
        parameters("fig05_block_tables", block_size=3)
