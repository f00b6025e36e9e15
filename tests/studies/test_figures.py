"""Every committed figure keeps the house rules: drawn again from the rows beside it and looked at as its artists."""

from functools import cache
from itertools import combinations

import pytest
from matplotlib.colors import to_rgba

from repro import paths
from repro.harness import experiment
from repro.harness.tables import Rows
from repro.report import plotting

pytestmark = pytest.mark.heavy(20)

FOLDER = paths.root() / "figures"
STEMS = paths.folders().stems()
RESERVED = {plotting.STYLE[name].color.lower() for name in ("vllm", "orca-max")}


@cache
def rows_of(stem):
    run = experiment.open(stem)
    return Rows.read({name: FOLDER / f"{stem}.{name}.csv" for name in run.study.TABLES}, run.study.TABLES)


@cache
def drawn(stem):
    figures = experiment.open(stem).study.draw(rows_of(stem), experiment.open(stem).params)
    for figure in figures.values():
        figure.draw_without_rendering()
    return figures


def another_run(stem):
    """Parameters of which one number differs from the paper's; None where nothing is a matter of scale."""
    run = experiment.open(stem)
    for name, value in run.params.model_dump().items():
        if isinstance(value, float) and name not in run.params.free:
            return experiment.open(stem, overrides={name: 0.75 * value})
    return None


def hollow(figure):
    """Markers and bars without a filling."""
    lines = [
        line for axis in figure.axes for line in axis.lines if line.get_marker() not in ("", "None", "x", "+", "_")
    ]
    bars = [bar for axis in figure.axes for bar in axis.patches if bar.get_width() and bar.get_height()]
    return [line for line in lines if str(line.get_markerfacecolor()) == "none"] + [
        bar for bar in bars if bar.get_facecolor()[3] == 0
    ]


def visible(texts):
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def tick_labels(line):
    """Those of a side's tick labels that are drawn."""
    low, high = sorted(line.get_view_interval())
    pairs = zip(line.get_majorticklocs(), line.get_majorticklabels())
    return visible(text for place, text in pairs if low <= place <= high)


@pytest.mark.parametrize("stem", STEMS)
def test_nothing_leaves_the_figure_and_no_words_in_a_panel_overlap(stem):
    for name, figure in drawn(stem).items():
        canvas = figure.bbox.padded(1)
        for axis in figure.axes:
            ticks = [tick_labels(axis.xaxis), tick_labels(axis.yaxis)]
            labels = [axis.title, axis.xaxis.label, axis.yaxis.label, *ticks[0], *ticks[1]]
            for text in visible([*axis.texts, *labels, *figure.texts]):
                box = text.get_window_extent()
                assert canvas.contains(box.x0, box.y0) and canvas.contains(box.x1, box.y1), (name, text.get_text())
            boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in visible(axis.texts)]
            for (one, here), (other, there) in combinations(boxes, 2):
                assert not here.overlaps(there), (name, one, other)
            for side in ticks:
                boxes = [text.get_window_extent().padded(-1) for text in side if not text.get_rotation()]
                assert not any(here.overlaps(there) for here, there in combinations(boxes, 2)), (name, axis.get_title())


@pytest.mark.parametrize("stem", STEMS)
def test_legends_stand_outside_the_data_and_logarithmic_axes_say_so(stem):
    for name, figure in drawn(stem).items():
        for axis in figure.axes:
            assert axis.get_legend() is None, name
            for line in (axis.xaxis, axis.yaxis):
                if line.get_scale() == "log":
                    told = len(tick_labels(line)) >= 2 and "log" in line.get_label_text()
                    assert told, (name, axis.get_title())


@pytest.mark.parametrize("stem", STEMS)
def test_beside_another_run_nothing_is_hollow_and_its_figures_say_what_it_is(stem):
    if (run := another_run(stem)) is None:
        pytest.skip("no number of it is a matter of scale")
    for name, figure in run.study.draw(rows_of(stem), run.params).items():
        assert not hollow(figure), name
        assert any(run.params.another_run in " ".join(text.get_text().split()) for text in figure.texts), name


def test_the_colours_of_vllm_and_orca_max_are_theirs_alone():
    looks = [plotting.other(number) for number in range(8)] + list(plotting.WAYS.values())
    assert not RESERVED & {look.color.lower() for look in looks}
    assert len({to_rgba(plotting.other(number).color) for number in range(8)}) == 8
