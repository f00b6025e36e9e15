"""The house style: who is who, what is measured, and what the paper drew can be told apart; equal rows, equal bytes."""

import matplotlib
import pandas as pd
import pytest

from repro.report import embedding, paper, plotting


def rows(system="vllm", evidence="modelled", seeds=(0, 1, 2), device="a100-2023"):
    return pd.DataFrame(
        [
            {
                "system": system,
                "evidence": evidence,
                "device": device,
                "seed": seed,
                "rate": rate,
                "latency": rate * (1 + 0.1 * seed),
            }
            for seed in seeds
            for rate in (1.0, 2.0)
        ]
    )


@pytest.fixture
def axis():
    with plotting.house():
        yield plotting.panels(["one"])[1][0]


def test_the_five_systems_differ_in_colour_and_in_marker():
    looks = list(plotting.STYLE.values())
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == 5
    assert set(plotting.STYLE) == set(plotting.LABEL)


def test_a_user_s_systems_get_styles_of_their_own_and_change_no_other():
    looks = plotting.styles(["mine", "vllm", "yours", "mine"])
    assert looks["vllm"] == plotting.STYLE["vllm"]
    assert len({look.color for look in looks.values()}) == 3
    assert looks["mine"].color not in {look.color for look in plotting.STYLE.values()}
    assert plotting.styles(["mine"]) == plotting.styles(["mine"])


def test_the_curve_is_the_mean_over_seeds_and_the_band_their_range(axis):
    plotting.curves(axis, rows(), "rate", "latency")
    assert list(axis.lines[0].get_ydata()) == pytest.approx([1.1, 2.2])
    band = axis.collections[0].get_paths()[0].vertices
    assert {round(y, 9) for x, y in band if x == 2.0} == {2.0, 2.4}


def test_the_rows_evidence_decides_the_line(axis):
    kinds = ("modelled", "replayed", "measured")
    plotting.curves(axis, pd.concat([rows(evidence=kind) for kind in kinds]), "rate", "latency")
    modelled, replayed, measured = axis.lines
    assert modelled.get_color() == replayed.get_color() == measured.get_color() == plotting.STYLE["vllm"].color
    assert modelled.get_linestyle() != "-" and replayed.get_linestyle() == measured.get_linestyle() == "-"
    assert measured.get_markeredgecolor() == "black" != replayed.get_markeredgecolor()


def test_text_is_dark_on_light_colours_and_white_on_dark_ones():
    assert plotting.ink("#E3B23C") == plotting.ink("#9FABC0") == "#1A1A1A" and plotting.ink("#17436F") == "white"


@pytest.mark.parametrize("low, high", [(0.02, 1.15), (0.06, 0.3), (1600, 80_000), (1e-3, 1e4)])
def test_a_logarithmic_axis_has_plain_numbers_and_says_so(axis, low, high):
    axis.set(ylim=(low, high), ylabel="latency (s)", yscale="log")
    plotting.log(axis)
    axis.figure.draw_without_rendering()
    texts = [text.get_text() for text in axis.get_yticklabels()]
    assert len(texts) >= 3 and not any("$" in text for text in texts)
    assert axis.get_ylabel() == "latency (s, log)"


def test_a_band_is_named_where_it_is_drawn(axis):
    plotting.band(axis, -15, 15, "within 15 %")
    assert [text.get_text() for text in axis.texts] == ["within 15 %"]


def test_a_legend_takes_as_few_lines_as_the_width_allows():
    with plotting.house():
        figure, _ = plotting.panels(["one", "two"])
        plotting.place_legend(figure, [plotting.key(text) for text in ("a", "b", "c", "a very long name indeed")])
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.legends[0]._ncols > 1


def test_the_paper_s_points_are_hollow_and_ours_are_not(axis):
    plotting.curves(axis, rows(), "rate", "latency", paper={"vllm": [(1.0, 1.0), (2.0, 2.0)]})
    theirs, ours = axis.lines
    assert theirs.get_markerfacecolor() == "none" != ours.get_markerfacecolor()
    assert theirs.get_marker() == ours.get_marker()


def test_missing_values_leave_a_gap_and_do_not_drag_the_mean(axis):
    table = rows(seeds=(0,))
    table.loc[table["rate"] == 2.0, "latency"] = float("nan")
    plotting.curves(axis, table, "rate", "latency")
    assert list(axis.lines[0].get_xdata()) == [1.0]


def test_the_bars_of_fig2_stack_to_the_whole_pool():
    pieces = dict(token_states=20.0, reserved=13.0, internal=57.0, rounding=4.0, free=6.0)
    table = pd.DataFrame([{"system": "orca-max", "evidence": "replayed", "seed": 0, **pieces}])
    with plotting.house():
        figure, (axis,) = plotting.panels([""])
        plotting.memory_bars(axis, table, paper=paper.figure("fig2"))
        plotting.memory_legend(figure, with_paper=True)
    ours = [bar for bar in axis.patches if bar.get_facecolor()[3] > 0]
    assert [bar.get_height() for bar in ours] == list(pieces.values())
    assert ours[-1].get_y() + ours[-1].get_height() == pytest.approx(100)
    assert len(axis.patches) - len(ours) == 4


def test_bars_carry_mean_and_range(axis):
    plotting.bars(axis, rows(), "latency", paper={"vllm": 1.5}, digits=2)
    assert [bar.get_height() for bar in axis.patches] == pytest.approx([1.65, 1.5])
    assert [text.get_text() for text in axis.texts] == ["1.65", "1.50"]


def test_the_footer_says_what_the_figure_is():
    both = pd.concat([rows(), rows(evidence="recorded", device="h200", seeds=(0,))])
    text = plotting.provenance(both, with_paper=True)
    assert text == (
        "Modelled: virtual time, step times of a100-2023, mean of 3 seeds (range: least to most). "
        "Recorded earlier on h200, one seed. Hollow: the paper"
    )
    with plotting.house():
        figure, _ = plotting.panels(["one"])
        plotting.footer(figure, rows(), note="A word more.")
    written = " ".join(figure.texts[-1].get_text().split())
    assert written.startswith("Modelled: virtual time") and written.endswith("A word more.")


def test_the_house_leaves_matplotlib_s_settings_alone():
    before = dict(matplotlib.rcParams)
    with plotting.house():
        assert matplotlib.rcParams["axes.grid"]
    assert dict(matplotlib.rcParams) == before


def test_a_notebook_can_show_the_figure():
    figure, _ = plotting.panels(["one"])
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("file_format", embedding.FIGURE_FORMATS)
def test_equal_rows_give_equal_bytes(file_format):
    def drawn():
        with plotting.house():
            figure, axes = plotting.panels(["one", "two"])
            plotting.curves(axes[0], rows(), "rate", "latency", paper={"vllm": [(1.0, 1.0)]})
            plotting.legend(figure, rows(), with_paper=True)
            plotting.footer(figure, rows(), with_paper=True)
        return embedding.figure_bytes(figure, file_format, {"experiment": "x"})

    assert drawn() == drawn()
