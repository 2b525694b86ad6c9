"""Published graph methods by name: their examples, nodes that must run once, and no trace in the planner's registry."""

from __future__ import annotations

import doctest

import pytest

from benchmarks.methods import checkmate, intervals, lower_sets, stages
from benchmarks.methods.published import PUBLISHED, method_names, solve_with_any
from benchmarks.random_graphs import random_tiny_graph
from solvers.graph.orders import IndexedGraph
from solvers.graph.registry import graph_solver_names
from solvers.problem.simulator import replay
from tests.support.graph_checks import optimum_seconds, telling_budgets, with_once


@pytest.mark.parametrize("module", [checkmate, intervals, lower_sets, stages])
def test_examples_in_docstrings_hold(module):
    assert doctest.testmod(module).attempted
    assert not doctest.testmod(module).failed


@pytest.mark.parametrize("solver", PUBLISHED)
def test_what_must_run_once_does(solver):
    for seed in range(6):
        graph = with_once(random_tiny_graph(seed), seed, 2)
        indexed = IndexedGraph(graph)
        for budget in telling_budgets(indexed):
            solution = solve_with_any(graph, budget, solver, time_limit_seconds=5.0)
            if solution.schedule is None:
                continue
            replayed = replay(graph, solution.schedule)
            assert replayed.peak_bytes <= budget
            assert replayed.seconds >= optimum_seconds(indexed, budget) * (1 - 1e-6)


def test_the_planner_does_not_know_them_afterwards():
    graph = random_tiny_graph(0)
    for solver in PUBLISHED:
        assert solve_with_any(graph, 10**6, solver).schedule is not None
    assert not set(PUBLISHED) & set(graph_solver_names())
    assert set(method_names()) == {*PUBLISHED, *graph_solver_names()}
