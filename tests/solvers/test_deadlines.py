"""Every method asks the deadline often, ends by it, and returns a schedule where a quick one fits.

The clock counts how often it is asked, so that a limit is one of work, the same on every machine.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import pytest

from benchmarks.random_chains import large_chain
from benchmarks.random_graphs import random_training_graph
from solvers.chain.baselines import keep_all_replay
from solvers.chain.candidates import BASELINES
from solvers.chain.registry import frontier, solve_chain, solver_names
from solvers.graph.orders import unplanned_replay
from solvers.graph.registry import graph_frontier, graph_solver_names, solve_graph
from solvers.problem.deadline import Deadline, TimeOver, check_deadline, left_seconds
from solvers.problem.simulator import replay
from solvers.problem.solution import Problem

STAGES, NODES = 300, 300
BUSY = 400_000  # calls between two checks, of problems that large: some for each stage or node, not for each pair
CHAIN_METHODS = [name for name in solver_names(linked=False) if name not in ("exhaustive", "ilp")]
GRAPH_METHODS = [name for name in graph_solver_names() if name != "exhaustive"]  # it refuses graphs so large


class BusyClock:
    """Counts how often it is asked; and the most calls of functions, Python's and C's, between two times."""

    def __init__(self) -> None:
        self.asked = self.calls = self.most_calls = 0

    def __call__(self) -> float:
        self.asked += 1
        self.most_calls, self.calls = max(self.most_calls, self.calls), 0
        return self.asked

    def profile(self, *_: Any) -> None:
        self.calls += 1


def watched(limit: int, solve: Any) -> tuple[Any, BusyClock]:
    clock = BusyClock()
    with Deadline(limit, clock):
        sys.setprofile(clock.profile)
        try:
            answer = solve()
        finally:
            sys.setprofile(None)
    clock()
    return answer, clock


@pytest.mark.parametrize("limit", [10, 3000])
@pytest.mark.parametrize("solver", CHAIN_METHODS)
def test_methods_of_chains_end_by_the_limit(solver, limit):
    chain = large_chain(1, STAGES)
    problem = Problem(chain=chain, budget_bytes=keep_all_replay(chain).peak_bytes // 3)
    solution, clock = watched(limit, lambda: solve_chain(problem, solver))
    assert clock.asked < limit + 50 and clock.most_calls < BUSY
    if solution.schedule is None:
        assert solution.shortage is not None
        assert limit < 3000 or solver in BASELINES
    else:
        replayed = replay(chain, solution.schedule)
        assert replayed.peak_bytes == solution.peak_bytes <= problem.budget_bytes
        assert solution.lower_bound_seconds <= replayed.seconds


@pytest.mark.parametrize("limit", [10, 1000])
@pytest.mark.parametrize("solver", GRAPH_METHODS)
def test_methods_of_graphs_end_by_the_limit(solver, limit):
    graph = random_training_graph(NODES, 1)
    budget_bytes = unplanned_replay(graph).peak_bytes // 2
    solution, clock = watched(limit, lambda: solve_graph(graph, budget_bytes, solver))
    assert clock.asked < limit + 50 and clock.most_calls < BUSY
    if solution.schedule is None:
        assert solution.shortage is not None and solution.shortage.minimum_budget_bytes > budget_bytes
    else:
        replayed = replay(graph, solution.schedule)
        assert replayed.peak_bytes == solution.peak_bytes <= budget_bytes


def test_curves_end_by_the_limit_with_what_is_there():
    chain = large_chain(1, STAGES)
    points, clock = watched(9000, lambda: frontier(chain, "auto"))
    assert clock.asked < 9100 and len(points) > 1
    graph = random_training_graph(100, 1)
    _, clock = watched(500, lambda: graph_frontier(graph, "eviction"))
    assert clock.asked < 700


def test_the_same_work_gives_the_same_answer():
    graph = random_training_graph(100, 2)
    budget_bytes = unplanned_replay(graph).peak_bytes // 2
    answers = []
    for _ in range(2):
        with Deadline(3000, clock=count().__next__):
            answers.append(solve_graph(graph, budget_bytes, "eviction"))
    assert answers[0].schedule == answers[1].schedule is not None


def test_of_nested_deadlines_the_earliest_counts():
    clock = count().__next__
    with Deadline(1000, clock) as outer:
        with Deadline(5, clock) as inner:
            while True:
                check_deadline()
        assert inner.passed and left_seconds() > 0
        with Deadline(10**6, clock) as inner:
            while True:
                check_deadline()
        assert inner.passed
        with pytest.raises(TimeOver):
            check_deadline()
    assert not outer.passed
