"""Plots of the bytes alive over a step without a plan and with it, its phases, the budget and the peak's contents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from planner.explain.figures import AxisUnits, check_picture, units_up_to, write_picture
from planner.explain.peak import Peak
from planner.explain.peak_report import PeakRow
from planner.explain.timeline import PhaseName, Span, Timeline
from planner.units import format_bytes
from profiler.op_graph import kind_of

TOP_PARTS = 5
_TEXT_WIDTH = 40  # characters of the column beside the curves
# Colours after Okabe and Ito: told apart with colour-blind eyes too.
_LINES = {"predicted": "#0072B2", "measured": "#D55E00"}
_PHASES: dict[PhaseName, str] = {"forward": "#56B4E9", "backward": "#E69F00", "optimizer": "#009E73"}
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
    units = _units(timelines, budget_bytes)
    figure = Figure(figsize=(12, 7.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    copying = [timeline for timeline in timelines if timeline.copies]
    grid = figure.add_gridspec(3, 2, width_ratios=(3.3, 1), height_ratios=(1, 1, 0.4 if copying else 1e-3))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above, sharey=above)
    _draw_step(above, [t for t in timelines if not t.planned], units, "without the plan")
    _draw_outline(below, [t for t in timelines if not t.planned], units)
    _draw_step(below, [t for t in timelines if t.planned], units, "with the plan")
    for axes in (above, below):
        label = f"budget {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / units.bytes_each, color="#B00020", linestyle=":", linewidth=1.5, label=label)
    above.tick_params(labelbottom=False)
    lowest = below
    for timeline in copying[:1]:
        lowest = figure.add_subplot(grid[2, 0], sharex=above)
        below.tick_params(labelbottom=False)
        draw_engines(lowest, timeline, units.seconds_each)
    lowest.set_xlabel(f"time since the step began [{units.seconds_name}]")
    _set_limits(below, timelines, budget_bytes, units)
    _list_parts(figure.add_subplot(grid[:, 1]), peaks)
    _add_legend(figure, below, timelines)
    if title:
        figure.suptitle(title, fontsize="medium")
    return figure


def _units(timelines: Sequence[Timeline], budget_bytes: int) -> AxisUnits:
    largest = max([budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)])
    longest = max(timeline.seconds for timeline in timelines)
    return units_up_to(largest, longest)


def _curve(timeline: Timeline, units: AxisUnits) -> _TimelineCurve:
    times, sizes = [], []
    for span in timeline.spans:
        times += [span.start_seconds, (span.start_seconds + span.end_seconds) / 2, span.end_seconds]
        sizes += [span.before_bytes, span.peak_bytes, span.after_bytes]
    return _TimelineCurve([time / units.seconds_each for time in times], [size / units.bytes_each for size in sizes])


def _draw_step(axes: Axes, timelines: Sequence[Timeline], units: AxisUnits, name: str) -> None:
    """One step, predicted and perhaps measured: the curves, the phases behind them, and the peak."""
    for timeline in timelines:
        curve, colour = _curve(timeline, units), _LINES[timeline.source]
        axes.plot(*curve, color=colour, linewidth=1.2, label=timeline.source, zorder=3)
        if timeline.source == "predicted":
            axes.fill_between(*curve, color=colour, alpha=0.12, linewidth=0)
        _shade_phases(axes, timeline, units)
    _mark_peaks(axes, timelines, units)
    axes.set_ylabel(f"alive {name} [{units.bytes_name}]")
    axes.grid(alpha=0.25)


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
    apart = {"optimizer": "the optimizer's step", "loss": "the loss"}
    action = apart.get(peak.action, f"the {peak.action} of {peak.stage}")
    lines = [f"Alive at the planned peak, {peak.source}:"]
    lines += _wrapped(f"{format_bytes(peak.peak_bytes)} in {action}{f', at {kind_of(peak.op)}' if peak.op else ''}")
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


def _add_legend(figure: Figure, axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Beside the axes it hides no curve."""
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
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
_COMPUTE = {"forward": "#56B4E9", "recompute": "#CC79A7", "backward": "#E69F00", "optimizer": "#009E73"}
_COPY, _STALL = "#0072B2", "#B00020"
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
        _bars(axes, "compute", busy, colour, action if spans else "", seconds_each)
    _bars(axes, "compute", _stalls(timeline.spans), _STALL, "waits for a copy", seconds_each)
    for direction, row in (("to_host", "to host"), ("to_device", "to device")):
        copies = [copy for copy in timeline.copies if copy.direction == direction]
        _bars(axes, row, [(copy.begin_seconds, copy.end_seconds) for copy in copies], _COPY, "", seconds_each)
    axes.set_yticks(list(_ROWS.values()), list(_ROWS))
    axes.set_ylim(-0.5, len(_ROWS) - 0.5)
    axes.tick_params(left=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", frameon=False)


def _stalls(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(span.start_seconds, span.start_seconds + span.stall_seconds) for span in spans if span.stall_seconds > 0]


def _bars(axes: Axes, row: str, times: list[tuple[float, float]], colour: str, label: str, seconds_each: float) -> None:
    """Bars from begin to end; nothing where there are none, and no entry in the legend."""
    if times:
        widths = [(begin / seconds_each, (end - begin) / seconds_each) for begin, end in times]
        place = (_ROWS[row] - _HEIGHT / 2, _HEIGHT)
        axes.broken_barh(widths, place, facecolors=colour, edgecolors="white", linewidth=0.3, label=label or None)
