"""How figures look: names that do not hide each other, levels that counting reaches, maps that can be read."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from experiments import style
from experiments.statistics import Interval, interval


@pytest.fixture
def panel():
    _, axes = style.panels(1, 1, (5, 4))
    return axes[0, 0]


def test_series_differ_in_more_than_their_colour():
    looks = [style.series(k) for k in range(9)]
    for key in ("color", "linestyle", "marker"):
        assert len({str(look[key]) for look in looks}) == 9


def test_no_two_of_many_series_look_alike():
    """Not even where there are no lines, or no markers: colours alone repeat."""
    looks = [style.series(k) for k in range(81)]
    for key in ("linestyle", "marker"):
        assert len({(look["color"], str(look[key])) for look in looks}) == 81


def test_equal_figures_are_equal_files(panel, tmp_path, monkeypatch):
    for folder, moment in (("one", "1000000000"), ("two", "1000000001")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)  # the time that a PDF would tell
        (tmp_path / folder).mkdir()
        style.save([("figure", panel.figure)], tmp_path / folder)
    for name in ("figure.png", "figure.pdf"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_names_stand_in_the_order_of_their_ends_and_apart(panel):
    ends = {"low": (10, 1.0), "middle": (10, 1.001), "high": (10, 1.002), "far": (10, 2.0)}
    panel.set(xlim=(0, 10), ylim=(0, 3))
    style.direct(panel, ends, {name: {"color": "black"} for name in ends})
    words = sorted(panel.texts, key=lambda text: text.xyann[1])
    assert [text.get_text() for text in words] == list(ends)
    heights = [panel.transData.transform(text.xyann)[1] for text in words]
    assert all(after - before > 10 for before, after in itertools.pairwise(heights))  # 7.5 points at 150 dpi are 15.6
    assert words[-1].xyann[1] == pytest.approx(2.0)  # nothing is near: at its own height


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_names_stand_beside_the_panel_and_their_lines_end_before_them(panel, scale):
    panel.set(xscale=scale, xlim=(1, 1000), ylim=(0, 3))
    style.direct(
        panel, {"one": (1000, 1.0), "two": (1000, 1.01)}, {name: {"color": "black"} for name in ("one", "two")}
    )
    panel.figure.draw_without_rendering()
    right = panel.get_window_extent().x1
    for text in panel.texts:
        left = Text.get_window_extent(text).x0  # of the name without its line
        assert right < left < right + 30
        assert text.arrow_patch.get_window_extent().x1 <= left + 1


def test_heights_move_as_little_as_possible():
    assert style.apart([0.0, 5.0, 30.0], 10) == [-2.5, 7.5, 30.0]  # a pair moves up and down by the same
    assert style.apart([0.0, 0.0, 0.0], 10) == [-10.0, 0.0, 10.0]
    assert style.apart([0.0, 9.0, 12.0], 10) == pytest.approx([-3.0, 7.0, 17.0])  # what one pushes pushes the next
    assert style.apart([], 10) == []


def test_a_loss_stands_beside_what_counting_reaches(panel):
    style.loss_axis(panel, "held-out text", "byte", 5, {"1": 3.2, "2": 2.4, "3": 1.701, "4": 1.7}, (1.5, 3.0))
    assert panel.get_ylabel() == "loss on held-out text\n(nats per byte), n = 5"
    assert panel.get_ylim() == (1.5, 3.0)
    lines = sorted(line.get_ydata()[0] for line in panel.lines)
    assert lines == [1.7, 1.701, 2.4]  # single tokens say nothing here
    assert [text.get_text() for text in panel.texts] == ["", "3-grams 1.70, 4-grams 1.70", "2-grams 2.40"]


def test_of_two_seeds_both_are_drawn():
    """Their interval would be 12.7 times as wide."""
    assert style.half(interval([1.0, 1.5])) == pytest.approx(0.25)
    assert style.half(interval([1.0, 1.5, 2.0])) == interval([1.0, 1.5, 2.0]).half
    assert style.about_bars(2) == "n = 2 seeds, bars and bands from one to the other"
    assert style.about_bars("2 to 5") == "n = 2 to 5 seeds, 95 % intervals, of two, both"
    assert style.about_bars(5) == "n = 5 seeds, 95 % intervals"


def test_panels_without_crossed_labels_keep_their_limits():
    figure, ((left, right),) = style.panels(1, 2, (8, 4))
    left.plot([1.0, 10.0], [2.4, 2.4])
    style.level(left, 2.4, "2-grams")
    right.plot([0.0, 10.0], [1.0, 1.0])
    right.set_xlim(5, 10)  # cut on purpose
    style.make_room(figure)
    assert right.get_xlim() == (5, 10)
    assert left.get_xlim()[0] < 0


def test_room_on_a_logarithmic_axis_with_data_at_zero(panel):
    panel.set_xscale("log")
    panel.plot([0.0, 1.0, 10.0], [2.41, 2.41, 2.41])
    style.level(panel, 2.4, "2-grams")
    style.make_room(panel.figure)
    assert 0 < panel.get_xlim()[0] < 1


@pytest.mark.parametrize(("height", "moves"), [(2.41, True), (1.5, False)])
def test_data_begins_beside_a_label_that_it_would_cross(panel, height, moves):
    panel.plot([0.0, 10.0], [height, height])
    style.loss_axis(panel, "held-out text", "byte", 5, {"2": 2.4}, (1.0, 3.0))
    style.make_room(panel.figure)
    panel.figure.draw_without_rendering()
    (label,) = (text.get_window_extent() for text in panel.texts)
    assert (panel.transData.transform((0.0, height))[0] > label.x1) == moves
    assert not moves or min(panel.get_xticks()) == 0.0  # no numbers where no data is


def test_lines_outside_the_axis_take_no_room(panel):
    """With a label far above the axis, matplotlib gives up its layout, and panels cover each other."""
    style.loss_axis(panel, "held-out text", "byte", 5, {"2": 9.0, "3": 1.9, "5": 1.0}, (1.5, 2.0))
    assert [text.get_text() for text in panel.texts] == ["3-grams 1.90"]
    panel.figure.canvas.draw()  # a failed layout is a warning, and warnings are errors
    assert panel.get_tightbbox().y1 < panel.figure.bbox.y1


def test_a_span_holds_all_intervals():
    own = [Interval(1.0, 0.5, 3), Interval(2.0, np.nan, 1), Interval(2.5, 0.1, 3)]
    low, high = style.span(own, [0.2])
    assert low < 0.2 < 2.6 < high
    assert style.span([*own, Interval(np.nan, np.nan, 3)], [0.2, np.nan, np.inf]) == (low, high)


def test_a_map_has_each_mean_with_its_interval(panel):
    cells = [[Interval(1.0, 0.25, 3), Interval(4.0, 0.5, 3)]]
    style.heat(panel, ["arm"], ["here", "there"], cells)
    assert [text.get_text() for text in panel.texts] == ["1.00\n±0.25", "4.00\n±0.50"]
    assert [text.get_color() for text in panel.texts] == ["black", "white"]  # darker for larger


def test_a_map_of_differences_has_signs_and_a_single_seed_no_interval(panel):
    cells = [[Interval(-0.001, 0.25, 3), Interval(0.25, np.nan, 1), Interval(-0.5, np.nan, 1)]]
    style.heat(panel, ["arm"], ["here", "there", "afar"], cells, sign="+")
    assert [text.get_text() for text in panel.texts] == ["+0.00\n±0.25", "+0.25", "-0.50"]


@pytest.mark.parametrize(("n", "rows"), [(1, 1), (3, 1), (4, 2), (5, 2), (7, 3)])
def test_many_panels_stand_in_rows(n, rows):
    figure, panels = style.tiles(n, 2.0, 1.0, sharex=True)
    assert len(panels) == len(figure.axes) == n
    assert figure.get_size_inches()[1] == rows
    assert all(panel.xaxis.get_tick_params()["labelbottom"] for panel in panels)


def test_a_narrow_interval_has_a_width_in_a_map(panel):
    style.heat(panel, ["a"], ["x", "y"], [[Interval(0.2, 0.0046, 5), Interval(0.2, 0.0054, 5)]])
    assert [text.get_text() for text in panel.texts] == ["0.20\n±0.005", "0.20\n±0.01"]


def test_a_single_seed_has_no_interval():
    assert style.about_bars("1") == "n = 1 seed, without intervals"
    assert style.about_bars("1 to 5") == "n = 1 to 5 seeds, 95 % intervals"


def test_a_curve_that_ends_in_no_number_has_no_name_there(panel):
    ends = {"lost": (10, np.nan), "diverged": (10, np.inf), "there": (10, 1.0)}
    panel.set(xlim=(0, 10), ylim=(0, 3))
    style.direct(panel, ends, {name: {"color": "black"} for name in ends})
    assert [text.get_text() for text in panel.texts] == ["there"]
    assert style.span([Interval(np.nan, np.nan, 3)], [np.inf]) == (-0.04, 1.04)  # a page without any number is drawn


def test_a_map_has_the_colours_of_its_finite_cells(panel):
    cells = [[Interval(1.0, 0.25, 3), Interval(np.nan, np.nan, 3), Interval(np.inf, np.nan, 1), Interval(4.0, 0.5, 3)]]
    style.heat(panel, ["arm"], ["a", "b", "c", "d"], cells)
    (image,) = panel.images
    assert image.get_clim() == (1.0, 4.0)
    assert [text.get_text() for text in panel.texts] == ["1.00\n±0.25", "not finite", "not finite", "4.00\n±0.50"]
    assert [text.get_color() for text in panel.texts] == ["black", "black", "black", "white"]
    panel.figure.canvas.draw()  # warnings are errors
