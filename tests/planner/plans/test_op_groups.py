"""Which ops run together, by hand."""

from __future__ import annotations

from planner.plans.op_groups import groups_of, small_storages
from profiler.step_graph import Side, StepGraph, StepOp, StepStorage

SIZES = (1000, 4, 1000, 4, 2000, 4)
X, MEAN, Y, RATE, Z, SUM = range(6)


def op(
    name: str, reads: tuple[int, ...], makes: tuple[int, ...], *, side: Side = "forward", random: bool = False
) -> StepOp:
    return StepOp(name=name, op=f"aten.{name}.default", reads=reads, makes=makes, side=side, random=random)


def step(*ops: StepOp) -> StepGraph:
    return StepGraph(ops=ops, storages=tuple(StepStorage(size_bytes=size) for size in SIZES), resident_bytes=0)


def grouped(*ops: StepOp) -> list[tuple[int, list[int]]]:
    found = step(*ops)
    return [(group.ordinal, group.once) for group in groups_of(found, small_storages(found, 20))]


def test_small_storages_are_those_that_hold_no_more_together() -> None:
    found = step(op("all", (), (X, MEAN, Y, RATE)))
    assert [small_storages(found, most) for most in (0, 4, 8, 1007, 1008)] == [
        frozenset(),
        frozenset({MEAN}),
        frozenset({MEAN, RATE}),
        frozenset({MEAN, RATE}),
        frozenset({MEAN, RATE, X}),
    ]


def test_small_results_are_made_with_what_they_are_made_of() -> None:
    mean, rate = op("mean", (X,), (MEAN,)), op("rate", (), (RATE,))
    assert grouped(op("x", (), (X,)), op("y", (X,), (Y,)), mean, rate, op("z", (Y, MEAN, RATE), (Z,))) == [
        (0, [2]),
        (1, [3]),
        (4, []),
    ]


def test_not_before_what_they_read_nor_where_that_would_have_to_stay() -> None:
    x, y, z = op("x", (), (X,)), op("y", (), (Y,)), op("z", (), (Z,))
    both = op("sum", (X, Y), (SUM,))
    assert grouped(x, y, z, both) == [(0, []), (1, []), (2, []), (3, [])]  # with y, x would have to be there
    reads_x = op("y", (X,), (Y,))
    assert grouped(x, reads_x, z, both) == [(0, []), (1, [3]), (2, [])]
    chained = op("rate", (MEAN, X), (RATE,))
    assert grouped(x, reads_x, op("mean", (Y,), (MEAN,)), z, chained) == [(0, []), (1, [2, 4]), (3, [])]


def test_draws_stay_in_their_order_and_backward_is_not_done_in_forward() -> None:
    x, z = op("x", (), (X,)), op("z", (), (Z,))
    assert grouped(x, z, op("mean", (X,), (MEAN,), random=True)) == [(0, []), (1, []), (2, [])]
    assert grouped(x, z, op("mean", (X,), (MEAN,), side="backward")) == [(0, []), (1, []), (2, [])]
