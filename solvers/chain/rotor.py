"""Optimal persistent schedules by dynamic programming: every budget of a chain from one table.

Formulation, with ``m`` the level (see ``solvers.chain.persistent``) that a range of stages may use:
``time(s, t, m) = min(keep o: f(s,o) + time(s+1, t, m - shift) + b(s,o),
drop to q: f(s) + .. + f(q-1) + time(q, t, m - a(q-1)) + time(s, q-1, m))`` where the choice's own need fits in m.
The gradients of stages that already went backward are part of every need.

Grid: levels are divided into at most a few thousand slots. A slot holds the fastest answer found whose *exact* need
fits in the slot, and that exact need is what shifts are added to; so rounding does not add up along the chain, as it
does where costs are rounded. Half of the levels lie evenly, a quarter in equal ratios, and a quarter close together
around the smallest budget. Chains whose levels all fit on the grid (small or homogeneous numbers) are solved exactly.

Long chains (more than 250 stages): ranges that run again are solved in full up to 40 stages; longer ones start and
stop at cuts every ten stages and only drop, which is what they are for, since they occur where memory is so short
that many stages wait for one boundary. The first pass keeps and drops freely, with a finer grid.

Guarantee: optimal among persistent schedules where the grid has a slot for every multiple of the levels' common
divisor, otherwise the best with one answer per slot; the exact needs equal the replayed peaks. Answers for larger
budgets are never slower: all are read from the one table, whatever the budget. Long chains: none, but for a bound.
Complexity: O(L^3 M) time and O(L^2 M) memory for L stages and M slots; O(L M) for long chains. Units: seconds, bytes.

Papers: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to
train deep neural networks with limited memory" (2019), section 4; Zhao et al., "Rockmate" (2023), section 3.3, for
the menu of options per stage.

The bound (``persistent_bound_seconds``) says what no answer of the table could beat, however fine its grid.

Formulation: the same recursion on functions of the level. A range's function is linear between
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
from dataclasses import replace
from itertools import accumulate, chain as chain_of, pairwise
from typing import NamedTuple

import numpy as np

from solvers.arrays import Floats, Indices, Integers
from solvers.chain.lower_bound import bound_seconds
from solvers.chain.persistent import ChainBytes, PersistentChoice, persistent_schedule
from solvers.chain.rotor_ranges import (
    NEVER,
    NOTHING,
    ChainArrays,
    CostPacking,
    RangeCosts,
    Ranges,
    at_exact_needs,
    faster_places,
    forbid,
    keep_columns,
    level_grid,
    reached_slots,
    recompute_columns,
)
from solvers.problem.chain import Chain
from solvers.problem.deadline import check_deadline
from solvers.problem.schedule import Schedule

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


_GOOD_ENOUGH = 0.001  # relative distance from the persistent optimum that needs no finer proof


class FrontierPoint(NamedTuple):
    """One answer of the table: its exact peak (resident bytes included, the optimizer's not) and seconds."""

    peak_bytes: int
    seconds: float


class Effort(NamedTuple):
    """The numbers of levels and ranges in a table.

    Attributes:
        slots: levels of the first pass.
        again_slots: levels of recomputed ranges.
        longest: stages of the longest ranges that are solved in full.
        spacing: stages between the cuts of longer ones.
    """

    slots: int
    again_slots: int
    longest: int
    spacing: int


class Table:
    """All answers for one chain.

    >>> from solvers.problem.examples import equal_stages
    >>> table = Table(equal_stages(3))
    >>> [(point.peak_bytes, round(point.seconds)) for point in table.points()]
    [(6, 13), (7, 12), (8, 11), (12, 10), (16, 9)]
    """

    def __init__(self, chain: Chain, slots: int | None = None, effort: Effort | None = None) -> None:
        self._chain = replace(chain, optimizer_peak_bytes=0)  # the optimizer's peak is no part of a point's
        self._bytes = ChainBytes(chain)
        self._resident_bytes = chain.resident_bytes
        self._count = len(chain.stages)
        effort = effort or effort_for(self._count, slots)
        rerun_grid = level_grid(chain, self._bytes, effort.again_slots)
        arrays = ChainArrays(chain, self._bytes)
        self._ranges = [Ranges(arrays, rerun_grid, list(range(self._count + 1)), effort.longest)]
        self._whole = effort.longest >= self._count
        self._exact = self._whole and rerun_grid.exact and effort.slots == effort.again_slots
        if not self._whole:
            cuts = _cuts(self._bytes, effort.spacing)
            self._ranges.append(Ranges(arrays, rerun_grid, cuts, len(cuts), self._ranges[0]))
        one_grid = effort.slots == effort.again_slots
        grid = rerun_grid if one_grid else level_grid(chain, self._bytes, effort.slots)
        self._arrays, self._grid = arrays, grid
        self._again_slots = None if one_grid else np.searchsorted(rerun_grid.levels, grid.levels, side="right") - 1
        self._solve()

    def points(self) -> list[FrontierPoint]:
        """Every answer of the table that no other one beats, by rising peak and falling seconds."""
        costs, needs = self._first.costs[0], self._first.needs[0]
        answers = [(int(needs[i]), int(costs[i])) for i in np.flatnonzero(costs[1:] < costs[:-1]) + 1]
        seconds = self._arrays.packing.seconds
        return [FrontierPoint(self._resident_bytes + need, seconds(cost)) for need, cost in answers]

    def schedule(self, point: FrontierPoint) -> Schedule:
        """The actions of one answer."""
        return persistent_schedule(self._count, self._choose, point.peak_bytes - self._resident_bytes)

    def error_seconds(self, point: FrontierPoint) -> float:
        """By how much the point may lie above the persistent optimum within its peak: proven, not estimated.

        Shared tensors count as the table's chain counts them. 0 where the grid is exact; else the distance from the
        larger of the bound on all schedules and, up to 250 stages, a bound on persistent ones
        (``persistent_bound_seconds``; refined until the distance is below 0.1 %, for a few seconds at most).
        """
        if self._exact:
            return 0.0
        bound = bound_seconds(self._chain, point.peak_bytes)
        enough = point.seconds * (1 - _GOOD_ENOUGH)
        if bound < enough and self._whole:
            level = point.peak_bytes - self._resident_bytes
            bound = max(bound, persistent_bound_seconds(self._chain, level, enough))
        return max(0.0, point.seconds - bound)

    def _choose(self, start: int, end: int, level: int) -> tuple[PersistentChoice, int, int]:
        """The fastest choice within a level; what it shifts the rest by is taken from its exact need."""
        choice, need = self._look(start, end, level)
        if choice.kind == "drop":
            return choice, need - int(self._bytes.boundaries[choice.value]), need
        if choice.kind == "keep":
            return choice, need - self._bytes.keep(start, end, choice.value)[1], 0
        return choice, 0, 0

    def _look(self, start: int, end: int, level: int) -> tuple[PersistentChoice, int]:
        if end < self._count:
            ranges = next(ranges for ranges in self._ranges if ranges.knows(start, end))
            return ranges.look(start, end, level)
        slot = int(np.searchsorted(self._first.needs[start], level, side="right")) - 1
        code, need = int(self._first.codes[start, slot]), int(self._first.needs[start, slot])
        options = self._arrays.options
        if code < options:
            return PersistentChoice("keep", int(self._arrays.keeps[code].options[start])), need
        return PersistentChoice("drop", code - 2 * options), need

    def _solve(self) -> None:
        """The first pass: all ranges that stop at the loss, from the shortest on."""
        shape = (self._count + 1, self._grid.size)
        self._first = RangeCosts(np.empty(shape, np.int64), np.empty(shape, np.int64), np.zeros(shape, np.int16))
        self._rests = np.empty(shape, dtype=np.int64)
        entry = self._bytes.entry(self._count, self._count)
        fits = self._grid.levels >= entry
        self._first.costs[-1], self._first.needs[-1] = np.where(fits, 0, NEVER), np.where(fits, entry, NOTHING)
        self._rest(self._count)
        for start in reversed(range(self._count)):
            check_deadline()
            self._answer(start)
            if start:
                self._rest(start)

    def _rest(self, q: int) -> None:
        """The costs of the range from q as the drop before it sees them: shifted, with its runs and code."""
        slots = self._shifted(q, int(self._bytes.boundaries[q]))
        self._rests[q] = self._first.costs[q, slots] + (int(self._arrays.runs[q]) + 2 * self._arrays.options + q)

    def _shifted(self, start: int, shift: int) -> Indices:
        grid = self._grid
        below = grid.below(shift)[None]
        return reached_slots(self._first.needs[start], grid, below, np.array([shift]))[0]

    def _answer(self, start: int) -> None:
        costs, grid, mask = self._drops(start), self._grid, self._arrays.packing.mask
        entry = self._bytes.entry(start, self._count)
        for code, column in enumerate(self._arrays.keeps):
            shift, need = int(column.shifts[start]), column.needs(entry, start)
            sums = self._first.costs[start + 1, self._shifted(start + 1, shift)] + (int(column.costs[start]) + code)
            sums[: grid.first(need)] = NEVER
            np.minimum(costs, sums, out=costs)
        rows, slots = faster_places(costs[None], mask)
        needs = self._needs(start, costs[slots] & mask, slots)
        answers = at_exact_needs(costs[None], grid, rows, slots, needs, mask)
        for stored, made in zip(self._first, answers, strict=True):
            stored[start] = made[0]

    def _drops(self, start: int) -> Integers:
        """The cheapest drop of each slot."""
        answers = [ranges.answers_from(start) for ranges in self._ranges]
        stops = np.concatenate([stops for stops, _, _ in answers])
        if not stops.size:
            return np.full(self._grid.size, NEVER, dtype=np.int64)
        again = np.concatenate([self._on_this_grid(costs, needs) for _, costs, needs in answers])
        sums = self._rests[stops] + again
        forbid(sums, self._grid.first(self._bytes.drop(start, self._count)[stops - start - 1]))
        return sums.min(axis=0) - self._arrays.runs[start]

    def _on_this_grid(self, values: Integers, needs: Integers) -> Integers:
        """Values of ranges that run again, for the levels of the first pass."""
        if self._again_slots is None:
            return values
        above = np.minimum(self._again_slots + 1, needs.shape[1] - 1)
        fits = needs.take(above, axis=1) <= self._grid.levels
        return np.where(fits, values.take(above, axis=1), values.take(self._again_slots, axis=1))

    def _needs(self, start: int, codes: Indices, slots: Indices) -> Integers:
        """Exact needs of the choices made in some slots."""
        options, needs = self._arrays.options, np.empty(slots.size, dtype=np.int64)
        for code in np.unique(codes):
            selected = codes == code
            needs_of = self._keep_needs if code < options else self._drop_needs
            needs[selected] = needs_of(start, int(code), slots[selected])
        return needs

    def _keep_needs(self, start: int, code: int, slots: Indices) -> Integers:
        column = self._arrays.keeps[code]
        shift = int(column.shifts[start])
        rest = self._first.needs[start + 1, self._shifted(start + 1, shift)[slots]]
        return np.maximum(rest + shift, column.needs(self._bytes.entry(start, self._count), start))

    def _drop_needs(self, start: int, code: int, slots: Indices) -> Integers:
        q = code - 2 * self._arrays.options
        shift = int(self._bytes.boundaries[q])
        rest = self._first.needs[q, self._shifted(q, shift)[slots]]
        ranges = next(ranges for ranges in self._ranges if ranges.knows(start, q - 1))
        needs = ranges.needs_of(start, q - 1)[None]
        parts = np.maximum(rest + shift, self._on_this_grid(needs, needs)[0, slots])
        return np.maximum(parts, self._bytes.drop(start, self._count)[q - start - 1])


_WHOLE_STAGES = 250  # solved in full up to here: 2 seconds at 200 stages on one slow core, and 300 MiB
_LONG = Effort(slots=2000, again_slots=320, longest=40, spacing=10)  # 1000 stages: 3 seconds, 600 MiB, 0.6 % at most


def effort_for(stage_count: int, slots: int | None = None) -> Effort:
    """The default numbers of levels and ranges for a table of so many stages.

    Measured on random chains of 50 and 100 stages against 8000 slots, at seven budgets from the smallest to the
    unplanned peak: at 2000 and 1000 slots answers were at most 0.1 % slower, at 500 slots at most 0.3 %; with menus of
    four options 2 % in the first hundredth above the smallest budget, 0.1 % elsewhere.
    """
    if stage_count > _WHOLE_STAGES and slots is None:
        return _LONG
    slots = slots or max(500, min(4000, 100_000 // stage_count))
    return Effort(slots, slots, stage_count, stage_count)


def _cuts(chain_bytes: ChainBytes, spacing: int) -> list[int]:
    """Every few stages of each run that may be dropped together, and the runs' ends."""
    edges = sorted({0, chain_bytes.stage_count, *(end for s, end in enumerate(chain_bytes.run_end) if end > s)})
    return sorted({cut for a, b in pairwise(edges) for cut in (*range(a, b, spacing), b)})
