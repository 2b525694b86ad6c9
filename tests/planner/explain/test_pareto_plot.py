"""The Pareto plot: it shows every curve, the unplanned point, the bound and the infeasible budgets."""

from __future__ import annotations

import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from planner.explain.pareto_plot import draw_pareto, pareto_figure
from planner.plans.pareto_curves import COLUMNS

MIB, GIB = 2**20, 2**30


def frame_of(*rows, scale: int = MIB) -> pd.DataFrame:
    """Rows of (solver, peak, seconds); the bound's peak is its budget."""
    full = [
        (solver, peak * scale, None if solver == "lower_bound" else peak * scale, seconds, seconds, "feasible", 0.0)
        for solver, peak, seconds in rows
    ]
    return pd.DataFrame(full, columns=list(COLUMNS))


ROWS = (
    ("none", 100, 0.010),
    ("keep_all", 100, 0.010),
    ("recompute_all", 50, 0.015),
    ("chen_sqrt", 60, 0.016),
    ("chen_greedy", 50, 0.015),
    ("rotor", 40, 0.014),
    ("rotor", 100, 0.010),
    ("rotor", 70, 0.012),
    ("lower_bound", 40, 0.013),
    ("lower_bound", 100, 0.010),
)


def lines(figure) -> dict:
    return {
        str(line.get_label()): line for line in figure.axes[0].get_lines() if not str(line.get_label()).startswith("_")
    }


def test_everything_is_drawn_and_named_in_the_legend():
    figure = pareto_figure(frame_of(*ROWS), title="Net on cpu", budget_bytes=55 * MIB)
    axes = figure.axes[0]
    names = {text.get_text() for text in figure.legends[0].get_texts()}
    solvers = {"keep_all", "recompute_all", "chen_sqrt", "chen_greedy", "rotor"}
    assert names == solvers | {"lower bound", "unplanned", "no plan fits", "budget 55.0 MiB"}
    assert axes.get_title() == "Net on cpu"
    assert "MiB" in axes.get_xlabel() and "ms" in axes.get_ylabel()
    colours = {to_rgba(line.get_color()) for name, line in lines(figure).items() if name in solvers}
    assert len(colours) == len(solvers)


def test_a_curve_is_drawn_by_rising_memory_in_steps_to_the_right():
    figure = pareto_figure(frame_of(*ROWS))
    rotor = lines(figure)["rotor"]
    assert list(rotor.get_xdata())[:3] == [40, 70, 100]
    assert list(rotor.get_ydata()) == pytest.approx([14, 12, 10, 10])
    assert rotor.get_drawstyle() == "steps-post"
    assert list(lines(figure)["lower bound"].get_xdata()) == [40, 100]
    assert list(lines(figure)["chen_sqrt"].get_xdata()) == [60]


def test_the_infeasible_part_ends_at_the_smallest_peak():
    axes = pareto_figure(frame_of(*ROWS)).axes[0]
    (region,) = [patch for patch in axes.patches if patch.get_label() == "no plan fits"]
    assert region.get_extents().transformed(axes.transData.inverted()).x1 == pytest.approx(40)


def test_between_the_first_bound_and_the_smallest_peak_no_plan_is_known():
    axes = pareto_figure(frame_of(*ROWS, ("lower_bound", 25, 0.02))).axes[0]
    regions = {patch.get_label(): patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches}
    assert regions["no plan fits"].x1 == pytest.approx(25)
    assert (regions["no plan known"].x0, regions["no plan known"].x1) == pytest.approx((25, 40))
    assert axes.get_xlim()[0] < 25


def test_the_bound_steps_to_the_left():
    """What is proven for a budget holds for smaller ones; between two of them no more is proven."""
    assert lines(pareto_figure(frame_of(*ROWS)))["lower bound"].get_drawstyle() == "steps-pre"


def test_a_problem_without_bytes_or_seconds_can_be_drawn():
    axes = pareto_figure(frame_of(("none", 0, 0.0), ("auto", 0, 0.0))).axes[0]
    assert axes.get_xlim()[0] <= 0 < axes.get_xlim()[1]


def test_large_models_are_drawn_in_gib_and_seconds():
    rows = [(solver, peak, seconds * 1000) for solver, peak, seconds in ROWS]
    figure = pareto_figure(frame_of(*rows, scale=GIB), budget_bytes=55 * GIB)
    axes = figure.axes[0]
    assert "GiB" in axes.get_xlabel() and "[s]" in axes.get_ylabel()
    assert list(lines(figure)["rotor"].get_xdata())[:2] == [40, 70]
    assert list(lines(figure)["budget 55.0 GiB"].get_xdata()) == [55, 55]


def test_every_point_lies_inside_the_axes():
    axes = pareto_figure(frame_of(*ROWS)).axes[0]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    for _, peak, seconds in ROWS:
        assert left < peak < right and low < seconds * 1e3 < high


def test_a_plan_of_many_times_the_fastest_s_time_does_not_flatten_the_rest():
    figure = pareto_figure(frame_of(*ROWS, ("auto", 30, 0.5), ("auto", 100, 0.01)))
    axes = figure.axes[0]
    assert 16 < axes.get_ylim()[1] < 30
    assert "auto (up to 500 ms, above the chart)" in {text.get_text() for text in figure.legends[0].get_texts()}
    assert not axes.texts  # a note at the curve would lie over markers and over the notes of other curves


def test_a_single_point_can_be_drawn():
    axes = pareto_figure(frame_of(("none", 10, 0.01), ("keep_all", 10, 0.01))).axes[0]
    assert axes.get_xlim()[0] < 10 < axes.get_xlim()[1]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml"), ("p.pdf", b"%PDF")])
def test_the_picture_is_written_in_the_format_of_its_name(tmp_path, name, start):
    draw_pareto(frame_of(*ROWS), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_other_formats_missing_folders_and_empty_tables_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got '.txt'"):
        draw_pareto(frame_of(*ROWS), tmp_path / "p.txt")
    with pytest.raises(ValueError, match="expected a folder"):
        draw_pareto(frame_of(*ROWS), tmp_path / "no" / "p.png")
    with pytest.raises(ValueError, match="at least one plan"):
        draw_pareto(frame_of(("none", 10, 0.01)), tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []
