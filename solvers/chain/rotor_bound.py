"""A bound on the seconds of persistent schedules: what no answer of the table could beat, however fine its grid.

Formulation: the recursion of ``solvers.chain.rotor`` on functions of the level. A range's function is linear between
the levels of an even grid and lies nowhere above the true one. Sums and minima of such functions stay below (the chord
of a minimum is); a shift moves the function off the grid, and where it bends upwards between two levels their values
are lowered until the chord is below it again. Levels from which a choice is possible are exact; within one step of
the grid it is taken to be possible a little before.

Guarantee: ``seconds(level) <= optimum among persistent schedules`` with shared tensors counted as the chain counts
them. It is no bound on all schedules. It meets the optimum where the grid has a step for every need; random chains of
24 to 200 stages on 250 to 2000 steps leave 0.1 to 1.4 %, less with menus and with tight budgets, where the bound on
all schedules leaves more. Complexity: O(L^3 M) time, O(L^2 M) memory for M levels. Units: bytes and seconds.
Source: the recursion of Beaumont et al., "Optimal checkpointing for heterogeneous chains" (2019), section 4; the
functions below it are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, chain as chain_of

import numpy as np

from solvers.arrays import Floats, Indices, Integers
from solvers.chain.persistent import ChainBytes
from solvers.chain.rotor_grid import NEVER, CostPacking, keep_columns, recompute_columns
from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline

_STEPS = 24_000  # of the first grid times stages: a tenth of a second for 48 stages, a second for 200
_FINER = (1.0, 1.4, 2.0, 2.8)  # grids tried one after the other; how well shifts match the steps is luck
_SLACK = 1e-9  # relative: sums of rounded seconds
_UNREACHED = np.iinfo(np.int64).max // 4  # level of a range that cannot run again; sums of two still fit


def persistent_bound_seconds(chain: Chain, level: int, enough_seconds: float) -> float:
    """The best bound of grids of rising fineness; stops at one that reaches ``enough_seconds``.

    ``level``: bytes above the resident ones, of a chain of up to a few hundred stages.
    """
    best = 0.0
    for finer in _FINER:
        steps = int(finer * max(100, _STEPS // len(chain.stages)))
        best = max(best, PersistentBound(chain, level, steps).seconds(level))
        if best >= enough_seconds:
            break
    return best


class PersistentBound:
    """Functions of all ranges up to one level.

    >>> from solvers.problem.examples import equal_stages
    >>> bound = PersistentBound(equal_stages(3), ceiling=16, steps=16)
    >>> [round(bound.seconds(level), 3) for level in (5, 6, 7, 8, 12, 16)]
    [inf, 13.0, 12.0, 11.0, 10.0, 9.0]
    """

    def __init__(self, chain: Chain, ceiling: int, steps: int) -> None:
        self._bytes = chain_bytes = ChainBytes(chain)
        self._count = chain_bytes.stage_count
        self._bottom = min(chain_bytes.entry(0, self._count), 0)
        self._packing = CostPacking(chain, 1)
        self._keeps = keep_columns(chain_bytes, self._packing)
        self._recomputes = recompute_columns(chain_bytes, self._packing)
        height = ceiling - self._bottom
        self._step = max(1, -(-height // steps))
        self._size = -(-height // self._step) + 1 + self._above()
        self._runs = np.array([0.0, *accumulate(stage.forward_seconds for stage in chain_bytes.stages)])
        self._entries, self._boundaries = chain_bytes.entries, chain_bytes.boundaries
        self._lengths_possible = np.array(chain_bytes.run_end) - np.arange(self._count)
        self._values: list[Floats] = []  # by length, a row per first stage; flat below the first possible level
        self._rests: list[Floats] = []  # as a drop before the range sees them
        self._needs: list[Integers] = []  # exact smallest levels
        for length in range(int(self._lengths_possible.max(initial=0))):
            self._fill(length)
        self._solve()

    def seconds(self, level: int) -> float:
        """The bound within a level up to the ceiling; infinite below the smallest possible one."""
        if level < self._first_needs[0]:
            return math.inf
        place, rest = divmod(level - self._bottom, self._step)
        values = self._first[0]
        value = values[place] + (values[min(place + 1, self._size - 1)] - values[place]) * rest / self._step
        return float(value) * (1 - _SLACK)

    def _above(self) -> int:
        """Levels to add above the ceiling, for stages that free more than they keep: ranges after them look there.

        What looks even further sees the last level instead, and is itself too high to be looked at from the ceiling.
        """
        freed = -np.minimum.reduce([np.minimum(column.shifts, 0) for column in self._keeps])
        return int((-(-freed // self._step) + (freed > 0)).sum())

    def _seconds(self, costs: Integers) -> Floats:
        return np.where(costs < NEVER, (costs >> self._packing.bits) * self._packing.tick_seconds, math.inf)

    def _slots(self, levels: Integers) -> Indices:
        """The last slot at or below each level."""
        return np.clip((levels - self._bottom) // self._step, 0, self._size)

    def _fill(self, length: int) -> None:
        """All ranges of one length that run again."""
        rows = self._count - length
        best, needs = np.full((rows, self._size), math.inf), np.full(rows, _UNREACHED, dtype=np.int64)
        valid = self._lengths_possible[:rows] > length
        for values, lowest in chain_of(self._kept(rows, length), self._dropped(rows, length)):
            check_deadline()
            lowest = np.where(valid, lowest, _UNREACHED)
            self._write(best, values, lowest)
            np.minimum(needs, lowest, out=needs)
        self._values.append(self._flat(best, needs))
        self._needs.append(needs)
        self._rests.append(self._shifted(self._values[-1], self._boundaries[:rows]) + self._runs[:rows, None])

    def _kept(self, rows: int, length: int) -> Iterator[tuple[Floats, Integers]]:
        entries = self._entries[length : length + rows]
        for column in self._keeps:
            lowest = column.needs(entries, slice(rows))
            lowest[column.costs[:rows] == NEVER] = _UNREACHED
            shifts, seconds = column.shifts[:rows], self._seconds(column.again_costs)[:rows, None]
            if length:
                rest = self._shifted(self._values[length - 1][1:], shifts)
                lowest = np.maximum(lowest, self._needs[length - 1][1:] + shifts)
                yield rest + seconds, lowest
            else:
                yield np.repeat(seconds, self._size, axis=1), np.maximum(lowest, entries + shifts)
        for column in self._recomputes if not length else []:
            lowest = np.where(column.costs < NEVER, column.backward_needs, _UNREACHED)
            yield np.repeat(self._seconds(column.costs)[:, None], self._size, axis=1), lowest

    def _dropped(self, rows: int, length: int) -> Iterator[tuple[Floats, Integers]]:
        entries = self._entries[length : length + rows]
        for j in range(1, length + 1):
            rests, again = slice(j, j + rows), self._needs[j - 1][:rows]
            drop_needs = [
                needs[j - 1] if needs.size >= j else _UNREACHED // 2 for needs in self._bytes.rerun_needs[:rows]
            ]
            rest_needs = self._needs[length - j][rests] + self._boundaries[rests]
            lowest = np.maximum(np.array(drop_needs) + entries, np.maximum(again, rest_needs))
            yield self._rests[length - j][rests] + self._values[j - 1][:rows] - self._runs[:rows, None], lowest

    def _write(self, best: Floats, values: Floats, lowest: Integers) -> None:
        """Write a choice into the levels from the last one before it is possible on, where it is faster."""
        np.minimum(best, values, out=best, where=np.arange(self._size) >= self._slots(lowest)[:, None])

    def _flat(self, best: Floats, needs: Integers) -> Floats:
        """Values below the first possible level like those at it: a shift may look there, a choice may not."""
        first = np.minimum(self._slots(needs), self._size - 1)
        flat = best[np.arange(best.shape[0])[:, None], np.maximum(np.arange(self._size), first[:, None])]
        return np.where(flat < math.inf, flat, 0.0)  # of ranges beyond the ceiling, which nobody takes

    def _shifted(self, values: Floats, shifts: Integers) -> Floats:
        """Each row's function moved up by its shift, back on the grid and nowhere above."""
        whole, rest = np.divmod(-shifts, self._step)
        weight = (rest / self._step)[:, None]
        place = np.arange(self._size) + whole[:, None]
        lower, upper = np.clip(place, 0, self._size - 1), np.clip(place + 1, 0, self._size - 1)
        bends = np.zeros_like(values)
        bends[:, 1:-1] = np.maximum(values[:, :-2] - 2 * values[:, 1:-1] + values[:, 2:], 0)
        rows = np.arange(values.shape[0])[:, None]
        between = values[rows, lower] * (1 - weight) + values[rows, upper] * weight
        return between - weight * (1 - weight) * np.maximum(bends[rows, lower], bends[rows, upper])

    def _solve(self) -> None:
        """The first pass: all ranges that stop at the loss, from the shortest on."""
        count, chain_bytes = self._count, self._bytes
        self._first, self._first_needs = np.zeros((count + 1, self._size)), np.zeros(count + 1, dtype=np.int64)
        self._first_rests = np.zeros((count + 1, self._size))
        self._first_needs[count] = chain_bytes.entry(count, count)
        self._rest(count)
        for start in reversed(range(count)):
            check_deadline()
            choices = [*self._first_kept(start), *self._first_dropped(start)]
            best = np.full((1, self._size), math.inf)
            for values, lowest in choices:
                self._write(best, values[None], np.array([lowest]))
            self._first_needs[start] = min(lowest for _, lowest in choices)
            self._first[start] = self._flat(best, self._first_needs[start : start + 1])[0]
            self._rest(start)

    def _rest(self, q: int) -> None:
        self._first_rests[q] = self._moved(q, int(self._boundaries[q])) + self._runs[q]

    def _moved(self, q: int, shift: int) -> Floats:
        return self._shifted(self._first[q : q + 1], np.array([shift]))[0]

    def _first_kept(self, start: int) -> Iterator[tuple[Floats, int]]:
        for column in self._keeps:
            if column.costs[start] < NEVER:
                shift, entry = int(column.shifts[start]), self._bytes.entry(start, self._count)
                rest = self._moved(start + 1, shift) + self._seconds(column.costs)[start]
                yield rest, max(int(column.needs(entry, start)), int(self._first_needs[start + 1]) + shift)

    def _first_dropped(self, start: int) -> Iterator[tuple[Floats, int]]:
        for j, drop_need in enumerate(self._bytes.drop(start, self._count).tolist(), start=1):
            q = start + j
            rest = int(self._first_needs[q] + self._boundaries[q])
            values = self._first_rests[q] + self._values[j - 1][start] - self._runs[start]
            yield values, max(drop_need, rest, int(self._needs[j - 1][start]))
