"""The charts of a report as plotly figures, without colours of paper and text: the page sets these, light or dark."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from planner.explain.peak import stage_in_words
from planner.explain.timeline import Span, Timeline
from planner.pictures import AxisUnits, units_up_to
from planner.report.command_results import BarChart
from planner.report.plan_report import ExplainedStep, MeasuredRun, PeakTable, PlanReport
from planner.units import format_bytes, format_seconds

# Colours after Okabe and Ito: told apart with colour-blind eyes too, and on white and black paper.
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, RED = (
    "#1F83C9", "#E0640F", "#0BA27A", "#CC79A7", "#E69F00", "#56B4E9", "#D0314B",
)  # fmt: skip
GREY = "#8A8F98"
_SOME_AGAIN = "backward, some ops again"
_ACTIONS = {
    "forward": SKY, "recompute": PINK, "backward": YELLOW, _SOME_AGAIN: "#E5B5D3", "optimizer": GREEN,
    "waits for a copy": RED,
}  # fmt: skip
_COPIES = {"to_host": "to host", "to_device": "to device"}
_PARTS = (BLUE, YELLOW, GREEN, PINK, SKY, ORANGE, RED, "#B8A100", GREY)
_PATTERNS = ("", "/", "x", ".", "+", "-", "|", "\\")  # of parts that share a colour
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
    plan = report.plan
    measured = report.measured.timelines if report.measured is not None else ()
    timelines = [step.timeline for step in report.steps] + [*measured]
    units = units_up_to(
        max([plan.budget_bytes, *(timeline.peak.peak_bytes for timeline in timelines)]),
        max(timeline.seconds for timeline in timelines),
    )
    longest = max(timeline.seconds for timeline in timelines) / units.seconds_each
    highest = max([plan.budget_bytes, *(t.peak.peak_bytes for t in timelines)]) / units.bytes_each
    planned = report.steps[1].timeline
    traces = [
        _floor(plan.resident_bytes, longest, units),
        *(_curve(number, step, units) for number, step in enumerate(report.steps)),
        *(_measured_curve(timeline, units) for timeline in measured),
        *_strips(planned, units),
    ]
    rows = 1 + len({copy.direction for copy in planned.copies})
    strip = 0.05 * rows
    figure = _figure(traces, 430 + 20 * rows, hovermode="closest")
    figure.update_xaxes(title=f"time since the step began [{units.seconds_name}]", range=[0, longest])
    figure.update_layout(
        yaxis={
            "title": f"bytes alive [{units.bytes_name}]",
            "range": [0, highest * _HEADROOM],
            "domain": [strip + 0.04, 1],
        },
        yaxis2={
            "domain": [0, strip],
            "range": [-0.5, rows - 0.5],
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
    )
    names = ["runs", *dict.fromkeys(_COPIES[copy.direction] for copy in planned.copies)]
    figure.update_layout(yaxis2_tickvals=list(range(rows)), yaxis2_ticktext=names, xaxis_anchor="y2")
    _budget_line(figure, plan.budget_bytes, units)
    _peak_label(figure, planned.peak, units, longest)
    _measured_lines(figure, report.measured, units)
    return figure


def _floor(resident_bytes: int, longest: float, units: AxisUnits) -> go.Scatter:
    height = resident_bytes / units.bytes_each
    return go.Scatter(
        x=[0, longest], y=[height, height], fill="tozeroy", mode="lines", name="there all the time", hoverinfo="skip",
        line={"width": 0}, fillcolor="rgba(138,143,152,0.25)",
    )  # fmt: skip


def _curve(number: int, step: ExplainedStep, units: AxisUnits) -> go.Scatter:
    timeline = step.timeline
    times, sizes, data, texts = [], [], [], []
    for place, span in enumerate(timeline.spans):
        middle = (span.start_seconds + span.end_seconds) / 2
        text = f"{_action_in_words(span)}<br>{format_bytes(span.peak_bytes)} at {format_seconds(middle)}"
        for at, size in (
            (span.start_seconds, span.before_bytes),
            (middle, span.peak_bytes),
            (span.end_seconds, span.after_bytes),
        ):
            times.append(at / units.seconds_each)
            sizes.append(size / units.bytes_each)
            data.append([number, place])
            texts.append(text)
    name = "with the plan" if timeline.planned else "without the plan"
    look = {"color": BLUE, "width": 2} if timeline.planned else {"color": GREY, "width": 1.5}
    fill: dict[str, Any] = {"fill": "tozeroy", "fillcolor": "rgba(31,131,201,0.15)"} if timeline.planned else {}
    return go.Scatter(
        x=times, y=sizes, customdata=data, text=texts, hovertemplate=f"<b>{name}</b><br>%{{text}}<extra></extra>",
        mode="lines", name=name, line=look, **fill,
    )  # fmt: skip


def _action_in_words(span: Span) -> str:
    names = {"optimizer": "the optimizer's step", "loss": "the loss"}
    # Plotly reads its texts as HTML, and a stage has the name that somebody gave it.
    return names.get(span.action, f"{span.action} of {html.escape(stage_in_words(span.stage))}")


def _measured_curve(timeline: Timeline, units: AxisUnits) -> go.Scatter:
    times, sizes, texts = [], [], []
    for span in timeline.spans:
        middle = (span.start_seconds + span.end_seconds) / 2
        for at, size in (
            (span.start_seconds, span.before_bytes),
            (middle, span.peak_bytes),
            (span.end_seconds, span.after_bytes),
        ):
            times.append(at / units.seconds_each)
            sizes.append(size / units.bytes_each)
            texts.append(f"{_action_in_words(span)}<br>{format_bytes(size)}")
    name = f"measured {'with' if timeline.planned else 'without'} the plan"
    look = {"color": ORANGE if timeline.planned else "#B8A100", "width": 1.5, "dash": "dot"}
    return go.Scatter(
        x=times, y=sizes, text=texts, hovertemplate=f"<b>{name}</b><br>%{{text}}<extra></extra>", mode="lines",
        name=name, line=look,
    )  # fmt: skip


def _strips(timeline: Timeline, units: AxisUnits) -> Iterable[go.Scatter]:
    """What runs when: a thick line for each kind of action, and for copies in each direction."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in _ACTIONS}
    for span in timeline.spans:
        name = _SOME_AGAIN if span.again_seconds > 0 else "backward" if span.action == "loss" else span.action
        if name in times and span.end_seconds > span.start_seconds:
            times[name].append((span.start_seconds + span.stall_seconds, span.end_seconds))
        if span.stall_seconds > 0:
            times["waits for a copy"].append((span.start_seconds, span.start_seconds + span.stall_seconds))
    for name, spans in times.items():
        if spans:
            yield _strip(name, spans, 0, _ACTIONS[name], units, legend=True)
    rows = dict.fromkeys(copy.direction for copy in timeline.copies)
    for row, direction in enumerate(rows, 1):
        spans = [(c.begin_seconds, c.end_seconds) for c in timeline.copies if c.direction == direction]
        yield _strip(_COPIES[direction], spans, row, BLUE if direction == "to_host" else GREEN, units, legend=False)


def _strip(
    name: str, spans: Sequence[tuple[float, float]], row: int, colour: str, units: AxisUnits, *, legend: bool
) -> go.Scatter:
    merged: list[list[float]] = []
    for start, end in spans:
        if merged and start - merged[-1][1] < 1e-9:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    times = [at for start, end in merged for at in (start / units.seconds_each, end / units.seconds_each, None)]
    return go.Scatter(
        x=times, y=[None if at is None else row for at in times], yaxis="y2", mode="lines", name=name,
        line={"width": 12, "color": colour}, showlegend=legend, hovertemplate=f"{name}<extra></extra>",
    )  # fmt: skip


def _budget_line(figure: go.Figure, budget_bytes: int, units: AxisUnits) -> None:
    label = f"budget {format_bytes(budget_bytes)}"
    figure.add_hline(
        y=budget_bytes / units.bytes_each, line={"color": RED, "dash": "dot", "width": 1.5},
        annotation={"text": label, "font": {"color": RED}, "xanchor": "right", "x": 1, "yanchor": "bottom"},
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
    figure.add_hline(
        y=measured.peak_bytes / units.bytes_each, line={"color": ORANGE, "dash": "dash", "width": 1.5},
        annotation={
            "text": f"measured peak {format_bytes(measured.peak_bytes)}", "font": {"color": ORANGE},
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

    said = [f"{format_bytes(p.peak_bytes)}: {format_seconds(p.seconds)}, {p.slowdown:.2f} times" for p in points]
    here = f"this plan: {format_bytes(plan.predicted_peak_bytes)}, {plan.slowdown:.2f} times"
    without = f"without a plan: {format_bytes(plan.unplanned_peak_bytes)}"
    peaks = [point.peak_bytes for point in points]
    bounds = [point.lower_bound_seconds / unplanned_seconds for point in points]
    bound_texts = [f"no such plan is below {bound:.2f} times" for bound in bounds]
    traces = [
        scatter("plans", peaks, [p.slowdown for p in points], said, mode="lines+markers", line={"color": BLUE},
                marker={"size": 10}),
        scatter("lower bound", peaks, bounds, bound_texts, mode="lines", line={"color": GREY, "dash": "dash"}),
        scatter("this plan", [plan.predicted_peak_bytes], [plan.slowdown], [here], mode="markers",
                marker={"symbol": "star", "size": 17, "color": ORANGE}),
        scatter("without a plan", [plan.unplanned_peak_bytes], [1.0], [without], mode="markers",
                marker={"symbol": "square", "size": 11, "color": GREY}),
    ]  # fmt: skip
    figure = _figure(traces, 380, hovermode="closest")
    figure.update_xaxes(title=f"peak of the step [{units.bytes_name}]")
    figure.update_yaxes(title="time, times the unplanned step")
    figure.add_vline(x=plan.budget_bytes / units.bytes_each, line={"color": RED, "dash": "dot", "width": 1.5})
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
            marker=part_marker(k), text=[what] * len(tables),
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


def part_marker(number: int) -> dict[str, Any]:
    """The colour of a figure's part, with a pattern where the colours are used up: no two of 72 parts look alike."""
    round_, place = divmod(number, len(_PARTS))
    return {"color": _PARTS[place], "pattern": {"shape": _PATTERNS[round_ % len(_PATTERNS)]}}


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
        for (name, sizes), colour in zip(chart.series, (BLUE, ORANGE, GREEN), strict=False)
    ]  # fmt: skip
    figure = _figure(bars, 360, barmode="group")
    figure.update_yaxes(title=f"peak [{units.bytes_name}]", rangemode="tozero")
    _budget_line(figure, chart.budget_bytes, units)
    return figure
