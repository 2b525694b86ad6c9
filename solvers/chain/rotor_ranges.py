"""A grid of levels, seconds as whole numbers, and ranges of stages that are recomputed: parts of the rotor's table.

The persistent recursion is solved for all ranges by rising length, as whole arrays. A row stands for a range that
starts at a cut of the chain. With a cut before every stage these are all ranges up to a longest one; with cuts further
apart they are long ranges between cuts, which can only drop up to another cut and take their shortest ranges from the
cuts that lie closer together.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Indices, Integers
from solvers.chain.persistent import ChainBytes, PersistentChoice, smallest_level
from solvers.problem.chain import Chain, Option
from solvers.problem.deadline import check_deadline

NEVER = 1 << 60  # cost of a slot without an answer; three of them still sum within 64 bits
NOTHING = np.iinfo(np.int64).min // 4  # need of a slot without an answer: sorts before every real one


_TIGHT = 1.25  # up to this multiple of the smallest level slots are close together


class Grid:
    """Rising levels in bytes; the first is too small for any answer.

    Attributes:
        levels: the level of each slot.
        exact: whether every need that can occur has a slot of its own.
    """

    def __init__(self, levels: Integers, exact: bool) -> None:
        self.levels = levels
        self.exact = exact
        self.size = levels.size
        self.below = cache(self._below)  # equal stages ask for the same shift

    def _below(self, shift: int) -> Indices:
        """For each slot the last one whose level plus ``shift`` is within its own."""
        return np.maximum(np.searchsorted(self.levels, self.levels - shift, side="right") - 1, 0)

    def slots_below(self, shifts: Integers) -> Indices:
        """``below`` of each shift, stacked."""
        stacked = np.empty((shifts.size, self.size), dtype=np.intp)
        for row, shift in enumerate(shifts):
            check_deadline()
            stacked[row] = self.below(int(shift))
        return stacked

    def first(self, needs: Integers) -> Indices:
        """The first slot that each need fits in."""
        return np.searchsorted(self.levels, needs)


class CostPacking:
    """Seconds as whole numbers with free low bits, in which a cost carries the code of the choice that made it.

    Whole numbers make sums exact and ties ties, and the smaller of two packed costs brings its code with it.
    """

    def __init__(self, chain: Chain, codes: int) -> None:
        self.bits = codes.bit_length()
        self.mask = (1 << self.bits) - 1
        # a power of two, so that whole and dyadic seconds stay exact; all sums stay below NEVER
        self.tick_seconds = 2.0 ** (math.frexp(_most_seconds(chain))[1] - (59 - self.bits))

    def cost(self, seconds: float) -> int:
        """Seconds as a cost whose code is 0."""
        return round(seconds / self.tick_seconds) << self.bits

    def seconds(self, cost: int) -> float:
        """The seconds of a cost, whatever its code."""
        return (cost >> self.bits) * self.tick_seconds


class RangeCosts(NamedTuple):
    """Costs (packed, or with code 0), exact needs and codes of some ranges, one row each and one column per slot."""

    costs: Integers
    needs: Integers
    codes: NDArray[np.int16]


def reached_slots(
    needs: Integers, grid: Grid, below: Indices, shifts: Integers, window: slice = slice(None)
) -> Indices:
    """Per row and slot the last column whose need fits once the row's shift is added, counted through all rows.

    ``below`` is right but for the next slot, whose exact need may lie low enough in it. With a window, only its slots.
    """
    places = below[:, window] + np.arange(0, needs.size, grid.size)[:, None]
    above = np.minimum(places + 1, np.arange(grid.size - 1, needs.size, grid.size)[:, None])
    fits = needs.ravel().take(above, mode="clip") <= grid.levels[window] - shifts[:, None]
    np.copyto(places, above, where=fits)
    return places


def at_exact_needs(
    costs: Integers, grid: Grid, rows: Indices, columns: Indices, needs: Integers, mask: int
) -> RangeCosts:
    """Move every answer to the first slot that its exact need fits in; slots between repeat the one below.

    Packed ``costs`` have a row per range; ``rows``, ``columns`` and ``needs`` are those of the answers that are faster
    than the one before, in reading order.
    """
    source = np.zeros(costs.shape, dtype=np.int32)
    source[rows, grid.first(needs)] = np.arange(1, rows.size + 1)  # rising, so the fastest of a slot stays
    source = np.maximum.accumulate(source, axis=1)
    packed = costs[rows, columns]
    values = np.concatenate(([NEVER], packed & ~mask)), np.concatenate(([NOTHING], needs))
    codes = np.concatenate(([0], packed & mask)).astype(np.int16)
    return RangeCosts(values[0][source], values[1][source], codes[source])


def faster_places(costs: Integers, mask: int) -> tuple[Indices, Indices]:
    """Rows and columns of the answers that are faster than the slot before."""
    plain = costs | mask
    rows, columns = np.nonzero(plain[:, 1:] < np.minimum(plain[:, :-1], NEVER))
    return rows, columns + 1


def level_grid(chain: Chain, chain_bytes: ChainBytes, slots: int) -> Grid:
    """Levels of the slots, of which the first holds nothing.

    They are all multiples of the common divisor where these are few enough. Else half of them lie evenly up to the top,
    a quarter in equal ratios from the smallest need of a stage on, and a quarter evenly near the smallest level of the
    whole chain, where single boundaries decide.
    """
    top, bottom = _top(chain, chain_bytes), min(chain_bytes.entry(0, chain_bytes.stage_count), 0)
    unit = _common_divisor(chain)
    exact = top // unit < slots
    if exact:
        levels = np.arange(0, top + 2 * unit, unit)
    else:
        backwards = [chain_bytes.backward(s, o) for s, x in enumerate(chain.stages) for o in range(len(x.options))]
        least_need, tight = max(min(backwards), unit, top // (8 * slots)), smallest_level(chain_bytes)
        ratios = np.geomspace(least_need, max(top, least_need), slots // 4)
        close = np.linspace(min(least_need, tight), tight * _TIGHT, slots // 4)
        levels = np.ceil(np.concatenate((np.linspace(0, top + 1, slots // 2), ratios, close)))
    return Grid(np.concatenate(([bottom - 1], np.unique(levels))).astype(np.int64), exact)


def _most_seconds(chain: Chain) -> float:
    """More than any schedule of the table lasts: one forward per stage before each backward, and one to start with."""
    count = len(chain.stages)
    slowest = [max(o.rerun_seconds + o.backward_seconds for o in stage.options) for stage in chain.stages]
    return (count + 2) * (sum(stage.forward_seconds for stage in chain.stages) + sum(slowest))


def _top(chain: Chain, sizes: ChainBytes) -> int:
    """Level above which nothing gets faster: with it every stage may keep what its most demanding option keeps."""
    top = shift = 0
    for s, stage in enumerate(chain.stages):
        choices = [sizes.keep(s, sizes.stage_count, o) for o in range(len(stage.options))]
        top = max(top, shift + max(need for need, _ in choices))
        shift += max(0, *(shift_bytes for _, shift_bytes in choices))
    return max(top, shift + sizes.entry(sizes.stage_count, sizes.stage_count))


def _common_divisor(chain: Chain) -> int:
    sizes = (
        getattr(item, name)
        for stage in chain.stages
        for item in (stage, *stage.options)
        for name in item.__slots__
        if name.endswith("_bytes")
    )
    return math.gcd(*sizes) or 1


class OptionColumn(NamedTuple):
    """One option of every stage, the i-th of those worth looking at; stages with fewer have a cost of ``NEVER``.

    Attributes:
        options: the option's number in the stage.
        costs: of its forward and backward.
        again_costs: of these where the forward is no first one.
        shifts: by how much it shifts the rest of a range.
        backward_needs: the level that its backward needs; for recomputing, its whole need.
        forward_peak_bytes: of its forward.
    """

    options: Integers
    costs: Integers
    again_costs: Integers
    shifts: Integers
    backward_needs: Integers
    forward_peak_bytes: Integers

    def needs(self, entries: Integers | int, stages: Indices | slice | int) -> Integers:
        """Level that keeping stages with the option needs themselves, in ranges with these entries."""
        return np.maximum(entries + self.forward_peak_bytes[stages], self.backward_needs[stages])


_Row = tuple[int, int, int, int, int, int]


def keep_columns(sizes: ChainBytes, packing: CostPacking) -> list[OptionColumn]:
    """The options to keep that no other one of the stage beats in everything."""

    def row(s: int, o: int, option: Option) -> _Row:
        forward, again, backward = map(
            packing.cost, (option.forward_seconds, option.rerun_seconds, option.backward_seconds)
        )
        shift_bytes = sizes.keep(s, s, o)[1]
        return o, forward + backward, again + backward, shift_bytes, sizes.backward(s, o), option.forward_peak_bytes

    return _columns([[row(s, o, x) for o, x in enumerate(stage.options)] for s, stage in enumerate(sizes.stages)])


def recompute_columns(sizes: ChainBytes, packing: CostPacking) -> list[OptionColumn]:
    """The options to run again directly before the backward that no other one beats in everything."""

    def row(s: int, o: int, option: Option) -> _Row:
        cost = packing.cost(option.recompute_seconds) + packing.cost(option.backward_seconds)
        return o, cost, cost, 0, sizes.recompute(s, o), 0

    return _columns([[row(s, o, x) for o, x in enumerate(stage.options)] for s, stage in enumerate(sizes.stages)])


def _columns(rows: list[list[_Row]]) -> list[OptionColumn]:
    options = [_unbeaten(row) for row in rows]
    nothing: _Row = (0, NEVER, NEVER, 0, 0, 0)
    columns = zip_longest(*options, fillvalue=nothing)
    return [OptionColumn(*np.array(column, dtype=np.int64).T.copy()) for column in columns]


def _unbeaten(rows: list[_Row]) -> list[_Row]:
    """Rows without those that another one, or an equal one before, beats in every number but the first."""
    best: list[_Row] = []
    for row in sorted(rows, key=lambda row: (*row[1:], row[0])):
        if not any(all(a <= b for a, b in zip(other[1:], row[1:], strict=True)) for other in best):
            best.append(row)
    return best


class ChainArrays:
    """The data that all tables of a chain share.

    Attributes:
        bytes, packing: of the chain, and of its costs.
        keeps, recomputes: the options worth looking at.
        options: codes for each of keeping and recomputing; dropping has those from twice as many on.
        runs: for each stage the cost of running all stages before it, keeping nothing.
        drop_needs: what dropping stages once more adds to the entry, for all starts one after the other.
        drop_offsets: where in ``drop_needs`` each start begins.
    """

    def __init__(self, chain: Chain, chain_bytes: ChainBytes) -> None:
        # a cost may carry an option to keep, an option to recompute, or a cut to drop up to
        codes = 2 * max(len(stage.options) for stage in chain_bytes.stages) + chain_bytes.stage_count + 1
        self.bytes, self.packing = chain_bytes, CostPacking(chain, codes)
        self.keeps = keep_columns(chain_bytes, self.packing)
        self.recomputes = recompute_columns(chain_bytes, self.packing)
        self.options = max(len(self.keeps), len(self.recomputes))
        runs = [0, *accumulate(self.packing.cost(stage.forward_seconds) for stage in chain_bytes.stages)]
        self.runs = np.array(runs, dtype=np.int64)
        self.drop_needs = np.concatenate([*chain_bytes.rerun_needs, [NOTHING]])
        self.drop_offsets = np.cumsum([0, *(needs.size for needs in chain_bytes.rerun_needs)])[:-1]


class _SlotSpan(NamedTuple):
    """Slots of all ranges of a length: before ``least`` none has an answer, from ``most`` on none gets faster."""

    least: int
    most: int


class Ranges:
    """Answers of all ranges between cuts, up to ``longest`` cuts apart.

    Attributes:
        cuts: first stages of ranges, rising, and the stage after the last one.
        answers: for each length (in cuts, less one) the answers of all ranges, a row per first cut.
    """

    def __init__(
        self, arrays: ChainArrays, grid: Grid, cuts: list[int], longest: int, finer: Ranges | None = None
    ) -> None:
        self.arrays, self.grid, self.cuts, self.finer = arrays, grid, cuts, finer
        self.answers: list[RangeCosts] = []
        self._starts = np.array(cuts[:-1])
        self._ends = np.array(cuts[1:]) - 1
        self._row_of = {cut: row for row, cut in enumerate(cuts)}
        self._lengths_possible = self._reaches()
        self._boundaries = arrays.bytes.boundaries[self._starts]
        self._below = grid.slots_below(self._boundaries)
        self._options = arrays.options
        self._keep_below = [grid.slots_below(column.shifts) for column in arrays.keeps] if finer is None else []
        self._rests: list[Integers] = []  # costs as the drop before a range sees them: shifted, with its runs and code
        self._extremes: list[tuple[Integers, Integers]] = []  # per row needs of the slowest and of the fastest answer
        self._spans: list[_SlotSpan] = []
        self._rest_spans: list[_SlotSpan] = []
        lengths = min(longest, int(self._lengths_possible.max(initial=0)))
        sizes = (self._starts.size - np.arange(lengths)) * grid.size
        self._offsets = np.concatenate(([0], np.cumsum(sizes)))
        self._all_needs = np.empty(self._offsets[-1], dtype=np.int64)  # in one piece: choices look into many lengths
        for length in range(lengths):
            self._fill(length)

    def knows(self, start: int, end: int) -> bool:
        """Whether the range is one of these."""
        row, stop = self._row_of.get(start), self._row_of.get(end + 1)
        return row is not None and stop is not None and 0 <= stop - row - 1 < len(self.answers)

    def look(self, start: int, end: int, level: int) -> tuple[PersistentChoice, int]:
        """The choice that the fastest answer of a range within a level makes, and its exact need."""
        row = self._row_of[start]
        answers = self.answers[self._row_of[end + 1] - row - 1]
        slot = int(np.searchsorted(answers.needs[row], level, side="right")) - 1
        return self._choice(start, int(answers.codes[row, slot])), int(answers.needs[row, slot])

    def answers_from(self, start: int) -> tuple[Indices, Integers, Integers]:
        """The ends of the ranges from a stage, their costs and needs; without those that the finer cuts have."""
        row, least = self._row_of.get(start), len(self.finer.answers) if self.finer else 0
        reach = 0 if row is None else min(len(self.answers), int(self._lengths_possible[row]))
        stops = np.array(self.cuts[row + 1 : row + 1 + reach] if row is not None and reach > 0 else [], dtype=np.intp)
        far = np.flatnonzero(stops - start > least)
        rows = [(self.answers[length].costs[row], self.answers[length].needs[row]) for length in far]
        costs, needs = np.array(rows, dtype=np.int64).reshape(far.size, 2, self.grid.size).transpose(1, 0, 2)
        return stops[far], costs, needs

    def needs_of(self, start: int, end: int) -> Integers:
        """Exact needs of a range, a slot each."""
        row = self._row_of[start]
        return self.answers[self._row_of[end + 1] - row - 1].needs[row]

    def _choice(self, start: int, code: int) -> PersistentChoice:
        kind = code // self._options
        if kind >= 2:
            return PersistentChoice("drop", self.cuts[code - 2 * self._options])
        column = (self.arrays.keeps, self.arrays.recomputes)[kind][code % self._options]
        return PersistentChoice(("keep", "recompute")[kind], int(column.options[start]))

    def _reaches(self) -> Indices:
        """For each cut, how many of the cuts after it still end a range that may run again."""
        run_ends = np.array(self.arrays.bytes.run_end, dtype=np.int64)[self._starts]
        return np.searchsorted(np.array(self.cuts), run_ends, side="right") - 1 - np.arange(self._starts.size)

    def _fill(self, length: int) -> None:
        """All ranges of one length: their answers, and what a drop before them makes of these."""
        check_deadline()
        rows = self._starts.size - length
        lowest = self._lowest(rows, length)
        window = self._window(rows, length, lowest)
        best = self._drops(rows, length, lowest, window)
        if self.finer is None:
            self._keep(best, rows, length, window)
        costs = np.full((rows, self.grid.size), NEVER, dtype=np.int64)
        costs[:, window] = best
        costs[:, window.stop :] = best[:, -1:]
        costs[self._lengths_possible[:rows] <= length] = NEVER
        places = faster_places(costs, self.arrays.packing.mask)
        needs = self._needs(costs[places] & self.arrays.packing.mask, places, length)
        answers = at_exact_needs(costs, self.grid, *places, needs, self.arrays.packing.mask)
        if self.finer is not None:
            self._copy_finer(answers, self.finer, length)
        first = self._offsets[length]
        stored = self._all_needs[first : first + answers.needs.size].reshape(answers.needs.shape)
        stored[:] = answers.needs
        answers = answers._replace(needs=stored)
        self.answers.append(answers)
        self._rests.append(self._rest(answers, rows))
        self._extremes.append(_extremes(answers))
        self._spans.append(self._span(*self._extremes[-1]))
        self._rest_spans.append(self._span(*(needs + self._boundaries[:rows] for needs in self._extremes[-1])))

    def _entries(self, rows: int, length: int) -> Integers:
        return self.arrays.bytes.entries[self._ends[length : length + rows]]

    def _drop_levels(self, starts: Indices, stops: Indices, ends: Indices) -> Integers:
        """Level that dropping the stages from each start up to each stop needs itself, in a range up to an end."""
        arrays = self.arrays
        places = np.minimum(arrays.drop_offsets[starts] + stops - starts - 1, arrays.drop_needs.size - 1)
        return arrays.drop_needs[places] + arrays.bytes.entries[ends]

    def _lowest(self, rows: int, length: int) -> Indices:
        """The first slot that each drop fits in: a row per range, a column per cut that it may stop at."""
        starts, stops = np.arange(rows)[:, None], np.arange(1, length + 1)
        needs = self._drop_levels(self._starts[starts], self._starts[starts + stops], self._ends[starts + length])
        return np.where(self._lengths_possible[:rows, None] > length, self.grid.first(needs), 0)

    def _window(self, rows: int, length: int, lowest: Indices) -> slice:
        """The slots in which the fastest answer of any range of this length may differ from slot to slot."""
        pairs = [(self._spans[j - 1], self._rest_spans[length - j]) for j in range(1, length + 1)]
        spans = [_SlotSpan(max(a.least, b.least), max(a.most, b.most)) for a, b in pairs]
        if self.finer is None:
            spans += [self._keep_span(column, rows, length) for column in self.arrays.keeps]
        if self.finer is None and not length:
            spans += [self._span(column.backward_needs, column.backward_needs) for column in self.arrays.recomputes]
        most = max([int(lowest.max(initial=0)), *(span.most for span in spans)])
        least = min([self.grid.size - 1, *(span.least for span in spans)])
        return slice(least, max(least, min(most, self.grid.size - 1)) + 1)

    def _keep_span(self, column: OptionColumn, rows: int, length: int) -> _SlotSpan:
        slowest = fastest = self._entries(rows, length)
        if length:
            slowest, fastest = (needs[1:] for needs in self._extremes[length - 1])
        shifts, least_needs = column.shifts[:rows], column.needs(self._entries(rows, length), slice(rows))
        return self._span(slowest + shifts, np.maximum(fastest + shifts, least_needs))

    def _span(self, least: Integers, most: Integers) -> _SlotSpan:
        return _SlotSpan(int(self.grid.first(least).min()), int(self.grid.first(most).max()))

    def _drops(self, rows: int, length: int, lowest: Indices, window: slice) -> Integers:
        """The cheapest drop of each range and slot of the window."""
        best = np.full((rows, window.stop - window.start), 2 * NEVER, dtype=np.int64)
        sums = np.empty_like(best)
        for j in range(1, length + 1):
            check_deadline()
            again, rest = self.answers[j - 1].costs[:rows, window], self._rests[length - j][j : j + rows, window]
            np.add(rest, again, out=sums)
            forbid(sums, lowest[:, j - 1] - window.start)
            np.minimum(best, sums, out=best)
        best -= self.arrays.runs[self._starts[:rows], None]
        return best

    def _keep(self, best: Integers, rows: int, length: int, window: slice) -> None:
        """Write keeping a range's first stage, and running a single one again, where that is cheaper."""
        grid, entries = self.grid, self._entries(rows, length)
        for code, column in enumerate(self.arrays.keeps):
            needs = column.needs(entries, slice(rows))
            if length:
                rest = self.answers[length - 1]
                slots = reached_slots(rest.needs[1:], grid, self._keep_below[code][:rows], column.shifts[:rows], window)
                sums = rest.costs[1:].ravel().take(slots, mode="clip")
                sums += column.again_costs[:rows, None] + code
            else:
                needs = np.maximum(needs, entries + column.shifts)
                sums = np.repeat(column.again_costs[:, None] + code, best.shape[1], axis=1)
            forbid(sums, grid.first(needs) - window.start)
            np.minimum(best, sums, out=best)
        if not length:
            for code, column in enumerate(self.arrays.recomputes, start=self._options):
                sums = np.repeat(column.costs[:, None] + code, best.shape[1], axis=1)
                forbid(sums, grid.first(column.backward_needs) - window.start)
                np.minimum(best, sums, out=best)

    def _rest(self, answers: RangeCosts, rows: int) -> Integers:
        slots = reached_slots(answers.needs, self.grid, self._below[:rows], self._boundaries[:rows])
        codes = 2 * self._options + np.arange(rows)
        return answers.costs.ravel().take(slots, mode="clip") + (self.arrays.runs[self._starts[:rows]] + codes)[:, None]

    def _needs(self, codes: Indices, places: tuple[Indices, Indices], length: int) -> Integers:
        """Exact needs of the choices made at some rows and slots."""
        rows, slots = places
        needs = np.empty(rows.size, dtype=np.int64)
        for option in range(self._options):
            self._keep_needs(needs, np.flatnonzero(codes == option), rows, slots, length, option)
            selected = np.flatnonzero(codes == self._options + option)
            if selected.size:
                needs[selected] = self.arrays.recomputes[option].backward_needs[rows[selected]]
        drops = np.flatnonzero(codes >= 2 * self._options)
        needs[drops] = self._drop_needs(rows[drops], codes[drops] - 2 * self._options, slots[drops], length)
        return needs

    def _keep_needs(
        self, needs: Integers, selected: Indices, rows: Indices, slots: Indices, length: int, option: int
    ) -> None:
        if not selected.size:
            return
        column, row = self.arrays.keeps[option], rows[selected]
        entries = self.arrays.bytes.entries[self._ends[row + length]]
        rest = entries + column.shifts[row]
        if length:
            below = self._keep_below[option][row, slots[selected]]
            rest = self._reached(length - 1, row + 1, slots[selected], below, column.shifts[row])
        needs[selected] = np.maximum(rest, column.needs(entries, row))

    def _drop_needs(self, rows: Indices, cuts: Indices, slots: Indices, length: int) -> Integers:
        jumps, shifts = cuts - rows, self._boundaries[cuts]
        rest = self._reached(length - jumps, cuts, slots, self._below[cuts, slots], shifts)
        again = self._all_needs[self._offsets[jumps - 1] + rows * self.grid.size + slots]
        drop_needs = self._drop_levels(self._starts[rows], self._starts[cuts], self._ends[rows + length])
        return np.maximum(np.maximum(rest, again), drop_needs)

    def _reached(
        self, lengths: Indices | int, rows: Indices, slots: Indices, below: Indices, shifts: Integers
    ) -> Integers:
        """Exact needs of the fastest answers that fit into slots once shifts are added, with these added."""
        size = self.grid.size
        first = self._offsets[lengths] + rows * size
        above = self._all_needs[first + np.minimum(below + 1, size - 1)] + shifts
        return np.where(above <= self.grid.levels[slots], above, self._all_needs[first + below] + shifts)

    def _copy_finer(self, answers: RangeCosts, finer: Ranges, length: int) -> None:
        """Takes the answer with cuts everywhere for ranges whose cuts lie close enough together that it is known."""
        for row, start in enumerate(self._starts[: answers.costs.shape[0]].tolist()):
            stages = int(self._ends[row + length]) - start
            if stages < len(finer.answers):
                for coarse, fine in zip(answers, finer.answers[stages], strict=True):
                    coarse[row] = fine[start]


def _extremes(answers: RangeCosts) -> tuple[Integers, Integers]:
    """Per row the needs of the slowest and of the fastest answer; far below all others where there is none."""
    first = (answers.costs < NEVER).argmax(axis=1)
    slowest = answers.needs[np.arange(first.size), first]
    return np.where(slowest == NOTHING, -NOTHING, slowest), answers.needs[:, -1].copy()


def forbid(costs: Integers, lowest: Indices) -> None:
    """Exclude the slots of each row before the lowest one: as costs stay high though runs may still be subtracted."""
    most = int(lowest.max(initial=0))
    if most <= 0:
        return
    np.copyto(costs[:, :most], 2 * NEVER, where=np.arange(most) < lowest[:, None])
