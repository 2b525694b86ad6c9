"""The command ``solve``: a plan for a profile or a problem file, checked against its own run if asked for."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.interrupts import INTERRUPTED, is_pressed, say_interrupted
from planner.cli.options import (
    GRAPH_GAP,
    GRAPH_SECONDS,
    LARGE_GRAPH_NODES,
    LARGE_GRAPH_SECONDS,
    AllowRounding,
    AsJson,
    BudgetOrRules,
    DevicesPerLink,
    HeadroomText,
    HostMemoryOption,
    LinkGbps,
    NoOffload,
    OffloadOnly,
    Out,
    RulesFile,
    Settings,
    SolverName,
    TargetRequest,
    Trust,
    numerics_of,
    offload_options,
    time_limit_callback,
)
from planner.cli.several_ranks import workload_of
from planner.cli.shell import check_folder, complain, note, say_written, searching, show, show_json, working

if TYPE_CHECKING:
    from planner.training.verification import Verification


def solve_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A profile, a chain problem or a graph problem.")],
    budget: BudgetOrRules = None,
    headroom: HeadroomText = None,
    rules: RulesFile = None,
    solver: SolverName = "auto",
    time_limit: Annotated[
        float | None,
        typer.Option(
            callback=time_limit_callback,
            help="Seconds for solvers that search; "
            f"of a graph {GRAPH_SECONDS:g} if unset, {LARGE_GRAPH_SECONDS:g} above {LARGE_GRAPH_NODES} nodes.",
        ),
    ] = None,
    no_menus: Annotated[
        bool, typer.Option("--no-menus", help="Of a profile: keep or recompute stages as a whole.")
    ] = False,
    allow_rounding: AllowRounding = False,
    no_offload: NoOffload = False,
    offload_only: OffloadOnly = False,
    link_gbps: LinkGbps = None,
    devices_per_link: DevicesPerLink = None,
    host_memory: HostMemoryOption = None,
    gap: Annotated[
        float | None,
        typer.Option(help=f"Graphs only: the search ends this close to the bound, a share ({GRAPH_GAP:g} if unset)."),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="[TARGET]",
            help="Of a profile: run the plan a few steps, correct its seconds, and solve again; on the model that the "
            "profile records if no TARGET follows.",
        ),
    ] = None,
    settings: Settings = None,
    trust: Trust = False,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="After Ctrl-C, write the best plan until then to -o all the same.")
    ] = False,
    output: Out = None,
    as_json: AsJson = False,
) -> None:
    """Choose what to keep, recompute and offload so that the step's true peak stays within the budget.

    FILE is a profile (planner profile -o), or a problem file: "format": "planner-chain" or "planner-graph".

    With --rules the plan does what these state, and only the rest, if it is to be solved for, is chosen. --budget may
    then be left out.

    With --verify (and --set, as for profile) the plan is checked against its own run, stage by stage: programs and
    second runs whose seconds are off by more than a tenth are corrected, and it is solved again. Of three plans at most
    the fastest is written.

    Ctrl-C ends the search: the best plan so far is printed, and written only with --keep-best; exit code 130.
    """
    from planner.cli import problem_solving
    from planner.cli.solution_summary import summary_of_plan
    from planner.cli.tables import solution_report, verification_report
    from planner.plans import problem_files
    from planner.plans.refusals import Infeasible
    from planner.plans.rules import Rules
    from profiler.json_files import write_document

    check_folder(output)
    _check_verify(verify, rules, settings)
    stated = None if rules is None else Rules.load(rules)
    offload_request = offload_options(no_offload, link_gbps, devices_per_link, host_memory, offload_only=offload_only)
    source = problem_files.read_source(file)
    target = TargetRequest(text=verify, settings=settings, option="--verify", trust=trust)
    if verify is not None:
        target.chosen(problem_solving.check_verifiable(source).target, file)  # Refused before the search, not after.
    if no_menus:
        source = problem_solving.stage_level(source, stated)
    try:
        limit_seconds = problem_solving.search_seconds(source, time_limit)
        with contextlib.redirect_stdout(sys.stderr), searching(limit_seconds):
            summary, document = problem_solving.solve_source(
                source,
                budget,
                solver=solver,
                time_limit_seconds=time_limit,
                gap=gap,
                rules=stated,
                offload=offload_request,
                headroom=headroom,
                numerics=numerics_of(allow_rounding),
            )
    except Infeasible as refusal:
        if as_json:
            show_json(problem_solving.refusal_of(refusal, source))
        raise
    except KeyboardInterrupt:
        if as_json:
            show_json(problem_solving.interrupted_document(source, solver))
        raise
    if is_pressed() and not summary.interrupted:  # A method of graphs that ended by it, and returned.
        summary, document = replace(summary, interrupted=True), {**document, "interrupted": True}
    if summary.no_offload:
        note(f"without offload: {summary.no_offload}")
    verified = None
    if verify is not None and not summary.interrupted:
        try:
            verified = _verified(document, target, file, solver=solver, time_limit_seconds=time_limit)
            summary, document = summary_of_plan(verified.plan), verified.plan.to_document()
        except KeyboardInterrupt:  # The plan is there, and was not checked against its own run.
            summary, document = replace(summary, interrupted=True), {**document, "interrupted": True}
    if summary.interrupted:
        _say_interrupted(output, keep_best)
        output = output if keep_best else None
    if output is not None:
        write_document(output, document)
    if as_json:
        show_json({**summary.to_document(), **({} if verified is None else _rounds(verified))})
    else:
        show(solution_report(summary))
        if verified is not None:
            show("", verification_report(verified))
    say_written(output)
    if output is None and not as_json and not summary.interrupted:
        note("not written anywhere: -o FILE writes it")
    if summary.interrupted:
        raise typer.Exit(INTERRUPTED)


def _say_interrupted(output: Path | None, keep_best: bool) -> None:
    say_interrupted("interrupted: best plan so far")
    if output is not None and not keep_best:
        complain(f"not written: {output}; --keep-best writes the best plan so far")


def _check_verify(verify: str | None, rules: Path | None, settings: list[str] | None) -> None:
    if verify is None and settings:
        raise ValueError("--set: expected --verify with it, got none; add it, the values are for the model that is run")
    if verify is not None and rules is not None:
        raise ValueError("--verify: expected a plan that is solved for, got --rules; planner train measures those")


def _rounds(verified: Verification) -> dict[str, Any]:
    from planner.cli.documents import round_document

    return {"verified": [round_document(each) for each in verified.rounds]}


def _verified(
    document: dict[str, Any],
    target: TargetRequest,
    file: Path,
    *,
    solver: str,
    time_limit_seconds: float | None,
) -> Verification:
    from planner.plans.plan import Plan
    from planner.training.verification import verify

    plan = Plan.from_document(document, "the plan")
    chosen = target.chosen(plan.target, file).with_changes((), plan.device)
    with working() as progress:
        workload = workload_of(chosen)
        progress("verify", 0, 1)
        return verify(workload, plan, solver=solver, time_limit_seconds=time_limit_seconds)
