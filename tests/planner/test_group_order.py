"""Where groups of ops are moved to: by hand, and what must hold of any step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.step_problem import OpGroup, groups_of, moved_groups
from profiler.step_graph import Side, SideReplay, StepGraph, StepOp, StepRuns, StepStorage, replay_step


def op(name: str, reads: tuple[int, ...], makes: tuple[int, ...], *, side: Side = "forward") -> StepOp:
    return StepOp(name=name, op=f"aten.{name}.default", reads=reads, makes=makes, side=side)


def moved(step: StepGraph) -> list[str]:
    groups = moved_groups(step, [OpGroup(ops=[ordinal]) for ordinal in range(len(step.ops))], frozenset())
    return [step.ops[ordinal].name for group in groups for ordinal in group.ops]


def backward_of_a_layer() -> StepGraph:
    """Reads an activation (0) and the gradient of its output (1); makes the input's gradient (2), the weight's (3)."""
    ops = (
        op("layer", (), (0,)),
        op("back_input", (1,), (2,), side="backward"),
        op("back_weight", (0, 1), (3,), side="backward"),
        op("back_last", (2,), (4,), side="backward"),
    )
    storages = (
        StepStorage(size_bytes=100),
        StepStorage(size_bytes=100, of_loss=True),
        StepStorage(size_bytes=100),
        StepStorage(size_bytes=10, gradient=True),
        StepStorage(size_bytes=10, gradient=True),
    )
    return StepGraph(ops=ops, storages=storages, resident_bytes=0)


def test_the_gradient_of_a_weight_comes_first_where_it_lets_go_of_more_than_it_makes() -> None:
    assert moved(backward_of_a_layer()) == ["layer", "back_weight", "back_input", "back_last"]


def test_what_is_read_comes_first() -> None:
    ops = backward_of_a_layer().ops
    step = replace(backward_of_a_layer(), ops=(ops[0], ops[1], replace(ops[2], reads=(0, 1, 2)), ops[3]))
    assert moved(step) == [each.name for each in step.ops]


def test_a_mask_is_made_where_it_is_read() -> None:
    ops = (
        op("mask", (), (0,)),
        op("first", (), (1,)),
        op("second", (1,), (2,)),
        op("masked", (0, 2), (3,)),
    )
    storages = (*(StepStorage(size_bytes=100) for _ in range(3)), StepStorage(size_bytes=100, returned=True))
    assert moved(StepGraph(ops=ops, storages=storages, resident_bytes=0)) == ["first", "second", "mask", "masked"]


def drawn(seed: int) -> StepGraph:
    """A step of ops that read what comes before them, some of which draw random numbers or run once."""
    rng = random.Random(seed)
    forward, backward = rng.randint(3, 12), rng.randint(3, 12)
    of_loss = forward + backward
    ops: list[StepOp] = []
    for k in range(forward + backward):
        side: Side = "forward" if k < forward else "backward"
        known = [*range(k), *([of_loss] if side == "backward" else [])]
        reads = tuple(sorted(rng.sample(known, min(len(known), rng.randint(1, 3)))))
        fixed = rng.random()
        ops.append(
            StepOp(
                name=f"op_{k}",
                op="aten.mm.default",
                side=side,
                reads=reads,
                makes=(k,),
                transient_bytes=rng.choice((0, 0, 50)),
                random=fixed < 0.1,
                once_reason="it must" if fixed > 0.9 else "",
            )
        )
    storages = [
        StepStorage(
            size_bytes=rng.choice((1, 10, 100, 200)),
            returned=k == forward - 1,
            gradient=k >= forward and rng.random() < 0.3,
        )
        for k in range(forward + backward)
    ]
    return StepGraph(ops=tuple(ops), storages=(*storages, StepStorage(size_bytes=10, of_loss=True)), resident_bytes=0)


def sides(step: StepGraph, ordinals: list[int]) -> tuple[SideReplay, SideReplay]:
    forward, backward = (tuple(k for k in ordinals if step.ops[k].side == side) for side in ("forward", "backward"))
    assert [*forward, *backward] == ordinals
    replay = replay_step(step, StepRuns(forward, backward))
    return replay.forward, replay.backward


@pytest.mark.parametrize("small_bytes", [0, 10])
def test_drawn_steps_hold_no_more_and_keep_what_has_an_order(small_bytes: int) -> None:
    gains = 0
    for seed in range(200):
        step = drawn(seed)
        small = frozenset(s for s, storage in enumerate(step.storages) if storage.size_bytes <= small_bytes)
        groups = groups_of(step, small)
        after = moved_groups(step, groups, small)
        assert sorted(after, key=groups.index) == groups
        ordinals = [ordinal for group in after for ordinal in group.first_run]
        made = {len(step.storages) - 1}
        for ordinal in ordinals:
            assert made.issuperset(step.ops[ordinal].reads)
            made.update(step.ops[ordinal].makes)
        fixed = [k for k in ordinals if step.ops[k].random or step.ops[k].once_reason]
        assert fixed == sorted(fixed)
        if not small_bytes:
            as_grouped = [ordinal for group in groups for ordinal in group.first_run]
            for old, new in zip(sides(step, as_grouped), sides(step, ordinals), strict=True):
                assert new.peak_bytes <= old.peak_bytes
                gains += new.peak_bytes < old.peak_bytes
    assert small_bytes or gains > 20
