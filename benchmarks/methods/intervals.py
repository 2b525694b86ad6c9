"""Moccasin's retention intervals, as a linear integer program for HiGHS.

Formulation: every node runs at most ``most_runs`` times; each run starts an interval that ends with the last read of
its output. The first runs keep the graph's order, and a repeated one may stand at its node's own place in any stage
between two of them. A linear program has no variable that is a time, so an interval is spelled out by the stages that
it reaches into, and within a stage by the last reader that needs it (``IntervalsModel``).
Guarantee: run to the end, the fastest of these schedules. They are not all schedules (see
``benchmarks.methods.checkmate``, whose stages these are), so nothing is bounded. Answers are checked against
the budget in exact bytes.
Complexity: O(n^2) binaries and O(n (n + m)) rows for n nodes with m inputs altogether, not the paper's O(n) integers;
exponential time. Units: bytes and seconds; inside the program both are scaled.

Paper: Bartan, Li, Teague, Lott, Dilkina, "Moccasin: efficient tensor rematerialization for neural networks" (2023),
section 2.
"""

from __future__ import annotations

import time
from itertools import pairwise

from benchmarks.methods.stages import fitting_order, with_end
from solvers.graph.orders import IndexedGraph
from solvers.problem.plain_data import check_size
from solvers.pulp_program import PulpProgram, Term, Terms, chosen, scaled

_BYTE_SCALE = 1e4  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 10 GB


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
        self.program = PulpProgram("intervals", budget_bytes, indexed.graph.unplanned_seconds, byte_scale=_BYTE_SCALE)
        self._indexed, self._count = indexed, indexed.count
        self._room = (budget_bytes - indexed.graph.resident_bytes) * self.program.byte
        self._size = [float(size) * self.program.byte for size in indexed.output_bytes]
        self._make_variables()
        self.program.minimise((x, float(indexed.seconds[i])) for (_, i), x in self.runs.items())
        for i in range(self._count):
            self.program.at_most([(self.runs[t, i], 1.0) for t in range(i + 1, self._count)], most_runs - 1)
        for t in range(self._count):
            self._flow_rows(t)
            self._need_rows(t)
            self._byte_rows(t)

    def solve(self, time_limit_seconds: float) -> list[tuple[int, int]] | None:
        """Stage and node of every repeated run; None where HiGHS found no solution, within the time limit or at all."""
        if not self.program.solve(time_limit_seconds).found:
            return None
        return [place for place, variable in self.runs.items() if chosen(variable)]

    def _make_variables(self) -> None:
        stages, readers, variable = range(self._count), self._indexed.readers, self.program.variable
        pairs = [(t, i) for t in stages for i in range(t)]
        self.runs = {pair: variable("run", *pair) for pair in pairs}
        self.kept = {pair: variable("kept", *pair) for pair in pairs}
        self._readers = {(t, i): [j for j in readers[i] if j <= t] for t in stages for i in range(t + 1)}
        self.needed = {
            (t, i, p): variable("needed", t, i, p, integral=False)
            for (t, i), readers in self._readers.items()
            for p in range(len(readers))
            if t not in readers  # what node t reads is needed throughout stage t
        }
        slots = [(t, k) for t in stages for k in range(t + 1)]
        self.used = {slot: variable("used", *slot, most=self._room, integral=False) for slot in slots}

    def _flow_rows(self, t: int) -> None:
        """A run needs its inputs, what is kept was kept or made a stage earlier, and what is kept does not run."""
        for k in range(t + 1):
            for i in self._indexed.inputs[k]:
                self.program.at_most([self._run(t, k), (self.runs[t, i], -1.0), (self.kept[t, i], -1.0)])
        for i in range(t):
            self.program.at_most([(self.runs[t, i], 1.0), (self.kept[t, i], 1.0)], 1.0)
            if i < t - 1:
                before = [(self.runs[t - 1, i], -1.0), (self.kept[t - 1, i], -1.0)]
                self.program.at_most([(self.kept[t, i], 1.0), *before])

    def _need_rows(self, t: int) -> None:
        for i in range(t + 1):
            readers = self._readers[t, i]
            if t not in readers:
                needs = [self._needed(t, i, p) for p in range(len(readers) + 1)]
                for p, j in enumerate(readers):
                    self.program.at_most([self._run(t, j), *scaled(needs[p], -1.0)])
                for earlier, later in pairwise(needs):
                    self.program.at_most([*later, *scaled(earlier, -1.0)])
            if i < t:
                self.program.at_most([self._run(t, i), *scaled(self._needed(t, i, 0), -1.0)])

    def _byte_rows(self, t: int) -> None:
        """Bytes from run to run; transient bytes come on top of a run's own."""
        for k in range(t + 1):
            made: Terms = self._needed(t, k, 0) if k < t else [(None, 1.0)]
            change = [*scaled(self._freed_by(t, k - 1), -1.0), *scaled(made, self._size[k])]
            if k:
                change.append((self.used[t, k - 1], 1.0))
            else:
                change += [(self.kept[t, i], self._size[i]) for i in range(t)]
            if k < t:
                change.append((self.kept[t, k], -self._size[k]))
            self.program.equal([*change, (self.used[t, k], -1.0)])
            if transient := float(self._indexed.transient_bytes[k]) * self.program.byte:
                self.program.at_most([(self._run(t, k)[0], transient), (self.used[t, k], 1.0)], self._room)

    def _freed_by(self, t: int, k: int) -> Terms:
        """Bytes that go after the slot of node k in stage t: of inputs that nothing later needs."""
        freed: Terms = []
        for i in self._indexed.inputs[k] if k >= 0 else ():
            p = self._readers[t, i].index(k)
            freed += scaled(self._needed(t, i, p), self._size[i])
            freed += scaled(self._needed(t, i, p + 1), -self._size[i])
        return freed

    def _run(self, t: int, k: int) -> Term:
        return (None if k == t else self.runs[t, k]), 1.0

    def _needed(self, t: int, i: int, p: int) -> Terms:
        """Whether node i is needed at its p-th reader of stage t or later; behind the last one, in a later stage."""
        readers = self._readers[t, i]
        if p < len(readers):
            return [(None if t in readers else self.needed[t, i, p], 1.0)]
        return [(self.kept[t + 1, i], 1.0)] if t + 1 < self._count else []


MOST_NODES = 500  # building the program takes 7 s at 200 nodes of a chain and grows with their square


def solve(
    indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0, most_runs: int = 2
) -> tuple[int, ...] | None:
    """The fastest order with at most ``most_runs`` intervals per node that is found within the time limit.

    Raises:
        ValueError: the graph is too large for the program to be built.

    >>> from solvers.problem.examples import late_reader
    >>> indexed = IndexedGraph(late_reader())
    >>> solve(indexed, 8), solve(indexed, 8, most_runs=1)
    ((0, 1, 2, 0, 3), None)
    """
    check_size("intervals", indexed.count, MOST_NODES, "nodes", "another method")
    deadline = time.monotonic() + time_limit_seconds
    model = IntervalsModel(with_end(indexed), budget_bytes, most_runs)
    repeated = model.solve(deadline - time.monotonic())
    if repeated is None:
        return None
    runs = sorted([*repeated, *((k, k) for k in range(indexed.count))])
    return fitting_order(indexed, [k for _, k in runs], budget_bytes)
