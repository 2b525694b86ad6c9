"""What the programs over stages share: the graph with a last node for its end, and an order that has to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from solvers.graph.orders import IndexedGraph, fits, without_unread_runs
from solvers.problem.graph import Node


def with_end(indexed: IndexedGraph) -> IndexedGraph:
    """The graph with a last node that reads every output and takes neither bytes nor seconds.

    Programs over stages, each of which ends with a first run, have no stage left after the last one in which an
    output freed too early could be made again; the end's own stage is one.

    >>> from solvers.problem.graph import Graph
    >>> nodes = (Node(name="a", seconds=1, output_bytes=1), Node(name="b", seconds=1, output_bytes=1))
    >>> with_end(IndexedGraph(Graph(nodes=nodes, outputs=("a", "b")))).inputs
    [(), (), (0, 1)]
    """
    graph = indexed.graph
    name = "end of " + " ".join(node.name for node in graph.nodes)  # longer than every name, so none of them
    end = Node(name=name, seconds=0.0, output_bytes=0, inputs=graph.outputs)
    return IndexedGraph(replace(graph, nodes=(*graph.nodes, end), outputs=()))


def fitting_order(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> tuple[int, ...] | None:
    """The order without unread runs, if that fits."""
    kept = without_unread_runs(indexed, order)
    return tuple(kept) if fits(indexed, kept, budget_bytes) else None
