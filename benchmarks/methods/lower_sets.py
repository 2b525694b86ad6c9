"""Canonical strategies over lower sets of the forward graph, by dynamic programming.

Formulation: a lower set of the forward nodes holds every input of its members; its boundary is the members that a node
outside reads. A rising sequence of lower sets cuts the forward pass into segments. After the forward pass only
boundaries are there; a segment runs again as a whole before the first backward node that reads one of its other
outputs. The dynamic program keeps, per lower set and per time spent on runs to repeat, the fewest bytes of
boundaries, and refuses segments whose published peak (boundaries, the segment and its gradients, and what the next
nodes need) is above the program's own budget. ``exact`` takes all lower sets, otherwise one per node: all that it
depends on. The published peak is a model of an implied backward pass, so the true budget is met by a sweep and a
bisection over the program's own, with both its fastest strategy and its slowest, which leaves the fewest bytes alive.
Here the last segment stays, since its backward follows at once, nodes that no backward node needs do not run again,
and everything is freed after its last read; a variant repeats the last segment too. Where no node is on the backward
side there is nothing to run again, and the answer is the order of the nodes or none.
Guarantee: none for a graph with its own backward nodes; every answer is checked against the budget in exact bytes.
Complexity: O(k^2 M) for k lower sets and M ticks of time, per budget tried; k is the number of forward nodes, or for
``exact`` up to exponential in it. Units: bytes and seconds, the latter in ticks of the whole forward pass.

Paper: Kusumoto, Inoue, Watanabe, Akiba, Koyama, "A graph theoretic framework of recomputation algorithms for
memory-efficient backpropagation" (2019), sections 3 and 4.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import numpy as np

from solvers.arrays import Indices, Mask
from solvers.graph.orders import IndexedGraph, fits, seconds_of
from solvers.problem.deadline import check_deadline

SecondsAndOrder = tuple[float, tuple[int, ...] | None]

MOST_SETS = 2000  # one budget of the program took 1.6 s with 600 sets, and that grows with their square
_TICKS = 256  # of the forward pass; the paper rounds times to 1 and 10
_STEPS = 12  # of the program's own budget, evenly: the same for every true budget, so a larger one loses none of them
_HALVINGS = 10  # of its range after that


def solve(
    indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0, exact: bool = False
) -> tuple[int, ...] | None:
    """The fastest order that fits among the canonical strategies tried; None where none fits.

    Raises:
        ValueError: there are too many lower sets.

    >>> from solvers.problem.examples import training_graph
    >>> indexed = IndexedGraph(training_graph(4))
    >>> solve(indexed, 4)
    (0, 1, 2, 3, 4, 5, 6, 0, 7)
    """
    deadline = time.monotonic() + time_limit_seconds
    if fits(indexed, range(indexed.count), budget_bytes):
        return tuple(range(indexed.count))
    table = _LowerSetTable(indexed, exact)
    best: SecondsAndOrder = (math.inf, None)
    step = table.most_bytes // _STEPS + 1
    for table_budget in range(step, table.most_bytes + step, step):
        best = min(best, _best_of(indexed, table.strategies(table_budget, deadline), budget_bytes))
    low, high = 0, table.most_bytes
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        strategies = table.strategies(middle, deadline)
        fastest = _best_of(indexed, strategies, budget_bytes)
        best = min(best, fastest)
        # Without any strategy the program's budget is too small; where its strategies do not fit it is too large.
        low, high = (middle, high) if fastest[1] or not strategies else (low, middle)
    return best[1]


def _best_of(indexed: IndexedGraph, strategies: list[Indices], budget_bytes: int) -> SecondsAndOrder:
    """Seconds and order of the fastest strategy that fits; infinite and None where none does."""
    orders = [order for segment_of in strategies for order in _orders(indexed, segment_of)]
    fitting = [order for order in orders if fits(indexed, order, budget_bytes)]
    return min(((seconds_of(indexed, order), order) for order in fitting), default=(math.inf, None))


def _orders(indexed: IndexedGraph, segment_of: Indices) -> Iterator[tuple[int, ...]]:
    """The order of runs of a strategy: with the last segment kept, and with it repeated too."""
    last = segment_of.max(initial=-1)
    yield _order(indexed, np.where(segment_of == last, -1, segment_of))
    yield _order(indexed, segment_of)


def _order(indexed: IndexedGraph, segment_of: Indices) -> tuple[int, ...]:
    """First runs in order, each segment's runs again before the first backward node that reads one of them.

    ``segment_of`` has for every node its segment where it is to run again, else -1.
    """
    rerun, order = _needed_again(indexed, segment_of), []
    waiting = {int(s) for s in segment_of[rerun]}
    for k, node in enumerate(indexed.graph.nodes):
        if node.side == "backward":
            reads = {int(segment_of[i]) for i in indexed.inputs[k] if rerun[i]} & waiting
            for s in sorted(reads):
                order += [int(v) for v in np.flatnonzero(rerun & (segment_of == s)) if v < k]
            waiting -= reads
        order.append(k)
    return tuple(order)


def _needed_again(indexed: IndexedGraph, segment_of: Indices) -> Mask:
    """Nodes to run again that a backward node reads, directly or through others of them."""
    rerun = np.zeros(indexed.count, dtype=bool)
    for k in reversed(range(indexed.count)):
        if rerun[k] or indexed.graph.nodes[k].side == "backward":
            inputs = [i for i in indexed.inputs[k] if segment_of[i] >= 0]
            rerun[inputs] = True
    return rerun


class _LowerSetTable:
    """The lower sets by size, with all that the recursion needs per pair of them; rows come before columns."""

    def __init__(self, indexed: IndexedGraph, exact: bool) -> None:
        self.count = indexed.count
        self.forward = np.flatnonzero([node.side == "forward" for node in indexed.graph.nodes])
        place = {int(v): p for p, v in enumerate(self.forward)}
        self.inputs = [[place[i] for i in indexed.inputs[v] if i in place] for v in self.forward]
        family = self._all_lower_sets() if exact else self._one_per_node()
        self.sets = np.array(sorted(family, key=lambda members: (sum(members), members)), dtype=bool)
        self.boundary, gradient_inputs = self._boundaries()
        size = indexed.output_bytes[self.forward]
        seconds = indexed.seconds[self.forward]
        tick = float(seconds.sum()) / _TICKS or 1.0
        members, inner = self.sets.astype(float), (self.sets & ~self.boundary) * seconds
        self.bytes = (self.sets * size).sum(axis=1)
        self.most_bytes = int(3 * size.sum()) + 1
        self.ticks = np.rint((inner.sum(axis=1) - members @ inner.T) / tick).astype(np.intp)
        boundary_bytes = (self.boundary * size).astype(float)
        self.new_bytes = np.rint(boundary_bytes.sum(axis=1) - members @ boundary_bytes.T).astype(np.int64)
        self.need = 2 * (self.bytes[None, :] - self.bytes[:, None]) + (gradient_inputs * size).sum(axis=1)
        self.before = (members @ (~self.sets).T.astype(float)) == 0
        np.fill_diagonal(self.before, False)

    def strategies(self, budget_bytes: int, deadline: float) -> list[Indices]:
        """Per strategy each node's segment, or -1 for a node that stays: the fastest and the slowest that fit."""
        rows = len(self.sets)
        fewest_bytes = np.full((rows, 2 * _TICKS), np.inf)
        predecessors = np.zeros((rows, 2 * _TICKS), dtype=np.intp)
        fewest_bytes[0, 0] = 0.0
        for column in range(1, rows):
            check_deadline()
            if time.monotonic() > deadline:
                return []
            for row in np.flatnonzero(self.before[:, column]):
                shift = self.ticks[row, column]
                reached = fewest_bytes[row, : 2 * _TICKS - shift]
                after = np.where(reached + self.need[row, column] <= budget_bytes, reached, np.inf)
                after += self.new_bytes[row, column]
                better = np.flatnonzero(after < fewest_bytes[column, shift:])
                fewest_bytes[column, shift + better] = after[better]
                predecessors[column, shift + better] = row
        ticks = np.flatnonzero(np.isfinite(fewest_bytes[-1]))
        return [self._segments(predecessors, int(tick)) for tick in sorted({*ticks[:1], *ticks[-1:]})]

    def _segments(self, predecessors: Indices, tick: int) -> Indices:
        segment_of = np.full(self.count, -1, dtype=np.intp)
        column = len(self.sets) - 1
        while column:
            row = predecessors[column, tick]
            dropped = self.sets[column] & ~self.sets[row] & ~self.boundary[column]
            segment_of[self.forward[dropped]] = column
            column, tick = row, tick - self.ticks[row, column]
        return segment_of

    def _one_per_node(self) -> set[tuple[bool, ...]]:
        """Nothing, everything, and for each node all that it depends on."""
        count = len(self.forward)
        below = np.eye(count, dtype=bool)
        for v, inputs in enumerate(self.inputs):
            below[v] |= below[inputs].any(axis=0)
        family = {tuple(row.tolist()) for row in below} | {(False,) * count, (True,) * count}
        return _few_enough(family)

    def _all_lower_sets(self) -> set[tuple[bool, ...]]:
        """Every lower set, node by node: with a node only where its inputs are in."""
        family: set[tuple[bool, ...]] = {()}
        for inputs in self.inputs:
            fit = {(*members, True) for members in family if all(members[i] for i in inputs)}
            family = _few_enough(fit | {(*members, False) for members in family})
        return family

    def _boundaries(self) -> tuple[Mask, Mask]:
        """Per set its boundary, and what else the gradients that enter it from outside need."""
        boundary, readers = np.zeros_like(self.sets), np.zeros_like(self.sets)
        for v, inputs in enumerate(self.inputs):
            for i in inputs:
                crossing = self.sets[:, i] & ~self.sets[:, v]
                boundary[crossing, i] = True
                readers[crossing, v] = True
        gradient_inputs = readers.copy()
        for v, inputs in enumerate(self.inputs):
            for i in inputs:
                gradient_inputs[readers[:, v], i] = True
        return boundary, gradient_inputs & ~self.sets


def _few_enough(family: set[tuple[bool, ...]]) -> set[tuple[bool, ...]]:
    if len(family) > MOST_SETS:
        raise ValueError(
            f"lower_sets: expected at most {MOST_SETS} lower sets, got more than {MOST_SETS}; "
            "take one per node (exact=False), or another method"
        )
    return family
