"""The command ``fit``: the whole way from a target to steps under a plan, with the files that are made on it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.options import (
    AllowRounding,
    AsJson,
    BudgetText,
    Device,
    HeadroomText,
    Settings,
    TargetArgument,
    TargetRequest,
    numerics_of,
)
from planner.cli.profiling import default_file, profile_file, profile_of_target
from planner.cli.several_ranks import check_alone, workload_of
from planner.cli.shell import check_folder, say_written, show, show_json, working
from planner.units import counted, exact_bytes, format_bytes, format_seconds
from profiler.target_record import TargetRecord

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.plans.plan import Plan
    from planner.plans.solving import Numerics
    from planner.training.training import TrainingRun
    from profiler.records import Profile
    from profiler.workload.workload import Workload


def fit_command(
    target: TargetArgument,
    budget: BudgetText,
    settings: Settings = None,
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps under the plan.")] = 3,
    headroom: HeadroomText = None,
    allow_rounding: AllowRounding = False,
    folder: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Where profile, plan and page go.", show_default="this folder"
        ),
    ] = Path(),
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no page.")] = False,
    as_json: AsJson = False,
) -> None:
    """Profile a training step, solve for a budget, train under the plan, and say what was predicted and measured.

    Writes the profile, the plan and a page that explains it (.html), named after the target, and overwrites only those
    of the same.
    """
    from planner.cli.train import PlanRequest, run_train
    from planner.plans.plan_claims import FORMAT as PLAN_FORMAT

    check_alone("fit", "planner train TARGET --budget B --shard ddp is for several")
    given = TargetRecord.given(target, settings, device)
    profile_path = profile_file(given, folder)
    check_folder(profile_path)
    workload, profile = _profiled(given, profile_path, numerics_of(allow_rounding))
    plan = _solved(profile, budget, profile_path, headroom or 0, numerics_of(allow_rounding), as_json=as_json)
    plan_path = default_file(given, "plan.json", folder, format=PLAN_FORMAT, budget_bytes=plan.budget_bytes)
    plan.save(plan_path)
    page = None if no_report else plan_path.with_suffix(".html")
    if not as_json:
        show(_unplanned(plan))
    run = run_train(
        PlanRequest(file=plan_path, budget=None),
        TargetRequest(text=target, settings=settings, device=device),
        lambda _: workload,
        steps=steps,
        retries=0,
        as_json=as_json,
        report=page,
        beside={"profile": str(profile_path), "plan": str(plan_path), "plan_status": plan.status},
    )
    if not as_json:
        show("", _answer(given, run))
    say_written(profile_path, plan_path)


def _profiled(target: TargetRecord, path: Path, numerics: Numerics) -> tuple[Workload, Profile]:
    with working() as progress:
        workload = workload_of(target)
        measured = profile_of_target(workload, target, progress, numerics)
    measured.save(path)
    return workload, measured


def _solved(
    profile: Profile, budget: str, path: Path, headroom: str | int, numerics: Numerics, *, as_json: bool
) -> Plan:
    """The plan; where there is none, the profile is there to be solved for another budget."""
    from planner.cli.problem_solving import refusal_of
    from planner.plans.refusals import NoPlan
    from planner.plans.solving import solve

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return solve(profile, budget, headroom=headroom, numerics=numerics)
    except NoPlan as refusal:
        if as_json:
            show_json({**refusal_of(refusal, profile), "profile": str(path)})
        say_written(path)
        raise


def _unplanned(plan: Plan) -> RenderableType:
    from planner.explain.tables import facts

    found = f"{plan.status}, by {plan.solver} in {format_seconds(plan.solve_seconds)}"
    return facts(
        [
            ("unplanned peak", exact_bytes(plan.unplanned_peak_bytes)),
            ("unplanned time", f"{format_seconds(plan.unplanned_seconds)} a step"),
            ("plan", f"{found}; {counted(plan.recomputed_ops, 'op')} run again"),
        ]
    )


def _answer(target: TargetRecord, run: TrainingRun) -> str:
    """In one sentence."""
    plan = run.plan
    does = "trains" if run.measured_peak_bytes <= plan.budget_bytes else "does not train"
    slowdown = run.measured_seconds / plan.unplanned_seconds if plan.unplanned_seconds else 1.0
    return (
        f"{target.text} {does} within {format_bytes(plan.budget_bytes)}: it takes "
        f"{format_bytes(run.measured_peak_bytes)} in place of {format_bytes(plan.unplanned_peak_bytes)}, and "
        f"{slowdown:.2f} times the time"
    )
