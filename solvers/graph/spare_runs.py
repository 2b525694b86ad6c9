"""Drops the repeated runs of an order whose output nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.graph.liveness import IndexedGraph


def without_spare_runs(indexed: IndexedGraph, order: Sequence[int]) -> list[int]:
    """The order less every repeated run that is not read before the node's next run, or the end; never a higher peak.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=1), Node(name="b", seconds=1, output_bytes=1, inputs=("a",))
    >>> without_spare_runs(IndexedGraph(Graph(nodes=(a, b), outputs=("b",))), [0, 1, 0, 1, 0])
    [0, 1, 0, 1]
    """
    first = {k: place for place, k in reversed(list(enumerate(order)))}
    read = {k for k in range(indexed.count) if indexed.is_output[k]}
    kept: list[int] = []
    for place in reversed(range(len(order))):
        k = order[place]
        if k in read or first[k] == place:
            kept.append(k)
            read.discard(k)
            read.update(indexed.inputs[k])
    return kept[::-1]
