"""Offload units of a stage: what autograd saves of it, and nothing else needs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.plans.offload_request import SMALLEST_OFFLOAD_UNIT_BYTES, offload_units_among
from profiler.op_graph import StageOp, StageOps, StageStorage

INPUT, PARAMETER, FIRST, SECOND = range(4)
STORAGES = (
    StageStorage(size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES, op=-1, saved=True, dies_after_stage=True),
    StageStorage(size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES, op=-1, saved=True, always_live=True),
    StageStorage(size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES, op=0, saved=True),
    StageStorage(size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES, op=1, saved=True),
)


def ops_with(changed: dict[int, StageStorage] | None = None, saves: tuple[int, ...] = (0, -1, 2, 3)) -> StageOps:
    """Two ops, the second of which reads what the first makes; ``changed``: storages in the place of those above."""
    ops = (
        StageOp(op="aten.mm.default", module="", seconds=0.0, reads=((INPUT, 0), (PARAMETER, 0)), allocates=(FIRST,)),
        StageOp(op="aten.gelu.default", module="", seconds=0.0, reads=((FIRST, 0),), allocates=(SECOND,)),
    )
    storages = tuple((changed or {}).get(number, storage) for number, storage in enumerate(STORAGES))
    return StageOps(ops=ops, storages=storages, saves=saves)


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (ops_with(), (FIRST, SECOND)),
        (ops_with(saves=(3,)), (SECOND,)),  # Autograd holds nothing else.
        (ops_with({FIRST: replace(STORAGES[FIRST], always_live=True)}), (SECOND,)),
        (ops_with({SECOND: replace(STORAGES[SECOND], returned=True)}), (FIRST,)),
        (ops_with({FIRST: replace(STORAGES[FIRST], size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES - 1)}), (SECOND,)),
        (ops_with(saves=()), ()),  # Files of older releases say nothing of the order.
    ],
)
@pytest.mark.parametrize("with_input", [False, True])
def test_what_autograd_alone_holds_may_travel(ops: StageOps, expected: tuple[int, ...], with_input: bool) -> None:
    own_input = (INPUT,) if with_input and 0 in ops.saves else ()
    assert offload_units_among(ops, with_input=with_input) == (*own_input, *expected)


def test_an_input_that_others_need_stays() -> None:
    shared = ops_with({INPUT: replace(STORAGES[INPUT], dies_after_stage=False)})
    assert offload_units_among(shared, with_input=True) == (FIRST, SECOND)
