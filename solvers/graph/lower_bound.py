"""A bound on time that holds for every schedule of a graph within a budget, in milliseconds.

Formulation: look at the first run of each node t. An earlier node that a first run after t still reads, or that is an
output, is alive then or has to run again: at least its own seconds. What is alive has to fit together with what t
needs, so enough bytes have to be paid for; the cheapest choice is a knapsack, and its linear relaxation is solved
greedily by seconds per byte. The bound is the largest one over all t, of graphs with more than 2,000 over a part of
them, and where the time is over of those until then.

Guarantee: no schedule within the budget is faster; infinite where one node does not fit. It is the relaxation of
``solvers.graph.moments`` at one moment and without the inputs of what runs again, so never above that
program's. Complexity: O(n^2) for n nodes, vectorised. Units: bytes and seconds.
Source: Dantzig, "Discrete-variable extremum problems" (1957), for the knapsack's relaxation.
"""

from __future__ import annotations

import math

import numpy as np

from solvers.graph.orders import IndexedGraph, peak_profile
from solvers.problem.deadline import left_seconds

_MOST_MOMENTS = 2000  # looked at, evenly picked where more exceed the budget: each bounds on its own
_MOST_PAIRS = 10_000_000  # of a moment and a node: about a second
_SLACK = 1e-12  # relative: summing floats in another order must not make the bound exceed an optimum


def graph_bound_seconds(indexed: IndexedGraph, budget_bytes: int) -> float:
    """Seconds that every schedule within the budget needs; infinite where some node cannot run in it.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=4)
    >>> c = Node(name="c", seconds=1, output_bytes=1, inputs=("a",))
    >>> indexed = IndexedGraph(Graph(nodes=(a, b, c), outputs=("c",)))
    >>> [round(graph_bound_seconds(indexed, budget), 6) for budget in (8, 6, 3)]
    [3.0, 3.5, inf]
    """
    if smallest_working_set(indexed)[0] > budget_bytes:
        return math.inf
    over = np.flatnonzero(peak_profile(indexed, range(indexed.count)) > budget_bytes)  # elsewhere nothing is paid
    most = 0.0
    count = min(over.size, _MOST_MOMENTS, _MOST_PAIRS // indexed.count)
    for t in over[np.linspace(0, over.size - 1, count).round().astype(np.int64)]:
        most = max(most, _least_paid(indexed, int(t), budget_bytes))
        if left_seconds() == 0.0:
            break
    return (float(indexed.seconds.sum()) + most) * (1 - _SLACK)


def smallest_working_set(indexed: IndexedGraph) -> tuple[int, int]:
    """Bytes below which no schedule exists, and the node that needs them: the largest op, or all outputs at the end."""
    worst = int(indexed.working_bytes.argmax())
    end_bytes = indexed.graph.resident_bytes + int(indexed.output_bytes[indexed.is_output].sum())
    return max((int(indexed.working_bytes[worst]), worst), (end_bytes, indexed.count - 1))


def _least_paid(indexed: IndexedGraph, t: int, budget_bytes: int) -> float:
    """Seconds of repeated runs that the bytes at the first run of t force."""
    idle = np.flatnonzero(indexed.needed_until[:t] > t)
    idle = idle[~np.isin(idle, indexed.inputs[t])]
    size, seconds = indexed.output_bytes[idle], indexed.seconds[idle]
    excess = int(indexed.working_bytes[t]) + int(size.sum()) - budget_bytes
    if excess <= 0:
        return 0.0
    ratio = np.divide(seconds, size, out=np.full(idle.size, np.inf), where=size > 0)
    cheap = np.argsort(ratio)
    size, seconds = size[cheap], seconds[cheap]
    share = np.clip((excess - (np.cumsum(size) - size)) / np.maximum(1, size), 0, 1)
    return float((share * seconds).sum())
