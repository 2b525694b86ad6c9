"""The program of a schedule: when what travels, and in which of its stage's lists it stands."""

from __future__ import annotations

import pytest

from planner.plans.lowering import LoweredSchedule, Transfer, TransferMoment, lowered
from planner.plans.plan import PlannedStage
from solvers.problem.chain_schedule import Action, Schedule


def stage(k: int) -> PlannedStage:
    return PlannedStage(
        name=f"block.{k}",
        kind="stage",
        module_class="Block",
        decision="keep",
        kept_bytes=0,
        runs=1,
        extra_seconds=0.0,
        extra_ops=0,
        links=((0, 0),) if k else (),
        input_shapes=(),
        parameter_shapes=(),
        mutated_buffers=(),
    )


def program(*rows: tuple[str, int, int | None], count: int = 3) -> LoweredSchedule:
    stages = [stage(k) for k in range(count)]
    return lowered(stages, Schedule(tuple(Action(*row) for row in rows)))  # type: ignore[arg-type]


def turns(found: LoweredSchedule) -> list[tuple[TransferMoment, str, int, int, int | None]]:
    return [(moment, t.kind, t.stage, t.unit, t.option) for moment, t in found.transfers]


def test_what_travels_in_forward_goes_after_a_stage_and_in_backward_before_one() -> None:
    found = program(
        *[
            ("forward", 0, 0),
            ("offload", 0, 1),
            ("forward", 1, 0),
            ("release", 0, 1),
            ("forward", 2, 0),
            ("free", 2, None),
        ],
        *[("backward", 2, None), ("free", 1, None), ("prefetch", 0, 1), ("backward", 1, None), ("free", 0, None)],
        ("backward", 0, None),
    )
    assert turns(found) == [
        ((0, 1, 0), "offload", 0, 1, 0),
        ((0, 2, 0), "release", 0, 1, 0),
        ((1, 1, 0), "prefetch", 0, 1, 0),
    ]
    assert found.order == {2: 0, 1: 1, 0: 2} and not found.dropped
    assert found.travelling == {(0, 0)}


def test_what_is_brought_back_behind_the_last_forward_waits_for_backward() -> None:
    found = program(
        *[("forward", 0, 0), ("offload", 0, 0), ("forward", 1, 0), ("forward", 2, 0), ("release", 0, 0)],
        *[("prefetch", 0, 0), ("free", 2, None), ("backward", 2, None), ("free", 1, None), ("backward", 1, None)],
        *[("free", 0, None), ("backward", 0, None)],
    )
    assert [(moment, kind) for moment, kind, *_ in turns(found)] == [
        ((0, 1, 0), "offload"),
        ((0, 3, 0), "release"),
        ((1, 0, 0), "prefetch"),
    ]


def test_a_held_input_travels_and_so_does_what_a_second_run_keeps() -> None:
    """Stages 0 to 2 are one segment; stage 1's input waits in host memory, and what stage 0 keeps after its rerun."""
    found = program(
        *[("forward", 0, None), ("forward", 1, None), ("offload", 1, 0), ("release", 1, 0), ("free", 1, None)],
        *[("forward", 2, 0), ("free", 2, None), ("backward", 2, None)],
        *[("forward", 0, 1), ("offload", 0, 2), ("release", 0, 2), ("prefetch", 1, 0), ("recompute", 1, 0)],
        *[("prefetch", 0, 2), ("backward", 1, None), ("free", 0, None), ("backward", 0, None)],
        count=3,
    )
    assert turns(found) == [
        ((0, 2, 0), "offload", 1, 0, None),
        ((0, 2, 0), "release", 1, 0, None),
        ((1, 1, 1), "offload", 0, 2, 1),
        ((1, 1, 1), "release", 0, 2, 1),
        ((1, 1, 1), "prefetch", 1, 0, None),
        ((1, 1, 2), "prefetch", 0, 2, 1),
    ]
    assert [rerun.stage for rerun in found.before_backward[1]] == [0, 1]
    assert [moment for moment, _ in found.transfers] == sorted(moment for moment, _ in found.transfers)


@pytest.mark.parametrize("kind", ["offload", "release", "prefetch"])
def test_transfers_are_no_reruns(kind: str) -> None:
    found = program(
        *[("forward", 0, 0), ("forward", 1, 0), ("free", 1, None), (kind, 0, 0), ("backward", 1, None)],
        *[("free", 0, None), ("backward", 0, None)],
        count=2,
    )
    assert found.before_backward == {1: (), 0: ()}
    assert [t for _, t in found.transfers] == [Transfer(kind, 0, 0, 0)]  # type: ignore[arg-type]
