"""The variables and rows of ``solvers.chain.ilp`` as a PuLP program, and the schedule that its values mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pulp

from solvers.highs import InterruptibleHiGHS
from solvers.problem.chain_schedule import Action, Schedule
from solvers.problem.solution import Problem

Term = tuple[pulp.LpVariable, float]

_BYTE_SCALE = 1e5  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 100 GB
_SECOND_SCALE = 1e3  # the unplanned step in the program's units
_FEASIBLE = 2  # HiGHS: kSolutionStatusFeasible


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What HiGHS found: a schedule (it may break the budget where the rows are loose) and its bound on seconds."""

    schedule: Schedule | None
    bound_seconds: float


class ChainModel:
    """One integer program; ``sweep`` chooses exact rows for rising phases, else the loose rows that bound everything.

    Phase t stands before the backward of stage t; index L is the first pass, whose own runs are ``kept[L, ...]``
    (first run keeps an option) or not, and whose second runs (loose rows only) are ``keep[L, ...]``, ``run[L, ...]``.

    Attributes:
        kept: ``[t, j, o]``, stage j is kept with option o as phase t starts.
        alive: ``[t, j]``, boundary j is alive as phase t starts.
        run, keep, redo: ``[t, k]``, ``[t, k, o]``, ``[t, o]``, the runs of phase t: without keeping, keeping, and
            directly before the backward.
        steady: ``[t, j]``, boundary j is there throughout phase t whatever the order of runs (loose rows only).
    """

    def __init__(self, problem: Problem, sweep: bool) -> None:
        self.stages, self.sweep = problem.chain.stages, sweep
        self.count = len(self.stages)
        self.byte = _BYTE_SCALE / max(1, problem.budget_bytes)
        self.second = _SECOND_SCALE / (problem.chain.unplanned_seconds or 1.0)
        self.room = problem.budget_bytes - problem.chain.resident_bytes
        self.residues = [0, *accumulate(stage.residue_bytes for stage in self.stages)]
        done = [0, *accumulate(stage.parameter_gradient_bytes for stage in self.stages)]
        self.gradients = [done[-1] - done[t + 1] + stage.gradient_bytes for t, stage in enumerate(self.stages)]
        self.impossible = done[-1] > self.room
        self.program = pulp.LpProblem("checkmate", pulp.LpMinimize)
        self.output_terms: dict[tuple[int, int, int, bool], pulp.LpVariable] = {}
        self._variables()
        self._objective()
        for t in range(self.count + 1):
            self._flow_rows(t)
        for t in range(self.count):
            self._first_run_row(t)
            self._phase_rows(t)

    def solve(self, time_limit_seconds: float) -> Outcome:
        """Run HiGHS; the bound is infinite where the program has no solution at all.

        The number of threads is left to HiGHS: its scheduler is one per process and refuses to run
        with another number than it was started with.
        """
        if self.impossible:
            return Outcome(schedule=None, bound_seconds=math.inf)
        # Without presolve: with it HiGHS 1.11 to 1.15.1 called answers of such programs optimal that CBC and the
        # exhaustive search beat; at 12 stages it is as fast without.
        solver = InterruptibleHiGHS(msg=False, timeLimit=time_limit_seconds, gapRel=1e-9, gapAbs=1e-7, presolve="off")
        status = self.program.solve(solver)
        if status == pulp.LpStatusInfeasible:
            return Outcome(schedule=None, bound_seconds=math.inf)
        highs: Any = self.program.solverModel
        info = highs.getInfo()
        found = info.primal_solution_status == _FEASIBLE  # PuLP's own status says "feasible" at any time limit
        first_runs = sum(stage.forward_seconds for stage in self.stages)  # not in the objective
        bound = max(0.0, info.mip_dual_bound / self.second + first_runs)
        return Outcome(schedule=self._schedule() if found else None, bound_seconds=bound)

    # variables and what they cost

    def _variables(self) -> None:
        n, options = self.count, [range(len(stage.options)) for stage in self.stages]
        phases = range(n if self.sweep else n + 1)
        free = [k for k in range(n) if self.stages[k].recomputable]
        self.kept = {
            (t, j, o): self._variable("kept", t, j, o)
            for t in range(n + 1)
            for j in range(min(t + 1, n))
            for o in options[j]
        }
        self.alive = {(t, j): self._variable("alive", t, j) for t in range(n + 1) for j in range(min(t, n - 1))}
        self.run = {(t, k): self._variable("run", t, k) for t in phases for k in free if k < t}
        self.keep = {
            (t, k, o): self._variable("keep", t, k, o) for t in phases for k in free if k <= t for o in options[k]
        }
        self.redo = {(t, o): self._variable("redo", t, o) for t in free for o in options[t]}
        loose = [] if self.sweep else range(n)
        self.steady = {(t, j): self._variable("steady", t, j) for t in loose for j in range(t)}

    def _variable(self, name: str, *index: int) -> pulp.LpVariable:
        return self.program.add_variable("_".join([name, *map(str, index)]), 0, 1, pulp.LpBinary)

    def _objective(self) -> None:
        stages, n = self.stages, self.count
        terms = [(x, stages[k].forward_seconds) for (_, k), x in self.run.items()]
        for (_, k, o), x in self.keep.items():
            terms.append((x, stages[k].options[o].forward_seconds))
        for (t, o), x in self.redo.items():
            terms.append((x, stages[t].options[o].recompute_seconds))
        for t, stage in enumerate(stages):
            for o, way in enumerate(stage.options):
                terms.append((self.kept[n, t, o], way.forward_seconds - stage.forward_seconds))
                terms += [(x, way.backward_seconds) for x in self._ways(t, o)]
        self.program += pulp.LpAffineExpression([(x, c * self.second) for x, c in _merged(terms)])

    def _ways(self, t: int, o: int) -> list[pulp.LpVariable]:
        """The variables of which one is 1 where stage t goes backward with option o."""
        found = [self.kept[t, t, o], self.keep.get((t, t, o)), self.redo.get((t, o))]
        return [x for x in found if x is not None]

    def _runs(self, t: int, k: int) -> list[pulp.LpVariable]:
        """The runs of stage k in phase t that make its boundary."""
        found = [self.run.get((t, k))]
        found += [self.keep.get((t, k, o)) for o in range(len(self.stages[k].options))]
        return [x for x in found if x is not None]

    def _all_runs(self, t: int, k: int) -> list[pulp.LpVariable]:
        return self._runs(t, k) + ([x for (at, _), x in self.redo.items() if at == t] if k == t else [])

    def _keeps(self, t: int, j: int) -> list[pulp.LpVariable]:
        return [self.kept[t, j, o] for o in range(len(self.stages[j].options))]

    # what follows from what

    def _flow_rows(self, t: int) -> None:
        add, n = self._at_most, self.count
        for j in range(min(t + 1, n)):
            add([*_plus(self._all_runs(t, j)), *_plus(self._keeps(t, j))], 1)
            if j and t < n:  # a run needs its input
                before = [self.alive[t, j - 1], *self._runs(t, j - 1)]
                add([*_plus(self._all_runs(t, j)), *_minus(before)], 0) if self._all_runs(t, j) else None
            if j:  # what is kept pins its input
                add([*_plus(self._keeps(t, j)), *_minus([self.alive[t, j - 1]])], 0)
                if not self.stages[j].linked:
                    self.alive[t, j - 1].lowBound = 1
        for j in range(t - 1):  # what is alive in the next phase was carried or made in this one
            add([(self.alive[t - 1, j], 1), (self.alive[t, j], -1), *_minus(self._runs(t, j))], 0)
        for j in range(min(t, n)):
            for o in range(len(self.stages[j].options)):
                made = [x for x in (self.kept[t, j, o], self.keep.get((t, j, o))) if x is not None]
                self._equal([(self.kept[t - 1, j, o], 1), *_minus(made)], 0) if t else None
        if t < n:
            self._equal(_plus([x for o in range(len(self.stages[t].options)) for x in self._ways(t, o)]), 1)
            self._steady_rows(t)
            if t:
                self._at_most(_minus([self.alive[t, t - 1], *self._runs(t, t - 1)]), -1)

    def _steady_rows(self, t: int) -> None:
        for j in range(t) if not self.sweep else ():
            stays = self.steady[t, j]
            if not self.stages[j + 1].linked:
                stays.lowBound = 1
            self._at_most([*_plus(self._keeps(t, j + 1)), (stays, -1)], 0)
            ends = [self.alive[t, j], *([self.alive[t - 1, j]] if j < t - 1 else [])]  # t - 1 itself ends at backward
            self._at_most([*_plus(ends), *_minus(self._runs(t, j)), (stays, -1)], len(ends) - 1)

    # bytes

    def _first_run_row(self, k: int) -> None:
        n, stage = self.count, self.stages[k]
        loss = stage.gradient_bytes if k == n - 1 else 0
        plain = max(stage.forward_peak_bytes, stage.boundary_bytes + stage.residue_bytes + loss)
        terms = [term for j in range(k) for term in self._kept_terms(n, j)]
        terms += [term for j in range(k - 1) for term in self._boundary_terms(n, j)]
        terms += [term for j in range(k) for term in self._negative_terms(n, j)]
        for o, way in enumerate(stage.options):
            peak = max(way.forward_peak_bytes, way.kept_bytes + stage.boundary_bytes + loss)
            terms.append((self.kept[n, k, o], peak - plain))
        self._fits(terms, self.residues[k] + self._input(k) + plain)
        if not self.sweep:
            self._second_run_row(k)

    def _second_run_row(self, k: int) -> None:
        """A stage run again before the first pass is over: what was kept before it is there, little else is certain."""
        n = self.count
        terms = [term for j in range(k + 1) for term in self._kept_terms(n, j)]
        terms += [term for j in range(k) for term in self._negative_terms(n, j)]
        for j in range(k - 1):  # inputs of kept stages
            terms += [(x, self.stages[j].boundary_bytes) for x in self._keeps(n, j + 1)]
        for (t, j, o), x in [*self.kept.items(), *self.keep.items()]:
            if t == n and j > k:
                terms.append((x, min(0, self.stages[j].options[o].kept_bytes)))
        self._fits([*terms, *self._run_terms(n, k)], self.residues[k + 1])

    def _phase_rows(self, t: int) -> None:
        base = self.residues[t + 1] + self.gradients[t]
        if t < self.count - 1:
            held = [term for j in range(t + 1) for term in self._kept_terms(t, j)]
            held += [term for j in range(t) for term in self._boundary_terms(t, j)]
            self._fits(held, base + self.stages[t].boundary_bytes)
        for k in range(t + 1):
            if self._all_runs(t, k):
                held = self._sweep_terms(t, k) if self.sweep else self._loose_terms(t, k)
                self._fits([*held, *self._run_terms(t, k)], base)
                if self.sweep:
                    self._after_row(t, k, base)
        self._backward_row(t, base - self.stages[t].residue_bytes)

    def _sweep_terms(self, t: int, k: int, own: bool = True) -> list[Term]:
        """What is alive as stage k runs in phase t, its input aside: earlier stages as they end, later as they are."""
        terms = [term for j in range(k) for term in self._kept_terms(t - 1, j)]
        terms += [term for j in range(k, t + 1) for term in self._kept_terms(t, j)]
        terms += [term for j in range(k - 1) for term in self._boundary_terms(t - 1, j)]
        terms += [term for j in range(k if own else k + 1, t) for term in self._boundary_terms(t, j)]
        outputs = enumerate(way.kept_output_bytes for way in self.stages[t].options)
        return terms + [(self.kept[t, t, o], size) for o, size in outputs]

    def _loose_terms(self, t: int, k: int) -> list[Term]:
        terms = [term for j in range(t + 1) for term in self._kept_terms(t, j)]
        terms += [term for j in range(t + 1) if j != k for term in self._negative_terms(t, j)]
        return terms + [term for j in range(t) if j != k - 1 for term in self._boundary_terms(t, j, steady=True)]

    def _run_terms(self, t: int, k: int) -> list[Term]:
        stage = self.stages[k]
        terms: list[Term] = [(x, self._input(k)) for x in self._all_runs(t, k)]
        if (t, k) in self.run:
            terms.append((self.run[t, k], stage.forward_peak_bytes))
        for o, way in enumerate(stage.options):
            if (t, k, o) in self.keep:
                terms.append((self.keep[t, k, o], way.forward_peak_bytes))
            if t == k and (t, o) in self.redo:
                terms.append((self.redo[t, o], way.recompute_peak_bytes - stage.residue_bytes))
        return terms

    def _after_row(self, t: int, k: int, base: int) -> None:
        """Right after the run of stage k: matters only where a forward's peak is below what it leaves."""
        stage = self.stages[k]
        leaves = [way.kept_bytes + stage.boundary_bytes - way.forward_peak_bytes for way in stage.options]
        if max(stage.boundary_bytes - stage.forward_peak_bytes, *leaves) <= 0:
            return
        terms = [*self._sweep_terms(t, k, own=False), *((x, self._input(k)) for x in self._all_runs(t, k))]
        terms += [(x, stage.boundary_bytes) for x in self._runs(t, k)]
        for o, way in enumerate(stage.options):
            terms.append((self.keep[t, k, o], way.kept_bytes - stage.residue_bytes))
        self._fits(terms, base)

    def _backward_row(self, t: int, base: int) -> None:
        terms = [term for j in range(t) for term in self._kept_terms(t - 1, j)]
        terms += [term for j in range(t - 1) for term in self._boundary_terms(t - 1, j)]
        for o, way in enumerate(self.stages[t].options):
            size = way.kept_bytes + self._output(t, o) + way.backward_peak_bytes
            terms += [(x, size) for x in self._ways(t, o)]
        self._fits(terms, base + self._input(t))

    def _kept_terms(self, t: int, j: int) -> list[Term]:
        stage = self.stages[j]
        return [(x, stage.options[o].kept_bytes - stage.residue_bytes) for o, x in enumerate(self._keeps(t, j))]

    def _negative_terms(self, t: int, j: int) -> list[Term]:
        """What runs of stage j in phase t, at a time unknown, may give back."""
        stage, terms = self.stages[j], []
        for o, way in enumerate(stage.options):
            saved = min(0, way.kept_bytes - stage.residue_bytes)
            made = [self.keep.get((t, j, o)), self.redo.get((t, o)) if t == j else None]
            terms += [(x, saved) for x in made if x is not None and saved]
        return terms if not self.sweep else []

    def _boundary_terms(self, t: int, j: int, steady: bool = False) -> list[Term]:
        """Boundary j, or where it is gone the part of it that stage j itself keeps."""
        alive = self.steady[t, j] if steady else self.alive[t, j]
        terms: list[Term] = [(alive, self.stages[j].boundary_bytes)]
        parts = [(o, self._output(j, o)) for o in range(len(self.stages[j].options))]
        return terms + [(self._beside(t, j, o, alive, steady), size) for o, size in parts if size]

    def _beside(self, t: int, j: int, o: int, alive: pulp.LpVariable, steady: bool) -> pulp.LpVariable:
        key = (t, j, o, steady)
        if key not in self.output_terms:
            self.output_terms[key] = self._variable("steadyless" if steady else "aliveless", t, j, o)
            self._at_most([(self.kept[t, j, o], 1), (alive, -1), (self.output_terms[key], -1)], 0)
        return self.output_terms[key]

    def _output(self, j: int, o: int) -> int:
        return min(self.stages[j].options[o].kept_output_bytes, self.stages[j].boundary_bytes)

    def _input(self, k: int) -> int:
        return self.stages[k - 1].boundary_bytes if k else 0

    # rows

    def _fits(self, terms: Iterable[Term], fixed: int) -> None:
        merged = [(x, size * self.byte) for x, size in _merged(terms) if size]
        if merged:
            self.program += pulp.LpAffineExpression(merged) <= (self.room - fixed) * self.byte
        elif fixed > self.room:
            self.impossible = True

    def _at_most(self, terms: Iterable[Term], most: float) -> None:
        self.program += pulp.LpAffineExpression(_merged(terms)) <= most

    def _equal(self, terms: Iterable[Term], value: float) -> None:
        self.program += pulp.LpAffineExpression(_merged(terms)) == value

    # the schedule

    def _schedule(self) -> Schedule | None:
        n = self.count
        if any(_chosen(x) for (t, *_), x in [*self.run.items(), *self.keep.items()] if t == n):
            return None  # a second run within the first pass: only the loose rows allow it, and they do not say when
        return _Writer(self).schedule()


class _Writer:
    """Turns values into actions: runs in rising order, everything freed as soon as nobody needs it."""

    def __init__(self, model: ChainModel) -> None:
        self.model = model
        self.actions: list[Action] = []
        self.here: set[int] = set()

    def schedule(self) -> Schedule:
        model, n = self.model, self.model.count
        for k in range(n):
            self._forward(k, self._option([model.kept[n, k, o] for o in range(len(model.stages[k].options))]))
            self._free({j for j in self.here if j != k and not _chosen(model.alive[n - 1, j])})
        for t in reversed(range(n)):
            self._phase(t)
        return Schedule(actions=tuple(self.actions))

    def _phase(self, t: int) -> None:
        model = self.model
        self._free({j for j in self.here if not self._needed(t, -1, j)})
        for k in range(t + 1):
            options = range(len(model.stages[k].options))
            keep = self._option([model.keep.get((t, k, o)) for o in options])
            redo = self._option([model.redo.get((t, o)) for o in options]) if k == t else None
            if redo is not None:
                self.actions.append(Action("recompute", k, redo))
            elif keep is not None or _chosen(model.run.get((t, k))):
                self._forward(k, keep)
            self._free({j for j in self.here if not self._needed(t, k, j)})
        self.actions.append(Action("backward", t))
        self._free({j for j in self.here if j == t - 1 and not self._carried(t - 1, j)})

    def _needed(self, t: int, position: int, j: int) -> bool:
        """Whether boundary j is read after the run at ``position`` of phase t, or carried on."""
        read = position < j + 1 <= t and any(_chosen(x) for x in self.model._all_runs(t, j + 1))
        return j == t - 1 or read or self._carried(t - 1, j)

    def _carried(self, t: int, j: int) -> bool:
        return (t, j) in self.model.alive and _chosen(self.model.alive[t, j])

    def _forward(self, k: int, option: int | None) -> None:
        self.actions.append(Action("forward", k, option))
        self.here.add(k)

    def _option(self, variables: list[pulp.LpVariable | None]) -> int | None:
        return next((o for o, x in enumerate(variables) if _chosen(x)), None)

    def _free(self, boundaries: set[int]) -> None:
        for j in sorted(boundaries):
            self.actions.append(Action("free", j))
        self.here -= boundaries


def _chosen(variable: pulp.LpVariable | None) -> bool:
    return variable is not None and (variable.value() or 0) > 0.5


def _plus(variables: Iterable[pulp.LpVariable]) -> list[Term]:
    return [(x, 1) for x in variables]


def _minus(variables: Iterable[pulp.LpVariable]) -> list[Term]:
    return [(x, -1) for x in variables]


def _merged(terms: Iterable[Term]) -> list[Term]:
    """One term per variable: an affine expression made from a list keeps only the last of two."""
    total: dict[pulp.LpVariable, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0) + factor
    return list(total.items())
