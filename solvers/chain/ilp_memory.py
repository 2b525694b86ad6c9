"""The rows of ``solvers.chain.ilp`` that keep the bytes alive at any time within the budget."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain

import pulp

from solvers.chain.ilp_variables import PhaseVariables
from solvers.problem.solution import Problem
from solvers.pulp_program import PulpProgram, Terms, times


class MemoryRows:
    """Writes the rows into a program: the first run of every stage, the phases' starts and runs, and the backwards.

    What is held when stages run is known to the action in phases whose runs rise (``sweep``). In the loose program it
    is what is there whatever the order of the runs.
    """

    def __init__(self, program: PulpProgram, problem: Problem, variables: PhaseVariables, sweep: bool) -> None:
        self._program, self._variables, self._sweep = program, variables, sweep
        self._stages = stages = problem.chain.stages
        self._count = count = len(stages)
        self._room = problem.budget_bytes - problem.chain.resident_bytes
        self._residues = [0, *accumulate(stage.residue_bytes for stage in stages)]
        done = [0, *accumulate(stage.parameter_gradient_bytes for stage in stages)]
        self._gradients = [done[-1] - done[t + 1] + stage.gradient_bytes for t, stage in enumerate(stages)]
        self._kept = {(t, j): self._kept_bytes(t, j) for t in range(count + 1) for j in range(min(t + 1, count))}
        self._boundaries: dict[tuple[int, int, bool], Terms] = {}
        program.fit([], self._room - done[-1])  # all gradients are there at the end
        for t in range(count):
            self._first_run(t)
            self._phase(t)

    def _fit(self, parts: Iterable[Terms], fixed_bytes: int) -> None:
        self._program.fit(chain.from_iterable(parts), self._room - fixed_bytes)

    # Rows

    def _first_run(self, k: int) -> None:
        last, stage = self._count, self._stages[k]
        loss_bytes = stage.gradient_bytes if k == last - 1 else 0
        dropped = max(stage.forward_peak_bytes, stage.boundary_bytes + stage.residue_bytes + loss_bytes)
        kept = [max(o.forward_peak_bytes, o.kept_bytes + stage.boundary_bytes + loss_bytes) for o in stage.options]
        parts = [self._kept[last, j] for j in range(k)]
        parts += [self._boundary(last, j) for j in range(k - 1)]
        parts += [self._freed_by_runs(last, j) for j in range(k)]
        parts.append([(self._variables.kept[last, k, o], peak - dropped) for o, peak in enumerate(kept)])
        self._fit(parts, self._residues[k] + self._input_bytes(k) + dropped)
        if not self._sweep:
            self._second_run(k)

    def _second_run(self, k: int) -> None:
        """A stage run again before the first pass is over: what was kept before it is there, little else is certain."""
        last, variables = self._count, self._variables
        parts = [self._kept[last, j] for j in range(k + 1)]
        parts += [self._freed_by_runs(last, j) for j in range(k)]
        for j in range(k - 1):  # inputs of kept stages
            parts.append(times(variables.kept_any(last, j + 1), self._stages[j].boundary_bytes))
        for runs in (variables.kept, variables.keep):
            later = [(x, self._stages[j].options[o].kept_bytes) for (t, j, o), x in runs.items() if t == last and j > k]
            parts.append([(x, min(0, size)) for x, size in later])
        self._fit([*parts, self._run(last, k)], self._residues[k + 1])

    def _phase(self, t: int) -> None:
        held_bytes = self._residues[t + 1] + self._gradients[t]
        if t < self._count - 1:
            parts = [self._kept[t, j] for j in range(t + 1)]
            parts += [self._boundary(t, j) for j in range(t)]
            self._fit(parts, held_bytes + self._stages[t].boundary_bytes)
        for k in range(t + 1):
            if self._variables.runs(t, k):
                alive = self._alive_in_sweep(t, k) if self._sweep else self._alive_in_any_order(t, k)
                self._fit([*alive, self._run(t, k)], held_bytes)
                if self._sweep:
                    self._after_run(t, k, held_bytes)
        self._backward(t, held_bytes - self._stages[t].residue_bytes)

    def _after_run(self, t: int, k: int, held_bytes: int) -> None:
        """Right after the run of stage k: matters only where a forward's peak is below what it leaves."""
        stage, variables = self._stages[k], self._variables
        leaves = [option.kept_bytes + stage.boundary_bytes - option.forward_peak_bytes for option in stage.options]
        if max(stage.boundary_bytes - stage.forward_peak_bytes, *leaves) <= 0:
            return
        parts = self._alive_in_sweep(t, k, boundary=False)
        parts.append(times(variables.runs(t, k), self._input_bytes(k)))
        parts.append(times(variables.forwards(t, k), stage.boundary_bytes))
        kept = [option.kept_bytes - stage.residue_bytes for option in stage.options]
        parts.append([(variables.keep[t, k, o], size) for o, size in enumerate(kept)])
        self._fit(parts, held_bytes)

    def _backward(self, t: int, held_bytes: int) -> None:
        parts = [self._kept[t - 1, j] for j in range(t)]
        parts += [self._boundary(t - 1, j) for j in range(t - 1)]
        for o, option in enumerate(self._stages[t].options):
            size = option.kept_bytes + self._kept_output_bytes(t, o) + option.backward_peak_bytes
            parts.append(times(self._variables.backwards(t, o), size))
        self._fit(parts, held_bytes + self._input_bytes(t))

    # What is held, as sums of bytes

    def _alive_in_sweep(self, t: int, k: int, boundary: bool = True) -> list[Terms]:
        """What is alive as stage k runs in phase t, its input aside: earlier stages as they end, later as they are."""
        parts = [self._kept[t - 1, j] for j in range(k)]
        parts += [self._kept[t, j] for j in range(k, t + 1)]
        parts += [self._boundary(t - 1, j) for j in range(k - 1)]
        parts += [self._boundary(t, j) for j in range(k if boundary else k + 1, t)]
        outputs = enumerate(option.kept_output_bytes for option in self._stages[t].options)
        return [*parts, [(self._variables.kept[t, t, o], size) for o, size in outputs]]

    def _alive_in_any_order(self, t: int, k: int) -> list[Terms]:
        parts = [self._kept[t, j] for j in range(t + 1)]
        parts += [self._freed_by_runs(t, j) for j in range(t + 1) if j != k]
        return [*parts, *(self._boundary(t, j, steady=True) for j in range(t) if j != k - 1)]

    def _run(self, t: int, k: int) -> Terms:
        """What a run of stage k in phase t needs itself, its input included."""
        stage, variables = self._stages[k], self._variables
        terms = times(variables.runs(t, k), self._input_bytes(k))
        if (t, k) in variables.run:
            terms.append((variables.run[t, k], stage.forward_peak_bytes))
        for o, option in enumerate(stage.options):
            if (t, k, o) in variables.keep:
                terms.append((variables.keep[t, k, o], option.forward_peak_bytes))
            if t == k and (t, o) in variables.recompute:
                terms.append((variables.recompute[t, o], option.recompute_peak_bytes - stage.residue_bytes))
        return terms

    def _kept_bytes(self, t: int, j: int) -> Terms:
        stage = self._stages[j]
        sizes = [option.kept_bytes - stage.residue_bytes for option in stage.options]
        return list(zip(self._variables.kept_any(t, j), sizes, strict=True))

    def _freed_by_runs(self, t: int, j: int) -> Terms:
        """What runs of stage j in phase t, at a time unknown, may give back."""
        stage, terms = self._stages[j], []
        for o, option in enumerate(stage.options):
            freed_bytes = min(0, option.kept_bytes - stage.residue_bytes)
            runs = [self._variables.keep.get((t, j, o)), self._variables.recompute.get((t, o)) if t == j else None]
            terms += [(x, freed_bytes) for x in runs if x is not None and freed_bytes]
        return terms if not self._sweep else []

    def _boundary(self, t: int, j: int, steady: bool = False) -> Terms:
        """Boundary j, or where it is gone the part of it that stage j itself keeps."""
        if (t, j, steady) not in self._boundaries:
            alive = self._variables.steady[t, j] if steady else self._variables.alive[t, j]
            terms: Terms = [(alive, self._stages[j].boundary_bytes)]
            for o in range(len(self._stages[j].options)):
                if size := self._kept_output_bytes(j, o):
                    terms.append((self._kept_output(t, j, o, alive, steady), size))
            self._boundaries[t, j, steady] = terms
        return self._boundaries[t, j, steady]

    def _kept_output(self, t: int, j: int, o: int, alive: pulp.LpVariable, steady: bool) -> pulp.LpVariable:
        """Whether stage j, kept with option o, holds a part of its boundary that is not alive itself."""
        held = self._program.variable("steady_output" if steady else "alive_output", t, j, o)
        self._program.at_most([(self._variables.kept[t, j, o], 1), (alive, -1), (held, -1)])
        return held

    def _kept_output_bytes(self, j: int, o: int) -> int:
        return min(self._stages[j].options[o].kept_output_bytes, self._stages[j].boundary_bytes)

    def _input_bytes(self, k: int) -> int:
        return self._stages[k - 1].boundary_bytes if k else 0
