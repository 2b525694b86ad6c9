"""Plots of the bytes alive over a step without a plan and with it, its phases, the budget and the peak's contents."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.explain.peak import Peak, PeakRow, moment_in_words
from planner.explain.timeline import PhaseName, Span, Timeline, aligned
from planner.pictures import AxisUnits, check_picture, new_figure, units_up_to, write_picture
from planner.plans.short_names import common_path, names_in_short
from planner.units import format_bytes
from profiler.op_graph import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TOP_PARTS = 5
_TEXT_WIDTH = 40  # characters of the column beside the curves
# Colours after Okabe and Ito: told apart with colour-blind eyes too.
_LINES = {"predicted": "#0072B2", "measured": "#D55E00"}
_PHASES: dict[PhaseName, str] = {"forward": "#56B4E9", "backward": "#E69F00", "optimizer": "#009E73"}
_RECOMPUTE, _FLOOR = "#CC79A7", "#999999"
_NAMED_BUMPS = 10  # of recomputation, the longest ones
_LEAST_BUMP = 0.012  # of the axes' width: a shorter one has no room for a name
_STRIP = 0.025  # of the axes' height
_HEADROOM = 1.16  # times the highest point: the peak's own words stand above it


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPeak:
    """A peak with its parts, alike ones together, largest first."""

    peak: Peak
    rows: Sequence[PeakRow]


class _TimelineCurve(NamedTuple):
    """A timeline in the units of the axes: start, peak and end of every action."""

    times: list[float]
    sizes: list[float]


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
    timelines = _side_by_side(timelines)
    units = _units(timelines, budget_bytes)
    figure = new_figure(12, 7.5, dpi=150)
    copying = [timeline for timeline in timelines if timeline.copies]
    grid = figure.add_gridspec(3, 2, width_ratios=(3.3, 1), height_ratios=(1, 1, 0.4 if copying else 1e-3))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above, sharey=above)
    longest = max(timeline.seconds for timeline in timelines)
    _draw_step(above, [t for t in timelines if not t.planned], units, "without the plan", longest)
    _draw_outline(below, [t for t in timelines if not t.planned], units)
    _draw_step(below, [t for t in timelines if t.planned], units, "with the plan", longest)
    for axes in (above, below):
        label = f"budget {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / units.bytes_each, color="#B00020", linestyle=":", linewidth=1.5, label=label)
    above.tick_params(labelbottom=False)
    lowest = below
    for timeline in copying[:1]:
        lowest = figure.add_subplot(grid[2, 0], sharex=above)
        below.tick_params(labelbottom=False)
        draw_engines(lowest, timeline, units.seconds_each)
    whose = ", as predicted" if any(timeline.source == "measured" for timeline in timelines) else ""
    lowest.set_xlabel(f"time since the step began{whose} [{units.seconds_name}]")
    _set_limits(below, timelines, budget_bytes, units)
    _list_parts(figure.add_subplot(grid[:, 1]), peaks)
    _add_legend(figure, [below, lowest] if copying else [below], timelines)
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def _side_by_side(timelines: Sequence[Timeline]) -> list[Timeline]:
    """Measured steps with their actions where the predicted ones have them: else only seconds were compared."""
    predicted = {timeline.planned: timeline for timeline in timelines if timeline.source == "predicted"}
    return [
        aligned(timeline, predicted[timeline.planned])
        if timeline.source == "measured" and timeline.planned in predicted
        else timeline
        for timeline in timelines
    ]


def _units(timelines: Sequence[Timeline], budget_bytes: int) -> AxisUnits:
    largest = max([budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)])
    longest = max(timeline.seconds for timeline in timelines)
    return units_up_to(largest, longest)


def _curve(timeline: Timeline, units: AxisUnits) -> _TimelineCurve:
    return _curve_of(timeline.spans, units)


def _curve_of(spans: Iterable[Span], units: AxisUnits) -> _TimelineCurve:
    times, sizes = [], []
    for span in spans:
        times += [span.start_seconds, (span.start_seconds + span.end_seconds) / 2, span.end_seconds]
        sizes += [span.before_bytes, span.peak_bytes, span.after_bytes]
    return _TimelineCurve([time / units.seconds_each for time in times], [size / units.bytes_each for size in sizes])


def _draw_step(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits, name: str, longest: float) -> None:
    """One step, predicted and perhaps measured: the curves, the phases behind them, the peak, and what runs again."""
    for timeline in timelines:
        if timeline.source == "predicted":
            _draw_floor(axes, timeline, units)
            _draw_recomputation(axes, timeline, units, longest)
        curve, colour = _curve(timeline, units), _LINES[timeline.source]
        axes.plot(*curve, color=colour, linewidth=1.2, label=timeline.source, zorder=3)
        if timeline.source == "predicted":
            axes.fill_between(*curve, color=colour, alpha=0.12, linewidth=0)
        _shade_phases(axes, timeline, units)
    _mark_peaks(axes, timelines, units)
    axes.set_ylabel(f"alive {name} [{units.bytes_name}]")
    axes.grid(alpha=0.25)


def _draw_floor(axes: Axes, timeline: Timeline, units: AxisUnits) -> None:
    """What is there when the step begins, and stays: model states and the batch."""
    size = timeline.spans[0].before_bytes / units.bytes_each
    times = [0.0, timeline.seconds / units.seconds_each]
    axes.fill_between(times, size, color=_FLOOR, alpha=0.45, linewidth=0, label="model states and batch", zorder=2)


def _draw_recomputation(axes: Axes, timeline: Timeline, units: AxisUnits, longest_seconds: float) -> None:
    """Runs of stages but their first in a colour of their own, the longest ones with the names of the stages; backwards
    in which some ops run again, hatched in the same colour.
    """
    inside = [span for span in timeline.spans if span.again_seconds > 0]
    for number, span in enumerate(inside):
        label = "backward, some ops again" if number == 0 else None
        look = {"facecolor": "none", "edgecolor": _RECOMPUTE, "hatch": "////", "linewidth": 0}
        axes.fill_between(*_curve_of([span], units), alpha=0.6, label=label, zorder=2, **look)
    bumps = recomputations(timeline)
    path = common_path([span.stage for bump in bumps for span in bump]) if bumps else ""
    for number, bump in enumerate(bumps):
        curve = _curve_of(bump, units)
        label = "recomputation" if number == 0 else None
        axes.fill_between(*curve, color=_RECOMPUTE, alpha=0.6, linewidth=0, label=label, zorder=2)
    room = [bump for bump in bumps if bump[-1].end_seconds - bump[0].start_seconds >= _LEAST_BUMP * longest_seconds]
    for bump in sorted(room, key=lambda bump: bump[0].start_seconds - bump[-1].end_seconds)[:_NAMED_BUMPS]:
        stages = [span.stage.replace(path, "") if path else span.stage for span in bump]
        middle = (bump[0].start_seconds + bump[-1].end_seconds) / 2 / units.seconds_each
        axes.annotate(
            f"recompute {names_in_short(list(dict.fromkeys(stages)), '')}",
            xy=(middle, 0),
            xytext=(0, 3),
            textcoords="offset points",
            rotation=90,
            horizontalalignment="center",
            verticalalignment="bottom",
            fontsize="x-small",
            zorder=6,
        )


def recomputations(timeline: Timeline) -> list[list[Span]]:
    """Runs of stages but their first, those without a backward between them together, in the order of time."""
    grouped = itertools.groupby(
        (span for span in timeline.spans if span.action in ("recompute", "backward")),
        key=lambda span: span.action,
    )
    return [list(spans) for action, spans in grouped if action == "recompute"]


def _shade_phases(axes: Axes, timeline: Timeline, units: AxisUnits) -> None:
    """The predicted phases behind the curves, the measured ones as a strip along the axis."""
    for phase, start, end in timeline.phases():
        left, right, colour = start / units.seconds_each, end / units.seconds_each, _PHASES[phase]
        if timeline.source == "measured":
            axes.axvspan(left, right, ymax=_STRIP, facecolor=colour, alpha=0.9, linewidth=0, zorder=4)
        else:
            axes.axvspan(left, right, facecolor=colour, alpha=0.10, linewidth=0)
            axes.axvline(left, color=colour, linewidth=0.8, alpha=0.8)


def _draw_outline(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits) -> None:
    """The unplanned step behind the planned one, to compare."""
    for timeline in timelines:
        if timeline.source == "predicted":
            curve = _curve(timeline, units)
            axes.plot(*curve, color="#888888", linewidth=0.9, linestyle="--", label="without the plan")


def _mark_peaks(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits) -> None:
    said = []
    for timeline in timelines:
        span = timeline.peak
        place = (span.start_seconds + span.end_seconds) / 2 / units.seconds_each
        size = span.peak_bytes / units.bytes_each
        axes.plot([place], [size], marker="v", markersize=7, color=_LINES[timeline.source], linestyle="", zorder=5)
        said.append((size, place, f"{format_bytes(span.peak_bytes)} {timeline.source}"))
    if not said:
        return
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    size, place = max((size, place) for size, place, _ in said)
    side = "left" if place < 0.3 * longest else "right" if place > 0.7 * longest else "center"
    axes.annotate(
        f"peak {', '.join(text for _, _, text in said)}",
        xy=(place, size),
        xytext=(0, 10),
        textcoords="offset points",
        horizontalalignment=side,
        fontsize="small",
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
        zorder=6,
    )


def _set_limits(axes: Axes, timelines: Sequence[Timeline], budget_bytes: int, units: AxisUnits) -> None:
    highest = max([budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)]) / units.bytes_each
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    axes.set_ylim(0, highest * _HEADROOM or 1.0)
    axes.set_xlim(0, longest or 1.0)


def _list_parts(axes: Axes, peaks: Sequence[ExplainedPeak]) -> None:
    """The largest parts of the planned peaks, in words."""
    axes.set_axis_off()
    lines = [line for explained in peaks for line in [*_words(explained), ""]]
    axes.text(0, 1, "\n".join(lines), transform=axes.transAxes, verticalalignment="top", fontsize="small")


def _words(explained: ExplainedPeak) -> list[str]:
    peak, rows = explained.peak, explained.rows
    lines = [f"Alive at the planned peak, {peak.source}:"]
    lines += _wrapped(
        f"{format_bytes(peak.peak_bytes)} {moment_in_words(peak)}{f', at {kind_of(peak.op)}' if peak.op else ''}"
    )
    for row in rows[:TOP_PARTS]:
        text = f"{format_bytes(row.size_bytes)}  {row.what}"
        text += f": {row.op}" if row.op else ""
        text += f", {row.where}" if row.where else ""
        lines += _wrapped(text, "• ", "   ")
    rest = sum(row.size_bytes for row in rows[TOP_PARTS:])
    return [*lines, f"• {format_bytes(rest)}  {len(rows) - TOP_PARTS} smaller parts"] if rest else lines


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    """Lines that fit beside the curves; ``first`` and ``others`` stand before them."""
    return textwrap.wrap(
        text,
        _TEXT_WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _add_legend(figure: Figure, all_axes: Sequence[Axes], timelines: Sequence[Timeline]) -> None:
    """One for all axes; beside them it hides no curve."""
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {}
    for axes in all_axes:
        handles, labels = axes.get_legend_handles_labels()
        entries |= {label: handle for label, handle in zip(labels, handles, strict=True) if label not in _PHASES}
    used = {span.phase for timeline in timelines for span in timeline.spans}
    phases = [Patch(facecolor=colour, alpha=0.35, label=phase) for phase, colour in _PHASES.items() if phase in used]
    figure.legend(
        [*entries.values(), *phases],
        [*entries, *(str(patch.get_label()) for patch in phases)],
        loc="outside lower center",
        ncols=8,
        fontsize="small",
    )


_ROWS = {"compute": 2, "to host": 1, "to device": 0}
_COMPUTE = {**_PHASES, "recompute": _RECOMPUTE}
_COPIES, _STALL = {"to host": "#0072B2", "to device": "#8B4513"}, "#B00020"
_HEIGHT = 0.8


def draw_engines(axes: Axes, timeline: Timeline, seconds_each: float) -> None:
    """Draw the rows of a predicted step.

    Args:
        axes: empty ones, with the time of the step along x.
        timeline: predicted, with its copies.
        seconds_each: seconds of one unit of the x axis.
    """
    for action, colour in _COMPUTE.items():
        spans = [span for span in timeline.spans if span.action == action]
        busy = [(span.start_seconds + span.stall_seconds, span.end_seconds) for span in spans]
        _bars(axes, "compute", busy, colour, "", seconds_each)
    _bars(axes, "compute", _stalls(timeline.spans), _STALL, "waits for a copy", seconds_each)
    for direction, row in (("to_host", "to host"), ("to_device", "to device")):
        copies = [copy for copy in timeline.copies if copy.direction == direction]
        times = [(copy.begin_seconds, copy.end_seconds) for copy in copies]
        _bars(axes, row, times, _COPIES[row], f"copies {row}", seconds_each)
    axes.set_yticks(list(_ROWS.values()), list(_ROWS))
    axes.set_ylim(-0.5, len(_ROWS) - 0.5)
    axes.tick_params(left=False)


def _stalls(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(span.start_seconds, span.start_seconds + span.stall_seconds) for span in spans if span.stall_seconds > 0]


def _bars(axes: Axes, row: str, times: list[tuple[float, float]], colour: str, label: str, seconds_each: float) -> None:
    """Bars from begin to end; nothing where there are none, and no entry in the legend."""
    if times:
        widths = [(begin / seconds_each, (end - begin) / seconds_each) for begin, end in times]
        place = (_ROWS[row] - _HEIGHT / 2, _HEIGHT)
        axes.broken_barh(widths, place, facecolors=colour, edgecolors="white", linewidth=0.3, label=label or None)
