"""Every graph method against the exhaustive oracle on small graphs, and the laws that larger ones have to keep."""

from __future__ import annotations

import pytest

from solvers import graph_exhaustive
from solvers.graph_bound import graph_bound_seconds
from solvers.graph_problem import GraphProblem
from solvers.graph_simulator import replay_graph
from solvers.graph_suite import solve_graph
from solvers.liveness import IndexedGraph, peak_profile, seconds_of
from tests.solvers.graphs import random_graph

RELATIVE = 1e-6  # what the integer programs are solved to


def budgets(indexed: IndexedGraph) -> list[int]:
    """Below the smallest feasible budget, at it, above it, in the middle, and what keeps everything."""
    low, high = graph_exhaustive.smallest_peak(indexed), int(peak_profile(indexed, range(indexed.count)).max())
    return sorted({low - 1, low, low + 1, (low + high) // 2, high})


def check(graph, indexed: IndexedGraph, budget: int, solver: str, **arguments) -> None:
    """No method beats the oracle, is above it where it claims optimality, or has a bound above it."""
    best = graph_exhaustive.solve(indexed, budget)
    solution = solve_graph(GraphProblem(graph=graph, budget_bytes=budget), solver, **arguments)
    if best.order is None:
        assert solution.status in ("infeasible", "unknown")
        assert solver != "auto" or solution.status == "infeasible"
        return
    optimum = seconds_of(indexed, best.order)
    assert solution.status != "infeasible"
    assert solution.lower_bound_seconds <= optimum * (1 + RELATIVE)
    if solution.schedule is None:
        assert solver != "auto"
        return
    replayed = replay_graph(graph, solution.schedule)
    assert (replayed.peak_bytes, replayed.seconds) == (solution.peak_bytes, solution.seconds)
    assert replayed.peak_bytes <= budget
    assert replayed.seconds >= optimum * (1 - RELATIVE)
    if solution.status == "optimal":
        assert replayed.seconds <= optimum * (1 + 2 * RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_graphs_against_the_oracle(block):
    for seed in range(100 * block, 100 * block + 100):
        graph = random_graph(seed)
        indexed = IndexedGraph(graph)
        for budget in budgets(indexed):
            check(graph, indexed, budget, "auto")
            assert graph_bound_seconds(indexed, budget) <= bound_of(indexed, budget) * (1 + RELATIVE)


def bound_of(indexed: IndexedGraph, budget: int) -> float:
    return graph_exhaustive.solve(indexed, budget).lower_bound_seconds


SEARCHES = ["moments"]


@pytest.mark.parametrize("solver", SEARCHES)
@pytest.mark.parametrize("block", range(4))
def test_the_searches_against_the_oracle(solver, block):
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        graph = random_graph(seed)
        indexed = IndexedGraph(graph)
        for budget in budgets(indexed):
            check(graph, indexed, budget, solver, time_limit_seconds=5.0, gap=0.0)
