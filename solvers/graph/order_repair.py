"""Repairs that never make an order of runs slower: what fits is kept instead of run again, what nobody reads is
dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solvers.graph.liveness import IndexedGraph, first_runs, last_reads, peak_profile
from solvers.problem.deadline import check_deadline


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
