"""The pictures of block tables: a panel for each iteration that was recorded, and a clear word for one that was not."""

import pytest

from repro.errors import UserError
from repro.report.diagrams import Cell, State, draw

STATES = [State(number, 4, {"0": [Cell(7, 4, 2), Cell(1, number, 1)], "1": [Cell(7, 4, 2)]}) for number in (1, 2)]


def test_each_recorded_iteration_has_a_panel_with_its_cells():
    figure = draw(STATES)
    assert [axis.get_title() for axis in figure.axes] == [f"Iteration {n}: 2 physical blocks" for n in (1, 2)]
    assert [text.get_text() for text in figure.axes[0].texts] == ["7\u00d72", "1", "7\u00d72"]
    assert len(draw(STATES, [2]).axes) == 1
    assert len(draw(STATES, [2], max_blocks=1).axes[0].texts) == 2


@pytest.mark.parametrize("states, iterations", [(STATES, [5]), ([], None), ([State(0, 4, {})], None)])
def test_iterations_that_were_not_recorded_are_refused(states, iterations):
    with pytest.raises(UserError, match=r"recorded: (\[1, 2\]|none)"):
        draw(states, iterations)
