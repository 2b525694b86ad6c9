"""Orders of runs that hold some outputs and make the others again on demand: quick, at any budget.

Formulation: first runs in order; what a first run reads and is not alive runs again just before it, with all it needs
in turn. Which outputs are held is a threshold on seconds per byte. What is not held is dropped at once (``drop``), or
kept in the first pass until the nodes that may run again have read it (``rerun``), and once it was made again also
while first runs to come read it (``segment``: the segments of Chen et al.).

Guarantee: each order is a valid schedule; its peak and seconds are whatever they are. Complexity: O(V E) per order at
the worst. Units: bytes and seconds.
Source: the segments are those of Chen et al., "Training deep nets with sublinear memory cost" (2016), section 4, on a
graph; the thresholds are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import numpy as np

from solvers.arrays import Mask
from solvers.graph.liveness import IndexedGraph, runs_for

DropRule = Literal["drop", "rerun", "segment"]
DROP_RULES: tuple[DropRule, ...] = get_args(DropRule)

THRESHOLDS = 10  # held sets tried, from nothing to all
MOST_RUNS_PER_NODE = 50  # longer orders are given up: they are no good schedules,
MOST_RUNS = 20_000  # and take seconds to write (of large graphs three per node)


def orders(indexed: IndexedGraph, rerunnable: Mask) -> Iterator[list[int]]:
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
