"""The binaries of ``solvers.chain.ilp``, and the schedule that their values mean."""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from solvers.problem.chain import Stage
from solvers.problem.chain_schedule import Action, Schedule
from solvers.pulp_program import PulpProgram, chosen

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
        """Of which one is 1 where stage j is kept as phase t starts, by option."""
        return [self.kept[t, j, o] for o in self.options[j]]

    def backwards(self, t: int, o: int) -> Variables:
        """Of which one is 1 where stage t goes backward with option o."""
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
