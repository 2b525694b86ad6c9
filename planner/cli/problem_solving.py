"""Solving what FILE may be at the command line: a profile, a chain problem or a graph problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.cli import chain_solutions
from planner.cli.documents import nothing_yet_document, refusal_document
from planner.cli.options import GRAPH_SECONDS, LARGE_GRAPH_NODES, LARGE_GRAPH_SECONDS
from planner.cli.solution_summary import SolutionSummary, StageSummary, summary_of_plan, summary_of_solution
from planner.plans.offload_request import Offload
from planner.plans.plan import Plan
from planner.plans.plan_claims import Interrupted
from planner.plans.problem_files import Source, all_bytes
from planner.plans.refusals import Infeasible, require_schedule
from planner.plans.rules import Rules
from planner.plans.solving import Numerics, find_plan
from planner.plans.stated_plan import state
from planner.units import parse_bytes
from profiler.records import Profile
from solvers.chain.baselines import keep_all_replay
from solvers.graph.liveness import unplanned_replay
from solvers.graph.registry import DEFAULT_GAP, solve_graph
from solvers.problem.chain import Chain
from solvers.problem.graph import Graph, GraphSchedule
from solvers.problem.graph_simulator import replay_graph
from solvers.problem.solution import GraphProblem

GRAPH_SOLUTION_FORMAT = "planner-graph-solution"
GRAPH_SOLUTION_VERSION = 1


def stage_level(source: Source, rules: Rules | None) -> Profile:
    """The profile without programs of stages; ValueError for a problem file, or with rules, which may need some."""
    if isinstance(source, Profile) and rules is None:
        return source.stage_level()
    kind = "rules" if rules is not None else "a problem file"
    raise ValueError(f"--no-menus: expected a profile alone, got {kind}; leave one of them out")


def check_verifiable(source: Source) -> Profile:
    """The profile, if its plan can be checked against its own run; raises ValueError for all else."""
    if isinstance(source, Profile) and source.frugal:
        raise ValueError(
            "--verify: expected the profile of a step that fits without a plan, got one of a step that was never run "
            "whole; leave it out, planner train measures the plan"
        )
    if not isinstance(source, Profile):
        raise ValueError("--verify: expected a profile, whose stages a model runs, got a problem file; leave it out")
    return source


def solve_source(
    source: Source,
    budget: str | None,
    *,
    solver: str,
    time_limit_seconds: float | None,
    gap: float | None,
    rules: Rules | None = None,
    offload: Offload | None = None,
    headroom: str | None = None,
    numerics: Numerics = "eager",
) -> tuple[SolutionSummary, dict[str, Any]]:
    """The summary of a solution, and the document to save.

    Args:
        source: the profile, chain or graph.
        budget: as text; None with rules that need none.
        solver, time_limit_seconds, gap: as at the command line.
        rules: what is stated of a profile's stages by hand.
        offload: whether and over what activations may go to host memory; None where nothing was said of it.
        headroom: of the budget, left to the device's allocator; None where nothing was said of it.
        numerics: as for ``planner.solve``.

    After Ctrl-C the best that was found until then, marked ``interrupted``.

    Raises:
        Infeasible: no schedule came out.
        KeyboardInterrupt: Ctrl-C was pressed before there was any.
        ValueError: a solver or an option that this kind of problem does not have, or a budget that does not parse.
    """
    if numerics != "eager" and (rules is not None or not isinstance(source, Profile)):
        raise ValueError("--allow-rounding: expected a profile alone, got rules or a problem file; leave it out")
    _check_options(source, gap=gap, rules=rules, offload=offload, headroom=headroom)
    if isinstance(source, Graph):
        summary, actions = solve_graph_problem(
            source, _given(budget), solver=solver, time_limit_seconds=time_limit_seconds, gap=gap
        )
        return summary, solution_file(summary, source, actions)
    if isinstance(source, Chain):
        summary, schedule = chain_solutions.solve_chain_problem(
            source, _given(budget), solver=solver, time_limit_seconds=time_limit_seconds, offload=offload or Offload()
        )
        return summary, chain_solutions.solution_file(summary, source, schedule)
    search: dict[str, Any] = {
        "solver": solver, "time_limit_seconds": time_limit_seconds, "headroom": headroom or 0
    }  # fmt: skip
    try:
        if rules is not None:
            plan = state(source, rules, budget=budget, **search)
        else:
            plan = find_plan(source, _given(budget), offload=offload or Offload(), numerics=numerics, **search)
    except Interrupted as stop:
        plan = stop.plan
    assert isinstance(plan, Plan)
    return summary_of_plan(plan), plan.to_document()


def _check_options(
    source: Source, *, gap: float | None, rules: Rules | None, offload: Offload | None, headroom: str | None
) -> None:
    """Refuse options that this kind of problem does not have."""
    if rules is not None and not isinstance(source, Profile):
        raise ValueError(
            "--rules: expected a profile, whose stages have names, got another file; make one with planner profile"
        )
    if offload is not None and (rules is not None or isinstance(source, Graph)):
        kind = "rules" if rules is not None else "a graph problem"
        raise ValueError(f"--link-gbps and the like: expected a profile or a chain alone, got {kind}; leave them out")
    if headroom is not None and not isinstance(source, Profile):
        raise ValueError(
            "--headroom: expected a profile, whose device has an allocator, got a problem file; lower the budget"
        )
    if gap is not None and not isinstance(source, Graph):
        kind = "a profile" if isinstance(source, Profile) else "a chain problem"
        raise ValueError(f"--gap: expected a graph problem, whose solvers search until then, got {kind}; leave it out")


def _given(budget: str | None) -> str:
    if budget is None:
        raise ValueError(
            "--budget: expected one, got none; give for example 8GiB or 70% (with --rules it may be left out)"
        )
    return budget


def search_seconds(source: Source, time_limit: float | None, of_graph_seconds: float | None = None) -> float:
    """For how long solvers may search; 0 where that is not known before.

    Args:
        source: what they solve.
        time_limit: as at the command line.
        of_graph_seconds: for a graph without a limit; None as for one solve.
    """
    if time_limit is not None or not isinstance(source, Graph):
        return time_limit or 0.0
    return of_graph_seconds or (LARGE_GRAPH_SECONDS if len(source.nodes) > LARGE_GRAPH_NODES else GRAPH_SECONDS)


def refusal_of(refusal: Infeasible, source: Source) -> dict[str, Any]:
    """What ``solve --json`` says where no schedule came out."""
    return refusal_document(refusal, **_unplanned(source))


def interrupted_document(source: Source, solver: str) -> dict[str, Any]:
    """What ``solve --json`` says where Ctrl-C came before there was any schedule."""
    return nothing_yet_document(solver, **_unplanned(source))


def _unplanned(source: Source) -> dict[str, Any]:
    if isinstance(source, Profile):
        peak_bytes, seconds = source.unplanned_peak_bytes, source.unplanned_seconds
        resident_bytes = source.resident.total
    else:
        unplanned = unplanned_replay(source) if isinstance(source, Graph) else keep_all_replay(source)
        peak_bytes, seconds, resident_bytes = unplanned.peak_bytes, unplanned.seconds, source.resident_bytes
    return {"unplanned_peak_bytes": peak_bytes, "unplanned_seconds": seconds, "resident_bytes": resident_bytes}


def title_of(source: Source, path: Path) -> str:
    """What a picture of it is headed with."""
    if isinstance(source, Profile):
        return f"{source.model_class} on {source.device} ({source.device_name})"
    if isinstance(source, Graph):
        return f"{path.stem}: a graph of {len(source.nodes)} nodes"
    return f"{path.stem}: a chain of {len(source.stages)} stages"


def solve_graph_problem(
    graph: Graph, budget: str, *, solver: str, time_limit_seconds: float | None, gap: float | None
) -> tuple[SolutionSummary, GraphSchedule]:
    """Solve a graph for ``budget``; the summary of its solution, and the schedule.

    Raises:
        Infeasible: nothing was found; its ``proven`` says whether nothing fits.
        ValueError: unknown solver, an impossible time limit or gap, or a budget that does not parse.
    """
    unplanned = unplanned_replay(graph)
    budget_bytes = parse_bytes(budget, whole_bytes=unplanned.peak_bytes)
    problem = GraphProblem(graph=graph, budget_bytes=min(budget_bytes, all_bytes(graph)))  # 64 bits hold it
    solution = solve_graph(problem, solver, time_limit_seconds, DEFAULT_GAP if gap is None else gap)
    schedule = require_schedule(solution, budget_bytes, solver).schedule
    assert schedule is not None
    replayed = replay_graph(graph, schedule)
    nodes = tuple(
        StageSummary(
            name=node.name,
            side=node.side,
            decision="recompute" if runs > 1 else "keep",
            runs=runs,
            extra_seconds=node.seconds * (runs - 1),
        )
        for node, runs in zip(graph.nodes, replayed.runs, strict=True)
    )
    summary = summary_of_solution(
        solution,
        replayed,
        unplanned,
        budget_bytes=budget_bytes,
        resident_bytes=graph.resident_bytes,
        stages=nodes,
    )
    return summary, schedule


def solution_file(summary: SolutionSummary, graph: Graph, schedule: GraphSchedule) -> dict[str, Any]:
    """What ``solve -o`` writes for a graph: the summary, and the actions by the names of their nodes."""
    file_format = {"format": GRAPH_SOLUTION_FORMAT, "version": GRAPH_SOLUTION_VERSION}
    return {**file_format, **summary.to_document(), "actions": schedule.to_list(graph)}
