"""Keeping, sending and dropping stages in one dynamic program that knows how far behind the copy engines are.

Formulation: stages are decided in forward order. A state holds the seconds spent on the stages decided, in forward and
backward; the bytes that stay on the device until their backward; and the backlog of either copy engine in seconds: what
is still leaving as the forward goes on, and, by symmetry, backward in time, what has to be back before the backwards of
the stages decided. Bytes in a backlog are on the device. Where a phase of a stage does not fit beside them the step
waits until enough of them are gone. A stage is kept with an option and a share of its parcels sent, the largest first,
or begins a segment that is dropped and run again, kept whole, before its backward. Of states alike in bytes and both
backlogs (the same cell of a grid) the one with the fewest seconds stays, with its exact numbers.

Guarantee: none; the schedules of the best final states, whose copies are then placed and replayed in exact bytes. The
model ignores shared tensors and counts boundaries whole.
Complexity: O(L (K + L) C) for L stages with K options and C cells. Units: bytes and seconds.
Paper: Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs"
(2021), section 4: the state with the pending transfers of forward and backward. Segments are single-level here.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.chain import Chain, Option
from solvers.link import Link
from solvers.persistent import ChainBytes, Choice, persistent_schedule
from solvers.schedule import Schedule

Floats = NDArray[np.float64]

_CELLS = (64, 12, 12)  # of bytes and of both backlogs: finer ones gain 0.2 % at most on chains of 24 and 50 stages
_SHARES = 3  # of a kept option's parcels: none, half of them, all
_LOOKED_AT = 2000  # final states, of which many are one draft
_FOUND = 60  # drafts; those of equal states place differently
_LONGEST = 8  # stages of a dropped segment


class _States(NamedTuple):
    """All states before one stage, as columns."""

    seconds: Floats
    held: Floats  # bytes until their backward
    out: Floats  # seconds of copies still leaving
    back: Floats  # seconds of copies that have to be back by then
    parent: Floats  # position among the states of stage ``origin``
    origin: Floats
    choice: Floats  # position in ``_Search._taken``


class _Step(NamedTuple):
    """A choice for one or more stages, in the numbers that move a state."""

    choice: Choice
    stop: int  # the stage after
    forward_seconds: float
    backward_seconds: float
    forward_bytes: float  # needed beside what is held
    backward_bytes: float
    held_bytes: float  # more is held after it
    sent_bytes: float = 0.0
    sent: tuple[int, ...] = ()  # parcels


class Draft(NamedTuple):
    """A schedule without copies yet, and the parcels (stage and number) that are meant to travel."""

    schedule: Schedule
    sent: frozenset[tuple[int, int]]


def drafts(chain: Chain, budget_bytes: int, link: Link) -> list[Draft]:
    """The most promising schedules first; placing their copies is left to ``solvers.placement``.

    >>> from solvers.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6, backward_peak_bytes=1,
    ...              recompute_seconds=1, recompute_peak_bytes=4, parcels=(4,))
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> link = Link(to_host_bytes_per_second=8.0, to_device_bytes_per_second=8.0)
    >>> draft = drafts(Chain(stages=(stage,) * 4), 14, link)[0]
    >>> draft.schedule.forward_runs(), sorted(draft.sent)
    (4, [(0, 0), (1, 0), (2, 0)])
    """
    search = _Search(chain, budget_bytes, link)
    found = dict.fromkeys(search.draft(final) for final in search.best())
    return list(found)[:_FOUND]


class _Search:
    def __init__(self, chain: Chain, budget_bytes: int, link: Link) -> None:
        self._chain, self._link = chain, link
        self._bytes = ChainBytes(chain.folded())
        self._room = float(budget_bytes - chain.resident_bytes)
        self._count = len(chain.stages)
        ways = [stage.options[0] for stage in chain.stages]  # a backlog longer than all of these is too long
        self._spans = sum(w.forward_seconds for w in ways) or 1.0, sum(w.backward_seconds for w in ways) or 1.0
        self._taken: list[_Step] = []
        waiting: list[list[_States]] = [[] for _ in range(self._count + 1)]
        waiting[0].append(_States(*(np.zeros(1) for _ in _States._fields)))
        self._states: list[_States | None] = []
        for k in range(self._count):
            states = self._thinned(waiting[k])
            self._states.append(states)
            if states is not None:
                for step in self._steps(k):
                    waiting[step.stop].append(self._moved(k, states, step))
        self._states.append(self._thinned(waiting[self._count]))

    def best(self) -> list[int]:
        """Positions of the final states with the fewest seconds."""
        final = self._states[-1]
        return [] if final is None else [int(i) for i in np.argsort(final.seconds, kind="stable")[:_LOOKED_AT]]

    def draft(self, final: int) -> Draft:
        """The actions that lead to a final state."""
        chosen: dict[int, Choice] = {}
        sent: set[tuple[int, int]] = set()
        stage, position = self._count, final
        while stage > 0:
            states = self._states[stage]
            assert states is not None
            step = self._taken[int(states.choice[position])]
            stage, position = int(states.origin[position]), int(states.parent[position])
            chosen[stage] = step.choice
            sent.update((stage, parcel) for parcel in step.sent)
        schedule = persistent_schedule(self._count, lambda start, end, _: (self._choose(chosen, start, end), 0, 0))
        return Draft(schedule, frozenset(sent))

    def _choose(self, chosen: dict[int, Choice], start: int, end: int) -> Choice:
        if end == self._count:
            found = chosen[start]
            return Choice("drop", start + 1) if found.kind == "recompute" else found
        if start < end:
            return Choice("keep", 0)
        found = chosen.get(start)  # a segment of one stage says with which option it runs again
        return found if found is not None and found.kind == "recompute" else Choice("recompute", 0)

    def _steps(self, k: int) -> list[_Step]:
        stage, end = self._chain.stages[k], self._bytes.run_end[k]
        found = [step for o, way in enumerate(stage.options) for step in self._keeps(k, o, way)]
        drops = [self._again(k, o) for o in range(len(stage.options))] if end > k else []
        drops += [self._dropped(k, q) for q in range(k + 2, min(end, k + _LONGEST) + 1)]
        return found + drops + ([self._sending(k, step) for step in drops] if stage.parcels else [])

    def _keeps(self, k: int, option: int, way: Option) -> list[_Step]:
        residues = self._bytes.residues_before[k]  # counted in what is held already
        shift = self._bytes.keep(k, self._count, option)[1]
        steps = []
        largest = sorted(range(len(way.parcels)), key=lambda i: -way.parcels[i])
        for copies in sorted({len(largest) * share // (_SHARES - 1) for share in range(_SHARES)}):
            sent_bytes = sum(way.parcels[i] for i in largest[:copies])
            steps.append(
                _Step(
                    choice=Choice("keep", option),
                    stop=k + 1,
                    forward_seconds=way.forward_seconds,
                    backward_seconds=way.backward_seconds,
                    forward_bytes=self._bytes.entry(k, self._count) + way.forward_peak_bytes - residues,
                    backward_bytes=self._bytes.backward(k, option) - residues,
                    held_bytes=shift + self._chain.stages[k].residue_bytes - sent_bytes,
                    sent_bytes=sent_bytes,
                    sent=tuple(largest[:copies]),
                )
            )
        return steps

    def _again(self, k: int, option: int) -> _Step:
        """Drop one stage and run it again with an option directly before its backward."""
        stage, way = self._chain.stages[k], self._chain.stages[k].options[option]
        residues = self._bytes.residues_before[k]
        return _Step(
            choice=Choice("recompute", option),
            stop=k + 1,
            forward_seconds=stage.forward_seconds,
            backward_seconds=way.recompute_seconds + way.backward_seconds,
            forward_bytes=float(self._bytes.drop(k, self._count)[0]) - residues,
            backward_bytes=self._bytes.recompute(k, option) - residues,
            held_bytes=stage.boundary_bytes + stage.residue_bytes,
        )

    def _dropped(self, k: int, q: int) -> _Step:
        """Drop stages k to q - 1 and run them again, all but the last kept with option 0."""
        b, stages = self._bytes, self._chain.stages[k:q]
        residues = b.residues_before[k]
        shifts = [0, *accumulate(b.keep(j, q - 1, 0)[1] for j in range(k, q - 1))]
        needs = [b.keep(j, q - 1, 0)[0] + shift for j, shift in zip(range(k, q - 1), shifts, strict=False)]
        needs.append(b.recompute(q - 1, 0) + shifts[-1])
        ways = [stage.options[0] for stage in stages]
        again = sum(way.forward_seconds for way in ways[:-1]) + ways[-1].recompute_seconds
        return _Step(
            choice=Choice("drop", q),
            stop=q,
            forward_seconds=sum(stage.forward_seconds for stage in stages),
            backward_seconds=again + sum(way.backward_seconds for way in ways),
            forward_bytes=float(b.drop(k, self._count)[q - k - 1]) - residues,
            backward_bytes=max(needs) - residues,
            held_bytes=stages[-1].boundary_bytes + sum(stage.residue_bytes for stage in stages),
        )

    def _sending(self, k: int, step: _Step) -> _Step:
        """The same with the input of the first stage away while it waits."""
        sizes = self._chain.stages[k].parcels
        sent_bytes, held_bytes = sum(sizes), step.held_bytes - sum(sizes)
        return step._replace(held_bytes=held_bytes, sent_bytes=sent_bytes, sent=tuple(range(len(sizes))))

    def _moved(self, k: int, states: _States, step: _Step) -> _States:
        """Where one choice leads from all states; those that never fit are left out."""
        link, slots = self._link, len(step.sent) * self._link.latency_seconds
        waits_out = self._wait(states, step.forward_bytes, states.out, link.to_host_bytes_per_second)
        waits_back = self._wait(states, step.backward_bytes, states.back, link.to_device_bytes_per_second)
        if step.stop == self._count:  # at the turn what is still leaving is there beside the first backward
            left = np.maximum(0.0, states.out - waits_out - step.forward_seconds)
            waits_out = waits_out + self._wait(states, step.backward_bytes, left, link.to_host_bytes_per_second)
        fits = np.flatnonzero(np.isfinite(waits_out + waits_back))
        waited, returned = waits_out[fits], waits_back[fits]
        self._taken.append(step)
        out = np.maximum(0.0, states.out[fits] - waited - step.forward_seconds)
        back = np.maximum(0.0, states.back[fits] - returned - step.backward_seconds)
        moved = _States(
            seconds=states.seconds[fits] + waited + returned + step.forward_seconds + step.backward_seconds,
            held=states.held[fits] + step.held_bytes,
            out=out + step.sent_bytes / link.to_host_bytes_per_second + slots,
            back=back + step.sent_bytes / link.to_device_bytes_per_second + slots,
            parent=fits.astype(np.float64),
            origin=np.full(fits.size, float(k)),
            choice=np.full(fits.size, float(len(self._taken) - 1)),
        )
        useful = (moved.out <= self._spans[0]) & (moved.back <= self._spans[1])
        return _States(*(column[useful] for column in moved))

    def _wait(self, states: _States, need_bytes: float, backlog: Floats, rate: float) -> Floats:
        """Seconds until enough of a backlog is gone for a phase to fit; infinite where all of it is not enough."""
        if rate == np.inf:
            return np.where(states.held + need_bytes <= self._room, 0.0, np.inf)
        over = (states.held + need_bytes - self._room) / rate + backlog
        return np.where(over <= backlog, np.maximum(0.0, over), np.inf)

    def _thinned(self, parts: list[_States]) -> _States | None:
        """The fastest state of each cell."""
        sizes = [part for part in parts if part.seconds.size]
        if not sizes:
            return None
        states = _States(*(np.concatenate(columns) for columns in zip(*sizes, strict=True)))
        limits = zip((states.held, states.out, states.back), _CELLS, (self._room or 1.0, *self._spans), strict=True)
        cells = [np.ceil(column / limit * count) for column, count, limit in limits]
        order = np.lexsort((states.seconds, *cells))
        keys = np.array(cells)[:, order]
        first = np.ones(order.size, dtype=bool)
        first[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
        return _States(*(column[order[first]] for column in states))
