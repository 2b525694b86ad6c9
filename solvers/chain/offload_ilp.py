"""Integer program for keeping, offloading and dropping at once, with the clocks of both copy engines: small chains.

Formulation: a path of the choices of ``solvers.chain.offload_choices`` through the stages. Positions are the forwards
in order, then the backwards. For each offload unit of each choice two rising rows of binaries say by which position its
device bytes are given up and by which it is fetched back; in between they are away. Bytes fit at every position.
Continuous clocks: each position starts after the one before, after the copies out that it relies on and the copies back
that it uses; the engines take copies in the order of making and of use. Clocks are tied to binaries by large constants.

Guarantee: the fastest of its class (single-level runs, copies in these orders, placed between positions) where HiGHS
ends in time; then replayed, where it may gain what its largest needs leave out. The bound is of the class alone, so
none is returned.
Complexity: O(L^2 P) binaries for P offload units of each choice, exponential time; chains of up to 8 stages are proven
in seconds where few offload units matter. Units: bytes and seconds, both scaled inside the program.
Paper: Jain et al., "Checkmate" (2020), section 4, for binaries per position; Beaumont, Eyraud-Dubois, Shilova (2021),
section 3, for the copies' constraints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from solvers.arrays import Floats
from solvers.chain.offload_choices import ChoiceStep, schedule_of, steps_from
from solvers.chain.persistent import ChainBytes, PersistentChoice
from solvers.highs import Program
from solvers.problem.chain import Link
from solvers.problem.plain_data import check_size
from solvers.problem.schedule import Action, Schedule
from solvers.problem.solution import Problem

MOST_STAGES = 16  # the program of more has thousands of binaries that nothing ties together tightly
_SLACK = 1e-6  # relative: a schedule as fast as the known one stays within HiGHS's tolerance
_RowTerm = tuple[int, float]


class _UnitVariables(NamedTuple):
    """The variables of one offload unit of one choice; ``gone`` and ``back`` by position, between making and use."""

    stage: int
    unit: int
    size_bytes: int
    offloaded: int
    gone: dict[int, int]
    back: dict[int, int]


def solve(
    problem: Problem, link: Link, time_limit_seconds: float = 60.0, known_seconds: float = math.inf
) -> Schedule | None:
    """The fastest schedule of the class found in the time; none where no schedule of the class fits.

    Args:
        problem, link: what to solve.
        time_limit_seconds: that HiGHS may take.
        known_seconds: of a schedule at hand; slower ones are not looked for, and all clocks are tighter.

    Raises:
        ValueError: the chain is too long for the program to be solved.

    >>> from solvers.problem.examples import equal_stages
    >>> link = Link(to_host_bytes_per_second=8.0, to_device_bytes_per_second=8.0)
    >>> schedule = solve(Problem(chain=equal_stages(3, (4,)), budget_bytes=12), link)
    >>> [action.stage for action in schedule.actions if action.kind == "send"]
    [0]
    """
    chain = problem.chain
    check_size("offload_ilp", len(chain.stages), MOST_STAGES, "stages", "pofo")
    if chain.optimizer_peak_bytes > problem.budget_bytes:
        return None
    return _OffloadModel(problem, link, known_seconds).solve(time_limit_seconds)


class _OffloadModel:
    """Positions 0 .. L-1 are the forwards of stages 0 .. L-1, L .. 2L-1 the backwards of stages L-1 .. 0."""

    def __init__(self, problem: Problem, link: Link, known_seconds: float) -> None:
        chain = problem.chain
        self._link, self._count = link, len(chain.stages)
        self._bytes = ChainBytes(chain.folded())
        self._room = problem.budget_bytes - chain.resident_bytes
        self._scale = 1e4 / max(1, problem.budget_bytes)
        self._second = 1e2 / (chain.unplanned_seconds or 1.0)
        self._program = Program()
        self._choices: list[tuple[int, ChoiceStep, int]] = []
        for k in range(self._count):
            self._choices += [(k, step, self._program.variable()) for step in steps_from(self._bytes, k)]
        self._path()
        self._units = [unit for k, step, chosen in self._choices for unit in self._offload_units(k, step, chosen)]
        self._horizon = min(self._longest(), known_seconds * (1 + _SLACK)) * self._second
        self._starts = [self._clock() for _ in range(2 * self._count)]
        self._fit()
        self._clocks()
        self._host(link.host_bytes)
        self._objective()

    def solve(self, time_limit_seconds: float) -> Schedule | None:
        """The schedule of the best values; None where there are none."""
        values = self._program.solve(time_limit_seconds=time_limit_seconds).values
        return None if values is None else self._schedule(values)

    def _clock(self) -> int:
        return self._program.variable(upper=self._horizon, integral=False)

    def _path(self) -> None:
        """One choice begins at each stage where another ends."""
        for k in range(self._count):
            begins = [(x, 1.0) for start, _, x in self._choices if start == k]
            ends = [(x, -1.0) for _, step, x in self._choices if step.stop == k]
            self._program.row(begins + ends, lower=0.0 if k else 1.0, upper=0.0 if k else 1.0)

    def _offload_units(self, k: int, step: ChoiceStep, chosen: int) -> list[_UnitVariables]:
        between = range(step.stop, 2 * self._count - step.stop + (step.stop - 1 - k))
        units = []
        for unit, size_bytes in enumerate(step.offload_units):
            gone, back = ({p: self._program.variable() for p in between} for _ in range(2))
            variables = _UnitVariables(k, unit, size_bytes, self._program.variable(), gone, back)
            self._program.row([(variables.offloaded, 1.0), (chosen, -1.0)], upper=0.0)
            self._rising(variables)
            units.append(variables)
        return units

    def _rising(self, unit: _UnitVariables) -> None:
        for row in (unit.gone, unit.back):
            for p, q in pairwise(row):
                self._program.row([(row[p], 1.0), (row[q], -1.0)], upper=0.0)
        for p in unit.gone:
            self._program.row([(unit.back[p], 1.0), (unit.gone[p], -1.0)], upper=0.0)
            self._program.row([(unit.gone[p], 1.0), (unit.offloaded, -1.0)], upper=0.0)

    def _fit(self) -> None:
        """Bytes at every position at which a choice runs: what earlier ones hold on the device, and its need."""
        for position in range(2 * self._count):
            k, running = self._running(position)
            terms: list[_RowTerm] = [(x, float(step.held_bytes)) for _, step, x in self._choices if step.stop <= k]
            forward = position < self._count
            terms += [(x, float(step.forward_bytes if forward else step.backward_bytes)) for step, x in running]
            for unit in self._units:
                if position in unit.gone:
                    terms += [(unit.gone[position], -unit.size_bytes), (unit.back[position], float(unit.size_bytes))]
            self._program.row([(x, size * self._scale) for x, size in terms], upper=self._room * self._scale)

    def _clocks(self) -> None:
        for position in range(1, 2 * self._count):
            self._after(self._starts[position], self._end(position - 1))
        self._engine_out()
        self._engine_back()

    def _engine_out(self) -> None:
        previous: int | None = None
        for unit in sorted(self._units, key=lambda s: (s.stage, -s.size_bytes, s.unit)):
            end = self._clock()
            seconds = self._link.to_host_seconds(unit.size_bytes) * self._second
            self._after(end, [*self._end(unit.stage), (unit.offloaded, seconds)], where=[(unit.offloaded, 1.0)])
            if previous is not None:
                self._after(end, [(previous, 1.0), (unit.offloaded, seconds)])
            for position, gone in unit.gone.items():
                self._after(self._starts[position], [(end, 1.0)], where=[(gone, 1.0)])
            previous = end

    def _engine_back(self) -> None:
        previous: int | None = None
        for unit in sorted(self._units, key=lambda s: (-s.stage, -s.size_bytes, s.unit)):
            end = self._clock()
            seconds = self._link.to_device_seconds(unit.size_bytes) * self._second
            if previous is not None:
                self._after(end, [(previous, 1.0), (unit.offloaded, seconds)])
            for position, gone in unit.gone.items():  # still away there: fetched after it at the earliest
                self._after(end, self._end(position), seconds, where=[(gone, 1.0), (unit.back[position], -1.0)])
            use = 2 * self._count - 1 - unit.stage
            self._after(self._starts[use], [(end, 1.0)], where=[(unit.offloaded, 1.0)])
            previous = end

    def _after(
        self, later: int, earlier: Sequence[_RowTerm], seconds: float = 0.0, where: Sequence[_RowTerm] = ()
    ) -> None:
        """``later >= earlier + seconds`` where the sum ``where`` is 1, or everywhere."""
        terms = [(later, 1.0), *((x, -c) for x, c in earlier), *((x, -self._horizon * c) for x, c in where)]
        self._program.row(_merged(terms), lower=seconds - (self._horizon if where else 0.0))

    def _running(self, position: int) -> tuple[int, list[tuple[ChoiceStep, int]]]:
        """The stage of a position, and the choices that may run there."""
        k = min(position, 2 * self._count - 1 - position)
        return k, [(step, x) for start, step, x in self._choices if start == k]

    def _end(self, position: int) -> list[_RowTerm]:
        """When the choice that runs at a position ends."""
        forward, (_, running) = position < self._count, self._running(position)
        runs = [(x, step.forward_seconds if forward else step.backward_seconds) for step, x in running]
        return [(self._starts[position], 1.0), *((x, seconds * self._second) for x, seconds in runs)]

    def _longest(self) -> float:
        """No clock of a fastest schedule shows more: every stage's slowest choice, and every copy waited for."""
        slowest = sum(
            max(step.forward_seconds + step.backward_seconds for step, _ in self._running(k)[1])
            for k in range(self._count)
        )
        link, sizes = self._link, [unit.size_bytes for unit in self._units]
        return slowest + sum(link.to_host_seconds(size) + link.to_device_seconds(size) for size in sizes)

    def _host(self, host_bytes: int | None) -> None:
        """Whatever is offloaded is in host memory at the end of the forward."""
        if host_bytes is not None and self._units:
            scale = 1e4 / max(1, host_bytes)
            terms = [(unit.offloaded, unit.size_bytes * scale) for unit in self._units]
            self._program.row(terms, upper=host_bytes * scale)

    def _objective(self) -> None:
        end = self._end(2 * self._count - 1)
        self._program.row(end, upper=self._horizon)
        for variable, seconds in end:
            self._program.costs[variable] += seconds

    def _schedule(self, values: Floats) -> Schedule:
        chosen = {k: step.choice for k, step, x in self._choices if values[x] > 0.5}
        schedule = schedule_of(self._count, chosen)
        places = self._places(schedule.actions, chosen)
        moves = [(unit, span) for unit in self._units if (span := _away_span(unit, values))]
        begins = sorted(moves, key=lambda move: (move[0].stage, -move[0].size_bytes, move[0].unit))
        gone = sorted(moves, key=lambda move: (move[1][0], move[0].stage, -move[0].size_bytes))
        back = sorted(moves, key=lambda move: (move[1][1], -move[0].stage, -move[0].size_bytes))
        transfers = [(places[unit.stage] + 1, Action("send", unit.stage, unit.unit)) for unit, _ in begins]
        transfers += [(places[span[0]], Action("release", unit.stage, unit.unit)) for unit, span in gone]
        transfers += [(places[span[1]], Action("fetch", unit.stage, unit.unit)) for unit, span in back]
        return schedule.with_inserted(transfers)

    def _places(self, actions: tuple[Action, ...], chosen: dict[int, PersistentChoice]) -> list[int]:
        """Index of the action with which each position begins."""
        firsts = [
            next(i for i, a in enumerate(actions) if a.kind == "forward" and a.stage == k) for k in range(self._count)
        ]
        last_forward, places = firsts[-1], list(firsts)
        starts = sorted(chosen)
        for k in reversed(range(self._count)):
            start = max(s for s in starts if s <= k)
            places.append(
                next(i for i, a in enumerate(actions) if i > last_forward and a.stage == start and a.kind != "free")
            )
        return places


def _away_span(unit: _UnitVariables, values: Floats) -> tuple[int, int] | None:
    """Positions before which an offload unit leaves and comes back; None where it never is away."""
    away = [p for p in unit.gone if values[unit.gone[p]] > 0.5 and values[unit.back[p]] < 0.5]
    return (away[0], away[-1] + 1) if away and values[unit.offloaded] > 0.5 else None


def _merged(terms: list[_RowTerm]) -> list[_RowTerm]:
    total: dict[int, float] = {}
    for variable, factor in terms:
        total[variable] = total.get(variable, 0.0) + factor
    return list(total.items())
