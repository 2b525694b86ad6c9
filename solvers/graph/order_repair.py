"""Cheap repairs of an order of runs that never make it slower: what fits is kept instead of run again."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.graph.liveness import IndexedGraph, last_reads, peak_profile


def keep_what_fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> list[int]:
    """Repeated runs dropped, dearest first, where keeping the earlier output instead stays in the budget.

    >>> from solvers.problem.graph import Graph, Node
    >>> a, b = Node(name="a", seconds=1, output_bytes=4), Node(name="b", seconds=1, output_bytes=2)
    >>> c = Node(name="c", seconds=1, output_bytes=1, inputs=("a", "b"))
    >>> indexed = IndexedGraph(Graph(nodes=(a, b, c), outputs=("c",)))
    >>> keep_what_fits(indexed, [0, 1, 0, 2], 7)
    [0, 1, 2]
    """
    best = without_spare_runs(indexed, order)
    while needless := _needless(indexed, best, budget_bytes):
        best = without_spare_runs(indexed, [v for place, v in enumerate(best) if place not in needless])
    return best


def _needless(indexed: IndexedGraph, order: list[int], budget_bytes: int) -> set[int]:
    """The places of repeated runs that can all be saved together."""
    last, room = last_reads(indexed, order), budget_bytes - peak_profile(indexed, order)
    before: dict[int, int] = {}
    again: list[tuple[float, int, int]] = []
    for place, v in enumerate(order):
        if v in before:
            again.append((-float(indexed.seconds[v]), place, before[v]))
        before[v] = place
    saved: set[int] = set()
    for _, place, earlier in sorted(again):
        gap, size = room[last[earlier] + 1 : place], indexed.output_bytes[order[place]]
        if not gap.size or gap.min() >= size:
            gap -= size  # what the saved run itself read is not held longer: more room than counted here
            saved.add(place)
    return saved


def fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> bool:
    """Whether the budget holds throughout an order, its end included."""
    return int(peak_profile(indexed, order).max()) <= budget_bytes


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
