"""Menus of a chain as arrays: what keeping and recomputing each stage costs, needs and shifts, option by option."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from solvers.chain.persistent import Bytes, ChainBytes
from solvers.chain.rotor_grid import NEVER, Seconds
from solvers.problem.chain import Option


class Menu(NamedTuple):
    """One option of every stage, the i-th of those worth looking at; stages with fewer have a cost of ``NEVER``.

    Attributes:
        options: the option's number in the stage.
        costs: of its forward and backward.
        shifts: by how much it shifts the rest of a range.
        backward_needs: the level that its backward needs; for recomputing, its whole need.
        forward_peak_bytes: of its forward.
    """

    options: Bytes
    costs: Bytes
    shifts: Bytes
    backward_needs: Bytes
    forward_peak_bytes: Bytes


def keep_menus(chain_bytes: ChainBytes, seconds: Seconds) -> list[Menu]:
    """The options to keep that no other one of the stage beats in everything."""
    return _menus([_keeps(chain_bytes, seconds, s) for s in range(chain_bytes.stage_count)])


def recompute_menus(chain_bytes: ChainBytes, seconds: Seconds) -> list[Menu]:
    """The options to run again directly before the backward that no other one beats in everything."""
    return _menus([_recomputes(chain_bytes, seconds, s) for s in range(chain_bytes.stage_count)])


_Row = tuple[int, int, int, int, int]


def _keeps(b: ChainBytes, seconds: Seconds, s: int) -> list[_Row]:
    return [
        (o, _cost(seconds, way.forward_seconds, way), b.keep(s, s, o)[1], b.backward(s, o), way.forward_peak_bytes)
        for o, way in enumerate(b.stages[s].options)
    ]


def _recomputes(b: ChainBytes, seconds: Seconds, s: int) -> list[_Row]:
    return [
        (o, _cost(seconds, way.recompute_seconds, way), 0, b.recompute(s, o), 0)
        for o, way in enumerate(b.stages[s].options)
    ]


def _cost(seconds: Seconds, run_seconds: float, way: Option) -> int:
    return seconds.cost(run_seconds) + seconds.cost(way.backward_seconds)


def _menus(rows: list[list[_Row]]) -> list[Menu]:
    menus = [_unbeaten(row) for row in rows]
    nothing: _Row = (0, NEVER, 0, 0, 0)
    longest = max(len(menu) for menu in menus)
    columns = [[menu[i] if i < len(menu) else nothing for menu in menus] for i in range(longest)]
    return [Menu(*np.array(column, dtype=np.int64).T.copy()) for column in columns]


def _unbeaten(rows: list[_Row]) -> list[_Row]:
    """Rows without those that another one, or an equal one before, beats in every number but the first."""
    best: list[_Row] = []
    for row in sorted(rows, key=lambda row: (*row[1:], row[0])):
        if not any(all(a <= b for a, b in zip(other[1:], row[1:], strict=True)) for other in best):
            best.append(row)
    return best
