"""The command ``solve``: a plan for a profile or a problem file, checked against its own run if asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.interrupts import INTERRUPTED
from planner.cli.options import (
    GRAPH_SECONDS,
    LARGE_GRAPH_NODES,
    LARGE_GRAPH_SECONDS,
    AllowRounding,
    AsJson,
    HeadroomText,
    OffloadText,
    OptionalBudget,
    RulesFile,
    SolverName,
    SourceFile,
    TargetRequest,
    TimeLimit,
    Trust,
    host_memory_callback,
    numerics_of,
    offload_of,
    offload_text,
    out_option,
)
from planner.cli.output import Output, output_files
from planner.cli.several_ranks import workload_of

if TYPE_CHECKING:
    from planner.cli.solutions import SolutionSummary
    from planner.plans.offload_request import Offload
    from planner.plans.rules import Rules
    from planner.plans.solving import Numerics
    from planner.plans.sources import Source
    from planner.training.verification import Verification
    from profiler.records import Profile


def solve_command(
    context: typer.Context,
    file: SourceFile,
    budget: OptionalBudget = None,
    solver: SolverName = "auto",
    time_limit: TimeLimit = None,
    offload: OffloadText = None,
    headroom: HeadroomText = None,
    rules: RulesFile = None,
    allow_rounding: AllowRounding = False,
    verify: Annotated[
        str | None,
        typer.Option(
            metavar="[TARGET]",
            help="Run the plan for a few steps, correct inaccurate times, and solve again. Uses the model that the "
            "profile records unless a TARGET follows.",
        ),
    ] = None,
    trust: Trust = False,
    output: Annotated[list[Path] | None, out_option("Write the plan to this file.")] = None,
    as_json: AsJson = False,
    no_offload: Annotated[bool, typer.Option("--no-offload", hidden=True, help="--offload no.")] = False,
    offload_only: Annotated[bool, typer.Option("--offload-only", hidden=True, help="--offload only.")] = False,
    link_gbps: Annotated[float | None, typer.Option(min=0, hidden=True, help="--offload gbps=G.")] = None,
    devices_per_link: Annotated[int | None, typer.Option(min=1, hidden=True, help="--offload devices=K.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(callback=host_memory_callback, hidden=True, help="--offload host=B.")
    ] = None,
) -> None:
    """Choose what to keep, recompute and offload so that the step's true peak stays within the budget.

    FILE is a profile, as planner profile writes it, or a problem file of a chain or a graph.

    With --rules, the plan follows the rules, and the solver decides the rest. If the rules decide everything, --budget
    is optional.

    With --verify the plan is run and checked stage by stage. If the time of a stage is off by more than a tenth, it is
    corrected and the problem is solved again, for at most three plans; the fastest plan is written.

    Ctrl-C ends the search with exit code 130; the best plan found so far is printed and written to -o.
    """
    from planner.cli import documents
    from planner.cli.solutions import summary_of_plan
    from planner.cli.tables import solution_report, verification_report
    from planner.plans.refusals import Infeasible
    from planner.plans.rules import Rules
    from planner.plans.sources import read_source
    from profiler.json_files import write_document

    out: Output = context.obj
    path = output_files(output, "json").json
    if verify is not None and rules is not None:
        raise ValueError("--verify: a plan made with --rules cannot be corrected; leave one out, or run planner train")
    stated = None if rules is None else Rules.load(rules)
    given = offload_text(
        offload,
        no_offload=no_offload,
        offload_only=offload_only,
        link_gbps=link_gbps,
        devices_per_link=devices_per_link,
        host_memory=host_memory,
    )
    offload_request = offload_of(given)
    source = read_source(file)
    target = TargetRequest(text=verify, option="--verify", trust=trust)
    if verify is not None:
        target.chosen(_verifiable(source).target, file)  # Refused before the search, not after.
    try:
        with out.searching(search_seconds(source, time_limit)):
            summary, document = solve_source(
                source,
                budget,
                solver=solver,
                time_limit_seconds=time_limit,
                rules=stated,
                offload=offload_request,
                headroom=headroom,
                numerics=numerics_of(allow_rounding),
            )
    except Infeasible as refusal:
        if as_json:
            out.show_json(documents.refusal_document(refusal, **unplanned_fields(source)))
        raise
    except KeyboardInterrupt:
        if as_json:
            out.show_json(documents.nothing_yet_document(solver, **unplanned_fields(source)))
        raise
    if summary.no_offload:
        out.note(f"without offload: {summary.no_offload}")
    verified = None
    interrupted = summary.interrupted or out.ctrl_c.pressed  # A method of graphs may end by it, and return.
    if verify is not None and not interrupted:
        try:
            verified = _verified(out, document, target, file, solver=solver, time_limit_seconds=time_limit)
            summary, document = summary_of_plan(verified.plan), verified.plan.to_document()
        except KeyboardInterrupt:  # The plan is there, and was not checked against its own run.
            interrupted = True
    if interrupted:
        summary, document = replace(summary, interrupted=True), {**document, "interrupted": True}
        out.ctrl_c.say("interrupted: best plan so far")
    if path is not None:
        write_document(path, document)
    if as_json:
        rounds = {} if verified is None else {"verified": [documents.round_document(each) for each in verified.rounds]}
        out.show_json({**summary.to_document(), **rounds})
    else:
        out.show(solution_report(summary), *([] if verified is None else ["", verification_report(verified)]))
    out.say_written(path)
    if path is None and not as_json and not interrupted:
        out.note("not written to any file: add -o FILE")
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _verifiable(source: Source) -> Profile:
    """The profile, if its plan can be checked against its own run; raises ValueError for all else."""
    from profiler.records import Profile

    if not isinstance(source, Profile):
        raise ValueError("--verify: a problem file has no model to run; leave it out, or solve a profile")
    if source.frugal:
        raise ValueError(
            "--verify: it compares the planned step with the unplanned one, which does not fit; leave it out, planner "
            "train reports the plan's measured peak and time"
        )
    return source


def _verified(
    out: Output,
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
    with out.working() as progress:
        workload = workload_of(chosen, out)
        progress("verify", 0, 1)
        return verify(workload, plan, solver=solver, time_limit_seconds=time_limit_seconds)


def solve_source(
    source: Source,
    budget: str | None,
    *,
    solver: str,
    time_limit_seconds: float | None,
    rules: Rules | None = None,
    offload: Offload | None = None,
    headroom: str | None = None,
    numerics: Numerics = "eager",
) -> tuple[SolutionSummary, dict[str, Any]]:
    """The summary of a solution, and the document to save.

    Args:
        source: the profile, chain or graph.
        budget: as text; None with rules that need none.
        solver, time_limit_seconds: as at the command line.
        rules: what is stated of a profile's stages by hand.
        offload: whether and over what activations may go to host memory; None where nothing was said of it.
        headroom: of the budget, left to the device's allocator; None where nothing was said of it.
        numerics: as for ``planner.solve``.

    After Ctrl-C the best solution that was found until then, marked ``interrupted``.

    Raises:
        Infeasible: no schedule came out.
        KeyboardInterrupt: Ctrl-C was pressed before there was any.
        ValueError: a solver or an option that this kind of problem does not have, or a budget that does not parse.
    """
    from planner.cli import solutions
    from planner.plans.offload_request import Offload
    from planner.plans.plan import Interrupted, Plan
    from planner.plans.solving import find_plan
    from planner.plans.stated_plan import state
    from profiler.records import Profile
    from solvers.problem.chain import Chain
    from solvers.problem.graph import Graph

    of_profile = isinstance(source, Profile)
    kind = "rules" if rules is not None else "a problem file"
    if rules is not None and not of_profile:
        raise ValueError("--rules: rules name stages of a model, and a problem file has none; pass a profile")
    if numerics != "eager" and (rules is not None or not of_profile):
        raise ValueError(f"--allow-rounding: it has no effect on {kind}; leave it out")
    if offload is not None and (rules is not None or isinstance(source, Graph)):
        raise ValueError(f"--offload: it has no effect on {kind if rules is not None else 'a graph'}; leave it out")
    if headroom is not None and not of_profile:
        raise ValueError("--headroom: a problem file has no device whose allocator needs room; lower the budget")
    if budget is None and rules is None:
        raise ValueError("--budget: it is missing; add the most bytes alive at once, such as 8GiB or 70%")
    if isinstance(source, Graph | Chain):
        assert budget is not None
        if isinstance(source, Graph):
            summary, actions = solutions.solve_graph_problem(
                source, budget, solver=solver, time_limit_seconds=time_limit_seconds
            )
            return summary, solutions.graph_solution_file(summary, source, actions)
        summary, schedule = solutions.solve_chain_problem(
            source, budget, solver=solver, time_limit_seconds=time_limit_seconds, offload=offload or Offload()
        )
        return summary, solutions.chain_solution_file(summary, source, schedule)
    search: dict[str, Any] = {
        "solver": solver, "time_limit_seconds": time_limit_seconds, "headroom": headroom or 0
    }  # fmt: skip
    try:
        if rules is not None:
            plan = state(source, rules, budget=budget, **search)
        else:
            assert budget is not None
            plan = find_plan(source, budget, offload=offload or Offload(), numerics=numerics, **search)
    except Interrupted as stop:
        assert isinstance(stop.plan, Plan)
        plan = stop.plan
    return solutions.summary_of_plan(plan), plan.to_document()


def search_seconds(source: Source, time_limit: float | None, of_graph_seconds: float | None = None) -> float:
    """How long solvers may search; 0 where that is not known before.

    Args:
        source: what they solve.
        time_limit: as at the command line.
        of_graph_seconds: for a graph without a limit; None as for one solve.
    """
    from solvers.problem.graph import Graph

    if time_limit is not None or not isinstance(source, Graph):
        return time_limit or 0.0
    return of_graph_seconds or (LARGE_GRAPH_SECONDS if len(source.nodes) > LARGE_GRAPH_NODES else GRAPH_SECONDS)


def unplanned_fields(source: Source) -> dict[str, Any]:
    """The known fields of the step without a plan."""
    from profiler.records import Profile
    from solvers.chain.baselines import keep_all_replay
    from solvers.graph.orders import unplanned_replay
    from solvers.problem.graph import Graph

    if isinstance(source, Profile):
        peak_bytes, seconds = source.unplanned_peak_bytes, source.unplanned_seconds
        resident_bytes = source.resident.total
    else:
        unplanned = unplanned_replay(source) if isinstance(source, Graph) else keep_all_replay(source)
        peak_bytes, seconds, resident_bytes = unplanned.peak_bytes, unplanned.seconds, source.resident_bytes
    return {"unplanned_peak_bytes": peak_bytes, "unplanned_seconds": seconds, "resident_bytes": resident_bytes}
