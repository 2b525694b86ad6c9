"""A graph as indices and arrays; for an order of runs its best frees, its memory profile and its schedule.

A graph solver only has to find the order in which nodes run. For a given order it is best to free every output
directly after its last read before its next run; this file works out those frees and the peak that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solvers.arrays import Integers
from solvers.problem.deadline import check_deadline
from solvers.problem.graph import Graph
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import Replay, replay


class IndexedGraph:
    """A graph by node index.

    Attributes:
        graph: the problem.
        count: number of nodes.
        inputs: per node the indices that it reads, rising, each once.
        readers: per node the indices that read it, rising.
        output_bytes, transient_bytes: int64, shape (count,).
        seconds: float64, shape (count,).
        needed_until: per node the last first run that reads it, ``count`` for outputs; int64, shape (count,).
        is_output: per node whether it has to be alive at the end.
        once: per node whether it must not run again.
        working_bytes: per node its inputs, output, transient and the resident bytes: no budget below this runs it;
            int64, shape (count,).
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.count = len(graph.nodes)
        index = {node.name: i for i, node in enumerate(graph.nodes)}
        self.inputs = [tuple(sorted({index[name] for name in node.inputs})) for node in graph.nodes]
        self.readers: list[list[int]] = [[] for _ in graph.nodes]
        for reader, inputs in enumerate(self.inputs):
            for i in inputs:
                self.readers[i].append(reader)
        self.output_bytes = np.array([node.output_bytes for node in graph.nodes], dtype=np.int64)
        self.transient_bytes = np.array([node.transient_bytes for node in graph.nodes], dtype=np.int64)
        self.seconds = np.array([node.seconds for node in graph.nodes], dtype=np.float64)
        self.is_output = np.zeros(self.count, dtype=bool)
        self.is_output[[index[name] for name in graph.outputs]] = True
        self.once = np.array([node.once for node in graph.nodes], dtype=bool)
        last_reader = [max(readers, default=-1) for readers in self.readers]
        self.needed_until: Integers = np.where(self.is_output, self.count, np.array(last_reader, dtype=np.int64))
        own_bytes = self.output_bytes + self.transient_bytes + graph.resident_bytes
        read_bytes = [self.output_bytes[list(inputs)].sum() for inputs in self.inputs]
        self.working_bytes: Integers = own_bytes + np.array(read_bytes, dtype=np.int64)


def last_reads(indexed: IndexedGraph, order: Sequence[int]) -> list[int]:
    """For each place of an order of runs the last place at which that run's output is needed.

    ``len(order)`` stands for the end of the schedule; a run that nobody reads is needed at its own place only.
    """
    last_read = list(range(len(order)))
    latest_run: dict[int, int] = {}
    for place, node in enumerate(order):
        for i in indexed.inputs[node]:
            last_read[latest_run[i]] = place
        latest_run[node] = place
    for node, place in latest_run.items():
        if indexed.is_output[node]:
            last_read[place] = len(order)
    return last_read


def first_runs(order: Sequence[int]) -> dict[int, int]:
    """For each node of an order of runs the place of its first run."""
    return {node: place for place, node in reversed(list(enumerate(order)))}


def peak_profile(indexed: IndexedGraph, order: Sequence[int]) -> Integers:
    """Bytes alive while each run of an order goes on, resident and transient ones included; shape (len(order),)."""
    last_read = last_reads(indexed, order)
    sizes = indexed.output_bytes[list(order)]
    change = np.zeros(len(order) + 2, dtype=np.int64)
    np.add.at(change, np.arange(len(order)), sizes)
    np.add.at(change, np.array(last_read, dtype=np.int64) + 1, -sizes)
    alive = np.cumsum(change)[: len(order)]
    return alive + indexed.transient_bytes[list(order)] + indexed.graph.resident_bytes


def schedule_of(indexed: IndexedGraph, order: Sequence[int]) -> Schedule:
    """The schedule of an order of runs, every output freed directly after its last read.

    >>> from solvers.problem.graph import Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=2, inputs=("a",))
    >>> indexed = IndexedGraph(Graph(nodes=(a, b), outputs=("b",)))
    >>> [(action.kind, action.node) for action in schedule_of(indexed, [0, 1]).actions]
    [('compute', 0), ('compute', 1), ('free', 0)]
    """
    last_read = last_reads(indexed, order)
    freed_after: list[list[int]] = [[] for _ in range(len(order) + 1)]
    for place, end in enumerate(last_read):
        freed_after[end].append(order[place])
    actions: list[Action] = []
    for place, node in enumerate(order):
        actions.append(Action("run", node))
        actions += [Action("free", v) for v in freed_after[place]]
    return Schedule(tuple(actions))


def seconds_of(indexed: IndexedGraph, order: Sequence[int]) -> float:
    """Seconds of all runs of an order."""
    return float(indexed.seconds[list(order)].sum())


def runs_for(indexed: IndexedGraph, alive: set[int], node: int) -> list[int]:
    """What has to run, in order, so that ``node`` is alive; it all is from then on."""
    check_deadline()
    runs: list[int] = []
    stack = [node]
    while stack:
        v = stack[-1]
        missing = [u for u in indexed.inputs[v] if u not in alive] if v not in alive else []
        if missing:
            stack += missing
            continue
        stack.pop()
        if v not in alive:
            runs.append(v)
            alive.add(v)
    return runs


def unplanned_replay(graph: Graph) -> Replay:
    """Every node once, in the file's order: what 100% of a budget and the unplanned seconds mean for a graph."""
    indexed = IndexedGraph(graph)
    return replay(graph, schedule_of(indexed, range(indexed.count)))
