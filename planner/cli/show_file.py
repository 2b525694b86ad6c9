"""The show command: a file as tables; of a plan also its ops, its timeline and its peak, predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from planner.cli import tables
from planner.cli.chain_solutions import (
    SOLUTION_FORMAT as CHAIN_SOLUTION_FORMAT,
    SOLUTION_VERSION as CHAIN_SOLUTION_VERSION,
    chain_summary,
    solved_chain,
)
from planner.cli.documents import measured_document, profile_document
from planner.cli.options import TargetRequest
from planner.cli.problem_solving import GRAPH_SOLUTION_FORMAT, GRAPH_SOLUTION_VERSION
from planner.cli.report import check_report
from planner.cli.several_ranks import workload_of
from planner.cli.shell import check_folder, note, say_written, show, show_json, working
from planner.cli.solution_summary import summary_from, summary_of_plan
from planner.explain.op_decisions import plan_ops_report
from planner.explain.peak import Peak, alive_report, peak_rows, peak_table, predicted_peak
from planner.explain.timeline import Timeline, predicted_timelines, seconds_outside_chain_of, timeline_table
from planner.pictures import check_picture
from planner.plans.plan import Plan, chain_in
from planner.plans.plan_claims import FORMAT as PLAN_FORMAT, VERSION as PLAN_VERSION
from planner.units import exact_bytes, format_seconds
from profiler.json_files import read_document, write_whole
from profiler.records import FORMAT as PROFILE_FORMAT, VERSION as PROFILE_VERSION, Profile

if TYPE_CHECKING:
    from planner.explain.measured_step import MeasuredStep
    from planner.report.plan_report import MeasuredRun
    from profiler.target_record import TargetRecord

FORMATS = {
    PLAN_FORMAT: PLAN_VERSION,
    PROFILE_FORMAT: PROFILE_VERSION,
    CHAIN_SOLUTION_FORMAT: CHAIN_SOLUTION_VERSION,
    GRAPH_SOLUTION_FORMAT: GRAPH_SOLUTION_VERSION,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRequest:
    """What to show besides the tables.

    Attributes:
        ops: every op of a plan.
        timeline: a picture.
        csv: a table of the timelines.
        peak_csv: a table of what is alive at the peak.
        html: a page that explains a plan.
        snapshot: the predicted step, for torch's memory viewer.
        target: the model to measure; None to show predictions alone.
        as_json: print a JSON document in place of tables.
    """

    ops: bool = False
    timeline: Path | None = None
    csv: Path | None = None
    peak_csv: Path | None = None
    html: Path | None = None
    snapshot: Path | None = None
    target: TargetRequest | None = None
    as_json: bool = False

    @property
    def outputs(self) -> tuple[Path | None, ...]:
        """The files to write."""
        return self.timeline, self.csv, self.peak_csv, self.html, self.snapshot

    @property
    def step(self) -> bool:
        """Whether anything of a step over time is asked for."""
        return any(self.outputs) or self.target is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExplainedStep:
    """A planned step over time, and its peaks explained."""

    timelines: list[Timeline]
    peaks: list[Peak]
    plan: Plan | None
    budget_bytes: int
    title: str


def run_show(file: Path, request: ShowRequest) -> None:
    """Print a file, and draw, write and measure what is asked for.

    Raises:
        ValueError: the file is not to be read, has nothing of what is asked for,
            or the model is not the plan's.
    """
    for path in request.outputs:
        check_folder(path)
    if request.timeline is not None:
        check_picture(request.timeline)
    check_report(request.html)
    document = read_document(file, FORMATS)
    file_format = document["format"]
    measured: MeasuredStep | None = None
    if file_format == PLAN_FORMAT:
        parts, measured = _show_plan(Plan.from_document(document, str(file)), file, request)
    elif file_format == CHAIN_SOLUTION_FORMAT:
        parts = _show_chain(document, str(file), request)
    else:
        parts = _show_other(document, str(file), request)
    if request.as_json:
        show_json({**_in_short(document, file), **({} if measured is None else measured_document(measured))})
    else:
        show(*parts)
    say_written(*request.outputs)


def _in_short(document: dict[str, Any], file: Path) -> dict[str, Any]:
    """What ``show --json`` says: as ``profile --json`` of a profile, and as ``solve --json`` of all else."""
    where = str(file)
    if document["format"] == PROFILE_FORMAT:
        return profile_document(Profile.from_document(document, where), file)
    if document["format"] == PLAN_FORMAT:
        return summary_of_plan(Plan.from_document(document, where)).to_document()
    chain = document["format"] == CHAIN_SOLUTION_FORMAT
    return (chain_summary(document, where) if chain else summary_from(document, where)).to_document()


def _show_other(document: dict[str, Any], where: str, request: ShowRequest) -> list[RenderableType]:
    """Profiles and solutions of graphs: tables alone."""
    if request.ops or request.step:
        raise ValueError(
            f"{where}: expected a plan to show ops, a timeline, a peak or a page of, got a {document['format']}; "
            "pass the plan that planner solve -o wrote"
        )
    if document["format"] == PROFILE_FORMAT:
        return [tables.profile_report(Profile.from_document(document, where))]
    return [tables.solution_report(summary_from(document, where))]


def _show_chain(document: dict[str, Any], where: str, request: ShowRequest) -> list[RenderableType]:
    """A chain's solution: stages have no ops and no model."""
    summary = chain_summary(document, where)
    if request.ops or request.target or request.html or request.snapshot:
        raise ValueError(
            f"{where}: expected the plan of a model to show ops of, to measure or to explain, got the solution of a "
            "chain; solve a profile"
        )
    parts = [tables.solution_report(summary)]
    if "chain" not in document and not request.step:
        return parts
    chain, schedule = solved_chain(document, where)
    timelines = predicted_timelines(chain, schedule, link=summary.link)
    step = _ExplainedStep(
        timelines=timelines,
        peaks=[predicted_peak(chain, schedule, timelines[1])],
        plan=None,
        budget_bytes=summary.budget_bytes,
        title=f"{Path(where).stem}: a chain of {len(chain.stages)} stages",
    )
    _write(step, request)
    return [*parts, "", *_peaks(step)]


def _show_plan(plan: Plan, file: Path, request: ShowRequest) -> tuple[list[RenderableType], MeasuredStep | None]:
    """Its tables, and what was measured."""
    where = str(file)
    summary = summary_of_plan(plan)
    parts: list[RenderableType] = [tables.promises_report(summary), "", tables.stages_report(summary)]
    if plan.menus and (request.ops or any(stage.decision == "selective" for stage in plan.stages)):
        parts += ["", plan_ops_report(plan, every_op=request.ops)]
    elif request.ops:
        note(f"{where} knows no ops of its stages: none is decided on by itself")
    if plan.chain is None and not request.step:
        note(f"{where} carries no chain (it is of an older release): its peak is not explained; solve again for that")
        return parts, None
    chain = chain_in(plan, where)
    outside_seconds = seconds_outside_chain_of(plan, chain)
    timelines = predicted_timelines(chain, plan.schedule, link=plan.link, seconds_outside_chain=outside_seconds)
    peaks = [predicted_peak(chain, plan.schedule, timelines[1], plan=plan)]
    chosen = None if request.target is None else request.target.chosen(plan.target, file)
    measured = None if chosen is None else _measured(plan, chosen)
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
    _write(step, request)
    _explain(plan, file, request, chosen, measured)
    return [*parts, "", *_peaks(step), *_verdict(plan, measured)], measured


def _explain(
    plan: Plan, file: Path, request: ShowRequest, target: TargetRecord | None, measured: MeasuredStep | None
) -> None:
    """Write the page and the snapshot, where they are asked for."""
    if request.html is not None:
        from planner.report.commands import commands_of
        from planner.report.page import write_report

        note("writing the report")
        commands = () if target is None else commands_of(plan, target.arguments, file)
        run = None if measured is None else _measured_run(measured)
        write_report(plan, request.html, measured=run, commands=commands, plan_file=file)
    if request.snapshot is not None:
        from planner.report.snapshot import write_snapshot

        write_snapshot(plan, request.snapshot)


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


def _measured(plan: Plan, target: TargetRecord) -> MeasuredStep:
    from planner.explain.measured_step import view_step

    with working() as progress:
        workload = workload_of(target)
        progress("measure steps", 0, 1)
        return view_step(workload, plan)


def _write(step: _ExplainedStep, request: ShowRequest) -> None:
    if request.csv is not None:
        write_whole(request.csv, timeline_table(step.timelines).to_csv(index=False, float_format="%.9g"))
    if request.peak_csv is not None:
        write_whole(request.peak_csv, peak_table(step.peaks).to_csv(index=False))
    if request.timeline is not None:
        from planner.explain.timeline_plot import ExplainedPeak, draw_timeline

        explained = [ExplainedPeak(peak=peak, rows=peak_rows(peak, step.plan)) for peak in step.peaks]
        draw_timeline(
            step.timelines, request.timeline, budget_bytes=step.budget_bytes, peaks=explained, title=step.title
        )


def _peaks(step: _ExplainedStep) -> list[RenderableType]:
    return [part for peak in step.peaks for part in (alive_report(peak, step.plan), "")][:-1]


def _verdict(plan: Plan, measured: MeasuredStep | None) -> list[RenderableType]:
    """Measured values, each with the predicted one."""
    if measured is None:
        return []
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
    return ["", tables.facts(comparisons)]
