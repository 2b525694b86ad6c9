"""A graph as indices and arrays; for an order of runs its best frees, its memory profile and its schedule.

A graph solver only has to find the order in which nodes run. For a given order it is best to free every output
directly after its last read before its next run; this file works out those frees and the peak that follows.

Repairs never make an order slower: what fits is kept instead of run again, what nobody reads is dropped. The incumbent
is the best order that a search has found, with the smallest peak, the best bound and the time left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from solvers.arrays import Integers, Mask
from solvers.problem.deadline import check_deadline, left_seconds
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

    @cached_property
    def rerunnable(self) -> Mask:
        """The nodes worth recomputing: forward ones, and those up to the moment at which most bytes lie idle.

        Those that must run once are never among them.
        """
        forward = np.array([node.side == "forward" for node in self.graph.nodes])
        idle = peak_profile(self, range(self.count)) - self.working_bytes
        early = np.arange(self.count) <= int(idle.argmax())
        chosen = (forward | early) & ~self.is_output & ~self.once
        return chosen if chosen.any() else ~self.once


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
    >>> [(action.kind, action.stage) for action in schedule_of(indexed, [0, 1]).actions]
    [('run', 0), ('run', 1), ('free', 0)]
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
    """The nodes to run, in order, so that ``node`` is alive; all of them are from then on."""
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


def keep_what_fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> list[int]:
    """Repeated runs dropped, most expensive first, where keeping the earlier output instead stays in the budget.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=2)
    >>> c = Node(name="c", seconds=1, output_bytes=1, inputs=("a", "b"))
    >>> indexed = IndexedGraph(Graph(nodes=(a, b, c), outputs=("c",)))
    >>> keep_what_fits(indexed, [0, 1, 0, 2], 7)
    [0, 1, 2]
    """
    repaired = without_unread_runs(indexed, order)
    while avoidable := _avoidable_runs(indexed, repaired, budget_bytes):
        repaired = without_unread_runs(indexed, [v for place, v in enumerate(repaired) if place not in avoidable])
    return repaired


def _avoidable_runs(indexed: IndexedGraph, order: list[int], budget_bytes: int) -> set[int]:
    """The places of repeated runs that can all be avoided together."""
    last, room = last_reads(indexed, order), budget_bytes - peak_profile(indexed, order)
    last_run: dict[int, int] = {}
    repeated: list[tuple[float, int, int]] = []
    for place, v in enumerate(order):
        if v in last_run:
            repeated.append((-float(indexed.seconds[v]), place, last_run[v]))
        last_run[v] = place
    avoidable: set[int] = set()
    for _, place, earlier in sorted(repeated):
        check_deadline()
        room_between, size = room[last[earlier] + 1 : place], indexed.output_bytes[order[place]]
        if not room_between.size or room_between.min() >= size:
            room_between -= size  # what the avoided run itself read is not held longer: more room than counted here
            avoidable.add(place)
    return avoidable


def may_run(indexed: IndexedGraph, order: Sequence[int]) -> bool:
    """Whether an order runs each node once that must not run again."""
    runs = np.bincount(np.array(order), minlength=indexed.count)
    return not bool((indexed.once & (runs > 1)).any())


def fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> bool:
    """Whether the budget holds throughout an order, its end included."""
    return int(peak_profile(indexed, order).max()) <= budget_bytes


def without_unread_runs(indexed: IndexedGraph, order: Sequence[int]) -> list[int]:
    """The order less every repeated run that is not read before the node's next run, or the end; never a higher peak.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=1), Node(name="b", seconds=1, output_bytes=1, inputs=("a",))
    >>> without_unread_runs(IndexedGraph(Graph(nodes=(a, b), outputs=("b",))), [0, 1, 0, 1, 0])
    [0, 1, 0, 1]
    """
    first = first_runs(order)
    read = {v for v in range(indexed.count) if indexed.is_output[v]}
    kept: list[int] = []
    for place in reversed(range(len(order))):
        v = order[place]
        if v in read or first[v] == place:
            kept.append(v)
            read.discard(v)
            read.update(indexed.inputs[v])
    return kept[::-1]


SMALLEST_GAP = 1e-6  # what the integer programs are solved to: no search gets closer
REMEMBERED = 40  # orders that are kept for merging


class Incumbent:
    """The best order and bound for one graph and budget; methods offer both to it.

    Attributes:
        indexed, budget_bytes: the problem.
        order, seconds: the fastest order offered that fits; None and infinite before there is one.
        smallest, smallest_bytes: the order with the smallest peak of all that were offered, and that peak.
        seen: the orders offered last, as offered and repaired, whether they fit or not.
        solver: the method that offered it.
        bound_seconds: the largest lower bound offered; holds for every schedule within the budget.
        gap: relative distance at which the search may stop, at least 1e-6.
    """

    def __init__(self, indexed: IndexedGraph, budget_bytes: int, *, gap: float) -> None:
        self.indexed = indexed
        self.budget_bytes = budget_bytes
        self.gap = max(gap, SMALLEST_GAP)
        self.order: list[int] | None = None
        self.seen: list[list[int]] = []
        self.solver = ""
        self.seconds = float("inf")
        self.bound_seconds = float(indexed.seconds.sum())
        self.smallest: list[int] = list(range(indexed.count))
        self.smallest_bytes = int(peak_profile(indexed, self.smallest).max())
        self._stopped = False

    @property
    def left_seconds(self) -> float:
        """Time that the deadline around leaves, not below zero; infinite without one."""
        return 0.0 if self._stopped else left_seconds()

    @property
    def done(self) -> bool:
        """Whether the time is over or the best order is as close to the bound as asked."""
        if self.left_seconds == 0.0 or self.bound_seconds == float("inf"):  # the bound says that none fits
            return True
        return self.order is not None and self.seconds - self.bound_seconds <= self.gap * self.seconds

    def stop(self) -> None:
        """End the search now."""
        self._stopped = True

    def offer(self, order: Sequence[int], solver: str, *, repair: bool = True) -> list[int]:
        """Repair an order and take it where it fits, is the fastest, and runs again what may; returns the repaired one.

        ``repair=False`` takes it as it is: a published method's own answer.
        """
        self.note(order, solver)  # before its repair, in which the time may end
        repaired = keep_what_fits(self.indexed, order, self.budget_bytes) if repair else list(order)
        self.seen += [list(order), repaired]
        del self.seen[:-REMEMBERED]
        self.note(repaired, solver)
        return repaired

    def note(self, order: Sequence[int], solver: str) -> None:
        """Take an order as it is, where it is the fastest that fits or the one with the smallest peak."""
        seconds, peak_bytes = seconds_of(self.indexed, order), int(peak_profile(self.indexed, order).max())
        faster, smaller = seconds < self.seconds and peak_bytes <= self.budget_bytes, peak_bytes < self.smallest_bytes
        if not (faster or smaller) or not may_run(self.indexed, order):
            return
        if faster:
            self.order, self.seconds, self.solver = list(order), seconds, solver
        if smaller:
            self.smallest, self.smallest_bytes = list(order), peak_bytes

    def offer_bound(self, seconds: float) -> None:
        """Take a lower bound on the seconds of every schedule within the budget."""
        self.bound_seconds = max(self.bound_seconds, seconds)
