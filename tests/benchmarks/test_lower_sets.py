"""Canonical strategies over lower sets against the oracle, and against strategies worked out by hand."""

from __future__ import annotations

import math

import pytest

from benchmarks.methods import lower_sets
from benchmarks.methods.published import solve_with_any
from benchmarks.random_graphs import random_tiny_graph
from solvers.graph.orders import IndexedGraph, peak_profile
from solvers.problem.examples import training_graph
from solvers.problem.graph import Graph, Node
from tests.support.graph_checks import checked_seconds, optimum_seconds, telling_budgets


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_every_answer_runs_fits_and_is_no_better_than_the_oracle(seed, exact):
    indexed = IndexedGraph(random_tiny_graph(seed))
    for budget in telling_budgets(indexed):
        checked_seconds(indexed, budget, lower_sets.solve(indexed, budget, exact=exact))


@pytest.mark.parametrize("exact", [False, True])
def test_on_a_chain_only_what_the_budget_lacks_runs_again(exact):
    """One segment that runs again costs one run per byte less; where nested repeats would be needed there is none."""
    for depth in (4, 5, 6):
        indexed = IndexedGraph(training_graph(depth))
        for budget in (depth, depth + 1):
            seconds = checked_seconds(indexed, budget, lower_sets.solve(indexed, budget, exact=exact))
            assert seconds == optimum_seconds(indexed, budget)


@pytest.mark.slow
def test_a_long_chain_fits_in_the_order_of_a_square_root():
    """100 stages: segments of ten leave ten boundaries, one segment and a gradient or two; each stage runs twice."""
    indexed = IndexedGraph(training_graph(100))
    order = lower_sets.solve(indexed, 25)
    assert order is not None
    assert peak_profile(indexed, order).max() <= 25
    assert max(order.count(k) for k in range(100)) == 2
    assert len(order) <= 200 + 90


def test_of_two_arms_the_cheaper_runs_again():
    """A diamond: the source and the right arm are a lower set whose boundary stays; the left arm is in the next one."""
    forward = (
        Node(name="a", seconds=1.0, output_bytes=2),
        Node(name="left", seconds=1.0, output_bytes=8, inputs=("a",)),
        Node(name="right", seconds=2.0, output_bytes=8, inputs=("a",)),
        Node(name="sum", seconds=1.0, output_bytes=2, inputs=("left", "right")),
        Node(name="loss", seconds=1.0, output_bytes=0, transient_bytes=9, inputs=("sum",)),
    )
    backward = (
        Node(name="d_sum", seconds=1.0, output_bytes=2, inputs=("loss", "sum"), side="backward"),
        Node(name="d_left", seconds=1.0, output_bytes=2, inputs=("d_sum", "left"), side="backward"),
        Node(name="d_right", seconds=1.0, output_bytes=2, inputs=("d_sum", "right", "a"), side="backward"),
    )
    indexed = IndexedGraph(Graph(nodes=(*forward, *backward), outputs=("d_left", "d_right")))
    unplanned = int(peak_profile(indexed, range(8)).max())
    assert unplanned == 29
    found = lower_sets.solve(indexed, unplanned - 1)
    assert checked_seconds(indexed, unplanned - 1, found) == 10.0


def test_without_a_backward_side_it_is_the_order_of_the_nodes_or_nothing():
    nodes = tuple(Node(name=f"n{k}", seconds=1.0, output_bytes=4, inputs=(f"n{k - 1}",) if k else ()) for k in range(4))
    indexed = IndexedGraph(Graph(nodes=(*nodes, Node(name="z", seconds=1.0, output_bytes=1, inputs=("n0", "n3")))))
    assert lower_sets.solve(indexed, 12) == (0, 1, 2, 3, 4)
    assert lower_sets.solve(indexed, 11) is None


@pytest.mark.parametrize("exact", [False, True])
def test_without_a_forward_side_too(exact):
    nodes = tuple(Node(name=name, seconds=1.0, output_bytes=4, side="backward") for name in "ab")
    indexed = IndexedGraph(Graph(nodes=nodes, outputs=("a", "b")))
    assert lower_sets.solve(indexed, 8, exact=exact) == (0, 1)
    assert lower_sets.solve(indexed, 7, exact=exact) is None


def test_a_larger_budget_is_not_slower_on_a_chain():
    indexed = IndexedGraph(training_graph(20))
    seconds = [checked(indexed, budget) for budget in range(9, 22)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] < math.inf


def checked(indexed: IndexedGraph, budget_bytes: int) -> float:
    order = lower_sets.solve(indexed, budget_bytes)
    return math.inf if order is None else float(indexed.seconds[list(order)].sum())


def test_what_no_node_fits_in_is_infeasible_for_every_schedule():
    graph = training_graph(3)
    assert lower_sets.solve(IndexedGraph(graph), 2) is None
    assert solve_with_any(graph, 2, "lower_sets").status == "infeasible"


def test_no_time_is_no_answer_and_no_claim():
    assert lower_sets.solve(IndexedGraph(training_graph(12)), 10, time_limit_seconds=0.0) is None


def test_too_many_lower_sets_are_refused():
    arms = tuple(Node(name=f"n{k}", seconds=1.0, output_bytes=1) for k in range(12))
    wide = Node(name="y", seconds=1.0, output_bytes=0, transient_bytes=5)
    last = Node(name="z", seconds=1.0, output_bytes=1, inputs=tuple(node.name for node in arms))
    indexed = IndexedGraph(Graph(nodes=(*arms, wide, last), outputs=("z",)))
    assert lower_sets.solve(indexed, 13) is None  # one per node are few
    with pytest.raises(ValueError, match="at most 2000 lower sets"):
        lower_sets.solve(indexed, 13, exact=True)
