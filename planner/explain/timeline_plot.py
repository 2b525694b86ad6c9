"""Plots of the bytes alive over a step without a plan and with it, what runs when, the budget and the peak's parts."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner.explain.peak import Peak, PeakRow, moment_in_words
from planner.explain.timeline import Span, Timeline, side_by_side, units_of
from planner.pictures import ACTIONS, BUDGET, CURVES, STATES, AxisUnits, check_picture, new_figure, write_picture
from planner.units import common_path, format_bytes, names_in_short
from profiler.op_graph import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP_PARTS = 5
_TEXT_WIDTH = 40  # characters of the column beside the curves
_NAMED = 10  # stretches of recomputation, the longest ones
_LEAST = 0.012  # of the axes' width: a shorter one has no room for a name
_HEADROOM = 1.16  # times the highest point: the peaks' own words stand above it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPeak:
    """A peak with its parts, alike ones together, largest first."""

    peak: Peak
    rows: Sequence[PeakRow]


def draw_timeline(
    timelines: Sequence[Timeline],
    path: str | Path,
    *,
    budget_bytes: int,
    peaks: Sequence[ExplainedPeak] = (),
    title: str = "",
) -> None:
    """Draw timelines and write the picture whole.

    Args:
        timelines: predicted ones, and measured ones if there are; without the plan and with it.
        path: a .png, .svg or .pdf file.
        budget_bytes: marked with a line.
        peaks: of the planned step; the largest parts are listed beside the curves.
        title: for example the model and the device.

    Raises:
        ValueError: another kind of file, or a folder that is not there.
    """
    check_picture(path)
    write_picture(timeline_figure(timelines, budget_bytes=budget_bytes, peaks=peaks, title=title), path)


def timeline_figure(
    timelines: Sequence[Timeline], *, budget_bytes: int, peaks: Sequence[ExplainedPeak] = (), title: str = ""
) -> Figure:
    """The figure that ``draw_timeline`` writes."""
    timelines = side_by_side(timelines)
    units = units_of(timelines, budget_bytes)
    planned = next((t for t in timelines if t.planned and t.source == "predicted"), timelines[-1])
    rows = list(dict.fromkeys(lane.row for lane in planned.lanes()))
    figure = new_figure(12, 7.5, dpi=150)
    grid = figure.add_gridspec(2, 2, width_ratios=(3.3, 1), height_ratios=(1, 0.03 + 0.05 * len(rows)))
    axes = figure.add_subplot(grid[0, 0])
    strip = figure.add_subplot(grid[1, 0], sharex=axes)
    _draw_curves(axes, timelines, units)
    _name_recomputations(axes, planned, units, max(timeline.seconds for timeline in timelines))
    budget = f"budget {format_bytes(budget_bytes)}"
    axes.axhline(budget_bytes / units.bytes_each, color=BUDGET, linestyle=":", linewidth=1.5, label=budget)
    _mark_peaks(axes, timelines, units)
    _set_limits(axes, timelines, budget_bytes, units)
    _draw_lanes(strip, planned, rows, units.seconds_each)
    axes.set_ylabel(f"bytes alive [{units.bytes_name}]")
    axes.tick_params(labelbottom=False)
    axes.grid(alpha=0.25)
    whose = ", as predicted" if any(timeline.source == "measured" for timeline in timelines) else ""
    strip.set_xlabel(f"time since the step began{whose} [{units.seconds_name}]")
    _list_parts(figure.add_subplot(grid[:, 1]), peaks)
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")  # beside the axes it hides no curve
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def _draw_curves(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits) -> None:
    """A line for each timeline, the planned one filled, over what is there from the step's beginning on."""
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    floor = timelines[-1].spans[0].before_bytes / units.bytes_each
    axes.fill_between([0, longest], floor, color=STATES, alpha=0.35, linewidth=0, label="model states and batch")
    for timeline in timelines:
        times, sizes = zip(*timeline.points(), strict=True)
        x, y = [at / units.seconds_each for at in times], [size / units.bytes_each for size in sizes]
        colour, dotted = CURVES[timeline.name], ":" if timeline.source == "measured" else "-"
        axes.plot(x, y, color=colour, linestyle=dotted, linewidth=1.8, label=timeline.name, zorder=3)
        if timeline.planned and timeline.source == "predicted":
            axes.fill_between(x, y, color=colour, alpha=0.15, linewidth=0)


def _name_recomputations(axes: Axes, timeline: Timeline, units: AxisUnits, longest_seconds: float) -> None:
    """The names of recomputed stages where they run, of the longest stretches."""
    stretches = recomputations(timeline)
    path = common_path([span.stage for stretch in stretches for span in stretch]) if stretches else ""
    room = [s for s in stretches if s[-1].end_seconds - s[0].start_seconds >= _LEAST * longest_seconds]
    for stretch in sorted(room, key=lambda s: s[0].start_seconds - s[-1].end_seconds)[:_NAMED]:
        stages = [span.stage.replace(path, "") if path else span.stage for span in stretch]
        middle = (stretch[0].start_seconds + stretch[-1].end_seconds) / 2 / units.seconds_each
        name = f"recompute {names_in_short(list(dict.fromkeys(stages)), '')}"
        look = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": "x-small"}
        axes.annotate(name, (middle, 0), xytext=(0, 3), textcoords="offset points", zorder=6, **look)


def recomputations(timeline: Timeline) -> list[list[Span]]:
    """Runs of stages but their first, those without a backward between them together, in the order of time."""
    spans = (span for span in timeline.spans if span.action in ("recompute", "backward"))
    grouped = itertools.groupby(spans, key=lambda span: span.action)
    return [list(spans) for action, spans in grouped if action == "recompute"]


def _mark_peaks(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits) -> None:
    """Each step's peak, with the predicted size and the measured one where there is one."""
    longest = max(timeline.seconds for timeline in timelines)
    for planned in (False, True):
        marked = [timeline for timeline in timelines if timeline.planned == planned]
        for timeline in marked:
            place = timeline.peak.middle_seconds / units.seconds_each, timeline.peak.peak_bytes / units.bytes_each
            axes.plot(*[[at] for at in place], marker="v", markersize=7, color=CURVES[timeline.name], zorder=5)
        if marked:
            highest = max((timeline.peak for timeline in marked), key=lambda span: span.peak_bytes)
            share = highest.middle_seconds / longest if longest else 0.5
            side = "left" if share < 0.3 else "right" if share > 0.7 else "center"
            said = ", ".join(f"{format_bytes(each.peak.peak_bytes)} {each.source}" for each in marked)
            place = highest.middle_seconds / units.seconds_each, highest.peak_bytes / units.bytes_each
            paper = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1}
            look = {"ha": side, "fontsize": "small", "bbox": paper, "zorder": 6}
            axes.annotate(f"peak {said}", place, xytext=(0, 10), textcoords="offset points", **look)


def _set_limits(axes: Axes, timelines: Sequence[Timeline], budget_bytes: int, units: AxisUnits) -> None:
    highest = max([budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)]) / units.bytes_each
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    axes.set_ylim(0, highest * _HEADROOM or 1.0)
    axes.set_xlim(0, longest or 1.0)


def _draw_lanes(axes: Axes, timeline: Timeline, rows: Sequence[str], seconds_each: float) -> None:
    """A predicted step over time: bars for the device, and below it for copies in each direction."""
    for lane in timeline.lanes():
        bars = [(begin / seconds_each, (end - begin) / seconds_each) for begin, end in lane.seconds]
        place = (rows.index(lane.row) - 0.4, 0.8)
        label = "" if lane.row == lane.action else lane.action
        axes.broken_barh(bars, place, facecolors=ACTIONS[lane.action], linewidth=0, label=label)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.tick_params(left=False)


def _list_parts(axes: Axes, peaks: Sequence[ExplainedPeak]) -> None:
    """The largest parts of the planned peaks, in words."""
    axes.set_axis_off()
    lines = [line for explained in peaks for line in [*_words(explained), ""]]
    axes.text(0, 1, "\n".join(lines), transform=axes.transAxes, verticalalignment="top", fontsize="small")


def _words(explained: ExplainedPeak) -> list[str]:
    peak, rows = explained.peak, explained.rows
    lines = [f"Alive at the planned peak, {peak.source}:"]
    at = f", at {kind_of(peak.op)}" if peak.op else ""
    lines += _wrapped(f"{format_bytes(peak.peak_bytes)} {moment_in_words(peak)}{at}")
    for row in rows[:TOP_PARTS]:
        by, where = f": {row.op}" if row.op else "", f", {row.where}" if row.where else ""
        lines += _wrapped(f"{format_bytes(row.size_bytes)}  {row.what}{by}{where}", "• ", "   ")
    rest = sum(row.size_bytes for row in rows[TOP_PARTS:])
    return [*lines, f"• {format_bytes(rest)}  {len(rows) - TOP_PARTS} smaller parts"] if rest else lines


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    """Lines that fit beside the curves; ``first`` and ``others`` stand before them."""
    wrapper = textwrap.TextWrapper(_TEXT_WIDTH, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)
