"""The moments program: which outputs are alive at some first runs of a graph, and what runs again between them.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from solvers.arrays import Floats, Mask
from solvers.graph.liveness import IndexedGraph, first_runs, last_reads, runs_for
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
