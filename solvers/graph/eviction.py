"""Orders made by eviction: run on, and when the budget is full, drop the output that is cheapest to miss.

Formulation: first runs in order; a missing input runs again first, with all that it needs. Before a run that would
not fit, the alive output with the smallest score is dropped, inputs of the runs in progress excepted. The score is what
it costs to make the output again, its missing inputs included, per byte and per step until it is needed next
(directly, or by a missing output that is made from it) to a power. As the schedule is planned ahead, the next need is
known, where the published method, at run time, takes the time since the last one in its place.

Guarantee: an order that is returned fits; one may exist where none is returned. Complexity: O(V E) for the scores and
O(R V) for R runs. Units: bytes and seconds.
Paper: Kirisame et al., "Dynamic tensor rematerialization" (2021), section 3, the heuristic h_DTR; the exact next need
after Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from __future__ import annotations

import numpy as np

from solvers.arrays import Floats, Mask
from solvers.graph.liveness import IndexedGraph
from solvers.problem.deadline import check_deadline

POWERS = (1.0, 0.5, 2.0, 0.0)  # of the steps until the next need: the published 1 first
SCORINGS = 1000  # of one order: scores of graphs with more nodes serve for several first runs
MOST_RUNS_PER_NODE = 50  # an order that runs nodes more often than this on average is given up


def eviction_order(
    indexed: IndexedGraph, budget_bytes: int, rerunnable: Mask, power: float = 1.0, noise: Floats | None = None
) -> list[int] | None:
    """An order of runs that fits the budget; None where this method finds none.

    Args:
        rerunnable: the nodes whose output may be dropped while it is needed, shape (count,).
        power: of the steps until the next need.
        noise: factors of the nodes' scores, shape (count,); all 1 where None.

    >>> from solvers.problem.examples import late_reader
    >>> eviction_order(IndexedGraph(late_reader()), 8, np.ones(4, dtype=bool))
    [0, 1, 2, 0, 3]
    """
    making = _OrderInMaking(
        indexed, budget_bytes, rerunnable, power, np.ones(indexed.count) if noise is None else noise
    )
    for t in range(indexed.count):
        if not making.make(t):
            return None
    if not all(making.make(int(v)) for v in np.flatnonzero(indexed.is_output)):
        return None
    return making.order


class _OrderInMaking:
    """The state while an order is made: what is alive, and since when scores hold."""

    def __init__(self, indexed: IndexedGraph, budget_bytes: int, rerunnable: Mask, power: float, noise: Floats) -> None:
        self.indexed = indexed
        self.order: list[int] = []
        self._room = budget_bytes - indexed.graph.resident_bytes
        self._rerunnable = rerunnable
        self._power = power
        self._noise = noise
        self._alive = np.zeros(indexed.count, dtype=bool)
        self._first_runs = 0  # first runs that are done
        self._scores = np.full(indexed.count, np.inf)
        self._feeds = _feeding(indexed, rerunnable)
        self._last = indexed.once & self._feeds  # what cannot be made again, and something may need
        self._scored_at = -1  # the first run for which the scores are

    def make(self, node: int) -> bool:
        """Run a node, and before it what it misses; False where it does not fit."""
        stack = [] if self._alive[node] else [node]
        while stack:
            v = stack[-1]
            missing = [u for u in self.indexed.inputs[v] if not self._alive[u]]
            if missing:
                stack.append(missing[-1])
                continue
            if not self._run(v, stack):
                return False
            stack.pop()
        return True

    def _run(self, v: int, stack: list[int]) -> bool:
        indexed = self.indexed
        needed_bytes = int(indexed.output_bytes[v] + indexed.transient_bytes[v])
        pinned = {u for w in stack for u in indexed.inputs[w]}
        check_deadline()
        while needed_bytes > self._room:
            victim = self._victim(pinned)
            if victim is None:
                return False
            self._alive[victim] = False
            self._room += int(indexed.output_bytes[victim])
            if self._last[victim]:  # What is made from it cannot be made again from now on.
                self._scored_at = -1
        self.order.append(v)
        self._alive[v] = True
        self._room -= int(indexed.output_bytes[v])
        if v == self._first_runs:
            self._first_runs += 1
        return len(self.order) <= MOST_RUNS_PER_NODE * indexed.count

    def _victim(self, pinned: set[int]) -> int | None:
        if self._first_runs - self._scored_at >= max(1, self.indexed.count // SCORINGS):
            self._score()
        victim = self._cheapest(pinned)
        stale = self._first_runs > self._scored_at if victim is None else self._last[victim]
        if stale:  # What was dropped since may need what cannot be made again, and was not needed then.
            self._score()
            victim = self._cheapest(pinned)
        return victim

    def _cheapest(self, pinned: set[int]) -> int | None:
        evictable = self._alive & (self.indexed.output_bytes > 0) & (self._scores < np.inf)
        evictable[list(pinned)] = False
        nodes = np.flatnonzero(evictable)
        return int(nodes[self._scores[nodes].argmin()]) if nodes.size else None

    def _score(self) -> None:
        """Scores for the present first run; missing nodes pass their need on to what they are made from."""
        check_deadline()
        indexed, first_runs = self.indexed, self._first_runs
        alive, inputs, readers = self._alive.tolist(), indexed.inputs, indexed.readers
        costs = np.where(indexed.once, np.inf, indexed.seconds).tolist()
        needs = [float(indexed.count) if end else np.inf for end in indexed.is_output]
        for v in range(first_runs):  # of lists: an array's single items are slow
            for u in inputs[v]:
                if not alive[u]:
                    costs[v] += costs[u]
        for v in reversed(range(first_runs)):
            later = [r if r >= first_runs else needs[r] for r in readers[v] if r >= first_runs or not alive[r]]
            if later:
                needs[v] = min(needs[v], *later)
        cost, need = np.array(costs), np.array(needs)
        wait = np.maximum(1.0, need - first_runs + 1)
        per_byte = cost * self._noise / np.maximum(1, indexed.output_bytes)
        last = np.isinf(cost)
        self._last = last & self._feeds
        chosen = self._rerunnable & ~last
        self._scores = np.divide(per_byte, wait**self._power, out=np.full(indexed.count, np.inf), where=chosen)
        self._scores[np.isinf(need)] = 0.0
        self._scored_at = first_runs


def _feeding(indexed: IndexedGraph, rerunnable: Mask) -> Mask:
    """From which nodes a node is made, directly or not, whose output may be dropped while it is needed."""
    feeds = np.zeros(indexed.count, dtype=bool)
    for v in reversed(range(indexed.count)):
        feeds[v] = any(rerunnable[r] or feeds[r] for r in indexed.readers[v])
    return feeds
