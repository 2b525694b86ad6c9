"""Checkmate as published: an integer program over frontier-advancing stages, and its relaxation rounded.

Formulation: stage t ends with the first run of node t; before it, earlier nodes run again in rising order, each at
most once. R says which, S what is alive as a stage starts, FREE what is freed after which run, U the bytes at each
run (``CheckmateModel``). ``round_relaxation`` solves the same program with fractions for a budget
less an allowance, rounds S (at a threshold, or up with its own value as the chance), and completes R with the fewest
runs.
Guarantee: ``solve`` run to the end is the fastest of these schedules, but schedules that run a node twice between
two first runs, or out of order, are left out: rarely, one of them is faster, or the only one that fits. So neither
function bounds all schedules. Rounding guarantees nothing; every answer is checked against the budget in exact bytes.
Complexity: O(n (n + m)) variables and rows for n nodes with m inputs altogether; the integer program takes
exponential time. Units: bytes and seconds; inside the program both are scaled.

Paper: Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (2020), sections 4
(4.6 for stages, 4.8 for the variables left out) and 5 (the relaxation, its two phases, and the allowance).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.methods.stages import fitting_order, with_end
from solvers.arrays import Floats, Mask
from solvers.graph.orders import IndexedGraph, seconds_of
from solvers.problem.plain_data import check_size
from solvers.pulp_program import PulpProgram, Term, scaled

_BYTE_SCALE = 1e4  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 10 GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Values of R and S, shape (stages, nodes)."""

    runs: Floats
    kept: Floats


class CheckmateModel:
    """Stage t ends with the first run of node t; within a stage nodes run in rising order, each at most once.

    Nothing has to be alive after the last stage: give a graph with several outputs a last node that reads them all.

    Attributes:
        runs: R, ``[t, i]``: node i runs in stage t, for i < t (node t always does).
        kept: S, ``[t, i]``: the output of node i is alive as stage t starts, for i < t.
        freed: FREE, ``[t, i, k]``: in stage t the output of node i is freed after the run of k, which reads it.
        used: U, ``[t, k]``: bytes after the run of node k in stage t, before what it read is freed.
    """

    def __init__(self, indexed: IndexedGraph, budget_bytes: float, integral: bool = True) -> None:
        self.program = PulpProgram("checkmate", budget_bytes, indexed.graph.unplanned_seconds, byte_scale=_BYTE_SCALE)
        self._indexed, self._count, self._integral = indexed, indexed.count, integral
        self._room = (budget_bytes - indexed.graph.resident_bytes) * self.program.byte
        self._size = [float(size) * self.program.byte for size in indexed.output_bytes]
        self._make_variables()
        self.program.minimise((x, float(indexed.seconds[i])) for (_, i), x in self.runs.items())
        for t in range(self._count):
            self._flow_rows(t)
            self._free_rows(t)
            self._byte_rows(t)

    def solve(self, time_limit_seconds: float) -> Matrices | None:
        """Run HiGHS; None where it found no solution, within the time limit or at all."""
        if not self.program.solve(time_limit_seconds, presolve=not self._integral).found:
            return None
        values = Matrices(runs=np.eye(self._count), kept=np.zeros((self._count, self._count)))
        for variables, matrix in ((self.runs, values.runs), (self.kept, values.kept)):
            for place, variable in variables.items():
                matrix[place] = variable.value() or 0.0
        return values

    def _make_variables(self) -> None:
        stages, whole, variable = range(self._count), self._integral, self.program.variable
        pairs = [(t, i) for t in stages for i in range(t)]
        self.runs = {(t, i): variable("R", t, i, integral=whole) for t, i in pairs}
        self.kept = {(t, i): variable("S", t, i, integral=whole) for t, i in pairs}
        reads = [(i, k) for k, inputs in enumerate(self._indexed.inputs) for i in inputs if self._size[i]]
        frees = [(t, i, k) for i, k in reads for t in range(k, self._count)]
        self.freed = {free: variable("FREE", *free, integral=whole) for free in frees}
        slots = [(t, k) for t in stages for k in range(t + 1)]
        self.used = {slot: variable("U", *slot, most=self._room, integral=False) for slot in slots}

    def _flow_rows(self, t: int) -> None:
        """(1b) a run needs its inputs, (1c) what is kept was kept or made in the stage before."""
        for k in range(t + 1):
            for i in self._indexed.inputs[k]:
                self.program.at_most([self._run(t, k), (self.runs[t, i], -1), (self.kept[t, i], -1)])
        for i in range(t - 1):
            self.program.at_most([(self.kept[t, i], 1), (self.runs[t - 1, i], -1), (self.kept[t - 1, i], -1)])

    def _free_rows(self, t: int) -> None:
        """(6) FREE is 1 exactly where the run takes place and neither a later run nor the next stage needs the output.

        There is no FREE[t, k, k]: a run that nothing reads is in no optimum (section 4.8).
        """
        for k in range(t + 1):
            for i in self._indexed.inputs[k]:
                if not self._size[i]:
                    continue
                later = [self._run(t, j) for j in self._indexed.readers[i] if k < j <= t]
                kept = [(self.kept[t + 1, i], 1.0)] if t + 1 < self._count else []
                hazards = [(None, 1.0), self._run(t, k, -1.0), *later, *kept]
                most, free = 2 + len(later), self.freed[t, i, k]
                self.program.at_most([*hazards, (free, most)], most)
                self.program.at_most([(free, -1), *scaled(hazards, -1.0)], -1)

    def _byte_rows(self, t: int) -> None:
        """(2) to (5): bytes from run to run; transient bytes come on top of a run's own."""
        for k in range(t + 1):
            change = [(self.used[t, k], 1.0), self._run(t, k, -self._size[k])]
            if k:
                inputs = [i for i in self._indexed.inputs[k - 1] if self._size[i]]
                freed = [(self.freed[t, i, k - 1], self._size[i]) for i in inputs]
                self.program.equal([*change, (self.used[t, k - 1], -1.0), *freed])
            else:
                self.program.equal([*change, *((self.kept[t, i], -self._size[i]) for i in range(t))])
            if transient := float(self._indexed.transient_bytes[k]) * self.program.byte:
                self.program.at_most([(self.used[t, k], 1.0), self._run(t, k, transient)], self._room)

    def _run(self, t: int, k: int, factor: float = 1.0) -> Term:
        """R[t, k] times a factor: node t runs in stage t whatever happens."""
        return (None if k == t else self.runs[t, k]), factor


MOST_NODES = 500  # building the program takes 3 s at 200 nodes of a chain and grows with their square
ALLOWANCES = (0.1, 0.0, 0.2)  # the paper's own first
_THRESHOLDS = 4  # random ones beside 0.5
_DRAWS = 16  # random roundings; the paper found them worse than thresholds
_WHOLE = 1e-6  # HiGHS's tolerance: how far below its value a fraction may come back


def solve(indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0) -> tuple[int, ...] | None:
    """The fastest order of frontier-advancing stages found within the time limit; None where none is found.

    Raises:
        ValueError: the graph is too large for the program to be built.

    >>> from solvers.problem.examples import late_reader
    >>> solve(IndexedGraph(late_reader()), 8)
    (0, 1, 2, 0, 3)
    """
    check_size("checkmate", indexed.count, MOST_NODES, "nodes", "another method")
    deadline, ended = time.monotonic() + time_limit_seconds, with_end(indexed)
    model = CheckmateModel(ended, budget_bytes)
    values = model.solve(deadline - time.monotonic())
    return fitting_order(indexed, _order(indexed, values.runs > 0.5), budget_bytes) if values else None


def round_relaxation(
    indexed: IndexedGraph, budget_bytes: int, time_limit_seconds: float = 60.0, seed: int = 0
) -> tuple[int, ...] | None:
    """The fastest order that fits among those rounded from the relaxation; None where none fits.

    Raises:
        ValueError: the graph is too large for the program to be built.
    """
    check_size("checkmate", indexed.count, MOST_NODES, "nodes", "another method")
    deadline, ended = time.monotonic() + time_limit_seconds, with_end(indexed)
    rng = np.random.default_rng(seed)
    best: tuple[float, tuple[int, ...] | None] = (math.inf, None)
    for allowance in ALLOWANCES:
        left = deadline - time.monotonic()
        values = CheckmateModel(ended, (1 - allowance) * budget_bytes, integral=False).solve(left) if left > 0 else None
        for kept in _roundings(values, rng) if values else ():
            order = fitting_order(indexed, _order(indexed, _fewest_runs(ended, kept)), budget_bytes)
            if order is not None:
                best = min(best, (seconds_of(indexed, order), order))
    return best[1]


def _roundings(values: Matrices, rng: np.random.Generator) -> Iterator[Mask]:
    for threshold in (0.5, *rng.uniform(0.05, 0.95, _THRESHOLDS)):
        yield values.kept >= threshold - _WHOLE
    for _ in range(_DRAWS):
        yield values.kept > rng.uniform(size=values.kept.shape)


def _fewest_runs(indexed: IndexedGraph, kept: Mask) -> Mask:
    """R from S: what a stage's own runs and the next stage need and the stage does not start with.

    Stages from the last on, since what a stage keeps and nobody makes before it has to be run there.
    """
    count = indexed.count
    runs = np.eye(count, dtype=bool)
    for t in reversed(range(count)):
        if t + 1 < count:
            runs[t, :t] |= kept[t + 1, :t] & ~kept[t, :t]
        for k in range(t, -1, -1):
            if runs[t, k]:
                inputs = list(indexed.inputs[k])
                runs[t, inputs] |= ~kept[t, inputs]
    return runs


def _order(indexed: IndexedGraph, runs: Mask) -> list[int]:
    """The runs of a matrix of stages, without the end node."""
    return [int(k) for row in runs for k in np.flatnonzero(row[: indexed.count])]
