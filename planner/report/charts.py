"""The charts of a report as plotly figures, without colours of paper and text: the page sets these, light or dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from planner.explain.peak import stage_in_words
from planner.explain.timeline import Lane, Span, Timeline, side_by_side, units_of
from planner.pictures import (
    ACTIONS,
    BLUE,
    BUDGET,
    CURVES,
    GREEN,
    GREY,
    STATES,
    VERMILION,
    AxisUnits,
    part_look,
    units_up_to,
)
from planner.report.command_results import BarChart
from planner.report.plan_report import MeasuredRun, PeakTable, PlanReport
from planner.units import format_bytes, format_seconds

_HEADROOM = 1.12  # times the highest point


def _figure(traces: Iterable[Any], height: int, **layout: Any) -> go.Figure:
    figure = go.Figure(list(traces))
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 12, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        hoverlabel={"align": "left"},
        **layout,
    )
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    return figure


def timeline_figure(report: PlanReport) -> go.Figure:
    """Bytes alive over the step, without the plan and with it, and below what runs when.

    The predicted curves carry the position of their step and of the action as custom data.
    """
    budget_bytes = report.plan.budget_bytes
    measured = report.measured.timelines if report.measured is not None else ()
    timelines = side_by_side([step.timeline for step in report.steps] + [*measured])
    units = units_of(timelines, budget_bytes)
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    highest = max([budget_bytes, *(t.peak.peak_bytes for t in timelines)]) / units.bytes_each
    planned = report.steps[1].timeline
    rows = list(dict.fromkeys(lane.row for lane in planned.lanes()))
    traces = [
        _floor(report.plan.resident_bytes, longest, units),
        *(_curve(number, timeline, units) for number, timeline in enumerate(timelines)),
        *(_strip(lane, rows.index(lane.row), units) for lane in planned.lanes()),
    ]
    strip = 0.05 * len(rows)
    figure = _figure(traces, 430 + 20 * len(rows), hovermode="closest")
    whose = ", as predicted" if measured else ""
    title = f"time since the step began{whose} [{units.seconds_name}]"
    figure.update_xaxes(title=title, range=[0, longest], anchor="y2")
    figure.update_layout(
        yaxis={
            "title": f"bytes alive [{units.bytes_name}]",
            "range": [0, highest * _HEADROOM],
            "domain": [strip + 0.04, 1],
        },
        yaxis2={
            "domain": [0, strip],
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": list(range(len(rows))),
            "ticktext": rows,
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
    _budget_line(figure, budget_bytes, units)
    _peak_label(figure, planned.peak, units, longest)
    _measured_lines(figure, report.measured, units)
    return figure


def _floor(resident_bytes: int, longest: float, units: AxisUnits) -> go.Scatter:
    height = resident_bytes / units.bytes_each
    return go.Scatter(
        x=[0, longest], y=[height, height], fill="tozeroy", mode="lines", name="there all the time", hoverinfo="skip",
        line={"width": 0, "color": STATES}, fillcolor=_pale(STATES, 0.25),
    )  # fmt: skip


def _pale(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def _curve(number: int, timeline: Timeline, units: AxisUnits) -> go.Scatter:
    """The bytes over a step; of each action its start, its peak and its end say the same words."""
    name, colour, measured = timeline.name, CURVES[timeline.name], timeline.source == "measured"
    texts = [
        f"{_action_in_words(span)}<br>{format_bytes(span.peak_bytes)} at {format_seconds(span.middle_seconds)}"
        for span in timeline.spans
        for _ in range(3)
    ]
    places = None if measured else [[number, place] for place in range(len(timeline.spans)) for _ in range(3)]
    fill: dict[str, Any] = {}
    if timeline.planned and not measured:
        fill = {"fill": "tozeroy", "fillcolor": _pale(colour, 0.15)}
    return go.Scatter(
        x=[at / units.seconds_each for at, _ in timeline.points()],
        y=[size / units.bytes_each for _, size in timeline.points()],
        customdata=places, text=texts, hovertemplate=f"<b>{name}</b><br>%{{text}}<extra></extra>", mode="lines",
        name=name, line={"color": colour, "width": 2, "dash": "dot" if measured else "solid"}, **fill,
    )  # fmt: skip


def _action_in_words(span: Span) -> str:
    names = {"optimizer": "the optimizer's step", "loss": "the loss"}
    # Plotly reads its texts as HTML, and a stage has the name that somebody gave it.
    return names.get(span.action, f"{span.action} of {html.escape(stage_in_words(span.stage))}")


def _strip(lane: Lane, row: int, units: AxisUnits) -> go.Scatter:
    """A thick line where a kind of action, or a copy, runs."""
    times = [at for begin, end in lane.seconds for at in (begin / units.seconds_each, end / units.seconds_each, None)]
    return go.Scatter(
        x=times, y=[None if at is None else row for at in times], yaxis="y2", mode="lines", name=lane.action,
        line={"width": 12, "color": ACTIONS[lane.action]}, showlegend=lane.row != lane.action,
        hovertemplate=f"{lane.action}<extra></extra>",
    )  # fmt: skip


def _budget_line(figure: go.Figure, budget_bytes: int, units: AxisUnits) -> None:
    label = f"budget {format_bytes(budget_bytes)}"
    figure.add_hline(
        y=budget_bytes / units.bytes_each, line={"color": BUDGET, "dash": "dot", "width": 1.5},
        annotation={"text": label, "font": {"color": BUDGET}, "xanchor": "right", "x": 1, "yanchor": "bottom"},
    )  # fmt: skip


def _peak_label(figure: go.Figure, span: Span, units: AxisUnits, longest: float) -> None:
    at = (span.start_seconds + span.end_seconds) / 2 / units.seconds_each
    side = "left" if at < 0.35 * longest else "right" if at > 0.65 * longest else "center"
    figure.add_annotation(
        x=at, y=span.peak_bytes / units.bytes_each, text=f"peak {format_bytes(span.peak_bytes)}", xanchor=side,
        showarrow=True, arrowhead=2, ax=0, ay=-34, font={"color": BLUE}, arrowcolor=BLUE,
    )  # fmt: skip


def _measured_lines(figure: go.Figure, measured: MeasuredRun | None, units: AxisUnits) -> None:
    """A measured peak without its timeline."""
    if measured is None or measured.timelines:
        return
    colour = CURVES["measured with the plan"]
    figure.add_hline(
        y=measured.peak_bytes / units.bytes_each, line={"color": colour, "dash": "dash", "width": 1.5},
        annotation={
            "text": f"measured peak {format_bytes(measured.peak_bytes)}", "font": {"color": colour},
            "xanchor": "left", "x": 0, "yanchor": "bottom",
        },
    )  # fmt: skip


def curve_figure(report: PlanReport) -> go.Figure:
    """Time against peak for every budget; the points of the first trace are those of ``report.curve``."""
    plan, points = report.plan, report.curve
    units = units_up_to(max(plan.unplanned_peak_bytes, plan.budget_bytes))
    unplanned_seconds = plan.unplanned_seconds or 1.0

    def scatter(
        name: str, peaks: Sequence[int], times: Sequence[float], texts: Sequence[str], **look: Any
    ) -> go.Scatter:
        return go.Scatter(
            x=[size / units.bytes_each for size in peaks], y=list(times), name=name, text=list(texts),
            hovertemplate="%{text}<extra></extra>", **look,
        )  # fmt: skip

    said = [
        f"{format_bytes(p.predicted_peak_bytes)}: {format_seconds(p.predicted_seconds)}, {p.slowdown:.2f} times"
        for p in points
    ]
    here = f"this plan: {format_bytes(plan.predicted_peak_bytes)}, {plan.slowdown:.2f} times"
    without = f"without a plan: {format_bytes(plan.unplanned_peak_bytes)}"
    peaks = [point.predicted_peak_bytes for point in points]
    bounds = [point.lower_bound_seconds / unplanned_seconds for point in points]
    bound_texts = [f"no such plan is below {bound:.2f} times" for bound in bounds]
    traces = [
        scatter("plans", peaks, [p.slowdown for p in points], said, mode="lines+markers", line={"color": BLUE},
                marker={"size": 10}),
        scatter("lower bound", peaks, bounds, bound_texts, mode="lines", line={"color": GREY, "dash": "dash"}),
        scatter("this plan", [plan.predicted_peak_bytes], [plan.slowdown], [here], mode="markers",
                marker={"symbol": "star", "size": 17, "color": VERMILION}),
        scatter("without a plan", [plan.unplanned_peak_bytes], [1.0], [without], mode="markers",
                marker={"symbol": "square", "size": 11, "color": GREY}),
    ]  # fmt: skip
    figure = _figure(traces, 380, hovermode="closest")
    figure.update_xaxes(title=f"peak of the step [{units.bytes_name}]")
    figure.update_yaxes(title="time, times the unplanned step")
    figure.add_vline(x=plan.budget_bytes / units.bytes_each, line={"color": BUDGET, "dash": "dot", "width": 1.5})
    return figure


def peaks_figure(tables: Sequence[PeakTable]) -> go.Figure:
    """Each peak as one bar, by what its bytes are there for."""
    units = units_up_to(max(table.peak_bytes for table in tables))
    sizes = [_by_what(table) for table in tables]
    order = dict.fromkeys(what for each in sizes for what in sorted(each, key=lambda what: -each[what]))
    names = [table.name for table in tables]
    bars = [
        go.Bar(
            y=names, x=[each.get(what, 0) / units.bytes_each for each in sizes], name=what, orientation="h",
            marker=_marker(*part_look(k)), text=[what] * len(tables),
            customdata=[format_bytes(each.get(what, 0)) for each in sizes], textposition="none",
            hovertemplate="%{text}: %{customdata}<extra>%{y}</extra>",
        )
        for k, what in enumerate(order)
    ]  # fmt: skip
    figure = _figure(bars, 210 + 60 * len(tables), barmode="stack")
    figure.update_xaxes(title=f"bytes at the peak [{units.bytes_name}]")
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(showlegend=True, legend={"traceorder": "normal"})
    return figure


def _marker(colour: str, hatch: str) -> dict[str, Any]:
    return {"color": colour, "pattern": {"shape": hatch}}


def _by_what(table: PeakTable) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for row in table.rows:
        sizes[row.what] = sizes.get(row.what, 0) + row.size_bytes
    return {what: size for what, size in sizes.items() if size > 0}


def bars_figure(chart: BarChart) -> go.Figure:
    """Bars side by side, in bytes, with the budget as a line."""
    units = units_up_to(max([chart.budget_bytes, *(size or 0 for _, sizes in chart.series for size in sizes)]))
    bars = [
        go.Bar(
            x=list(chart.names), y=[None if size is None else size / units.bytes_each for size in sizes], name=name,
            marker={"color": colour}, customdata=["" if size is None else format_bytes(size) for size in sizes],
            hovertemplate="%{x}: %{customdata}<extra>" + name + "</extra>",
        )
        for (name, sizes), colour in zip(chart.series, (BLUE, VERMILION, GREEN), strict=False)
    ]  # fmt: skip
    figure = _figure(bars, 360, barmode="group")
    figure.update_yaxes(title=f"peak [{units.bytes_name}]", rangemode="tozero")
    _budget_line(figure, chart.budget_bytes, units)
    return figure
