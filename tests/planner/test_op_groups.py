"""Which ops run together, by hand."""

from __future__ import annotations

from dataclasses import replace

from planner.step_problem import groups_of, small_storages
from profiler.step_graph import Side, StepGraph, StepOp, StepStorage

SIZES = (1000, 4, 1000, 4, 2000, 4)
X, MEAN, Y, RATE, Z, SUM = range(6)


def op(
    name: str, reads: tuple[int, ...], makes: tuple[int, ...], *, side: Side = "forward", random: bool = False
) -> StepOp:
    return StepOp(name=name, op=f"aten.{name}.default", reads=reads, makes=makes, side=side, random=random)


def step(*ops: StepOp) -> StepGraph:
    return StepGraph(ops=ops, storages=tuple(StepStorage(size_bytes=size) for size in SIZES), resident_bytes=0)


def grouped(*ops: StepOp) -> list[tuple[list[int], list[int]]]:
    found = step(*ops)
    return [(group.ops, group.once) for group in groups_of(found, small_storages(found, 20))]


def test_small_storages_are_those_that_hold_no_more_together() -> None:
    found = step(op("all", (), (X, MEAN, Y, RATE)))
    assert [small_storages(found, most) for most in (0, 4, 8, 1007, 1008)] == [
        frozenset(),
        frozenset({MEAN}),
        frozenset({MEAN, RATE}),
        frozenset({MEAN, RATE}),
        frozenset({MEAN, RATE, X}),
    ]


X_, Y_, Z_ = (op(name, (), (storage,)) for name, storage in (("x", X), ("y", Y), ("z", Z)))
Y_OF_X = op("y", (X,), (Y,))


def test_small_results_are_made_with_what_they_are_made_of() -> None:
    mean, rate = op("mean", (X,), (MEAN,)), op("rate", (), (RATE,))
    assert grouped(X_, Y_OF_X, mean, rate, op("z", (Y, MEAN, RATE), (Z,))) == [([0], [2]), ([1], [3]), ([4], [])]


def test_not_before_what_they_read_nor_where_that_would_have_to_stay() -> None:
    both = op("sum", (X, Y), (SUM,))
    assert grouped(X_, Y_, Z_, both) == [([0], []), ([1], []), ([2], []), ([3], [])]  # with y, x would have to stay
    assert grouped(X_, Y_OF_X, Z_, both) == [([0], []), ([1], [3]), ([2], [])]
    chained = op("rate", (MEAN, X), (RATE,))
    assert grouped(X_, Y_OF_X, op("mean", (Y,), (MEAN,)), Z_, chained) == [([0], []), ([1], [2, 4]), ([3], [])]


def test_draws_stay_in_their_order_and_backward_is_not_done_in_forward() -> None:
    assert grouped(X_, Z_, op("mean", (X,), (MEAN,), random=True)) == [([0], []), ([1], []), ([2], [])]
    assert grouped(X_, Z_, op("mean", (X,), (MEAN,), side="backward")) == [([0], []), ([1], []), ([2], [])]


def test_what_the_next_op_alone_reads_is_made_with_it_where_that_makes_no_more() -> None:
    z_of_y = op("z", (Y,), (Z,))
    assert grouped(X_, Y_OF_X, z_of_y) == [([0, 1], []), ([2], [])]  # y is half of z: to keep it may be better
    assert grouped(X_, Y_OF_X, op("sum", (X,), (SUM,))) == [([0], [2]), ([1], [])]
    assert grouped(X_, op("mean", (X,), (MEAN,)), op("y", (X, MEAN), (Y,))) == [([0, 2], [1])]
    assert grouped(X_, op("y", (X,), (Y,), side="backward")) == [([0], []), ([1], [])]


def test_not_where_that_takes_more_bytes_than_one_by_one() -> None:
    """While y is made of x, and z of y, x may have gone before z, unless somebody reads it later."""
    found = StepGraph(
        ops=(
            op("wide", (), (Z,)),
            op("x", (Z,), (X,)),
            op("y", (X,), (Y,)),
            op("back", (Z, Y), (SUM,), side="backward"),
        ),
        storages=tuple(StepStorage(size_bytes=size) for size in SIZES),
        resident_bytes=0,
    )
    assert [group.ops for group in groups_of(found, frozenset())] == [[0], [1], [2], [3]]
    later = replace(found, ops=(*found.ops[:3], op("end", (Z,), (RATE,)), *found.ops[3:]))
    assert [group.ops for group in groups_of(later, frozenset())] == [[0], [1, 2], [3], [4]]
