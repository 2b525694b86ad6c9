"""Moccasin's retention intervals, as a linear integer program for HiGHS.

Formulation: every node runs at most ``most_runs`` times; each run starts an interval that ends with the last read of
its output. The first runs keep the graph's order, and a repeated one may stand at its node's own place in any stage
between two of them. A linear program has no variable that is a time, so an interval is spelled out by the stages that
it reaches into, and within a stage by the last reader that needs it (``benchmarks.methods.intervals_model``).
Guarantee: run to the end, the fastest of these schedules. They are not all schedules (see
``benchmarks.methods.checkmate``, whose stages these are), so nothing is bounded. Answers are checked against
the budget in exact bytes.
Complexity: O(n^2) binaries and O(n (n + m)) rows for n nodes with m inputs altogether, not the paper's O(n) integers;
exponential time. Units: bytes and seconds; inside the program both are scaled.

Paper: Bartan, Li, Teague, Lott, Dilkina, "Moccasin: efficient tensor rematerialization for neural networks" (2023),
section 2.
"""

from __future__ import annotations

import time

from benchmarks.methods.intervals_model import IntervalsModel
from benchmarks.methods.stages import fitting_order, with_end
from solvers.graph.orders import IndexedGraph
from solvers.problem.plain_data import check_size

MOST_NODES = 500  # building the program takes 7 s at 200 nodes of a chain and grows with their square


def solve(
    indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0, most_runs: int = 2
) -> tuple[int, ...] | None:
    """The fastest order with at most ``most_runs`` intervals per node that is found within the time limit.

    Raises:
        ValueError: the graph is too large for the program to be built.

    >>> from solvers.problem.examples import late_reader
    >>> indexed = IndexedGraph(late_reader())
    >>> solve(indexed, 8), solve(indexed, 8, most_runs=1)
    ((0, 1, 2, 0, 3), None)
    """
    check_size("intervals", indexed.count, MOST_NODES, "nodes", "another method")
    deadline = time.monotonic() + time_limit_seconds
    model = IntervalsModel(with_end(indexed), budget_bytes, most_runs)
    repeated = model.solve(deadline - time.monotonic())
    if repeated is None:
        return None
    runs = sorted([*repeated, *((k, k) for k in range(indexed.count))])
    return fitting_order(indexed, [k for _, k in runs], budget_bytes)
