"""Cheap repairs of an order of runs that never make it slower: what fits is kept instead of run again."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.liveness import IndexedGraph, last_reads, peak_profile
from solvers.spare_runs import without_spare_runs


def keep_what_fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> list[int]:
    """Repeated runs dropped one by one, dearest first, where keeping the earlier output instead stays in the budget."""
    best = without_spare_runs(indexed, order)
    while True:
        place = _needless(indexed, best, budget_bytes)
        if place is None:
            return best
        best = without_spare_runs(indexed, best[:place] + best[place + 1 :])


def _needless(indexed: IndexedGraph, order: list[int], budget_bytes: int) -> int | None:
    """The place of the dearest repeated run that can be saved; None where there is none."""
    last, room = last_reads(indexed, order), budget_bytes - peak_profile(indexed, order)
    before: dict[int, int] = {}
    again: list[tuple[float, int, int]] = []
    for place, v in enumerate(order):
        if v in before:
            again.append((-float(indexed.seconds[v]), place, before[v]))
        before[v] = place
    for _, place, earlier in sorted(again):
        gap = room[last[earlier] + 1 : place]
        if not gap.size or gap.min() >= indexed.output_bytes[order[place]]:
            return place
    return None


def fits(indexed: IndexedGraph, order: Sequence[int], budget_bytes: int) -> bool:
    """Whether the budget holds throughout an order, its end included."""
    return int(peak_profile(indexed, order).max()) <= budget_bytes
