"""The report command: a plan explained in one HTML file, with measurements where a model is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import AsJson, Device, Measure, Settings, SnapshotFile, TargetRequest, Trust
from planner.cli.several_ranks import workload_of
from planner.cli.shell import check_folder, given_command, is_first, note, say_written, show_json, working

if TYPE_CHECKING:
    from planner.explain.measured_step import MeasuredStep
    from planner.plans.plan import Plan
    from planner.report.plan_report import MeasuredRun
    from planner.report.results import ResultSection
    from profiler.target_record import TargetRecord


def report_command(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan that solve wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page, an .html file; named after the plan if unset.")
    ] = None,
    measure: Measure = None,
    settings: Settings = None,
    device: Device = None,
    trust: Trust = False,
    snapshot: SnapshotFile = None,
    as_json: AsJson = False,
) -> None:
    """Explain a plan in one HTML file, to read in a browser, that needs neither a network nor the model.

    The answer, the memory over the step and what is alive in each moment, plans for other budgets, what each decision
    frees and costs, where the bytes of the peak come from, what else would help, and the commands to get it again.
    """
    from planner.cli.documents import measured_document
    from planner.plans.plan import Plan
    from planner.report.commands import commands_of
    from planner.report.page import check_page, write_report
    from planner.report.snapshot import write_snapshot

    if measure is None and (settings or device):
        raise ValueError("--set, --device: expected them beside --measure, got it missing; add it, or leave them out")
    page = file.with_suffix(".html") if output is None else output
    check_folder(page)
    check_page(page)
    check_folder(snapshot)
    plan = Plan.load(file)
    target = TargetRequest(text=measure, settings=settings, device=device, option="--measure", trust=trust)
    chosen = None if measure is None else target.chosen(plan.target, file)
    step = None if chosen is None else _measured_step(plan, chosen)
    measured = None if step is None else _measured_run(step)
    commands = () if chosen is None else commands_of(plan, chosen.arguments, file)
    note("writing the report")
    write_report(plan, page, measured=measured, commands=commands, plan_file=file)
    if snapshot is not None:
        write_snapshot(plan, snapshot)
    say_written(page, snapshot)
    if as_json:
        document = {"status": "written", "file": str(page), "snapshot": None if snapshot is None else str(snapshot)}
        show_json({**document, **({} if step is None else measured_document(step))})


def check_report(path: Path | None) -> None:
    """Refuse a page that could not be written, before anything is measured; raises ValueError."""
    if path is not None:
        from planner.report.page import check_page

        check_folder(path)
        check_page(path)


def write_result(
    path: Path | None,
    title: str,
    section: Callable[[], ResultSection],
    plan: Plan | None = None,
    target: TargetRecord | None = None,
) -> None:
    """Write a command's result as a page, with the plan that came out of it; nothing without a path.

    Args:
        path: of the page.
        title: its heading.
        section: the result.
        plan: that came out of it.
        target: that the plan was made of, where it does not record it.

    Of several ranks the first one writes.
    """
    if path is None or not is_first():
        return
    from planner.report.page import Page, write_page
    from planner.report.plan_report import report_of_plan

    note("writing the report")
    explained = None if plan is None else report_of_plan(replace(plan, target=plan.target or target))
    write_page(Page(title=title, plan=explained, results=(section(),), commands=(given_command(),)), path)
    say_written(path)


def _measured_step(plan: Plan, target: TargetRecord) -> MeasuredStep:
    from planner.explain.measured_step import view_step

    with working() as progress:
        workload = workload_of(target)
        progress("measure steps", 0, 1)
        return view_step(workload, plan)


def _measured_run(step: MeasuredStep) -> MeasuredRun:
    from planner.report.plan_report import MeasuredRun

    return MeasuredRun(
        peak_bytes=step.planned.peak.peak_bytes,
        seconds=step.planned.seconds,
        unplanned_peak_bytes=step.unplanned.peak.peak_bytes,
        unplanned_seconds=step.unplanned.seconds,
        timelines=(step.unplanned, step.planned),
        peak=step.peak,
    )
