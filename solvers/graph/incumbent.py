"""The best order of runs that a search has found, the one with the smallest peak, the best bound, and the time left."""

from __future__ import annotations

from collections.abc import Sequence

from solvers.graph.liveness import IndexedGraph, peak_profile, seconds_of
from solvers.graph.order_repair import keep_what_fits, may_run
from solvers.problem.deadline import left_seconds

SMALLEST_GAP = 1e-6  # what the integer programs are solved to: no search gets closer
REMEMBERED = 40  # orders that are kept for merging


class Incumbent:
    """What is known of one graph and budget; methods offer orders and bounds to it.

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
