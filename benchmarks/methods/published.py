"""Graph methods as published, by name, and ``solve_graph`` that knows them beside its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

from benchmarks.methods import checkmate, intervals, lower_sets
from solvers.graph.orders import Incumbent
from solvers.graph.registry import DEFAULT_GAP, METHODS, GraphMethod, graph_solver_names, solve_graph
from solvers.problem.graph import Graph
from solvers.problem.solution import Solution


def _order_of(solve: Callable[..., tuple[int, ...] | None], name: str) -> GraphMethod:
    """A method that answers once, and proves nothing."""

    def run(incumbent: Incumbent) -> None:
        order = solve(incumbent.indexed, incumbent.budget_bytes, time_limit_seconds=incumbent.left_seconds)
        if order is not None:
            incumbent.offer(order, name, repair=False)

    return run


PUBLISHED: dict[str, GraphMethod] = {
    "lower_sets": _order_of(lower_sets.solve, "lower_sets"),
    "lower_sets_exact": _order_of(partial(lower_sets.solve, exact=True), "lower_sets_exact"),
    "checkmate": _order_of(checkmate.solve, "checkmate"),
    "checkmate_rounding": _order_of(checkmate.round_relaxation, "checkmate_rounding"),
    "intervals": _order_of(intervals.solve, "intervals"),
}


def method_names() -> tuple[str, ...]:
    """The methods that ``solve_with_any`` knows: those of ``solve_graph``, then the published ones."""
    return (*graph_solver_names(), *PUBLISHED)


def solve_with_any(
    graph: Graph,
    budget_bytes: int,
    solver: str,
    time_limit_seconds: float | None = None,
    gap: float = DEFAULT_GAP,
) -> Solution:
    """``solve_graph``, by one of ``method_names()``."""
    with patch.dict(METHODS, PUBLISHED):
        return solve_graph(graph, budget_bytes, solver, time_limit_seconds, gap)
