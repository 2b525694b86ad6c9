"""The variables and rows of ``solvers.graph.intervals`` as a PuLP program."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pulp

from solvers.graph.liveness import IndexedGraph
from solvers.highs import InterruptibleHiGHS

Term = tuple[pulp.LpVariable, float]
Value = tuple[list[Term], float]  # terms and a constant

_BYTE_SCALE = 1e4  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 10 GB
_SECOND_SCALE = 1e3  # the unplanned seconds in the program's units
_FEASIBLE = 2  # HiGHS: kSolutionStatusFeasible


class IntervalsModel:
    """Stage t ends with the first run of node t; before it, earlier nodes run again in rising order.

    An interval of node i starts with a run of it. It covers stage t from the start where ``kept[t, i]``, and then up
    to the first of its readers' runs of that stage after which nothing in or after the stage needs it.

    Attributes:
        runs: ``[t, i]``, an interval of node i starts in stage t, for i < t (the first one of node t always does).
        kept: ``[t, i]``, an interval of node i reaches into stage t, for i < t.
        needed: ``[t, i, p]``, at the p-th reader of node i in stage t or later the output is needed.
        used: ``[t, k]``, bytes at the run of node k in stage t.
    """

    def __init__(self, indexed: IndexedGraph, budget_bytes: int, most_runs: int) -> None:
        self.indexed, self.count = indexed, indexed.count
        self.byte = _BYTE_SCALE / max(1, budget_bytes)
        self.room = (budget_bytes - indexed.graph.resident_bytes) * self.byte
        self.size = [float(size) * self.byte for size in indexed.output_bytes]
        self.program = pulp.LpProblem("intervals", pulp.LpMinimize)
        self._variables()
        self._objective()
        for i in range(self.count):
            self._at_most([(self.runs[t, i], 1.0) for t in range(i + 1, self.count)], most_runs - 1)
        for t in range(self.count):
            self._flow_rows(t)
            self._need_rows(t)
            self._byte_rows(t)

    def solve(self, time_limit_seconds: float) -> list[tuple[int, int]] | None:
        """Stage and node of every repeated run; None where HiGHS found no solution, within the time limit or at all.

        The number of threads is left to HiGHS: its scheduler is one per process and refuses to run
        with another number than it was started with.
        """
        # Without presolve: with it HiGHS 1.11 to 1.15.1 called wrong answers of ``solvers.chain.ilp``'s programs
        # optimal.
        limit = max(0.01, time_limit_seconds)
        self.program.solve(InterruptibleHiGHS(msg=False, timeLimit=limit, gapRel=1e-9, gapAbs=1e-7, presolve="off"))
        highs: Any = self.program.solverModel
        if highs.getInfo().primal_solution_status != _FEASIBLE:  # PuLP's status says "feasible" at any time limit
            return None
        return [place for place, variable in self.runs.items() if (variable.value() or 0.0) > 0.5]

    def _variables(self) -> None:
        add, n, readers = self.program.add_variable, self.count, self.indexed.readers
        pairs = [(t, i) for t in range(n) for i in range(t)]
        self.runs = {(t, i): add(f"run_{t}_{i}", 0, 1, pulp.LpBinary) for t, i in pairs}
        self.kept = {(t, i): add(f"kept_{t}_{i}", 0, 1, pulp.LpBinary) for t, i in pairs}
        self.here = {(t, i): [j for j in readers[i] if j <= t] for t in range(n) for i in range(t + 1)}
        self.needed = {
            (t, i, p): add(f"needed_{t}_{i}_{p}", 0, 1)
            for (t, i), here in self.here.items()
            for p in range(len(here))
            if t not in here  # what node t reads is needed throughout stage t
        }
        self.used = {(t, k): add(f"used_{t}_{k}", 0, self.room) for t in range(n) for k in range(t + 1)}

    def _objective(self) -> None:
        """Seconds of repeated runs; first runs are a constant."""
        second = _SECOND_SCALE / (self.indexed.graph.unplanned_seconds or 1.0)
        terms = [(x, float(self.indexed.seconds[i]) * second) for (_, i), x in self.runs.items()]
        self.program += pulp.LpAffineExpression(terms)

    def _flow_rows(self, t: int) -> None:
        """A run needs its inputs, what is kept was kept or made a stage earlier, and what is kept does not run."""
        for k in range(t + 1):
            for i in self.indexed.inputs[k]:
                self._rows_below(self._run(t, k), ([(self.runs[t, i], 1.0), (self.kept[t, i], 1.0)], 0.0))
        for i in range(t):
            self._at_most([(self.runs[t, i], 1.0), (self.kept[t, i], 1.0)], 1.0)
            if i < t - 1:
                self._rows_below(self._kept(t, i), ([(self.runs[t - 1, i], 1.0), (self.kept[t - 1, i], 1.0)], 0.0))

    def _need_rows(self, t: int) -> None:
        for i in range(t + 1):
            here = self.here[t, i]
            if t not in here:
                needs = [self._need(t, i, p) for p in range(len(here) + 1)]
                for p, j in enumerate(here):
                    self._rows_below(self._run(t, j), needs[p])
                for earlier, later in pairwise(needs):
                    self._rows_below(later, earlier)
            if i < t:
                self._rows_below(self._run(t, i), self._need(t, i, 0))

    def _byte_rows(self, t: int) -> None:
        """Bytes from run to run; transient bytes come on top of a run's own."""
        for k in range(t + 1):
            own = self._need(t, k, 0) if k < t else ([], 1.0)
            change = _times(own, self.size[k])
            if k:
                change = _plus(change, _times(self._freed_by(t, k - 1), -1.0))
                change = _plus(change, ([(self.used[t, k - 1], 1.0)], 0.0))
            else:
                change = _plus(change, ([(self.kept[t, i], self.size[i]) for i in range(t)], 0.0))
            if k < t:
                change = _plus(change, ([(self.kept[t, k], -self.size[k])], 0.0))
            terms, fixed = _plus(change, ([(self.used[t, k], -1.0)], 0.0))
            self.program += pulp.LpAffineExpression(_merged(terms)) == -fixed
            transient = float(self.indexed.transient_bytes[k]) * self.byte
            if transient:
                self._rows_below(
                    _plus(_times(self._run(t, k), transient), ([(self.used[t, k], 1.0)], 0.0)), ([], self.room)
                )

    def _freed_by(self, t: int, k: int) -> Value:
        """Bytes that go after the slot of node k in stage t: of inputs that nothing later needs."""
        total: Value = ([], 0.0)
        for i in self.indexed.inputs[k]:
            p = self.here[t, i].index(k)
            gone = _plus(self._need(t, i, p), _times(self._need(t, i, p + 1), -1.0))
            total = _plus(total, _times(gone, self.size[i]))
        return total

    def _run(self, t: int, k: int) -> Value:
        return ([], 1.0) if k == t else ([(self.runs[t, k], 1.0)], 0.0)

    def _kept(self, t: int, i: int) -> Value:
        return ([(self.kept[t, i], 1.0)], 0.0) if t < self.count else ([], 0.0)

    def _need(self, t: int, i: int, p: int) -> Value:
        here = self.here[t, i]
        if p < len(here):
            return ([], 1.0) if t in here else ([(self.needed[t, i, p], 1.0)], 0.0)
        return self._kept(t + 1, i)

    def _rows_below(self, less: Value, more: Value) -> None:
        terms, fixed = _plus(less, _times(more, -1.0))
        self._at_most(terms, -fixed)

    def _at_most(self, terms: Iterable[Term], most: float) -> None:
        merged = _merged(terms)
        if merged:
            self.program += pulp.LpAffineExpression(merged) <= most


def _times(value: Value, factor: float) -> Value:
    return [(x, c * factor) for x, c in value[0]], value[1] * factor


def _plus(a: Value, b: Value) -> Value:
    return [*a[0], *b[0]], a[1] + b[1]


def _merged(terms: Iterable[Term]) -> list[Term]:
    """One term per variable: an affine expression made from a list keeps only the last of two."""
    total: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0.0) + factor
    return [(x, c) for x, c in total.items() if c]
