"""The best order of runs that a search has found, the best bound, the orders seen last, and the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence

from solvers.graph.liveness import IndexedGraph, seconds_of
from solvers.graph.order_repair import fits, keep_what_fits, may_run

SMALLEST_GAP = 1e-6  # what the integer programs are solved to: no search gets closer
REMEMBERED = 40  # orders that are kept for merging


class Incumbent:
    """What is known of one graph and budget; methods offer orders and bounds to it.

    Attributes:
        indexed, budget_bytes: the problem.
        order, seconds: the fastest order offered that fits; None and infinite before there is one.
        seen: the orders offered last, as offered and repaired, whether they fit or not.
        solver: the method that offered it.
        bound_seconds: the largest lower bound offered; holds for every schedule within the budget.
        gap: relative distance at which the search may stop, at least 1e-6.
    """

    def __init__(self, indexed: IndexedGraph, budget_bytes: int, *, time_limit_seconds: float, gap: float) -> None:
        self.indexed = indexed
        self.budget_bytes = budget_bytes
        self.gap = max(gap, SMALLEST_GAP)
        self.order: list[int] | None = None
        self.seen: list[list[int]] = []
        self.solver = ""
        self.seconds = float("inf")
        self.bound_seconds = float(indexed.seconds.sum())
        self._deadline = time.perf_counter() + time_limit_seconds

    @property
    def left_seconds(self) -> float:
        """Time that is left, not below zero."""
        return max(0.0, self._deadline - time.perf_counter())

    @property
    def done(self) -> bool:
        """Whether the time is over or the best order is as close to the bound as asked."""
        if self.left_seconds == 0.0 or self.bound_seconds == float("inf"):  # the bound says that none fits
            return True
        return self.order is not None and self.seconds - self.bound_seconds <= self.gap * self.seconds

    def stop(self) -> None:
        """End the search now."""
        self._deadline = time.perf_counter()

    def offer(self, order: Sequence[int], solver: str, *, repair: bool = True) -> list[int]:
        """Repair an order and take it where it fits, is the fastest, and runs again what may; returns the repaired one.

        ``repair=False`` takes it as it is: a published method's own answer.
        """
        repaired = keep_what_fits(self.indexed, order, self.budget_bytes) if repair else list(order)
        self.seen += [list(order), repaired]
        del self.seen[:-REMEMBERED]
        seconds = seconds_of(self.indexed, repaired)
        if (
            seconds < self.seconds
            and may_run(self.indexed, repaired)
            and fits(self.indexed, repaired, self.budget_bytes)
        ):
            self.order, self.seconds, self.solver = repaired, seconds, solver
        return repaired

    def offer_bound(self, seconds: float) -> None:
        """Take a lower bound on the seconds of every schedule within the budget."""
        self.bound_seconds = max(self.bound_seconds, seconds)
