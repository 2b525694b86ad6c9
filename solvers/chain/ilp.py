"""Integer program over the forward-backward graph of a chain: a proven optimum, or an incumbent with its bound.

Formulation: Checkmate's R, S and FREE variables on the graph that a chain implies. Time is cut into a first pass and
one phase before the backward of each stage t = L-1 .. 0. R: stage k runs in phase t without keeping, keeping an
option, or (k == t) recomputed directly before its backward. S: which boundaries and which kept options are alive as a
phase starts. FREE is eliminated: within a phase stages run in rising order and a boundary has one reader, so at the
run of stage k a boundary j < k - 1 is alive exactly if it is retained into the next phase, k - 1 because it is read,
and j >= k if it was alive as the phase began. Two programs share these variables:

* ``sweep``: exact bytes of every schedule whose phases run stages in rising order, each at most once (Checkmate's
  frontier-advancing schedules). Contains all persistent schedules and more.
* ``bound``: only what holds in whatever order and however often stages run in a phase: kept options and boundaries
  that are there at both ends of the phase, and everything at the starts of phases and at backwards. Every schedule
  of the chain is feasible in it at no greater cost, so its optimum bounds them all.

Guarantee: ``bound`` is solved first; where its answer, replayed, fits, it is the optimum over all schedules. Otherwise
the answer is that of ``sweep``, with the bound of ``bound``; the two differ only where transients outweigh what they
make room for. Where the problem says which schedules it ``accepts``, ``sweep`` has rows besides: a run leads to that of
the next stage, and an input that is read and not used up stays. Then all runs of a phase lead up to its backward.
Complexity: O(L^2 K) binaries for menus of K options, exponential time.
Units: bytes and seconds; inside the program both are scaled, so that HiGHS's tolerances stay below one byte.

Paper: Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization" (2020), section 4.
"""

from __future__ import annotations

import math
import time

from solvers.chain.ilp_memory import MemoryRows
from solvers.chain.ilp_variables import PhaseVariables
from solvers.problem.chain_schedule import Schedule
from solvers.problem.chain_simulator import replay
from solvers.problem.number_checks import check_size
from solvers.problem.solution import Candidate, Problem
from solvers.pulp_program import PulpProgram, Terms, times

MOST_STAGES = 100  # rows grow with L^2 and terms with L^3: beyond, building the program takes minutes
_TOLERANCE = 1e-8  # a bound this close to the schedule's seconds is HiGHS's own rounding
_BYTE_SCALE = 1e5  # the budget in the program's units: HiGHS's tolerance of 1e-6 is a byte in 100 GB


def solve(problem: Problem, time_limit_seconds: float = 60.0) -> Candidate:
    """The fastest schedule found within the time limit, and a bound on every schedule within the budget.

    The bound is infinite where no schedule exists. Tensors that stages share are left out: give a chain
    ``folded()`` for schedules that fit, or without them for a bound.

    Raises:
        ValueError: the chain is too long for the program to be built.

    >>> from solvers.problem.examples import equal_stages
    >>> solve(Problem(chain=equal_stages(3), budget_bytes=8)).lower_bound_seconds
    11.0
    """
    check_size("ilp", len(problem.chain.stages), MOST_STAGES, "stages", "rotor")
    if problem.budget_bytes < problem.chain.optimizer_peak_bytes or problem.budget_bytes <= 0:
        return Candidate(schedule=None, lower_bound_seconds=math.inf)
    deadline = time.monotonic() + time_limit_seconds
    loose = ChainModel(problem, sweep=False).solve(time_limit_seconds / 2)
    schedule, bound_seconds = loose.schedule, loose.lower_bound_seconds
    interrupted = loose.interrupted
    if not interrupted and bound_seconds < math.inf and not _will_do(problem, schedule):
        exact = ChainModel(problem, sweep=True).solve(max(0.1, deadline - time.monotonic()))
        schedule, interrupted = exact.schedule, exact.interrupted
    result = None if schedule is None else replay(problem.chain, schedule)
    if result is None or result.peak_bytes > problem.budget_bytes:
        return Candidate(schedule=None, lower_bound_seconds=bound_seconds, interrupted=interrupted)
    seconds = result.seconds
    proven = bound_seconds >= seconds * (1 - _TOLERANCE)
    return Candidate(
        schedule=schedule, lower_bound_seconds=seconds if proven else bound_seconds, interrupted=interrupted
    )


def _will_do(problem: Problem, schedule: Schedule | None) -> bool:
    if schedule is None or replay(problem.chain, schedule).peak_bytes > problem.budget_bytes:
        return False
    return problem.accepts is None or problem.accepts(schedule)


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
            if sweep and problem.accepts is not None:
                self._led_on_rows(t)
        MemoryRows(self.program, problem, self._variables, sweep)

    def solve(self, time_limit_seconds: float) -> Candidate:
        """What HiGHS finds: a schedule (loose rows may let it break the budget) and its bound, infinite without any."""
        answer = self.program.solve(time_limit_seconds)
        first_runs = sum(stage.forward_seconds for stage in self._stages)  # not in the objective
        return Candidate(
            schedule=self._variables.schedule() if answer.found else None,
            lower_bound_seconds=max(0.0, answer.bound_seconds + first_runs),
            interrupted=answer.interrupted,
        )

    def _seconds(self) -> Terms:
        """Seconds of the step, less those of first runs that keep nothing."""
        stages, variables = self._stages, self._variables
        terms: Terms = [(x, stages[k].forward_seconds) for (_, k), x in variables.run.items()]
        terms += [(x, stages[k].options[o].rerun_seconds) for (_, k, o), x in variables.keep.items()]
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

    def _led_on_rows(self, t: int) -> None:
        """A run of phase t leads to that of the next stage; an input that is read and not used up stays."""
        variables = self._variables
        for j in range(min(t, self._count - 1)):
            if forwards := variables.forwards(t, j):
                self.program.at_most([*times(forwards, 1), *times(variables.runs(t, j + 1), -1)])
            if (drop := variables.run.get((t, j + 1))) is not None:
                self.program.at_most([(variables.alive[t, j], 1), (drop, 1), (variables.alive[t - 1, j], -1)], 1)

    def _steady_rows(self, t: int, j: int) -> None:
        """A boundary that is there at both ends of a phase, or read by a kept stage, is there throughout."""
        variables = self._variables
        steady = variables.steady[t, j]
        if not self._stages[j + 1].linked:
            steady.lowBound = 1
        self.program.at_most([*times(variables.kept_any(t, j + 1), 1), (steady, -1)])
        ends = [variables.alive[t, j], *([variables.alive[t - 1, j]] if j < t - 1 else [])]  # t - 1 ends at backward
        self.program.at_most([*times(ends, 1), *times([*variables.forwards(t, j), steady], -1)], len(ends) - 1)
