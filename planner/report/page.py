"""The page of a report: one HTML file with all that it needs, from templates beside this file."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.explain.peak import stage_in_words
from planner.plans.plan import Plan
from planner.report.command_results import ResultSection
from planner.report.commands import commands_of, solve_command
from planner.report.plan_report import MeasuredRun, PlanReport, decision_rows, report_of_plan
from planner.units import format_bytes, format_seconds, shown_units
from profiler.json_files import write_whole

if TYPE_CHECKING:
    import jinja2
    import plotly.graph_objects as go

SUFFIXES = (".html", ".htm")
_PACKAGES = ("sublinear-planner", "torch", "numpy", "highspy", "plotly")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report to write.

    Attributes:
        title: of the page.
        plan: explained; None where a command's result is no plan.
        results: of commands, above the plan.
        commands: that give all of it again, one a line.
    """

    title: str
    plan: PlanReport | None = None
    results: tuple[ResultSection, ...] = ()
    commands: tuple[str, ...] = ()


def check_page(path: Path | None) -> None:
    """Refuse a file that is no page by its name; raises ValueError."""
    if path is not None and path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: expected a page's name ending in .html, got {path.suffix!r}; rename it")


def write_report(
    plan: Plan,
    path: str | Path,
    *,
    measured: MeasuredRun | None = None,
    commands: Sequence[str] = (),
    plan_file: str | Path = "plan.json",
) -> None:
    """Explain a plan in one HTML file that needs no network.

    Args:
        plan: with its chain.
        path: a .html file.
        measured: measurements of the plan, shown beside its predictions.
        commands: the commands that reproduce the plan, one per line; empty for those derived from the plan.
        plan_file: the path of the plan, used in the commands; the profile is assumed to be in the same folder.

    Raises:
        ValueError: another kind of file, a folder that is not there, or a plan of an older release, without its chain.
    """
    check_page(Path(path))
    report = report_of_plan(plan, measured=measured, plan_file=plan_file)
    given = tuple(commands) or commands_of(plan, plan_file=plan_file)
    page = Page(title=plan.title, plan=report, commands=given)
    write_page(page, path)


def write_page(page: Page, path: str | Path) -> None:
    """Write a page whole or not at all."""
    write_whole(path, page_html(page))


def page_html(page: Page) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    from planner.report import charts

    figures: dict[str, go.Figure] = {}
    if page.plan is not None:
        figures = {"timeline": charts.timeline_figure(page.plan), "peaks": charts.peaks_figure(page.plan.peaks)}
        if page.plan.curve:
            figures["curve"] = charts.curve_figure(page.plan)
    for number, result in enumerate(page.results):
        if result.chart is not None:
            figures[f"result-{number}"] = charts.bars_figure(result.chart)
    data = {
        "units": shown_units(),
        "figures": {name: json.loads(str(figure.to_json())) for name, figure in figures.items()},
        "steps": [] if page.plan is None else _steps(page.plan),
        "curve": [] if page.plan is None else [_point(point, page.plan) for point in page.plan.curve],
        "start": 0 if page.plan is None else _nearest(page.plan),
    }
    environment = _environment()
    return environment.get_template("page.html.j2").render(
        page=page,
        figures=figures,
        data=_json_in_html(data),
        plotly=get_plotlyjs(),
        style=_asset("page.css"),
        script=_asset("page.js"),
        versions=_versions(),
    )


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=lambda size: format_bytes(size) if size else "-", seconds=_time)
    return environment


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _json_in_html(data: Any) -> str:
    """JSON that no tag ends early, whatever modules are called."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _steps(report: PlanReport) -> list[dict[str, Any]]:
    """The parts alive in each action, and the action's name."""
    return [
        {
            "planned": step.timeline.planned,
            "peak": step.timeline.spans.index(step.timeline.peak),
            "labels": step.history.labels,
            "changes": step.history.changes,
            "actions": [
                [span.action, stage_in_words(span.stage), span.start_seconds, span.end_seconds, span.peak_bytes]
                for span in step.timeline.spans
            ],
        }
        for step in report.steps
    ]


def _point(point: Plan, report: PlanReport) -> dict[str, Any]:
    return {
        "text": f"{format_bytes(point.predicted_peak_bytes)}: {format_seconds(point.predicted_seconds)} a step, "
        f"{point.slowdown:.2f} times the unplanned step ({point.status})",
        "command": solve_command(report.plan, point.predicted_peak_bytes, report.plan_file),
        "rows": [
            [
                row.where,
                row.decision,
                format_bytes(row.kept_bytes) if row.kept_bytes else "-",
                format_bytes(row.freed_bytes) if row.freed_bytes else "-",
                format_bytes(row.sent_bytes) if row.sent_bytes else "-",
                _time(row.extra_seconds),
            ]
            for row in decision_rows(point)
        ],
    }


def _nearest(report: PlanReport) -> int:
    """The point of the curve that is nearest to the plan."""
    gaps = [abs(point.predicted_peak_bytes - report.plan.predicted_peak_bytes) for point in report.curve]
    return gaps.index(min(gaps)) if gaps else 0


def _versions() -> list[tuple[str, str]]:
    found = [("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return [*found, ("platform", platform.platform(terse=True))]
