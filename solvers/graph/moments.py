"""Bounds and orders by the moments program, which counts memory at some first runs: few at first, then more.

Formulation: a moment is the first run of a node at which memory is counted. The program at a few moments is a
relaxation of the whole problem. Its order is replayed in exact bytes. Where that exceeds the budget at a first run, the
run becomes a moment; where it exceeds it between moments (what runs again needs room itself), the budget at the next
moment is lowered by the excess for the next round. Rounds with a lowered budget give orders, rounds without give
bounds.

Guarantee: the bound holds for every schedule of the graph; an order equal to it is optimal. Every order is exact.
Complexity: each round is an integer program with O(V K) binaries, which HiGHS solves in 0.1 to 10 seconds where V is
up to 2,600 and K about 4 to 12 (``benchmarks.solvers``); a round that runs out of time gives the bound it has reached.
Units: bytes and seconds.
Source: own combination of the stages of Jain et al., "Checkmate" (2020), section 4, with constraint generation.

The program (``MomentsProgram``).

Formulation: a *moment* is the first run of a node; moments cut the first runs into intervals. For every node v that
may run again and every interval k that can still need it, ``held[k, v]`` says that v is alive when interval k starts
and ``rerun[k, v]`` that it runs again in it. What is held was held or made before; what a first run of the interval
reads is held or made in it; what runs again finds its inputs held or made; at a moment what is held beyond it, what
the node there reads, makes and needs beside has to fit the budget. Minimised are the seconds of what runs again.

Two groups of nodes: those of ``rerunnable`` are modelled as above. For the others, the coarse ones, each gap between
two needs in which the output is not alive costs at least one run of their own.

Guarantee: every schedule gives a solution of the program, so its optimum bounds all schedules within the budget,
whatever the moments are. Not every solution is a schedule: memory between the moments is left out. Orders read from
solutions are therefore checked against the exact profile, and moments are added where that exceeds the budget.
Complexity: O(V K) variables and O((V + E) K) rows for K moments. Units: bytes and seconds.

Source: the stages of Jain et al., "Checkmate" (2020), section 4.3, thinned out to chosen stages.

The local search (``NeighbourhoodSearch``) solves a part of the best order again by the program, the rest stays.

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

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise

import numpy as np

from solvers.arrays import Floats, Integers, Mask
from solvers.graph.orders import Incumbent, IndexedGraph, first_runs, fits, last_reads, peak_profile, runs_for
from solvers.highs import Program

_SCALE = 1e4  # what all first runs cost together in the program: far above HiGHS's absolute tolerances


class MomentsProgram:
    """The program for one graph, budget and list of moments.

    Attributes:
        program: to solve; its objective is the whole time, in units of ``unit_seconds``.
        held, rerun: variables by (interval, node).
        kept: of the coarse nodes, variables by (node, the need that ends a gap).
        interval_ends: the last node of every interval; one more interval follows the last first run.
    """

    def __init__(
        self,
        indexed: IndexedGraph,
        budget_bytes: int,
        moments: Sequence[int],
        rerunnable: Mask,
        reserved_bytes: Sequence[int] | None = None,
    ) -> None:
        """``reserved_bytes``: per moment what the budget is lowered by there; with it the optimum bounds nothing."""
        self.indexed = indexed
        self.program = Program()
        self.unit_seconds = (float(indexed.seconds.sum()) or 1.0) / _SCALE
        self.program.offset = float(indexed.seconds.sum()) / self.unit_seconds
        self.interval_ends = sorted({*moments, indexed.count - 1})
        self._reserved = dict(zip(moments, reserved_bytes or [0] * len(moments), strict=True))
        self._interval = np.searchsorted(self.interval_ends, np.arange(indexed.count))
        self._budget_bytes = budget_bytes
        self._rerunnable = rerunnable
        self.held: dict[tuple[int, int], int] = {}
        self.rerun: dict[tuple[int, int], int] = {}
        self.kept: dict[tuple[int, int], int] = {}
        self._coarse_terms: list[list[tuple[int, float]]] = [[] for _ in self.interval_ends]
        self._make_variables()
        self._make_coarse_nodes()
        for k in range(len(self.interval_ends)):
            self._make_rows(k)
        self._make_end_rows()

    def _needed_until(self) -> list[int]:
        """Per node the last interval in which it can be needed."""
        last_interval = [len(self.interval_ends) if output else -1 for output in self.indexed.is_output]
        for v in reversed(range(self.indexed.count)):
            for r in self.indexed.readers[v]:
                last_interval[v] = max(
                    last_interval[v], int(self._interval[r]), last_interval[r] if self._rerunnable[r] else -1
                )
        return last_interval

    def _make_variables(self) -> None:
        program, last_interval = self.program, self._needed_until()
        for v in np.flatnonzero(self._rerunnable):
            cost = float(self.indexed.seconds[v]) / self.unit_seconds
            for k in range(int(self._interval[v]) + 1, last_interval[v] + 1):
                self.held[k, int(v)] = program.variable()
                self.rerun[k, int(v)] = program.variable(cost=cost)

    def _make_coarse_nodes(self) -> None:
        """Nodes that are not modelled in full: in each gap between needs the output is held, or costs one run."""
        indexed, program = self.indexed, self.program
        moments = np.array(sorted(self._reserved))
        for v in np.flatnonzero(~self._rerunnable & (indexed.output_bytes > 0)):
            cost, share = float(indexed.seconds[v]) / self.unit_seconds, self._share(int(indexed.output_bytes[v]))
            needs = [int(v), *indexed.readers[v], *([indexed.count] if indexed.is_output[v] else [])]
            for before, after in pairwise(needs):
                inside = moments[np.searchsorted(moments, before + 1) : np.searchsorted(moments, after)]
                if inside.size:
                    kept = program.variable(cost=-cost)
                    program.offset += cost
                    self.kept[int(v), after] = kept
                    for moment in inside:
                        self._coarse_terms[self._interval[moment]].append((kept, share))

    def _share(self, size_bytes: int) -> float:
        return size_bytes / max(1, self._budget_bytes)

    def _make_rows(self, k: int) -> None:
        program, indexed = self.program, self.indexed
        start = self.interval_ends[k - 1] + 1 if k else 0
        for u in {u for t in range(start, self.interval_ends[k] + 1) for u in indexed.inputs[t]}:
            if (k, u) in self.held:
                program.row([(self.held[k, u], 1.0), (self.rerun[k, u], 1.0)], lower=1.0)
        for v in np.flatnonzero(self._rerunnable[: self.interval_ends[k] + 1]):
            self._make_node_rows(k, int(v))
        if self.interval_ends[k] in self._reserved:
            self._make_memory_row(k, self.interval_ends[k])

    def _make_end_rows(self) -> None:
        """After the last first run outputs may run again once more, and have to be alive."""
        k = len(self.interval_ends)
        for v in np.flatnonzero(self._rerunnable):
            if (k, int(v)) not in self.held:
                continue
            self._make_node_rows(k, int(v))
            if self.indexed.is_output[v]:
                self.program.row([(self.held[k, int(v)], 1.0), (self.rerun[k, int(v)], 1.0)], lower=1.0)

    def _make_node_rows(self, k: int, v: int) -> None:
        now, run, later = self.held.get((k, v)), self.rerun.get((k, v)), self.held.get((k + 1, v))
        if now is None or run is None:
            return
        if later is not None:
            self.program.row([(later, 1.0), (now, -1.0), (run, -1.0)], upper=0.0)
        for u in self.indexed.inputs[v]:
            if (k, u) in self.held:
                self.program.row([(run, 1.0), (self.held[k, u], -1.0), (self.rerun[k, u], -1.0)], upper=0.0)

    def _make_memory_row(self, k: int, moment: int) -> None:
        indexed = self.indexed
        room = self._budget_bytes - int(indexed.working_bytes[moment]) - self._reserved[moment]
        inputs = {*indexed.inputs[moment], moment}
        terms = [
            (self.held[k + 1, int(v)], self._share(int(indexed.output_bytes[v])))
            for v in np.flatnonzero(self._rerunnable[:moment] & (indexed.output_bytes[:moment] > 0))
            if (k + 1, int(v)) in self.held and int(v) not in inputs
        ]
        self.program.row(terms + self._coarse_terms[k], upper=room / max(1, self._budget_bytes))

    def hold_coarse(self) -> None:
        """Hold the coarse nodes throughout, as an order read from a solution does."""
        for variable in self.kept.values():
            self.program.fix(variable, 1.0)

    def dropped_coarse(self, values: Floats) -> set[int]:
        """The coarse nodes that are not held in some gap."""
        return {v for (v, _), variable in self.kept.items() if values[variable] < 0.5}

    def encode(self, order: Sequence[int]) -> Floats:
        """An order of runs as a solution: what it holds at the moments, and what it runs again between them."""
        values = np.zeros(len(self.program.costs))
        values[list(self.kept.values())] = 1.0
        last_read, first_run = last_reads(self.indexed, order), first_runs(order)
        stops = [first_run[end] for end in self.interval_ends]
        for p, v in enumerate(order):
            interval = int(np.searchsorted(stops, p))
            for k in range(interval + 1, int(np.searchsorted(stops, last_read[p])) + 1):
                if (k, v) in self.held:
                    values[self.held[k, v]] = 1.0
            if p != first_run[v] and (interval, v) in self.rerun:
                values[self.rerun[interval, v]] = 1.0
        return values

    def order(self, values: Floats) -> list[int]:
        """An order of runs that holds at the moments what a solution holds, and runs again only what is then missing.

        Between moments everything is run as late as possible.
        """
        held = {key for key, variable in self.held.items() if values[variable] > 0.5}
        held_after: list[set[int]] = [set() for _ in range(len(self.interval_ends) + 1)]
        for k, v in held:
            held_after[k].add(v)
        alive: set[int] = set()
        order: list[int] = []
        for k, end in enumerate(self.interval_ends):
            for t in range(self.interval_ends[k - 1] + 1 if k else 0, end + 1):
                wanted = list(self.indexed.inputs[t])
                if t == end:
                    wanted += sorted(held_after[k + 1] - {t})
                for u in wanted:
                    order += runs_for(self.indexed, alive, u)
                order.append(t)
                alive.add(t)
            alive = {v for v in alive if v in held_after[k + 1] or not self._rerunnable[v]}
        for v in np.flatnonzero(self.indexed.is_output):
            order += runs_for(self.indexed, alive, int(v))
        return order


MOMENTS = 4  # to start with: at 400 to 2,600 nodes optimal in 1 to 3 s where a dozen takes 8 to more than 20 s
ADDED = 3  # moments a round: the worst ones; a round with more takes longer than several with few
ROUND_GAP = 0.3  # share of the gap asked for that one round may leave
_TRUST = 1e-7  # relative: HiGHS's tolerances must not lift a bound above an optimum
PROMOTED_NODES = 300  # up to here the program stays small enough when late nodes are modelled in full
_EXTRA = 1e-3  # of the budget, kept free in addition to an excess: the next order differs a little


class MomentSearch:
    """The rounds on one search; ``step`` makes one round, ``finished`` says that no further one would help."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self.rerunnable = incumbent.indexed.rerunnable.copy()
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


def first_moments(incumbent: Incumbent) -> list[int]:
    """A few nodes, evenly among those that exceed the budget when every node runs once, and the worst of them."""
    profile = peak_profile(incumbent.indexed, range(incumbent.indexed.count))
    over = np.flatnonzero(profile > incumbent.budget_bytes)
    if not over.size:
        return [int(profile.argmax())]
    picks = over[np.linspace(0, over.size - 1, min(MOMENTS, over.size)).round().astype(np.int64)]
    return sorted({int(profile.argmax()), *picks.tolist()})


def _are_first_runs(order: list[int]) -> Mask:
    """The places of an order that are first runs: the nodes come in their own order there."""
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


FEWEST_MOMENTS = 12  # for a window of all nodes; smaller windows have more: orders are then read more exactly
MOST_PAIRS = 30_000  # of a moment and a node: building the program takes about a second (1,000 nodes at 30 moments)
ROUND_SECONDS = 4.0  # a window that takes longer is too large
_FIRST_SHARE = 0.5  # of the nodes that may run again, free in the first round
_REPAIRS = 3  # rounds with a lower budget after an order that does not fit


class NeighbourhoodSearch:
    """Rounds on one search that has an order; ``step`` makes one."""

    def __init__(self, incumbent: Incumbent) -> None:
        self.incumbent = incumbent
        self.rerunnable = incumbent.indexed.rerunnable
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
