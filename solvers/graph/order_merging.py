"""Merging of orders of runs: the best selection from all that several of them run again.

Formulation: a template (``solvers.graph.template_program``) is the shortest order found that contains the best known
order and some others, which need not fit the budget. More others are taken after rounds that end early, fewer after
rounds that run out of time.

Towards a smaller peak the same is done with the order of the smallest peak, where no order fits the budget yet.

Guarantee: never worse than the order it starts from; proves nothing. Complexity: one integer program a round.
Units: bytes and seconds.
Source: solution merging after Applegate, Bixby, Chvatal, Cook, "Finding tours in the TSP" (1999).
"""

from __future__ import annotations

import numpy as np

from solvers.graph.incumbent import Incumbent
from solvers.graph.template_program import TemplateProgram, template_of

ROUND_SECONDS = 4.0  # a template that takes longer is too large
WHOLE_NODES = 800  # graphs with more are merged window by window: templates of 400 nodes take 0.3 to 4 s
_PLACES_A_SECOND = 1500  # a template's rows grow with the square of its places: 5,500 of them took 9 s to build
_BUILD_SHARE = 0.3  # of the time left, for building a template's program
_QUICK_SECONDS = 1.0  # a template that takes less may be larger


class OrderMerging:
    """Rounds on one search; ``step`` makes one.

    Args:
        smallest_peak: start from the order with the smallest peak and lower that; otherwise from the fastest one that
            fits, of which there has to be one.
    """

    def __init__(self, incumbent: Incumbent, *, smallest_peak: bool = False) -> None:
        self.incumbent = incumbent
        self._smallest_peak = smallest_peak
        self._rng = np.random.default_rng(0)
        self._others = 2
        self._share = min(1.0, WHOLE_NODES / incumbent.indexed.count)  # of the first runs, in one window
        self._last_seconds = 0.0

    def step(self) -> None:
        """Merge the best order with some of the others seen; without others there is nothing to do."""
        incumbent, peak = self.incumbent, self._smallest_peak
        best = incumbent.smallest if peak else incumbent.order
        assert best is not None
        others = [order for order in incumbent.seen if order != best]
        before = incumbent.left_seconds
        if before < self._last_seconds:
            incumbent.stop()  # no time for another round
        if not others or incumbent.done:
            return
        picks = self._rng.choice(len(others), size=min(self._others, len(others)), replace=False)
        window = self._draw_window()
        template = template_of(incumbent.indexed, [best, *(others[int(pick)] for pick in picks)], window)
        if (len(template) / _PLACES_A_SECOND) ** 2 > _BUILD_SHARE * before:
            self._adapt(solved=False)
            return
        budget_bytes = incumbent.smallest_bytes if peak else incumbent.budget_bytes
        program = TemplateProgram(incumbent.indexed, budget_bytes, template, smallest_peak=peak)
        answer = program.program.solve(
            time_limit_seconds=min(ROUND_SECONDS, before), relative_gap=incumbent.gap / 10, start=program.encode(best)
        )
        self._last_seconds = before - incumbent.left_seconds
        self._adapt(solved=answer.status == "optimal")
        if answer.values is not None:
            incumbent.offer(program.order(answer.values), "merging")

    def _draw_window(self) -> tuple[int, int]:
        count = self.incumbent.indexed.count
        size = round(self._share * (count + 1))
        start = int(self._rng.integers(0, count + 2 - size))
        return start, start + size

    def _adapt(self, *, solved: bool) -> None:
        """Larger templates after quick rounds, smaller ones after those that ran out of time: windows first."""
        if not solved and self._others > 1:
            self._others -= 1
        elif not solved:
            self._share = max(0.05, self._share * 0.7)
        elif self._last_seconds < _QUICK_SECONDS and self._share < 1.0:
            self._share = min(1.0, self._share * 1.3)
        elif self._last_seconds < _QUICK_SECONDS:
            self._others += 1
