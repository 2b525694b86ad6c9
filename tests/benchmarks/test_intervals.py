"""Retention intervals against the oracle and against Checkmate's program, which has the same stages."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from benchmarks.methods import checkmate, intervals
from benchmarks.methods.published import solve_with_any
from benchmarks.random_graphs import random_tiny_graph
from solvers.graph.orders import IndexedGraph
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph, Node
from tests.support.graph_checks import checked_seconds, optimum_seconds, telling_budgets
from tests.support.nightly import by_day

SEEDS = range(25)


def most_often(order: tuple[int, ...] | None) -> int:
    return max(Counter(order).values()) if order else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(SEEDS, range(6)))
def test_with_intervals_to_spare_it_finds_what_checkmate_finds(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    for budget in telling_budgets(indexed):
        found = intervals.solve(indexed, budget, most_runs=9)
        expected = checked_seconds(indexed, budget, checkmate.solve(indexed, budget))
        assert checked_seconds(indexed, budget, found) == expected


@pytest.mark.slow
@pytest.mark.parametrize("seed", by_day(SEEDS, range(6)))
def test_two_intervals_are_as_good_where_two_runs_are_enough(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    for budget in telling_budgets(indexed):
        found = intervals.solve(indexed, budget)
        assert most_often(found) <= 2
        seconds = checked_seconds(indexed, budget, found)
        unlimited = checkmate.solve(indexed, budget)
        if unlimited is None or most_often(unlimited) <= 2:
            assert seconds == checked_seconds(indexed, budget, unlimited)


def test_what_stays_for_a_later_stage_is_there_past_its_last_reader_of_this_one():
    """b fits nowhere beside a: a second b in the stage of e, between a and its reader c, would cost less than a's."""
    nodes = (
        Node(name="a", seconds=5.0, output_bytes=4),
        Node(name="b", seconds=1.0, output_bytes=1, transient_bytes=5),
        Node(name="c", seconds=1.0, output_bytes=0, inputs=("a",)),
        Node(name="d", seconds=1.0, output_bytes=0, transient_bytes=5),
        Node(name="e", seconds=1.0, output_bytes=0, inputs=("b",)),
        Node(name="f", seconds=1.0, output_bytes=0, inputs=("a",)),
    )
    indexed = IndexedGraph(Graph(nodes=nodes, outputs=("f",)))
    assert checked_seconds(indexed, 9, intervals.solve(indexed, 9, most_runs=3)) == 20.0


def test_more_intervals_are_never_slower():
    indexed = IndexedGraph(training_graph(6))
    seconds = [checked_seconds(indexed, 4, intervals.solve(indexed, 4, most_runs=most)) for most in (1, 2, 3, 4)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == math.inf
    assert seconds[-1] == optimum_seconds(indexed, 4)


def test_what_no_node_fits_in_is_infeasible_for_every_schedule():
    graph = training_graph(3, size_bytes=1 << 30)
    assert intervals.solve(IndexedGraph(graph), (3 << 30) - 1) is None
    assert solve_with_any(graph, (3 << 30) - 1, "intervals").status == "infeasible"


def test_no_time_is_no_answer_and_no_claim():
    assert intervals.solve(IndexedGraph(training_graph(12)), 6, time_limit_seconds=0.0) is None


def test_large_graphs_are_refused():
    with pytest.raises(ValueError, match="at most 500 nodes, got 502"):
        intervals.solve(IndexedGraph(training_graph(251)), 100)
