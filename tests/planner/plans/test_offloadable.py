"""Offload units of an option: what somebody holds under it, and a run can tell from everything else that it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.plans.offloadable import SMALLEST_OFFLOAD_UNIT_BYTES, offload_units_among
from profiler.op_graph import StageOp, StageOps, StageStorage, StorageVersion
from profiler.records import OptionRecord

MADE = tuple(range(4))


def ops_of(last_reads: tuple[StorageVersion, ...]) -> StageOps:
    """Ops 0 and 1 make tensors alike, of which op 2 reads both; autograd saves what ops 2 and 3 make."""
    reads: tuple[tuple[StorageVersion, ...], ...] = ((), (), ((0, 0), (1, 0)), last_reads)
    return StageOps(
        ops=tuple(
            StageOp(op="aten.add.Tensor", module="", seconds=0.0, reads=read, allocates=(k,))
            for k, read in enumerate(reads)
        ),
        storages=tuple(StageStorage(size_bytes=SMALLEST_OFFLOAD_UNIT_BYTES, op=k, saved=k >= 2) for k in MADE),
        saves=(2, 3),
    )


def option(kept: tuple[int, ...], rerun: tuple[int, ...]) -> OptionRecord:
    return OptionRecord(
        name="",
        kept=kept,
        rerun=rerun,
        forward_seconds=0.0,
        backward_seconds=0.0,
        freed_bytes=0,
        forward_peak_bytes=0,
        backward_peak_bytes=0,
    )


@pytest.mark.parametrize(
    ("kept", "rerun", "last_reads", "expected"),
    [
        ((0, 1), (2, 3), (), (0, 1)),  # Alike in all, and both may: either is as good as the other.
        ((0,), (2, 3), (), ()),  # Which of the two it would be is not known.
        ((0,), (2, 3), ((0, 0),), (0,)),
        ((0, 1, 2), (3,), ((0, 0),), (0, 2)),  # Nobody holds what op 1 has made.
        ((2, 3), (0,), (), (2, 3)),
    ],
)
def test_what_can_be_told_apart_and_is_held_may_travel(
    kept: tuple[int, ...], rerun: tuple[int, ...], last_reads: tuple[StorageVersion, ...], expected: tuple[int, ...]
) -> None:
    assert offload_units_among(ops_of(last_reads), option(kept, rerun), with_input=False) == expected


def test_without_the_order_of_saves_nothing_may_travel() -> None:
    old = replace(ops_of(((0, 0),)), saves=())
    assert offload_units_among(old, None, with_input=True) == ()
    assert offload_units_among(old, option((0,), (2, 3)), with_input=True) == ()
