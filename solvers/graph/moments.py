"""Bounds and orders by the moments program, which counts memory at some first runs: few at first, then more.

Formulation: a moment is the first run of a node at which memory is counted. The program of
``solvers.graph.moments_program`` at a few moments is a relaxation of the whole problem. Its order is replayed in exact
bytes. Where that exceeds the budget at a first run, the run becomes a moment; where it
exceeds it between moments (what runs again needs room itself), the budget at the next moment is lowered by the
excess for the next round. Rounds with a lowered budget give orders, rounds without give bounds.

Guarantee: the bound holds for every schedule of the graph; an order equal to it is optimal. Every order is exact.
Complexity: each round is an integer program with O(V K) binaries, which HiGHS solves in 0.1 to 10 seconds where V is
up to 2,600 and K about 4 to 12 (``benchmarks.solvers``); a round that runs out of time gives the bound it has reached.
Units: bytes and seconds.
Source: own combination of the stages of Jain et al., "Checkmate" (2020), section 4, with constraint generation.
"""

from __future__ import annotations

from itertools import accumulate, groupby

import numpy as np

from solvers.arrays import Integers, Mask
from solvers.graph.incumbent import Incumbent
from solvers.graph.liveness import IndexedGraph, peak_profile
from solvers.graph.moments_program import MomentsProgram

MOMENTS = 4  # to start with: at 400 to 2,600 nodes optimal in 1 to 3 s where a dozen takes 8 to more than 20 s
ADDED = 3  # moments a round: the worst ones; a round with more takes longer than several with few
ROUND_GAP = 0.3  # share of the gap asked for that one round may leave
_TRUST = 1e-7  # relative: HiGHS's tolerances must not lift a bound above an optimum
PROMOTED_NODES = 300  # up to here the program stays small enough when late nodes are modelled in full
_EXTRA = 1e-3  # of the budget, kept free in addition to an excess: the next order differs a little


class MomentSearch:
    """The rounds on one search; ``step`` makes one round, ``finished`` says that no further one would help."""

    def __init__(self, incumbent: Incumbent, rerunnable: Mask) -> None:
        self.incumbent = incumbent
        self.rerunnable = rerunnable
        self.finished = False
        self._moments = first_moments(incumbent)
        self._reserved: dict[int, int] = {}
        self._bounded = False  # whether the present moments have given their bound

    def step(self, time_limit_seconds: float) -> None:
        """One round: solve, read, replay, refine."""
        incumbent, bounding = self.incumbent, not self._bounded
        reserved = [0 if bounding else self._reserved.get(moment, 0) for moment in self._moments]
        program = MomentsProgram(incumbent.indexed, incumbent.budget_bytes, self._moments, self.rerunnable, reserved)
        if not bounding:
            program.hold_coarse()
        answer = program.program.solve(
            time_limit_seconds=min(time_limit_seconds, incumbent.left_seconds),
            relative_gap=ROUND_GAP * incumbent.gap,
            start=None if incumbent.order is None else program.encode(incumbent.order),
        )
        if bounding:
            incumbent.offer_bound(answer.bound * program.unit_seconds * (1 - _TRUST))
            self._bounded = True
        if answer.values is None:
            self.finished = not bounding or answer.status == "infeasible"
            return
        fitted = self._refine(incumbent.offer(program.order(answer.values), "moments"))
        if bounding:
            self._promote(program.dropped_coarse(answer.values))
        else:
            self.finished = fitted

    def _refine(self, order: list[int]) -> bool:
        """Whether the order fits; where it does not, moments and reserves for the next round."""
        incumbent = self.incumbent
        excess = peak_profile(incumbent.indexed, order) - incumbent.budget_bytes
        if excess.max() <= 0:
            return True
        added = _missing_moments(order, excess, set(self._moments))
        if added:
            self._moments = sorted({*self._moments, *added})
            self._bounded = False
        for moment, size in _excess_at_moments(order, excess, self._moments).items():
            self._reserved[moment] = self._reserved.get(moment, 0) + size + int(incumbent.budget_bytes * _EXTRA)
        return False

    def _promote(self, dropped: set[int]) -> None:
        """Nodes whose gaps were paid for too cheaply are modelled in full, with all that they are made from."""
        if not dropped or self.incumbent.indexed.count > PROMOTED_NODES:
            return
        stack = list(dropped)
        while stack:
            v = stack.pop()
            if not self.rerunnable[v]:
                self.rerunnable[v] = True
                stack += self.incumbent.indexed.inputs[v]
        self._bounded = False


def rerunnable_nodes(indexed: IndexedGraph) -> Mask:
    """The nodes that are worth running again: forward ones, and those up to the moment at which most bytes lie idle.

    Those that must run once are never among them.
    """
    nodes = indexed.graph.nodes
    forward = np.array([node.side == "forward" for node in nodes])
    idle = peak_profile(indexed, range(indexed.count)) - indexed.working_bytes
    early = np.arange(indexed.count) <= int(idle.argmax())
    chosen = (forward | early) & ~indexed.is_output & ~indexed.once
    return chosen if chosen.any() else ~indexed.once


def first_moments(incumbent: Incumbent) -> list[int]:
    """A few nodes, evenly among those that exceed the budget when every node runs once, and the worst of them."""
    profile = peak_profile(incumbent.indexed, range(incumbent.indexed.count))
    over = np.flatnonzero(profile > incumbent.budget_bytes)
    if not over.size:
        return [int(profile.argmax())]
    picks = over[np.linspace(0, over.size - 1, min(MOMENTS, over.size)).round().astype(np.int64)]
    return sorted({int(profile.argmax()), *picks.tolist()})


def _are_first_runs(order: list[int]) -> Mask:
    """Which places of an order are first runs: the nodes come in their own order there."""
    array = np.array(order)
    reached = np.array(list(accumulate(order, max)))
    return (array == reached) & (np.concatenate(([-1], reached[:-1])) < array)


def _missing_moments(order: list[int], excess: Integers, moments: set[int]) -> set[int]:
    """The worst first runs of the worst stretches that exceed the budget at first runs that are no moments."""
    first_runs = np.flatnonzero(_are_first_runs(order))
    stretches = groupby(first_runs, key=lambda place: excess[place] > 0 and order[place] not in moments)
    worst = [
        max((int(excess[place]), order[place]) for place in places) for exceeding, places in stretches if exceeding
    ]
    return {v for _, v in sorted(worst)[-ADDED:]}


def _excess_at_moments(order: list[int], excess: Integers, moments: list[int]) -> dict[int, int]:
    """For each moment the largest excess since the moment before."""
    reached = np.array(list(accumulate(order, max)))
    next_first_run = np.where(_are_first_runs(order), reached, reached + 1)  # the first run that is done or comes next
    excess_by_moment: dict[int, int] = {}
    for place in np.flatnonzero(excess > 0):
        k = min(int(np.searchsorted(moments, next_first_run[place])), len(moments) - 1)
        excess_by_moment[moments[k]] = max(excess_by_moment.get(moments[k], 0), int(excess[place]))
    return excess_by_moment
