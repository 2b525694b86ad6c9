"""Every graph method against the exhaustive oracle on small graphs, and the laws that larger ones have to keep."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.random_graphs import random_tiny_graph, random_training_graph
from solvers.graph import exhaustive
from solvers.graph.lower_bound import graph_bound_seconds
from solvers.graph.orders import IndexedGraph, peak_profile, seconds_of
from solvers.graph.registry import graph_frontier, graph_solver_names, solve_graph
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph
from solvers.problem.simulator import replay
from tests.support.graph_checks import optimum_seconds, telling_budgets, with_once

RELATIVE = 1e-6  # what the integer programs are solved to


def check(graph, indexed: IndexedGraph, budget: int, solver: str, **arguments) -> None:
    """No method beats the oracle, is above it where it claims optimality, or has a bound above it."""
    best = exhaustive.solve(indexed, budget)
    solution = solve_graph(graph, budget, solver, **arguments)
    if best is None:
        assert solution.status in ("infeasible", "unknown")
        assert solver != "auto" or solution.status == "infeasible"
        return
    optimum = seconds_of(indexed, best)
    assert solution.status != "infeasible"
    assert solution.lower_bound_seconds <= optimum * (1 + RELATIVE)
    if solution.schedule is None:
        assert solver != "auto"
        return
    replayed = replay(graph, solution.schedule)
    assert (replayed.peak_bytes, replayed.seconds) == (solution.peak_bytes, solution.seconds)
    assert replayed.peak_bytes <= budget
    assert replayed.seconds >= optimum * (1 - RELATIVE)
    if solution.status == "optimal":
        assert replayed.seconds <= optimum * (1 + 2 * RELATIVE)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_graphs_against_the_oracle(block):
    for seed in range(100 * block, 100 * block + 100):
        graph = random_tiny_graph(seed)
        indexed = IndexedGraph(graph)
        for budget in telling_budgets(indexed):
            check(graph, indexed, budget, "auto")
            assert graph_bound_seconds(indexed, budget) <= optimum_seconds(indexed, budget) * (1 + RELATIVE)


SEARCHES = ["moments"]


@pytest.mark.slow
@pytest.mark.parametrize("solver", SEARCHES)
@pytest.mark.parametrize("block", range(4))
def test_the_searches_against_the_oracle(solver, block):
    for seed in range(1000 + 25 * block, 1025 + 25 * block):
        graph = random_tiny_graph(seed)
        indexed = IndexedGraph(graph)
        for budget in telling_budgets(indexed):
            check(graph, indexed, budget, solver, time_limit_seconds=5.0, gap=0.0)


def half_budget(graph) -> int:
    profile = peak_profile(IndexedGraph(graph), range(len(graph.nodes)))
    return int(IndexedGraph(graph).working_bytes.max() + profile.max()) // 2


@pytest.mark.slow
def test_a_training_graph_is_proven_and_larger_budgets_are_never_slower():
    graph = random_training_graph(60, 3)
    low, high = half_budget(graph), int(peak_profile(IndexedGraph(graph), range(len(graph.nodes))).max())
    solutions = [
        solve_graph(graph, budget, gap=0.0, time_limit_seconds=60.0) for budget in (low, (low + high) // 2, high)
    ]
    assert [solution.status for solution in solutions] == ["optimal"] * 3
    seconds = [solution.seconds or 0.0 for solution in solutions]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(graph.unplanned_seconds)


def test_a_search_that_finds_nothing_more_ends_before_its_time():
    graph = random_training_graph(20, 1)
    smallest = solve_graph(graph, 1).shortage
    assert smallest is not None
    again = solve_graph(graph, smallest.minimum_budget_bytes, time_limit_seconds=1e6, gap=0.0)
    assert again.schedule is not None


@pytest.mark.slow
def test_a_budget_below_the_largest_op_is_infeasible_and_says_what_would_do():
    graph = random_training_graph(60, 3)
    solution = solve_graph(graph, 1000, time_limit_seconds=0.5)
    assert solution.status == "infeasible" and solution.shortage is not None
    enough = solution.shortage.minimum_budget_bytes
    assert solution.shortage.stage in {node.name for node in graph.nodes}
    assert solve_graph(graph, enough, time_limit_seconds=0.5).schedule is not None


def test_a_method_that_finds_nothing_does_not_call_a_budget_infeasible():
    graph = random_training_graph(60, 3)
    solution = solve_graph(graph, half_budget(graph), "keep_all")
    assert solution.status == "unknown" and solution.shortage is not None
    assert solution.lower_bound_seconds >= graph.unplanned_seconds * (1 - RELATIVE)


@pytest.mark.parametrize("solver", graph_solver_names())
@pytest.mark.slow
def test_what_must_run_once_does_whatever_the_method(solver):
    for seed in range(6):
        graph = with_once(random_tiny_graph(seed), seed, 2)
        indexed = IndexedGraph(graph)
        for budget in telling_budgets(indexed):
            check(graph, indexed, budget, solver, time_limit_seconds=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["auto", "demand"])
def test_larger_graphs_with_nodes_that_run_once_are_solved(solver):
    graph = with_once(random_training_graph(60, 3), 3, 6)
    solution = solve_graph(graph, half_budget(graph), solver, time_limit_seconds=1.5)
    assert solution.schedule is not None
    replay(graph, solution.schedule)
    runs = Counter(solution.schedule.nodes_run())
    assert all(runs[place] == 1 for place, node in enumerate(graph.nodes) if node.once)
    assert max(runs.values()) > 1


def test_the_file_of_a_graph_names_only_what_must_run_once():
    graph = with_once(random_tiny_graph(0), 0, 1)
    document = graph.to_dict()
    assert [node["once"] for node in document["nodes"] if "once" in node] == [True]
    assert Graph.from_dict(document) == graph


@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"solver": "magic"}, "expected one of"), ({"time_limit_seconds": 0.0}, "time limit"), ({"gap": 1.0}, "gap")],
)
def test_bad_arguments_are_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        solve_graph(training_graph(3), 9, **arguments)


def test_ctrl_c_leaves_the_best_order_so_far(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("solvers.graph.moments.MomentSearch.step", interrupted)
    graph = random_training_graph(60, 3)
    solution = solve_graph(graph, half_budget(graph))
    assert solution.interrupted and solution.status == "feasible"


@pytest.mark.slow
def test_a_frontier_falls_as_its_peaks_rise():
    points = graph_frontier(random_training_graph(40, 1), "auto", time_limit_seconds=3.0)
    peaks, seconds = [p.peak_bytes or 0 for p in points], [p.seconds or 0.0 for p in points]
    assert peaks == sorted(set(peaks)) and seconds == sorted(set(seconds), reverse=True)
