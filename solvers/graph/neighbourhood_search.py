"""Large-neighbourhood search: a part of the best order is solved again by the moments program, the rest stays.

Formulation: moments are drawn at random among the first runs; at each, the budget is lowered by what the known order
needs more between the moments than at them, so that the known order is a solution of the program. A stretch of
neighbouring nodes, drawn at random, is free; of all others the program keeps what is alive at the moments. The
stretch grows after rounds that end early and shrinks after rounds that run out of time.

Guarantee: never worse than the order it starts from; proves nothing. Complexity: one integer program a round.
Units: bytes and seconds.
Source: large-neighbourhood search after Shaw, "Using constraint programming and local search methods to solve vehicle
routing problems" (1998), on windows of Jain et al.'s stages ("Checkmate", 2020, section 4).
"""

from __future__ import annotations

import numpy as np

from solvers.arrays import Floats, Mask
from solvers.graph.incumbent import Incumbent
from solvers.graph.liveness import first_runs, peak_profile
from solvers.graph.moments_program import MomentsProgram
from solvers.graph.order_repair import fits

FEWEST_MOMENTS = 12  # for a window of all nodes; smaller windows have more: orders are then read more exactly
MOST_PAIRS = 30_000  # of a moment and a node: building the program takes about a second (1,000 nodes at 30 moments)
ROUND_SECONDS = 4.0  # a window that takes longer is too large
_FIRST_SHARE = 0.5  # of the nodes that may run again, free in the first round
_REPAIRS = 3  # rounds with a lower budget after an order that does not fit


class NeighbourhoodSearch:
    """Rounds on one search that has an order; ``step`` makes one."""

    def __init__(self, incumbent: Incumbent, rerunnable: Mask) -> None:
        self.incumbent = incumbent
        self.rerunnable = rerunnable
        self._rng = np.random.default_rng(0)
        self._share = _FIRST_SHARE
        self._last_seconds = 0.0

    def step(self) -> None:
        """Solve one window again, with repairs while its order does not fit."""
        incumbent, order = self.incumbent, self.incumbent.order
        assert order is not None
        moments = self._draw_moments(order)
        reserved = _reserves(incumbent, order, moments)
        free = self._draw_window()
        for _ in range(_REPAIRS):
            before = incumbent.left_seconds
            if before < self._last_seconds:
                incumbent.stop()  # no time for another round
                return
            program = MomentsProgram(incumbent.indexed, incumbent.budget_bytes, moments, self.rerunnable, reserved)
            program.hold_coarse()
            start = program.encode(order)
            _hold_outside(program, start, free)
            limit = min(ROUND_SECONDS, incumbent.left_seconds)
            answer = program.program.solve(time_limit_seconds=limit, relative_gap=incumbent.gap / 10, start=start)
            self._last_seconds = before - incumbent.left_seconds
            self._share = min(1.0, self._share * 1.2) if answer.status == "optimal" else max(0.05, self._share * 0.7)
            if answer.values is None or incumbent.left_seconds == 0:
                return
            offered = incumbent.offer(program.order(answer.values), "local search")
            if fits(incumbent.indexed, offered, incumbent.budget_bytes):
                return
            excess = _reserves(incumbent, offered, moments)
            reserved = [max(a, b) for a, b in zip(reserved, excess, strict=True)]

    def _draw_moments(self, order: list[int]) -> list[int]:
        """First runs at random, likelier where the budget is nearly used up; the fullest one always."""
        indexed = self.incumbent.indexed
        profile = peak_profile(indexed, order)
        places = np.unique(np.array(order), return_index=True)[1]  # of the first runs, by node
        load = profile[places] / self.incumbent.budget_bytes
        weights = np.maximum(load, 0.05) ** 8
        most = max(FEWEST_MOMENTS, MOST_PAIRS // max(1, int(self.rerunnable.sum())))
        count = min(indexed.count, most, round(FEWEST_MOMENTS / self._share))
        picks = self._rng.choice(indexed.count, size=count, replace=False, p=weights / weights.sum())
        return sorted({int(load.argmax()), *(int(pick) for pick in picks)})

    def _draw_window(self) -> Mask:
        nodes = np.flatnonzero(self.rerunnable)
        size = max(1, round(self._share * nodes.size))
        start = int(self._rng.integers(0, nodes.size - size + 1))
        free = np.zeros(self.incumbent.indexed.count, dtype=bool)
        free[nodes[start : start + size]] = True
        return free


def _reserves(incumbent: Incumbent, order: list[int], moments: list[int]) -> list[int]:
    """Per moment how much more memory an order needs since the moment before than at it."""
    profile = peak_profile(incumbent.indexed, order)
    place = first_runs(order)
    places = [place[moment] for moment in moments]
    starts = [0, *(p + 1 for p in places[:-1])]
    return [int(profile[a : b + 1].max() - profile[b]) for a, b in zip(starts, places, strict=True)]


def _hold_outside(program: MomentsProgram, values: Floats, free: Mask) -> None:
    """Keep outside the window what a solution holds."""
    for (_, v), variable in program.held.items():
        if not free[v]:
            program.program.fix(variable, values[variable])
