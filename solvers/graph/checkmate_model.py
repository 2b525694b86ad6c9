"""The variables and rows of ``solvers.graph.checkmate`` as a PuLP program, integral or relaxed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from solvers.graph.liveness import IndexedGraph
from solvers.highs import InterruptibleHiGHS

Term = tuple[pulp.LpVariable, float]
Values = NDArray[np.float64]

_BYTE_SCALE = 1e4  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 10 GB
_SECOND_SCALE = 1e3  # the unplanned seconds in the program's units
_FEASIBLE = 2  # HiGHS: kSolutionStatusFeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Values of R and S, shape (stages, nodes)."""

    runs: Values
    kept: Values


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
        self.indexed, self.count = indexed, indexed.count
        self.byte = _BYTE_SCALE / max(1.0, budget_bytes)
        self.room = (budget_bytes - indexed.graph.resident_bytes) * self.byte
        self.size = [float(size) * self.byte for size in indexed.output_bytes]
        self.kind = pulp.LpBinary if integral else pulp.LpContinuous
        self.program = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self._variables()
        self._objective()
        for t in range(self.count):
            self._flow_rows(t)
            self._free_rows(t)
            self._byte_rows(t)

    def solve(self, time_limit_seconds: float) -> Matrices | None:
        """Run HiGHS; None where it found no solution, within the time limit or at all.

        The number of threads is left to HiGHS: its scheduler is one per process and refuses to run
        with another number than it was started with.
        """
        # Without presolve: with it HiGHS 1.11 to 1.15.1 called wrong answers of ``solvers.chain.ilp``'s programs
        # optimal.
        presolve = "off" if self.kind == pulp.LpBinary else "choose"
        limit = max(0.01, time_limit_seconds)
        self.program.solve(InterruptibleHiGHS(msg=False, timeLimit=limit, gapRel=1e-9, gapAbs=1e-7, presolve=presolve))
        highs: Any = self.program.solverModel
        if highs.getInfo().primal_solution_status != _FEASIBLE:  # PuLP's status says "feasible" at any time limit
            return None
        values = Matrices(runs=np.eye(self.count), kept=np.zeros((self.count, self.count)))
        for variables, matrix in ((self.runs, values.runs), (self.kept, values.kept)):
            for place, variable in variables.items():
                matrix[place] = variable.value() or 0.0
        return values

    def _variables(self) -> None:
        pairs = [(t, i) for t in range(self.count) for i in range(t)]
        self.runs = {(t, i): self._variable("R", t, i) for t, i in pairs}
        self.kept = {(t, i): self._variable("S", t, i) for t, i in pairs}
        reads = [(i, k) for k, inputs in enumerate(self.indexed.inputs) for i in inputs if self.size[i]]
        self.freed = {(t, i, k): self._variable("FREE", t, i, k) for i, k in reads for t in range(k, self.count)}
        self.used = {
            (t, k): self.program.add_variable(f"U_{t}_{k}", 0, self.room)
            for t in range(self.count)
            for k in range(t + 1)
        }

    def _variable(self, name: str, *index: int) -> pulp.LpVariable:
        return self.program.add_variable("_".join([name, *map(str, index)]), 0, 1, self.kind)

    def _objective(self) -> None:
        """Seconds of repeated runs; first runs are a constant."""
        second = _SECOND_SCALE / (self.indexed.graph.unplanned_seconds or 1.0)
        terms = [(x, float(self.indexed.seconds[i]) * second) for (_, i), x in self.runs.items()]
        self.program += pulp.LpAffineExpression(terms)

    def _flow_rows(self, t: int) -> None:
        """(1b) a run needs its inputs, (1c) what is kept was kept or made in the stage before."""
        for k in range(t + 1):
            run, least = self._run(t, k)
            for i in self.indexed.inputs[k]:
                self._at_most([*run, (self.runs[t, i], -1), (self.kept[t, i], -1)], -least)
        for i in range(t - 1):
            self._at_most([(self.kept[t, i], 1), (self.runs[t - 1, i], -1), (self.kept[t - 1, i], -1)], 0)

    def _free_rows(self, t: int) -> None:
        """(6) FREE is 1 exactly where the run takes place and neither a later run nor the next stage needs the output.

        There is no FREE[t, k, k]: a run that nothing reads is in no optimum (section 4.8).
        """
        for k in range(t + 1):
            for i in self.indexed.inputs[k]:
                if not self.size[i]:
                    continue
                run, least = self._run(t, k)
                later = [self._run(t, j) for j in self.indexed.readers[i] if k < j <= t]
                kept = [(self.kept[t + 1, i], 1.0)] if t + 1 < self.count else []
                hazards = [(x, -c) for x, c in run] + [term for terms, _ in later for term in terms] + kept
                fixed = 1 - least + sum(one for _, one in later)
                most, free = 2 + len(later), self.freed[t, i, k]
                self._at_most([*hazards, (free, most)], most - fixed)
                self._at_most([(free, -1), *((x, -c) for x, c in hazards)], fixed - 1)

    def _byte_rows(self, t: int) -> None:
        """(2) to (5): bytes from run to run; transient bytes come on top of a run's own."""
        for k in range(t + 1):
            run, one = self._run(t, k)
            now = [(self.used[t, k], 1.0), *((x, -self.size[k]) for x, _ in run)]
            if k:
                freed = [(self.freed[t, i, k - 1], self.size[i]) for i in self.indexed.inputs[k - 1] if self.size[i]]
                now += [(self.used[t, k - 1], -1.0), *freed]
            else:
                now += [(self.kept[t, i], -self.size[i]) for i in range(t)]
            self.program += pulp.LpAffineExpression(now) == one * self.size[k]
            transient = float(self.indexed.transient_bytes[k]) * self.byte
            if transient:
                self._at_most([(self.used[t, k], 1.0), *((x, transient) for x, _ in run)], self.room - one * transient)

    def _run(self, t: int, k: int) -> tuple[list[Term], int]:
        """R[t, k] as terms and a constant: node t runs in stage t whatever happens."""
        return ([], 1) if k == t else ([(self.runs[t, k], 1.0)], 0)

    def _at_most(self, terms: Iterable[Term], most: float) -> None:
        expression = pulp.LpAffineExpression(list(terms))
        if expression:
            self.program += expression <= most
