"""The timeline's picture: curves, phases, budget and peaks are there, and the legend hides none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib.lines import Line2D

from planner.explain.peak import peak_rows, predicted_peak
from planner.explain.timeline import Timeline, predicted_timelines
from planner.explain.timeline_plot import ExplainedPeak, draw_timeline, timeline_figure
from tests.support.small_chain import DROPPED, two_stages


@pytest.fixture
def timelines() -> list[Timeline]:
    return predicted_timelines(two_stages(), DROPPED, seconds_outside_chain=0.5)


@pytest.fixture
def all_four(timelines: list[Timeline]) -> list[Timeline]:
    return [*timelines, *(replace(timeline, source="measured") for timeline in timelines)]


@pytest.fixture
def peaks(timelines: list[Timeline]) -> list[ExplainedPeak]:
    peak = predicted_peak(two_stages(), DROPPED, timelines[1])
    return [ExplainedPeak(peak=peak, rows=peak_rows(peak))]


def points_of(line: Line2D) -> tuple[list[float], list[float]]:
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]  # type: ignore[union-attr]


def test_both_steps_are_drawn_with_their_budget(timelines: list[Timeline]) -> None:
    axes = timeline_figure(timelines, budget_bytes=18).axes[0]
    lines = {str(line.get_label()): line for line in axes.get_lines()}
    times, sizes = points_of(lines["with the plan"])
    planned = timelines[1].spans
    assert max(sizes) == 17 and sizes[:3] == [10, 12, 11]
    assert (times[0], times[-1]) == (0, pytest.approx(planned[-1].end_seconds * 1e3))
    assert set(points_of(lines["budget 18 B"])[1]) == {18}
    assert max(points_of(lines["without the plan"])[1]) == timelines[0].peak.peak_bytes


def test_the_legend_names_everything_and_lies_beside_the_curves(all_four: list[Timeline]) -> None:
    figure = timeline_figure(all_four, budget_bytes=18, title="Net on cpu")
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    curves = {"with the plan", "without the plan", "measured with the plan", "measured without the plan"}
    actions = {"forward", "recompute", "backward", "optimizer"}
    assert names == curves | actions | {"model states and batch", "budget 18 B"}
    figure.canvas.draw()
    legend = figure.legends[0].get_window_extent()
    assert all(legend.y1 <= axes.get_window_extent().y0 for axes in figure.axes[:2])


def test_bars_below_say_what_runs_when(timelines: list[Timeline]) -> None:
    """The first stage runs again from 4 s on; 10 B are there all the time."""
    axes, strip, _ = timeline_figure(timelines, budget_bytes=18).axes
    bars = {str(bar.get_label()): [path.get_extents() for path in bar.get_paths()] for bar in strip.collections}
    for lane in timelines[1].lanes():
        times = [(bar.x0, bar.x1) for bar in bars[lane.action]]
        assert times == [pytest.approx((begin * 1e3, end * 1e3)) for begin, end in lane.seconds]
    again = [span for span in timelines[1].spans if span.action == "recompute"]
    assert bars["recompute"][0].x0 == pytest.approx(again[0].start_seconds * 1e3)
    floor = next(area for area in axes.collections if area.get_label() == "model states and batch")
    assert floor.get_paths()[0].get_extents().y1 == 10


def test_peaks_are_marked_and_explained(all_four: list[Timeline], peaks: list[ExplainedPeak]) -> None:
    figure = timeline_figure(all_four, budget_bytes=18, peaks=peaks)
    axes, strip, beside = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert texts[0] == "recompute first" and texts[-1] == "peak 17 B predicted, 17 B measured"
    words = beside.texts[0].get_text()
    assert "17 B in the forward of second" in words
    assert "• 10 B  resident" in words and "• 6 B  made as its forward runs, second" in words
    figure.canvas.draw()
    text, column = beside.texts[0].get_window_extent(), figure.bbox
    assert text.x0 >= max(axes.get_window_extent().x1, strip.get_window_extent().x1)
    assert text.x1 <= column.x1


def test_long_names_stay_inside_the_picture(timelines: list[Timeline], peaks: list[ExplainedPeak]) -> None:
    row = replace(peaks[0].rows[0], where="encoder.some.very.long.module.path.layers.0 to 11 (12 stages)", op="x" * 30)
    figure = timeline_figure(timelines, budget_bytes=18, peaks=[ExplainedPeak(peak=peaks[0].peak, rows=[row] * 9)] * 2)
    figure.canvas.draw()
    text = figure.axes[2].texts[0].get_window_extent()
    assert text.x1 <= figure.bbox.x1 and text.y0 >= 0
    assert "4 smaller parts" in figure.axes[2].texts[0].get_text()


def test_large_and_slow_steps_are_drawn_in_gib_and_seconds(timelines: list[Timeline]) -> None:
    spans = tuple(
        replace(s, start_seconds=10 * s.start_seconds, end_seconds=10 * s.end_seconds) for s in timelines[1].spans
    )
    figure = timeline_figure([replace(timelines[1], spans=spans)], budget_bytes=18 * 2**30)
    assert "[GiB]" in figure.axes[0].get_ylabel() and "[s]" in figure.axes[1].get_xlabel()


def test_a_step_without_bytes_or_seconds_can_be_drawn(timelines: list[Timeline]) -> None:
    empty = [
        replace(s, start_seconds=0, end_seconds=0, before_bytes=0, peak_bytes=0, after_bytes=0)
        for s in timelines[1].spans
    ]
    figure = timeline_figure([replace(timelines[1], spans=tuple(empty))], budget_bytes=0)
    assert figure.axes[1].get_xlim()[1] > 0


@pytest.mark.parametrize(("name", "start"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml"), ("t.pdf", b"%PDF")])
def test_the_picture_is_written_whole_in_the_format_of_its_name(tmp_path, timelines, peaks, name, start) -> None:
    draw_timeline(timelines, tmp_path / name, budget_bytes=18, peaks=peaks)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_formats_and_missing_folders_are_refused(tmp_path, timelines) -> None:
    with pytest.raises(ValueError, match="got '.jpg'"):
        draw_timeline(timelines, tmp_path / "t.jpg", budget_bytes=18)
    with pytest.raises(ValueError, match="expected a folder"):
        draw_timeline(timelines, tmp_path / "no" / "t.png", budget_bytes=18)
    assert list(tmp_path.iterdir()) == []


def test_backwards_in_which_some_ops_run_again_have_a_colour_of_their_own(timelines: list[Timeline]) -> None:
    planned = timelines[1]
    spans = tuple(replace(s, again_seconds=0.5) if s.action == "backward" else s for s in planned.spans)
    strip = timeline_figure([timelines[0], replace(planned, spans=spans)], budget_bytes=18).axes[1]
    bars = {str(bar.get_label()) for bar in strip.collections}
    assert "backward, some ops recomputed" in bars and "backward" not in bars
