"""What tables of persistent schedules are made of: a grid of levels, seconds as whole numbers, options as arrays."""

from __future__ import annotations

import math
from functools import cache
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from solvers.arrays import Indices, Integers
from solvers.chain.minimum_memory import smallest_level
from solvers.chain.persistent import ChainBytes
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
