"""The oracle of graphs against two slower searches that share nothing with it, and against the replay."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

import pytest

from benchmarks.random_graphs import random_tiny_graph
from solvers.graph import exhaustive
from solvers.graph.orders import IndexedGraph, schedule_of
from solvers.problem.examples import training_graph
from solvers.problem.simulator import replay
from tests.support.graph_checks import optimum_seconds, unplanned_peak, with_once


def budgets(indexed: IndexedGraph) -> range:
    """Every budget from one that nothing fits in up to one that everything fits in."""
    return range(int(indexed.working_bytes.max()) - 1, unplanned_peak(indexed) + 1)


def replayed(indexed: IndexedGraph, order: tuple[int, ...], budget_bytes: int) -> float:
    """Seconds of an order once the judge has found it to run within the budget."""
    result = replay(indexed.graph, schedule_of(indexed, order))
    assert result.peak_bytes <= budget_bytes
    return result.seconds


def cheapest_by_relaxation(indexed: IndexedGraph, budget_bytes: int) -> float:
    """Seconds by value iteration over all states, each free an edge of its own, until nothing gets cheaper."""
    n, nodes = indexed.count, indexed.graph.nodes
    held = {alive: sum(nodes[v].output_bytes for v in alive) for alive in subsets(n)}
    cost = {(0, frozenset()): 0.0}
    changed = True
    while changed:
        changed = False
        for (done, alive), spent in list(cost.items()):
            after = [((done, alive - {v}), spent) for v in alive]
            for v in set(range(min(done + 1, n))) - alive:
                if v < done and nodes[v].once:
                    continue
                need = indexed.graph.resident_bytes + held[alive] + nodes[v].output_bytes + nodes[v].transient_bytes
                if alive.issuperset(indexed.inputs[v]) and need <= budget_bytes:
                    after.append(((done + (v == done), alive | {v}), spent + nodes[v].seconds))
            for state, seconds in after:
                if seconds < cost.get(state, math.inf):
                    cost[state], changed = seconds, True
    outputs = {v for v in range(n) if indexed.is_output[v]}
    return min((spent for (done, alive), spent in cost.items() if done == n and alive >= outputs), default=math.inf)


def subsets(count: int) -> Iterator[frozenset[int]]:
    for size in range(count + 1):
        yield from map(frozenset, combinations(range(count), size))


@pytest.mark.parametrize("once", [0, 1, 2])
@pytest.mark.parametrize("seed", range(60))
def test_it_equals_value_iteration_at_every_budget(seed, once):
    indexed = IndexedGraph(with_once(random_tiny_graph(seed, count=3 + seed % 4), seed, once))
    for budget in budgets(indexed):
        order, cheapest = exhaustive.solve(indexed, budget), cheapest_by_relaxation(indexed, budget)
        assert (math.inf if order is None else replayed(indexed, order, budget)) == cheapest


def orders(indexed: IndexedGraph, spare: int, begun: tuple[int, ...] = (), fresh: int = 0) -> Iterator[tuple[int, ...]]:
    """Every order of runs with at most ``spare`` repeated ones."""
    if fresh == indexed.count:
        yield begun
    else:
        yield from orders(indexed, spare, (*begun, fresh), fresh + 1)
    if spare:
        for v in range(fresh):
            yield from orders(indexed, spare - 1, (*begun, v), fresh)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_that_the_replay_accepts_beats_it(seed):
    indexed = IndexedGraph(random_tiny_graph(seed, count=4))
    results = [replay(indexed.graph, schedule_of(indexed, order)) for order in orders(indexed, spare=3)]
    for budget in budgets(indexed):
        fast = min((result.seconds for result in results if result.peak_bytes <= budget), default=math.inf)
        assert optimum_seconds(indexed, budget) <= fast
    assert exhaustive.smallest_peak(indexed) <= min(result.peak_bytes for result in results)


@pytest.mark.parametrize("seed", range(200))
def test_the_smallest_peak_is_where_answers_begin(seed):
    indexed = IndexedGraph(random_tiny_graph(seed))
    low = exhaustive.smallest_peak(indexed)
    assert exhaustive.solve(indexed, low - 1) is None
    answers = [exhaustive.solve(indexed, budget) for budget in range(low, unplanned_peak(indexed) + 1)]
    seconds = [replayed(indexed, order, low + i) for i, order in enumerate(answers) if order is not None]
    assert len(seconds) == len(answers)
    assert seconds == sorted(seconds, reverse=True)  # a larger budget is never slower
    assert seconds[-1] == indexed.graph.unplanned_seconds


def test_a_chain_by_hand():
    """Three forwards, three backwards: in three bytes f0 makes room for b2 and runs again for b0; two hold no b1."""
    indexed = IndexedGraph(training_graph(3))
    assert unplanned_peak(indexed) == 4
    assert exhaustive.smallest_peak(indexed) == 3
    seconds = [optimum_seconds(indexed, budget) for budget in (4, 3, 2)]
    assert seconds == [9.0, 10.0, math.inf]


def test_large_graphs_are_refused():
    with pytest.raises(ValueError, match="at most 12 nodes, got 14"):
        exhaustive.solve(IndexedGraph(training_graph(7)), 100)
