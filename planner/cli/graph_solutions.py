"""Graph problem files at the command line: solved, and the solution written so that anyone can replay it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.cli.documents import refusal_document
from planner.plans.problem_files import all_bytes
from planner.plans.solving import NoPlan, require_schedule
from planner.units import parse_bytes
from solvers.graph.liveness import unplanned_replay
from solvers.graph.registry import DEFAULT_GAP, solve_graph
from solvers.problem.graph import Graph
from solvers.problem.graph_schedule import GraphSchedule
from solvers.problem.graph_simulator import GraphReplay, replay_graph
from solvers.problem.solution import GraphProblem

SOLUTION_FORMAT = "planner-graph-solution"
SOLUTION_VERSION = 1


def solve_graph_document(
    graph: Graph, budget: str, *, solver: str, time_limit_seconds: float | None, gap: float | None
) -> tuple[dict[str, Any], GraphSchedule]:
    """Solve a graph for ``budget``; the document of its solution and the schedule.

    Raises:
        Infeasible: nothing fits.
        NothingFound: nothing was found, and nothing ruled out.
        ValueError: unknown solver, an impossible time limit or gap, or a budget that does not parse.
    """
    whole = unplanned_replay(graph)
    budget_bytes = parse_bytes(budget, whole_bytes=whole.peak_bytes)
    problem = GraphProblem(graph=graph, budget_bytes=min(budget_bytes, all_bytes(graph)))  # 64 bits hold it
    solution = solve_graph(problem, solver, time_limit_seconds, DEFAULT_GAP if gap is None else gap)
    schedule = require_schedule(solution, budget_bytes, solver).schedule
    assert schedule is not None
    replayed = replay_graph(graph, schedule)
    document = {
        "solver": solution.solver,
        "status": solution.status,
        "interrupted": solution.interrupted,
        "budget_bytes": budget_bytes,
        **_predictions(graph, replayed, whole),
        "lower_bound_seconds": solution.lower_bound_seconds,
        "gap": solution.gap,
        "solve_seconds": solution.solve_seconds,
        "stages": _node_documents(graph, replayed),
    }
    return document, schedule


def solution_file(document: Mapping[str, Any], graph: Graph, schedule: GraphSchedule) -> dict[str, Any]:
    """What ``solve -o`` writes for a graph: the document, and the actions by the names of their nodes."""
    return {"format": SOLUTION_FORMAT, "version": SOLUTION_VERSION, **document, "actions": schedule.to_list(graph)}


def graph_refusal(refusal: NoPlan, graph: Graph) -> dict[str, Any]:
    """The refusal document of a graph problem."""
    whole = unplanned_replay(graph)
    return refusal_document(
        refusal,
        unplanned_peak_bytes=whole.peak_bytes,
        unplanned_seconds=whole.seconds,
        resident_bytes=graph.resident_bytes,
    )


def _predictions(graph: Graph, replayed: GraphReplay, whole: GraphReplay) -> dict[str, Any]:
    again = (node.seconds * (runs - 1) for node, runs in zip(graph.nodes, replayed.runs, strict=True))
    return {
        "predicted_peak_bytes": replayed.peak_bytes,
        "predicted_seconds": replayed.seconds,
        "unplanned_peak_bytes": whole.peak_bytes,
        "unplanned_seconds": whole.seconds,
        "resident_bytes": graph.resident_bytes,
        "recomputed_seconds": sum(again),
        "slowdown": replayed.seconds / whole.seconds if whole.seconds > 0 else 1.0,
    }


def _node_documents(graph: Graph, replayed: GraphReplay) -> list[dict[str, Any]]:
    return [
        {
            "name": node.name,
            "side": node.side,
            "decision": "recompute" if runs > 1 else "keep",
            "runs": runs,
            "extra_seconds": node.seconds * (runs - 1),
        }
        for node, runs in zip(graph.nodes, replayed.runs, strict=True)
    ]
