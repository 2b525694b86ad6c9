"""Graph problems at the command line: solved, and the solution written so that anyone can replay it."""

from __future__ import annotations

from typing import Any

from planner.cli.solution_summary import SolutionSummary, StageSummary, summary_of_solution
from planner.plans.problem_files import all_bytes
from planner.plans.refusals import require_schedule
from planner.units import parse_bytes
from solvers.graph.liveness import unplanned_replay
from solvers.graph.registry import DEFAULT_GAP, solve_graph
from solvers.problem.graph import Graph
from solvers.problem.graph_schedule import GraphSchedule
from solvers.problem.graph_simulator import replay_graph
from solvers.problem.solution import GraphProblem

SOLUTION_FORMAT = "planner-graph-solution"
SOLUTION_VERSION = 1


def solve_graph_problem(
    graph: Graph, budget: str, *, solver: str, time_limit_seconds: float | None, gap: float | None
) -> tuple[SolutionSummary, GraphSchedule]:
    """Solve a graph for ``budget``; the summary of its solution, and the schedule.

    Raises:
        Infeasible: nothing fits.
        NothingFound: nothing was found, and nothing ruled out.
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
    file_format = {"format": SOLUTION_FORMAT, "version": SOLUTION_VERSION}
    return {**file_format, **summary.to_document(), "actions": schedule.to_list(graph)}
