"""The program of ``solvers.chain.ilp``: its objective, what follows from what, and what its solution means."""

from __future__ import annotations

from solvers.chain.ilp_memory import MemoryRows
from solvers.chain.ilp_variables import PhaseVariables
from solvers.problem.solution import Candidate, Problem
from solvers.pulp_program import PulpProgram, Terms, times

_BYTE_SCALE = 1e5  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 100 GB


class ChainModel:
    """One integer program; ``sweep`` chooses exact rows for rising phases, else loose rows that bound all schedules."""

    def __init__(self, problem: Problem, sweep: bool) -> None:
        chain = problem.chain
        self._stages, self._count, self._sweep = chain.stages, len(chain.stages), sweep
        self.program = PulpProgram("checkmate", problem.budget_bytes, chain.unplanned_seconds, byte_scale=_BYTE_SCALE)
        self._variables = PhaseVariables(self.program, chain.stages, sweep)
        self.program.minimise(self._seconds())
        for t in range(self._count + 1):
            self._flow_rows(t)
        MemoryRows(self.program, problem, self._variables, sweep)

    def solve(self, time_limit_seconds: float) -> Candidate:
        """What HiGHS finds: a schedule (loose rows may let it break the budget) and its bound, infinite without any."""
        answer = self.program.solve(time_limit_seconds)
        first_runs = sum(stage.forward_seconds for stage in self._stages)  # not in the objective
        return Candidate(
            schedule=self._variables.schedule() if answer.found else None,
            lower_bound_seconds=max(0.0, answer.bound_seconds + first_runs),
        )

    def _seconds(self) -> Terms:
        """Seconds of the step, less those of first runs that keep nothing."""
        stages, variables = self._stages, self._variables
        terms: Terms = [(x, stages[k].forward_seconds) for (_, k), x in variables.run.items()]
        terms += [(x, stages[k].options[o].forward_seconds) for (_, k, o), x in variables.keep.items()]
        terms += [(x, stages[t].options[o].recompute_seconds) for (t, o), x in variables.recompute.items()]
        for t, stage in enumerate(stages):
            for o, option in enumerate(stage.options):
                terms.append((variables.kept[self._count, t, o], option.forward_seconds - stage.forward_seconds))
                terms += times(variables.backwards(t, o), option.backward_seconds)
        return terms

    def _flow_rows(self, t: int) -> None:
        """Rows of phase t, and of what goes over into it from the phase before in time, t + 1 .. L."""
        variables, n = self._variables, self._count
        for j in range(min(t + 1, n)):
            self._stage_rows(t, j)
        for j in range(t - 1):  # what is alive in the next phase was alive or made in this one
            before = [variables.alive[t, j], *variables.forwards(t, j)]
            self.program.at_most([(variables.alive[t - 1, j], 1), *times(before, -1)])
        for j in range(min(t, n)):
            for o in variables.options[j]:
                before = [x for x in (variables.kept[t, j, o], variables.keep.get((t, j, o))) if x is not None]
                self.program.equal([(variables.kept[t - 1, j, o], 1), *times(before, -1)])
        if t < n:
            self.program.equal(times((x for o in variables.options[t] for x in variables.backwards(t, o)), 1), 1)
            for j in range(t) if not self._sweep else ():
                self._steady_rows(t, j)
            if t:  # a backward reads the boundary before it
                self.program.at_most(times([variables.alive[t, t - 1], *variables.forwards(t, t - 1)], -1), -1)

    def _stage_rows(self, t: int, j: int) -> None:
        variables = self._variables
        runs, kept = variables.runs(t, j), variables.kept_any(t, j)
        self.program.at_most(times([*runs, *kept], 1), 1)
        if runs and j and t < self._count:  # a run needs its input
            inputs = [variables.alive[t, j - 1], *variables.forwards(t, j - 1)]
            self.program.at_most([*times(runs, 1), *times(inputs, -1)])
        if j:  # what is kept pins its input
            self.program.at_most([*times(kept, 1), (variables.alive[t, j - 1], -1)])
            if not self._stages[j].linked:
                variables.alive[t, j - 1].lowBound = 1

    def _steady_rows(self, t: int, j: int) -> None:
        """A boundary that is there at both ends of a phase, or read by a kept stage, is there throughout."""
        variables = self._variables
        steady = variables.steady[t, j]
        if not self._stages[j + 1].linked:
            steady.lowBound = 1
        self.program.at_most([*times(variables.kept_any(t, j + 1), 1), (steady, -1)])
        ends = [variables.alive[t, j], *([variables.alive[t - 1, j]] if j < t - 1 else [])]  # t - 1 ends at backward
        self.program.at_most([*times(ends, 1), *times([*variables.forwards(t, j), steady], -1)], len(ends) - 1)
