"""What holds for every answer of a graph method: it runs, it fits, no oracle is beaten, and its bound is true."""

from __future__ import annotations

import math

from solvers.graph import exhaustive
from solvers.graph.liveness import IndexedGraph, peak_profile, schedule_of
from solvers.problem.graph_simulator import replay_graph
from solvers.problem.solution import GraphCandidate


def telling_budgets(indexed: IndexedGraph) -> list[int]:
    """One too small, the smallest, one more, one in the middle, and the unplanned peak."""
    low = exhaustive.smallest_peak(indexed)
    high = int(peak_profile(indexed, range(indexed.count)).max())
    return sorted({low - 1, low, low + 1, (low + high) // 2, high})


def checked_seconds(indexed: IndexedGraph, budget_bytes: int, found: GraphCandidate) -> float:
    """Seconds of an answer as the judge counts them, infinite where there is none; asserts all that has to hold."""
    best = exhaustive.solve(indexed, budget_bytes).lower_bound_seconds
    assert found.lower_bound_seconds <= best
    if found.order is None:
        return math.inf
    result = replay_graph(indexed.graph, schedule_of(indexed, found.order))
    assert result.peak_bytes <= budget_bytes
    assert result.seconds >= best
    return result.seconds
