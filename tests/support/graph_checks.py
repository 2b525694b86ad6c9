"""What holds for every answer of a graph method: it runs, it fits, and no oracle is beaten."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from solvers.graph import exhaustive
from solvers.graph.orders import IndexedGraph, peak_profile, schedule_of, seconds_of
from solvers.problem.graph import Graph
from solvers.problem.simulator import replay


def with_once(graph: Graph, seed: int, count: int) -> Graph:
    """The graph with a few nodes, drawn by the seed, that must run once."""
    drawn = random.Random(seed).sample(range(len(graph.nodes)), min(count, len(graph.nodes)))
    nodes = tuple(replace(node, once=k in drawn) for k, node in enumerate(graph.nodes))
    return replace(graph, nodes=nodes)


def unplanned_peak(indexed: IndexedGraph) -> int:
    """The peak of every node once, in the file's order."""
    return int(peak_profile(indexed, range(indexed.count)).max())


def telling_budgets(indexed: IndexedGraph) -> list[int]:
    """One too small, the smallest, one more, one in the middle, and the unplanned peak."""
    low, high = exhaustive.smallest_peak(indexed), unplanned_peak(indexed)
    return sorted({low - 1, low, low + 1, (low + high) // 2, high})


def optimum_seconds(indexed: IndexedGraph, budget_bytes: int) -> float:
    """Seconds of the oracle's order; infinite where there is none."""
    order = exhaustive.solve(indexed, budget_bytes)
    return math.inf if order is None else seconds_of(indexed, order)


def checked_seconds(indexed: IndexedGraph, budget_bytes: int, order: Sequence[int] | None) -> float:
    """Seconds of an answer as the judge counts them, infinite where there is none; asserts all that has to hold."""
    if order is None:
        return math.inf
    result = replay(indexed.graph, schedule_of(indexed, order))
    assert result.peak_bytes <= budget_bytes
    assert result.seconds >= optimum_seconds(indexed, budget_bytes)
    return result.seconds
