"""Keeping, offloading and dropping at once: ``pofo``, a dynamic program, and ``offload_ilp``, an integer program.

Both compare the same choices for a stage: kept with an option, or dropped alone or in a run. Dropped runs are
single-level: they run again from their first stage, all but the last kept with option 0, directly before their
backward. Each choice comes with the seconds, bytes and offload units that move a method's state.

``pofo`` (``proposals``) is one dynamic program whose states count the copies still under way.

Formulation: stages are decided in forward order. A state holds the seconds spent on the stages decided, in forward and
backward; the bytes that stay on the device until their backward; and the backlog of either copy engine in seconds: what
is still leaving as the forward goes on, and, by symmetry, backward in time, what has to be back before the backwards of
the stages decided. Bytes in a backlog are on the device. Where a phase of a stage does not fit beside them the step
waits until enough of them are gone. A stage is kept with an option and a share of its units offloaded, the largest
first, or begins a segment that is dropped and run again, kept whole, before its backward. Of states alike in bytes and
both backlogs (the same cell of a grid) the one with the fewest seconds stays, with its exact numbers.

Guarantee: none; the schedules of the best final states, whose copies are then placed and replayed in exact bytes. The
model ignores shared tensors and counts boundaries whole.
Complexity: O(L (K + L) C) for L stages with K options and C cells. Units: bytes and seconds.
Paper: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs"
(2021), section 4: the state with the pending transfers of forward and backward. Segments are single-level here.

``offload_ilp`` (``solve_program``) has the clocks of both copy engines, for small chains.

Formulation: a path of these choices through the stages. Positions are the forwards
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
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from solvers.arrays import Floats
from solvers.chain.persistent import ChainBytes, PersistentChoice, persistent_schedule
from solvers.highs import Program
from solvers.problem.chain import Chain, Link
from solvers.problem.deadline import check_deadline
from solvers.problem.plain_data import check_size
from solvers.problem.schedule import Action, Schedule
from solvers.problem.solution import Problem

LONGEST = 8  # stages of a dropped run


class ChoiceStep(NamedTuple):
    """A choice for the stages up to ``stop``.

    Attributes:
        choice: ``keep``, ``drop``, or ``recompute`` for a single dropped stage with the option of its second run.
        stop: the first stage after it.
        forward_bytes, backward_bytes: needed at most in either phase, in addition to what earlier stages hold.
        held_bytes: held from its forward to its backward.
        offload_units: bytes of each part of that which may be offloaded.
    """

    choice: PersistentChoice
    stop: int
    forward_seconds: float
    backward_seconds: float
    forward_bytes: float
    backward_bytes: float
    held_bytes: float
    offload_units: tuple[int, ...] = ()


def steps_from(sizes: ChainBytes, k: int) -> list[ChoiceStep]:
    """All choices that begin with stage k of the first pass."""
    end, options = sizes.run_end[k], range(len(sizes.stages[k].options))
    kept = [_kept(sizes, k, o) for o in options]
    alone = [_dropped_alone(sizes, k, o) for o in options] if end > k else []
    runs = [_dropped_run(sizes, k, q) for q in range(k + 2, min(end, k + LONGEST) + 1)]
    return [_with_loss(sizes, step) for step in kept + alone + runs]


def schedule_of(count: int, chosen: dict[int, PersistentChoice]) -> Schedule:
    """The actions, without copies, of the choices by their first stage."""
    return persistent_schedule(count, lambda start, end, _: (_choose(count, chosen, start, end), 0, 0))


def _choose(count: int, chosen: dict[int, PersistentChoice], start: int, end: int) -> PersistentChoice:
    if end == count:
        choice = chosen[start]
        return PersistentChoice("drop", start + 1) if choice.kind == "recompute" else choice
    if start < end:
        return PersistentChoice("keep", 0)
    choice = chosen.get(start)
    return choice if choice is not None and choice.kind == "recompute" else PersistentChoice("recompute", 0)


def _with_loss(sizes: ChainBytes, step: ChoiceStep) -> ChoiceStep:
    """The last choice's forward ends with the gradient of the loss in addition to all that is held."""
    if step.stop < (count := sizes.stage_count):
        return step
    loss_bytes = step.held_bytes + sizes.entry(count, count) - sizes.residues_before[count]
    return step._replace(forward_bytes=max(step.forward_bytes, loss_bytes))


def _kept(sizes: ChainBytes, k: int, o: int) -> ChoiceStep:
    stage, option = sizes.stages[k], sizes.stages[k].options[o]
    residues = sizes.residues_before[k]  # held by the stages before
    return ChoiceStep(
        choice=PersistentChoice("keep", o),
        stop=k + 1,
        forward_seconds=option.forward_seconds,
        backward_seconds=option.backward_seconds,
        forward_bytes=sizes.entry(k, sizes.stage_count) + option.forward_peak_bytes - residues,
        backward_bytes=sizes.backward(k, o) - residues,
        held_bytes=sizes.keep(k, sizes.stage_count, o)[1] + stage.residue_bytes,
        offload_units=option.offload_units,
    )


def _dropped_alone(sizes: ChainBytes, k: int, o: int) -> ChoiceStep:
    """Drop one stage and run it again with an option directly before its backward."""
    stage, option = sizes.stages[k], sizes.stages[k].options[o]
    residues = sizes.residues_before[k]
    return ChoiceStep(
        choice=PersistentChoice("recompute", o),
        stop=k + 1,
        forward_seconds=stage.forward_seconds,
        backward_seconds=option.recompute_seconds + option.backward_seconds,
        forward_bytes=int(sizes.drop(k, sizes.stage_count)[0]) - residues,
        backward_bytes=sizes.recompute(k, o) - residues,
        held_bytes=stage.boundary_bytes + stage.residue_bytes,
        offload_units=stage.offload_units,
    )


def _dropped_run(sizes: ChainBytes, k: int, q: int) -> ChoiceStep:
    """Drop stages k to q - 1 and run them again, all but the last kept with option 0."""
    stages, residues = sizes.stages[k:q], sizes.residues_before[k]
    keeps = [sizes.keep(j, q - 1, 0) for j in range(k, q - 1)]
    shifts = [0, *accumulate(shift for _, shift in keeps)]
    level_needs = [need + shift for (need, _), shift in zip(keeps, shifts, strict=False)]
    level_needs.append(sizes.recompute(q - 1, 0) + shifts[-1])
    options = [stage.options[0] for stage in stages]
    again = sum(option.rerun_seconds for option in options[:-1]) + options[-1].recompute_seconds
    return ChoiceStep(
        choice=PersistentChoice("drop", q),
        stop=q,
        forward_seconds=sum(stage.forward_seconds for stage in stages),
        backward_seconds=again + sum(option.backward_seconds for option in options),
        forward_bytes=int(sizes.drop(k, sizes.stage_count)[q - k - 1]) - residues,
        backward_bytes=max(level_needs) - residues,
        held_bytes=stages[-1].boundary_bytes + sum(stage.residue_bytes for stage in stages),
        offload_units=stages[0].offload_units,
    )


_CELLS = (64, 12, 12)  # of bytes and of both backlogs: finer ones gain 0.2 % at most on chains of 24 and 50 stages
_SHARES = 3  # of a kept option's units offloaded: none, half of them, all
_FINAL_STATES = 2000  # looked at; many are one proposal
_PROPOSALS = 60  # those of equal states place differently


class _OffloadStates(NamedTuple):
    """All states before one stage, as columns."""

    seconds: Floats
    held_bytes: Floats  # bytes until their backward
    out_seconds: Floats  # seconds of copies still leaving
    back_seconds: Floats  # seconds of copies that have to be back by then
    parent: Floats  # position among the states of stage ``origin``
    origin: Floats
    choice: Floats  # position in ``_OffloadSearch._taken``


class OffloadProposal(NamedTuple):
    """A schedule without copies yet, and the units (stage and number) that are to be offloaded."""

    schedule: Schedule
    offloaded: frozenset[tuple[int, int]]


def proposals(chain: Chain, budget_bytes: int, link: Link) -> list[OffloadProposal]:
    """The most promising schedules first; placing their copies is left to ``solvers.chain.transfer_placement``.

    >>> from solvers.problem.examples import equal_stages
    >>> link = Link(to_host_bytes_per_second=8.0, to_device_bytes_per_second=8.0)
    >>> proposal = proposals(equal_stages(4, (4,)), 14, link)[0]
    >>> proposal.schedule.forward_runs(), sorted(proposal.offloaded)
    (4, [(0, 0), (1, 0), (2, 0)])
    """
    search = _OffloadSearch(chain, budget_bytes, link)
    distinct = dict.fromkeys(search.proposal(final) for final in search.best())
    return list(distinct)[:_PROPOSALS]


class _OffloadSearch:
    def __init__(self, chain: Chain, budget_bytes: int, link: Link) -> None:
        self._link = link
        self._bytes = ChainBytes(chain.folded())
        self._room = float(budget_bytes - chain.resident_bytes)
        self._count = len(chain.stages)
        options = [stage.options[0] for stage in chain.stages]  # a backlog longer than all of these is too long
        self._spans = (
            sum(option.forward_seconds for option in options) or 1.0,
            sum(option.backward_seconds for option in options) or 1.0,
        )
        self._taken: list[tuple[PersistentChoice, tuple[int, ...]]] = []
        arriving: list[list[_OffloadStates]] = [[] for _ in range(self._count + 1)]
        arriving[0].append(_OffloadStates(*(np.zeros(1) for _ in _OffloadStates._fields)))
        self._states: list[_OffloadStates | None] = []
        for k in range(self._count):
            check_deadline()
            states = self._thinned(arriving[k])
            self._states.append(states)
            if states is not None:
                for step in steps_from(self._bytes, k):
                    arriving[step.stop] += [self._moved(k, states, step, units) for units in self._shares(step)]
        self._states.append(self._thinned(arriving[self._count]))

    def best(self) -> list[int]:
        """Positions of the final states with the fewest seconds."""
        final = self._states[-1]
        return [] if final is None else [int(i) for i in np.argsort(final.seconds, kind="stable")[:_FINAL_STATES]]

    def proposal(self, final: int) -> OffloadProposal:
        """The actions that lead to a final state."""
        chosen: dict[int, PersistentChoice] = {}
        offloaded: set[tuple[int, int]] = set()
        stage, position = self._count, final
        while stage > 0:
            states = self._states[stage]
            assert states is not None
            choice, units = self._taken[int(states.choice[position])]
            stage, position = int(states.origin[position]), int(states.parent[position])
            chosen[stage] = choice
            offloaded.update((stage, unit) for unit in units)
        return OffloadProposal(schedule_of(self._count, chosen), frozenset(offloaded))

    def _shares(self, step: ChoiceStep) -> list[tuple[int, ...]]:
        """The units of a choice that may be offloaded together, the largest first."""
        largest = sorted(range(len(step.offload_units)), key=lambda i: -step.offload_units[i])
        return [tuple(largest[:n]) for n in sorted({len(largest) * i // (_SHARES - 1) for i in range(_SHARES)})]

    def _moved(self, k: int, states: _OffloadStates, step: ChoiceStep, units: tuple[int, ...]) -> _OffloadStates:
        """The states that one choice leads to from all states; those that never fit are left out."""
        link, slots = self._link, len(units) * self._link.latency_seconds
        units_bytes = sum(step.offload_units[i] for i in units)
        waits_out = self._wait(states, step.forward_bytes, states.out_seconds, link.to_host_bytes_per_second)
        waits_back = self._wait(states, step.backward_bytes, states.back_seconds, link.to_device_bytes_per_second)
        if step.stop == self._count:  # what is still leaving then counts with the first backward
            still_leaving = np.maximum(0.0, states.out_seconds - waits_out - step.forward_seconds)
            waits_out = waits_out + self._wait(
                states, step.backward_bytes, still_leaving, link.to_host_bytes_per_second
            )
        possible = np.flatnonzero(np.isfinite(waits_out + waits_back))
        waited, returned = waits_out[possible], waits_back[possible]
        self._taken.append((step.choice, units))
        out = np.maximum(0.0, states.out_seconds[possible] - waited - step.forward_seconds)
        back = np.maximum(0.0, states.back_seconds[possible] - returned - step.backward_seconds)
        after = _OffloadStates(
            seconds=states.seconds[possible] + waited + returned + step.forward_seconds + step.backward_seconds,
            held_bytes=states.held_bytes[possible] + step.held_bytes - units_bytes,
            out_seconds=out + units_bytes / link.to_host_bytes_per_second + slots,
            back_seconds=back + units_bytes / link.to_device_bytes_per_second + slots,
            parent=possible.astype(np.float64),
            origin=np.full(possible.size, float(k)),
            choice=np.full(possible.size, float(len(self._taken) - 1)),
        )
        useful = (after.out_seconds <= self._spans[0]) & (after.back_seconds <= self._spans[1])
        return _OffloadStates(*(column[useful] for column in after))

    def _wait(self, states: _OffloadStates, need_bytes: float, backlog: Floats, rate: float) -> Floats:
        """Seconds until enough of a backlog is gone for a phase to fit; infinite where all of it is not enough."""
        if rate == np.inf:
            return np.where(states.held_bytes + need_bytes <= self._room, 0.0, np.inf)
        over = (states.held_bytes + need_bytes - self._room) / rate + backlog
        return np.where(over <= backlog, np.maximum(0.0, over), np.inf)

    def _thinned(self, groups: list[_OffloadStates]) -> _OffloadStates | None:
        """The fastest state of each cell."""
        nonempty = [group for group in groups if group.seconds.size]
        if not nonempty:
            return None
        states = _OffloadStates(*(np.concatenate(columns) for columns in zip(*nonempty, strict=True)))
        columns = states.held_bytes, states.out_seconds, states.back_seconds
        limits = self._room or 1.0, *self._spans
        cells = [np.ceil(column / most * count) for column, most, count in zip(columns, limits, _CELLS, strict=True)]
        order = np.lexsort((states.seconds, *cells))
        keys = np.array(cells)[:, order]
        first = np.ones(order.size, dtype=bool)
        first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return _OffloadStates(*(column[order[first]] for column in states))


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


def solve_program(
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
    >>> schedule = solve_program(Problem(chain=equal_stages(3, (4,)), budget_bytes=12), link)
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
