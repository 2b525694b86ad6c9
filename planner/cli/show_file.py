"""The command ``show``: a file as tables; of a plan also its ops, its timeline and its peak, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import AsJson, TargetRequest, Trust, out_option
from planner.cli.output import Output, OutputFiles, output_files
from planner.cli.several_ranks import workload_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.cli.solutions import SolutionSummary
    from planner.explain.measured_step import MeasuredStep
    from planner.explain.peak import Peak
    from planner.explain.timeline import Timeline
    from planner.plans.plan import Plan
    from planner.report.plan_report import MeasuredRun
    from profiler.target_record import TargetRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest:
    """The outputs besides the tables.

    Attributes:
        ops: every op of a plan.
        files: pictures, tables and pages to write.
        target: the model to measure; None to show predictions alone.
    """

    ops: bool
    files: OutputFiles
    target: TargetRequest | None

    @property
    def step(self) -> bool:
        """Whether anything of a step over time is asked for."""
        return bool(self.files.all) or self.target is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExplainedStep:
    """A planned step over time, and its peaks explained."""

    timelines: list[Timeline]
    peaks: list[Peak]
    plan: Plan | None
    budget_bytes: int
    title: str


def show_command(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A profile, a plan, or the solution of a chain or graph problem.")
    ],
    ops: Annotated[bool, typer.Option("--ops", help="List every op of the plan, not only the largest.")] = False,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="[TARGET]",
            help="Also run steps, and show measurements beside predictions; on the model that the plan records unless "
            "a TARGET follows.",
        ),
    ] = None,
    trust: Trust = False,
    output: Annotated[
        list[Path] | None,
        out_option(
            "Write a page that explains the plan, .html; the bytes alive over a step as a picture, .png, .svg or .pdf, "
            "or a table, .csv; the predicted step for pytorch.org/memory_viz, .pickle. May be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option("--html", hidden=True, help="-o FILE.html.")] = None,
) -> None:
    """Print a plan: its stages, what happens to their ops and why, and what is alive at its peak.

    Profiles and solutions of chain and graph problems are printed as tables.
    """
    out: Output = context.obj
    if html is not None:
        from planner.report.page import check_page

        check_page(html)
    files = output_files([*(output or ()), *([] if html is None else [html])], "page", "picture", "table", "snapshot")
    target = None if measure is None else TargetRequest(text=measure, option="--measure", trust=trust)
    run_show(out, file, ShowRequest(ops=ops, files=files, target=target))


def run_show(out: Output, file: Path, request: ShowRequest) -> None:
    """Print a file, and draw, write and measure what is asked for.

    Raises:
        ValueError: the file is not to be read, has nothing of what is asked for, or the model is not the plan's.
    """
    from planner.cli import solutions, tables
    from planner.cli.documents import profile_document
    from planner.plans.plan import FORMAT as PLAN_FORMAT, VERSION as PLAN_VERSION, Plan
    from profiler.json_files import read_document
    from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile

    where = str(file)
    document = read_document(
        file,
        {
            PLAN_FORMAT: PLAN_VERSION,
            PROFILE_FORMAT: PROFILE_VERSION,
            solutions.CHAIN_FORMAT: solutions.CHAIN_VERSION,
            solutions.GRAPH_FORMAT: solutions.GRAPH_VERSION,
        },
    )
    file_format = document["format"]
    if file_format == PLAN_FORMAT:
        plan = Plan.from_document(document, where)
        summary = solutions.summary_of_plan(plan)
        parts, found = _show_plan(out, plan, summary, file, request)
        short = {**summary.to_document(), **found}
    elif file_format == solutions.CHAIN_FORMAT:
        summary = solutions.chain_summary(document, where)
        parts, found = _show_chain(summary, document, where, request)
        short = {**summary.to_document(), **found}
    elif request.ops or request.step:
        raise ValueError(
            f"{where}: it holds a {file_format}, which has no ops, timeline or page to show; "
            "pass the plan that planner solve -o wrote"
        )
    elif file_format == PROFILE_FORMAT:
        profile = Profile.from_document(document, where)
        parts, short = [tables.profile_report(profile)], profile_document(profile, file)
    else:
        summary = solutions.summary_from(document, where)
        parts, short = [tables.solution_report(summary)], summary.to_document()
    out.answer(short, *parts)
    out.say_written(*request.files.all)


def _show_chain(
    summary: SolutionSummary, document: dict[str, Any], where: str, request: ShowRequest
) -> tuple[list[RenderableType], dict[str, Any]]:
    """The tables of a chain's solution, and what is alive at its peak; its stages have no ops and no model."""
    from planner.cli import tables
    from planner.cli.solutions import solved_chain
    from planner.explain.peak import peak_parts, predicted_peak
    from planner.explain.timeline import predicted_timelines

    if request.ops or request.target or request.files.page or request.files.snapshot:
        raise ValueError(
            f"{where}: it holds the solution of a chain problem, which has no ops and no model to measure or explain; "
            "solve a profile"
        )
    parts = [tables.solution_report(summary)]
    if "chain" not in document and not request.step:
        return parts, {}
    chain, schedule = solved_chain(document, where)
    timelines = predicted_timelines(chain, schedule, link=summary.link)
    step = _ExplainedStep(
        timelines=timelines,
        peaks=[predicted_peak(chain, schedule, timelines[1])],
        plan=None,
        budget_bytes=summary.budget_bytes,
        title=f"{Path(where).stem}: a chain of {len(chain.stages)} stages",
    )
    _write(step, request.files)
    return [*parts, "", *_peaks(step)], {"alive_at_peak": peak_parts(step.peaks)}


def _show_plan(
    out: Output, plan: Plan, summary: SolutionSummary, file: Path, request: ShowRequest
) -> tuple[list[RenderableType], dict[str, Any]]:
    """The tables of a plan; and what is alive at its peak and what was measured, for JSON."""
    from planner.cli import tables
    from planner.cli.documents import measured_document
    from planner.explain.op_decisions import plan_ops_report
    from planner.explain.peak import peak_parts, predicted_peak
    from planner.explain.timeline import predicted_timelines, seconds_outside_chain_of
    from planner.plans.plan import chain_in

    where = str(file)
    parts: list[RenderableType] = [tables.promises_report(summary), "", tables.stages_report(summary)]
    if plan.menus and (request.ops or any(stage.decision == "selective" for stage in plan.stages)):
        parts += ["", plan_ops_report(plan, every_op=request.ops)]
    elif request.ops:
        out.note(f"{where} decides on whole stages alone, so it has no ops to list")
    if plan.chain is None and not request.step:
        out.note(f"{where} comes from an older release without the chain that explains its peak; solve again for that")
        return parts, {}
    chain = chain_in(plan, where)
    outside_seconds = seconds_outside_chain_of(plan, chain)
    timelines = predicted_timelines(chain, plan.schedule, link=plan.link, seconds_outside_chain=outside_seconds)
    peaks = [predicted_peak(chain, plan.schedule, timelines[1], plan=plan)]
    chosen = None if request.target is None else request.target.chosen(plan.target, file)
    measured = None if chosen is None else _measured(out, plan, chosen)
    if measured is not None:
        timelines += [measured.unplanned, measured.planned]
        peaks.append(measured.peak)
    step = _ExplainedStep(
        timelines=timelines,
        peaks=peaks,
        plan=plan,
        budget_bytes=plan.budget_bytes,
        title=f"{plan.model_class} on {plan.device} ({plan.precision})"
        + ("; the step without the plan is computed" if plan.frugal else ""),
    )
    _write(step, request.files)
    _explain(out, plan, file, request.files, chosen, measured)
    found = {"alive_at_peak": peak_parts(peaks), **({} if measured is None else measured_document(measured))}
    return [*parts, "", *_peaks(step), *_verdict(plan, measured)], found


def _explain(
    out: Output,
    plan: Plan,
    file: Path,
    files: OutputFiles,
    target: TargetRecord | None,
    measured: MeasuredStep | None,
) -> None:
    """Write the page and the snapshot, where they are asked for."""
    if files.page is not None:
        from planner.report.commands import commands_of
        from planner.report.page import write_report

        out.note("writing the report")
        commands = () if target is None else commands_of(plan, target.arguments, file)
        run = None if measured is None else _measured_run(measured)
        write_report(plan, files.page, measured=run, commands=commands, plan_file=file)
    if files.snapshot is not None:
        from planner.report.snapshot import write_snapshot

        write_snapshot(plan, files.snapshot)


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


def _measured(out: Output, plan: Plan, target: TargetRecord) -> MeasuredStep:
    from planner.explain.measured_step import view_step

    with out.working() as progress:
        workload = workload_of(target, out)
        progress("measure steps", 0, 1)
        return view_step(workload, plan)


def _write(step: _ExplainedStep, files: OutputFiles) -> None:
    from planner.explain.timeline import timeline_table
    from profiler.json_files import write_whole

    if files.table is not None:
        write_whole(files.table, timeline_table(step.timelines).to_csv(index=False, float_format="%.9g"))
    if files.picture is not None:
        from planner.explain.peak import peak_rows
        from planner.explain.timeline_plot import ExplainedPeak, draw_timeline

        explained = [ExplainedPeak(peak=peak, rows=peak_rows(peak, step.plan)) for peak in step.peaks]
        draw_timeline(step.timelines, files.picture, budget_bytes=step.budget_bytes, peaks=explained, title=step.title)


def _peaks(step: _ExplainedStep) -> list[RenderableType]:
    from planner.explain.peak import alive_report

    return [part for peak in step.peaks for part in (alive_report(peak, step.plan), "")][:-1]


def _verdict(plan: Plan, measured: MeasuredStep | None) -> list[RenderableType]:
    """Measured values, each with the predicted one."""
    if measured is None:
        return []
    from planner.explain.tables import facts
    from planner.units import exact_bytes, format_seconds

    planned, unplanned = measured.planned, measured.unplanned
    rows = [
        ("peak with the plan", planned.peak.peak_bytes, plan.predicted_peak_bytes),
        ("peak without it", unplanned.peak.peak_bytes, plan.unplanned_peak_bytes),
    ]
    comparisons = [
        (name, f"{exact_bytes(size)} measured, {exact_bytes(expected)} predicted") for name, size, expected in rows
    ]
    slowdown = planned.seconds / unplanned.seconds if unplanned.seconds else 1.0
    times = f"{slowdown:.2f} x the {format_seconds(unplanned.seconds)} without it"
    comparisons.append(
        ("time with the plan", f"{format_seconds(planned.seconds)}: {times} (predicted: {plan.slowdown:.2f} x)")
    )
    return ["", facts(comparisons)]
