"""Keeping, offloading and dropping stages in one dynamic program whose states count the copies still under way.

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
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from solvers.arrays import Floats
from solvers.chain.offload_choices import ChoiceStep, schedule_of, steps_from
from solvers.chain.persistent import ChainBytes, PersistentChoice
from solvers.problem.chain import Chain, Link
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Schedule

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
        """Which units of a choice may be offloaded together, the largest first."""
        largest = sorted(range(len(step.offload_units)), key=lambda i: -step.offload_units[i])
        return [tuple(largest[:n]) for n in sorted({len(largest) * i // (_SHARES - 1) for i in range(_SHARES)})]

    def _moved(self, k: int, states: _OffloadStates, step: ChoiceStep, units: tuple[int, ...]) -> _OffloadStates:
        """Where one choice leads from all states; those that never fit are left out."""
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
