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
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import pulp

from solvers.problem.chain import Stage
from solvers.problem.plain_data import check_size
from solvers.problem.schedule import Action, Schedule
from solvers.problem.simulator import replay
from solvers.problem.solution import Candidate, Problem
from solvers.pulp_program import PulpProgram, Terms, chosen, times

Variables = list[pulp.LpVariable]


class PhaseVariables:
    """Phase t stands before the backward of stage t; index L is the first pass.

    The first runs of the first pass are ``kept[L, ...]`` (they keep an option) or not; its second runs, which the
    loose program alone knows, are ``keep[L, ...]`` and ``run[L, ...]``.

    Attributes:
        count: stages, L.
        options: numbers of each stage's options.
        kept: ``[t, j, o]``, stage j is kept with option o as phase t starts.
        alive: ``[t, j]``, boundary j is alive as phase t starts.
        run, keep, recompute: ``[t, k]``, ``[t, k, o]``, ``[t, o]``, the runs of phase t: without keeping, keeping, and
            directly before the backward.
        steady: ``[t, j]``, boundary j is there throughout phase t whatever the order of runs (loose program only).
    """

    def __init__(self, program: PulpProgram, stages: Sequence[Stage], sweep: bool) -> None:
        self.count = n = len(stages)
        self.options = options = [range(len(stage.options)) for stage in stages]
        phases = range(n if sweep else n + 1)
        free = [k for k in range(n) if stages[k].recomputable]
        starts = [(t, j) for t in range(n + 1) for j in range(min(t + 1, n))]
        variable = program.variable
        self.kept = {(t, j, o): variable("kept", t, j, o) for t, j in starts for o in options[j]}
        self.alive = {(t, j): variable("alive", t, j) for t in range(n + 1) for j in range(min(t, n - 1))}
        self.run = {(t, k): variable("run", t, k) for t in phases for k in free if k < t}
        keeps = [(t, k, o) for t in phases for k in free if k <= t for o in options[k]]
        self.keep = {index: variable("keep", *index) for index in keeps}
        self.recompute = {(t, o): variable("recompute", t, o) for t in free for o in options[t]}
        self.steady = {(t, j): variable("steady", t, j) for t in range(0 if sweep else n) for j in range(t)}

    def kept_any(self, t: int, j: int) -> Variables:
        """The variables by option, one of which is 1 where stage j is kept as phase t starts."""
        return [self.kept[t, j, o] for o in self.options[j]]

    def backwards(self, t: int, o: int) -> Variables:
        """The variables one of which is 1 where stage t goes backward with option o."""
        return _there(self.kept[t, t, o], self.keep.get((t, t, o)), self.recompute.get((t, o)))

    def forwards(self, t: int, k: int) -> Variables:
        """The runs of stage k in phase t that make its boundary."""
        return _there(self.run.get((t, k)), *(self.keep.get((t, k, o)) for o in self.options[k]))

    def runs(self, t: int, k: int) -> Variables:
        """All runs of stage k in phase t."""
        recomputes = [self.recompute.get((t, o)) for o in self.options[t]] if k == t else []
        return self.forwards(t, k) + _there(*recomputes)

    def schedule(self) -> Schedule | None:
        """The actions of a solution; None for one of the loose program that does not say when stages run."""
        if any(chosen(x) for (t, *_), x in [*self.run.items(), *self.keep.items()] if t == self.count):
            return None  # a second run within the first pass
        return _Reader(self).schedule()


def _there(*variables: pulp.LpVariable | None) -> Variables:
    return [x for x in variables if x is not None]


class _Reader:
    """Turns values into actions: runs in rising order, every boundary freed as soon as nobody needs it."""

    def __init__(self, variables: PhaseVariables) -> None:
        self._variables = variables
        self._actions: list[Action] = []
        self._alive: set[int] = set()  # boundaries

    def schedule(self) -> Schedule:
        variables, count = self._variables, self._variables.count
        for k in range(count):
            self._forward(k, _first_chosen(variables.kept_any(count, k)))
            self._free({j for j in self._alive if j != k and not chosen(variables.alive[count - 1, j])})
        for t in reversed(range(count)):
            self._phase(t)
        return Schedule(actions=tuple(self._actions))

    def _phase(self, t: int) -> None:
        variables = self._variables
        self._free({j for j in self._alive if not self._needed(t, -1, j)})
        for k in range(t + 1):
            keep = _first_chosen([variables.keep.get((t, k, o)) for o in variables.options[k]])
            recompute = _first_chosen([variables.recompute.get((t, o)) for o in variables.options[t]] if k == t else [])
            if recompute is not None:
                self._actions.append(Action("recompute", k, recompute))
            elif keep is not None or chosen(variables.run.get((t, k))):
                self._forward(k, keep)
            self._free({j for j in self._alive if not self._needed(t, k, j)})
        self._actions.append(Action("backward", t))
        self._free({j for j in self._alive if j == t - 1 and not self._stays(t - 1, j)})

    def _needed(self, t: int, position: int, j: int) -> bool:
        """Whether boundary j is read after the run at ``position`` of phase t, or stays alive for the next phase."""
        read = position < j + 1 <= t and any(chosen(x) for x in self._variables.runs(t, j + 1))
        return j == t - 1 or read or self._stays(t - 1, j)

    def _stays(self, t: int, j: int) -> bool:
        return chosen(self._variables.alive.get((t, j)))

    def _forward(self, k: int, option: int | None) -> None:
        self._actions.append(Action("forward", k, option))
        self._alive.add(k)

    def _free(self, boundaries: set[int]) -> None:
        self._actions += [Action("free", j) for j in sorted(boundaries)]
        self._alive -= boundaries


def _first_chosen(variables: Sequence[pulp.LpVariable | None]) -> int | None:
    """The option whose variable is 1."""
    return next((o for o, x in enumerate(variables) if chosen(x)), None)


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
        """Bytes alive as stage k runs in phase t without its input: earlier stages as they end, later as they are."""
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
        """Bytes that a run of stage k in phase t needs itself, its input included."""
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
        """Bytes that runs of stage j in phase t, at an unknown time, may give back."""
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
        """The result of HiGHS: a schedule (loose rows may let it break the budget) and a bound, else infinity."""
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
