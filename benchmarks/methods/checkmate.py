"""Checkmate as published: an integer program over frontier-advancing stages, and its relaxation rounded.

Formulation: stage t ends with the first run of node t; before it, earlier nodes run again in rising order, each at
most once. R says which, S what is alive as a stage starts, FREE what is freed after which run, U the bytes at each
run (``benchmarks.methods.checkmate_model``). ``round_relaxation`` solves the same program with fractions for a budget
less an allowance, rounds S (at a threshold, or up with its own value as the chance), and completes R with the fewest
runs.
Guarantee: ``solve`` run to the end is the fastest of these schedules, but schedules that run a node twice between
two first runs, or out of order, are left out: rarely, one of them is faster, or the only one that fits. So neither
function bounds all schedules. Rounding guarantees nothing; every answer is checked against the budget in exact bytes.
Complexity: O(n (n + m)) variables and rows for n nodes with m inputs altogether; the integer program takes
exponential time. Units: bytes and seconds; inside the program both are scaled.

Paper: Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (2020), sections 4
(4.6 for stages, 4.8 for the variables left out) and 5 (the relaxation, its two phases, and the allowance).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.methods.checkmate_model import CheckmateModel, Matrices
from benchmarks.methods.stages import fitting_order, with_end
from solvers.arrays import Mask
from solvers.graph.orders import IndexedGraph, seconds_of
from solvers.problem.plain_data import check_size

MOST_NODES = 500  # building the program takes 3 s at 200 nodes of a chain and grows with their square
ALLOWANCES = (0.1, 0.0, 0.2)  # the paper's own first
_THRESHOLDS = 4  # random ones beside 0.5
_DRAWS = 16  # random roundings; the paper found them worse than thresholds
_WHOLE = 1e-6  # HiGHS's tolerance: how far below its value a fraction may come back


def solve(indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0) -> tuple[int, ...] | None:
    """The fastest order of frontier-advancing stages found within the time limit; None where none is found.

    Raises:
        ValueError: the graph is too large for the program to be built.

    >>> from solvers.problem.examples import late_reader
    >>> solve(IndexedGraph(late_reader()), 8)
    (0, 1, 2, 0, 3)
    """
    check_size("checkmate", indexed.count, MOST_NODES, "nodes", "another method")
    deadline, ended = time.monotonic() + time_limit_seconds, with_end(indexed)
    model = CheckmateModel(ended, budget_bytes)
    values = model.solve(deadline - time.monotonic())
    return fitting_order(indexed, _order(indexed, values.runs > 0.5), budget_bytes) if values else None


def round_relaxation(
    indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0, seed: int = 0
) -> tuple[int, ...] | None:
    """The fastest order that fits among those rounded from the relaxation; None where none fits.

    Raises:
        ValueError: the graph is too large for the program to be built.
    """
    check_size("checkmate", indexed.count, MOST_NODES, "nodes", "another method")
    deadline, ended = time.monotonic() + time_limit_seconds, with_end(indexed)
    rng = np.random.default_rng(seed)
    best: tuple[float, tuple[int, ...] | None] = (math.inf, None)
    for allowance in ALLOWANCES:
        left = deadline - time.monotonic()
        values = CheckmateModel(ended, (1 - allowance) * budget_bytes, integral=False).solve(left) if left > 0 else None
        for kept in _roundings(values, rng) if values else ():
            order = fitting_order(indexed, _order(indexed, _fewest_runs(ended, kept)), budget_bytes)
            if order is not None:
                best = min(best, (seconds_of(indexed, order), order))
    return best[1]


def _roundings(values: Matrices, rng: np.random.Generator) -> Iterator[Mask]:
    for threshold in (0.5, *rng.uniform(0.05, 0.95, _THRESHOLDS)):
        yield values.kept >= threshold - _WHOLE
    for _ in range(_DRAWS):
        yield values.kept > rng.uniform(size=values.kept.shape)


def _fewest_runs(indexed: IndexedGraph, kept: Mask) -> Mask:
    """R from S: what a stage's own runs and the next stage need and the stage does not start with.

    Stages from the last on, since what a stage keeps and nobody makes before it has to be run there.
    """
    count = indexed.count
    runs = np.eye(count, dtype=bool)
    for t in reversed(range(count)):
        if t + 1 < count:
            runs[t, :t] |= kept[t + 1, :t] & ~kept[t, :t]
        for k in range(t, -1, -1):
            if runs[t, k]:
                inputs = list(indexed.inputs[k])
                runs[t, inputs] |= ~kept[t, inputs]
    return runs


def _order(indexed: IndexedGraph, runs: Mask) -> list[int]:
    """The runs of a matrix of stages, without the end node."""
    return [int(k) for row in runs for k in np.flatnonzero(row[: indexed.count])]
