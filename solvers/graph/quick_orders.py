"""Orders of runs made without a program, at any budget: on demand, and by eviction.

On demand (``orders``) some outputs are held and the others made again.

Formulation: first runs in order; what a first run reads and is not alive runs again just before it, with all it needs
in turn. Which outputs are held is a threshold on seconds per byte. What is not held is dropped at once (``drop``), or
kept in the first pass until the nodes that may run again have read it (``rerun``), and once it was made again also
while first runs to come read it (``segment``: the segments of Chen et al.).

Guarantee: each order is a valid schedule; its peak and seconds are whatever they are. Complexity: O(V E) per order at
the worst. Units: bytes and seconds.
Source: the segments are those of Chen et al., "Training deep nets with sublinear memory cost" (2016), section 4, on a
graph; the thresholds are our own.

By eviction (``eviction_order``) the output that is cheapest to miss is dropped when the budget is full.

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

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np

from solvers.arrays import Floats, Mask
from solvers.graph.orders import IndexedGraph, runs_for
from solvers.problem.deadline import check_deadline

DropRule = Literal["drop", "rerun", "segment"]
DROP_RULES: tuple[DropRule, ...] = get_args(DropRule)

THRESHOLDS = 10  # held sets tried, from nothing to all
MOST_RUNS_PER_NODE = 50  # longer orders are given up: they are no good schedules,
MOST_RUNS = 20_000  # and take seconds to write (of large graphs three per node)


def orders_on_demand(indexed: IndexedGraph, rerunnable: Mask) -> Iterator[list[int]]:
    """Orders from the least memory to the least time."""
    for held in held_sets(indexed, rerunnable):
        for rule in DROP_RULES:
            order = order_with(indexed, rerunnable, held, rule)
            if order is not None:
                yield order


def held_sets(indexed: IndexedGraph, rerunnable: Mask) -> Iterator[Mask]:
    """Nothing, then more and more of the nodes that take longest per byte, in equal shares of all their bytes."""
    ratio = indexed.seconds / np.maximum(1, indexed.output_bytes)
    nodes = np.flatnonzero(rerunnable)
    nodes = nodes[np.argsort(-ratio[nodes], kind="stable")]
    cumulative_bytes = np.cumsum(indexed.output_bytes[nodes])
    for share in np.linspace(0, 1, THRESHOLDS + 1):
        held = np.zeros(indexed.count, dtype=bool)
        held[nodes[cumulative_bytes <= share * (cumulative_bytes[-1] if cumulative_bytes.size else 0)]] = True
        yield held


def order_with(indexed: IndexedGraph, rerunnable: Mask, held: Mask, rule: DropRule) -> list[int] | None:
    """The order that holds ``held`` and everything that is not ``rerunnable``; None where it grows too long.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=2)
    >>> c = Node(name="c", seconds=1, output_bytes=1, inputs=("a", "b"))
    >>> indexed = IndexedGraph(Graph(nodes=(a, b, c), outputs=("c",)))
    >>> order_with(indexed, np.array([True, False, False]), np.zeros(3, dtype=bool), "drop")
    [0, 1, 0, 2]
    """
    dropped, until = (rerunnable & ~held).tolist(), _kept_until(indexed, rerunnable, rule)
    alive: set[int] = set()
    order: list[int] = []
    due: list[list[int]] = [[] for _ in range(indexed.count + 1)]  # per first run: what may be dropped when it is over
    for t in range(indexed.count):
        runs = [v for u in indexed.inputs[t] for v in runs_for(indexed, alive, u)] + [t]
        alive.add(t)
        order += runs
        for v in (*due[t], *(v for v in runs if dropped[v])):
            if until(v, t) > t:
                due[until(v, t)].append(v)
            else:
                alive.discard(v)
        if len(order) > min(max(MOST_RUNS, 3 * indexed.count), MOST_RUNS_PER_NODE * indexed.count):
            return None
    for v in np.flatnonzero(indexed.is_output):
        order += runs_for(indexed, alive, int(v))
    return order


def _kept_until(indexed: IndexedGraph, rerunnable: Mask, rule: DropRule) -> Callable[[int, int], int]:
    """The first run up to which a node that is not held stays alive, asked when first run t is over."""
    last = [max(readers, default=-1) for readers in indexed.readers]
    early = [max((r for r in readers if rerunnable[r]), default=v) for v, readers in enumerate(indexed.readers)]
    if rule == "drop":
        return lambda v, t: t + 1 if t + 1 in indexed.readers[v] else -1
    if rule == "rerun":
        return lambda v, t: early[v]
    return lambda v, t: last[v] if t > early[v] else early[v]


POWERS = (1.0, 0.5, 2.0, 0.0)  # of the steps until the next need: the published 1 first
SCORINGS = 1000  # of one order: scores of graphs with more nodes serve for several first runs


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
