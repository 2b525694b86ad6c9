"""Optimal persistent schedules by dynamic programming: every budget of a chain from one table.

Formulation, with ``m`` the level (see ``solvers.persistent``) that a range of stages may use:
``time(s, t, m) = min(keep o: f(s,o) + time(s+1, t, m - shift) + b(s,o),
drop to q: f(s) + .. + f(q-1) + time(q, t, m - a(q-1)) + time(s, q-1, m))`` where the choice's own need fits in m.
The gradients of stages that already went backward are part of every need.

Grid: levels are split into at most a few hundred slots. A slot holds the fastest answer found whose *exact* need
fits in the slot, and that exact need is what shifts are added to; so rounding does not add up along the chain, as it
does where costs are rounded. Chains whose levels all fit on the grid (small or homogeneous numbers) are solved exactly.

Guarantee: optimal among persistent schedules where the grid has a slot for every multiple of the levels' common
divisor, otherwise the best with one answer per slot; the exact needs equal the replayed peaks. Answers for larger
budgets are never slower: all are read from the one table, whatever the budget.
Complexity: O(L^3 M) time and O(L^2 M) memory for L stages and M slots. Units: seconds and bytes.

Papers: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (2019), section 4; Zhao et al., "Rockmate" (2023), section 3.3, for
the menu of options per stage.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.chain import Chain
from solvers.persistent import Bytes, ChainBytes, Choice, persistent_schedule
from solvers.schedule import Schedule

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

_NOTHING = np.iinfo(np.int64).min // 4  # need of a slot without an answer: sorts before every real one
_WHOLE = 2.0**50  # seconds become whole numbers that sum to less than this: sums are exact and ties are ties
_RECOMPUTE = 10_000  # codes of choices: an option to keep, this plus an option to recompute, or minus the drop's end


class Point(NamedTuple):
    """One answer of the table: its exact peak (resident bytes included, the optimizer's not), seconds and slot."""

    peak_bytes: int
    seconds: float
    slot: int


class _Cell(NamedTuple):
    """Answers of one range, one per slot: seconds (in ticks), exact need, choice and the slot it was made for."""

    ticks: Floats
    needs: Bytes
    codes: NDArray[np.int16]
    origins: NDArray[np.int16]


class Table:
    """All answers for one chain.

    >>> from solvers.chain import Option, Stage
    >>> way = Option(forward_seconds=1, backward_seconds=2, kept_bytes=4, forward_peak_bytes=6,
    ...              backward_peak_bytes=1, recompute_seconds=1, recompute_peak_bytes=4)
    >>> stage = Stage(name="s", options=(way,), boundary_bytes=1, forward_seconds=1, forward_peak_bytes=2)
    >>> table = Table(Chain(stages=(stage,) * 3))
    >>> [(point.peak_bytes, round(point.seconds)) for point in table.points()]
    [(6, 13), (7, 12), (8, 11), (12, 10), (16, 9)]
    """

    def __init__(self, chain: Chain, slots: int | None = None) -> None:
        self._bytes = ChainBytes(chain)
        self._resident_bytes = chain.resident_bytes
        self._count = len(chain.stages)
        self._levels = _grid(chain, self._bytes, _slots_for(self._count) if slots is None else slots)
        self._tick_seconds = _most_seconds(chain) / _WHOLE or 1.0
        runs = [self._ticks(stage.forward_seconds) for stage in chain.stages]
        self._runs = np.array([0, *accumulate(runs)], dtype=np.float64)
        rows = self._levels.size
        self._again = [_cells(rows, max(1, end - s)) for s, end in enumerate(self._bytes.run_end)]  # column t - s
        self._first = _cells(rows, self._count + 1)  # the first pass: column s
        for end in range(self._count + 1):
            self._fill(end)

    def points(self) -> list[Point]:
        """Every answer of the table that no other one beats, by rising peak and falling seconds."""
        ticks, needs = self._first.ticks[:, 0], self._first.needs[:, 0]
        fresh = np.flatnonzero(ticks[1:] < ticks[:-1]) + 1
        peaks = self._resident_bytes + needs
        return [Point(int(peaks[i]), float(ticks[i]) * self._tick_seconds, int(i)) for i in fresh]

    def schedule(self, point: Point) -> Schedule:
        """The actions of one answer."""
        return persistent_schedule(self._count, self._choose, point.slot)

    def _ticks(self, seconds: float) -> float:
        return float(round(seconds / self._tick_seconds))

    def _choose(self, start: int, end: int, slot: int) -> tuple[Choice, int, int]:
        cells, column = (self._first, start) if end == self._count else (self._again[start], end - start)
        code, origin = int(cells.codes[slot, column]), int(cells.origins[slot, column])
        if code >= _RECOMPUTE:
            return Choice("recompute", code - _RECOMPUTE), 0, 0
        if code < 0:
            return Choice("drop", -code), self._slot(-code, end, origin, self._bytes.boundary(-code - 1)), origin
        return Choice("keep", code), self._slot(start + 1, end, origin, self._bytes.keep(start, end, code)[1]), 0

    def _slot(self, start: int, end: int, origin: int, shift: int) -> int:
        if start == self._bytes.empty_stage(end):
            return 0
        needs = self._first.needs[:, start] if end == self._count else self._again[start].needs[:, end - start]
        return int(np.searchsorted(needs, self._levels[origin] - shift, side="right")) - 1

    def _fill(self, end: int) -> None:
        """All ranges that stop at ``end``, from the shortest on."""
        stop, rows = self._bytes.empty_stage(end), self._levels.size
        rest = _cells(rows, self._count + 2)  # column q: the range q..end as the drop before it sees it
        cell = self._empty(self._bytes.entry(stop, end))
        for start in range(stop - 1, -2, -1):
            if start + 1 > 0:
                self._shift_into(rest, start + 1, cell)
            if start < 0 or (end < self._count and self._bytes.run_end[start] <= end):
                return
            cell = self._solve(start, end, cell, rest)
            cells, column = (self._first, start) if end == self._count else (self._again[start], end - start)
            for stored, values in zip(cells, cell, strict=True):
                stored[:, column] = values

    def _empty(self, entry: int) -> _Cell:
        fits = self._levels >= entry
        codes = np.zeros(fits.size, dtype=np.int16)
        return _Cell(np.where(fits, 0.0, np.inf), np.where(fits, entry, _NOTHING), codes, codes)

    def _shift_into(self, rest: _Cell, q: int, cell: _Cell) -> None:
        shift = self._bytes.boundary(q - 1)
        ticks, needs = self._shifted(cell, shift)
        rest.ticks[:, q] = ticks + self._runs[q]
        rest.needs[:, q] = needs

    def _shifted(self, cell: _Cell, shift: int) -> tuple[Floats, Bytes]:
        """For each slot the fastest answer of ``cell`` that fits once ``shift`` is added to its need."""
        slot = np.searchsorted(cell.needs, self._levels - shift, side="right") - 1
        return cell.ticks[slot], cell.needs[slot] + shift

    def _solve(self, start: int, end: int, rest_kept: _Cell, rest: _Cell) -> _Cell:
        best = self._drop(start, end, rest)
        stage = self._bytes.stages[start]
        for option, way in enumerate(stage.options):
            need, shift = self._bytes.keep(start, end, option)
            ticks, needs = self._shifted(rest_kept, shift)
            ticks = ticks + (self._ticks(way.forward_seconds) + self._ticks(way.backward_seconds))
            self._take(best, ticks, np.maximum(needs, need), need, option)
            if start == end:
                need = self._bytes.recompute(start, option)
                seconds = self._ticks(way.recompute_seconds) + self._ticks(way.backward_seconds)
                self._take(best, np.full(self._levels.size, seconds), np.int64(need), need, _RECOMPUTE + option)
        return self._settle(best)

    def _take(self, best: _Cell, ticks: Floats, needs: Bytes | np.int64, need: int, code: int) -> None:
        """Write a choice into the slots that it fits in and where it is faster."""
        better = ticks < best.ticks
        better[: np.searchsorted(self._levels, need)] = False
        np.copyto(best.ticks, ticks, where=better)
        np.copyto(best.needs, needs, where=better)
        best.codes[better] = code

    def _drop(self, start: int, end: int, rest: _Cell) -> _Cell:
        """The fastest drop of each slot; slots in which none fits stay empty."""
        rows = self._levels.size
        column = _cells(rows, 1)
        best = _Cell(column.ticks[:, 0], column.needs[:, 0], column.codes[:, 0], np.arange(rows, dtype=np.int16))
        own = self._bytes.drop(start, end)
        if not own.size:
            return best
        low, high = np.searchsorted(self._levels, own[[0, -1]])
        columns = slice(start + 1, start + 1 + own.size)
        ticks = rest.ticks[low:, columns] + self._again[start].ticks[low:, : own.size]
        partly = ticks[: high - low]  # above, every drop fits
        partly[self._levels[low:high, None] < own] = np.inf
        pick = ticks.argmin(axis=1)
        line = np.arange(low, rows)
        best.ticks[low:] = ticks[line - low, pick] - self._runs[start]
        parts = np.maximum(rest.needs[line, start + 1 + pick], self._again[start].needs[line, pick])
        best.needs[low:] = np.maximum(parts, own[pick])
        best.codes[low:] = -(start + 1 + pick)
        return best

    def _settle(self, best: _Cell) -> _Cell:
        """Move every answer to the first slot that its exact need fits in; slots between repeat the one below."""
        ticks = best.ticks
        fresh = np.flatnonzero(ticks < np.concatenate(([np.inf], ticks[:-1])))
        source = np.full(ticks.size, -1, dtype=np.intp)
        source[np.searchsorted(self._levels, best.needs[fresh])] = fresh  # rising, so the fastest of a slot stays
        source = np.maximum.accumulate(source)
        settled = _Cell(best.ticks[source], best.needs[source], best.codes[source], best.origins[source])
        settled.ticks[source < 0] = np.inf
        settled.needs[source < 0] = _NOTHING
        return settled


def _cells(rows: int, columns: int) -> _Cell:
    shape = (rows, columns)
    needs = np.full(shape, _NOTHING, dtype=np.int64)
    return _Cell(np.full(shape, np.inf), needs, np.zeros(shape, np.int16), np.zeros(shape, np.int16))


def _slots_for(stage_count: int) -> int:
    """Slots that keep 50 stages well below a second and 200 below ten on one core.

    Measured on random chains of 20 and 50 stages against 8000 slots: at 2000 slots and 50 stages answers were
    at most 0.15 % slower, at 512 slots at most 0.7 % (4 % with menus of four options, next to the smallest budget).
    """
    return max(256, min(4000, 100_000 // stage_count))


def _most_seconds(chain: Chain) -> float:
    """More than any schedule of the table lasts: one forward per stage before each backward, and one to start with."""
    count = len(chain.stages)
    slowest = [
        max(max(o.forward_seconds, o.recompute_seconds) + o.backward_seconds for o in stage.options)
        for stage in chain.stages
    ]
    return (count + 2) * (sum(stage.forward_seconds for stage in chain.stages) + sum(slowest))


def _grid(chain: Chain, chain_bytes: ChainBytes, slots: int) -> Bytes:
    """Levels of the slots: the first holds nothing; then every multiple of the common divisor where they are few
    enough, else half of them evenly up to the top and half in equal ratios, which resolves small budgets too."""
    top, bottom = _top(chain, chain_bytes), min(chain_bytes.entry(0, chain_bytes.stage_count), 0)
    unit = _common_divisor(chain)
    if top // unit < slots:
        levels = np.arange(0, top + 2 * unit, unit)
    else:
        ratios = np.geomspace(max(unit, top / slots / 8), top, slots // 2)
        levels = np.union1d(np.linspace(0, top, slots // 2), ratios).astype(np.int64) + 1
    return np.concatenate(([bottom - 1], np.unique(levels))).astype(np.int64)


def _top(chain: Chain, b: ChainBytes) -> int:
    """Level above which nothing gets faster: with it every stage may keep what its most demanding option keeps."""
    top = shift = 0
    for s, stage in enumerate(chain.stages):
        choices = [b.keep(s, b.stage_count, o) for o in range(len(stage.options))]
        top = max(top, shift + max(need for need, _ in choices))
        shift += max(0, *(moved for _, moved in choices))
    return max(top, shift + b.entry(b.stage_count, b.stage_count))


def _common_divisor(chain: Chain) -> int:
    sizes = (
        getattr(item, name)
        for stage in chain.stages
        for item in (stage, *stage.options)
        for name in item.__slots__
        if name.endswith("_bytes")
    )
    return math.gcd(*sizes) or 1
