"""The engines' strip below a timeline: when the device computes, waits, and copies to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from planner.explain.timeline import Span, Timeline

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
