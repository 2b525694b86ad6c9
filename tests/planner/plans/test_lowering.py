"""Lowered schedules: when each transfer is due, and in which of its stage's lists its offload unit stands."""

from __future__ import annotations

import pytest

from planner.plans.lowering import (
    LoweredSchedule,
    Transfer,
    TransferMoment,
    UnsupportedPlan,
    can_carry_out,
    lower_schedule,
)
from planner.plans.plan import PlannedStage
from solvers.problem.schedule import Action, Schedule
from tests.support.planned_blocks import planned_block


def stage(k: int) -> PlannedStage:
    return planned_block(f"block.{k}", ((0, 0),) if k else ())


def lowered(*rows: tuple[str, int, int | None], count: int = 3) -> LoweredSchedule:
    stages = [stage(k) for k in range(count)]
    return lower_schedule(stages, Schedule(tuple(Action(*row) for row in rows)))  # type: ignore[arg-type]


def due(schedule: LoweredSchedule) -> list[tuple[TransferMoment, str, int, int, int | None]]:
    return [(moment, t.kind, t.stage, t.unit, t.option) for moment, t in schedule.transfers]


def test_a_transfer_is_due_after_a_stage_in_forward_and_before_one_in_backward() -> None:
    schedule = lowered(
        *[
            ("forward", 0, 0),
            ("send", 0, 1),
            ("forward", 1, 0),
            ("release", 0, 1),
            ("forward", 2, 0),
            ("free", 2, None),
        ],
        *[("backward", 2, None), ("free", 1, None), ("fetch", 0, 1), ("backward", 1, None), ("free", 0, None)],
        ("backward", 0, None),
    )
    assert due(schedule) == [
        ((0, 1, 0), "send", 0, 1, 0),
        ((0, 2, 0), "release", 0, 1, 0),
        ((1, 1, 0), "fetch", 0, 1, 0),
    ]
    assert schedule.backward_order == {2: 0, 1: 1, 0: 2} and not schedule.dropped
    assert schedule.sending == {(0, 0)}


def test_what_is_brought_back_behind_the_last_forward_waits_for_backward() -> None:
    schedule = lowered(
        *[("forward", 0, 0), ("send", 0, 0), ("forward", 1, 0), ("forward", 2, 0), ("release", 0, 0)],
        *[("fetch", 0, 0), ("free", 2, None), ("backward", 2, None), ("free", 1, None), ("backward", 1, None)],
        *[("free", 0, None), ("backward", 0, None)],
    )
    assert [(moment, kind) for moment, kind, *_ in due(schedule)] == [
        ((0, 1, 0), "send"),
        ((0, 3, 0), "release"),
        ((1, 0, 0), "fetch"),
    ]


def test_a_held_input_is_sent_and_so_is_what_a_second_run_keeps() -> None:
    """Stages 0 to 2 are one segment; stage 1's input waits in host memory, and what stage 0 keeps after its rerun."""
    schedule = lowered(
        *[("forward", 0, None), ("forward", 1, None), ("send", 1, 0), ("release", 1, 0), ("free", 1, None)],
        *[("forward", 2, 0), ("free", 2, None), ("backward", 2, None)],
        *[("forward", 0, 1), ("send", 0, 2), ("release", 0, 2), ("fetch", 1, 0), ("recompute", 1, 0)],
        *[("fetch", 0, 2), ("backward", 1, None), ("free", 0, None), ("backward", 0, None)],
        count=3,
    )
    assert due(schedule) == [
        ((0, 2, 0), "send", 1, 0, None),
        ((0, 2, 0), "release", 1, 0, None),
        ((1, 1, 1), "send", 0, 2, 1),
        ((1, 1, 1), "release", 0, 2, 1),
        ((1, 1, 1), "fetch", 1, 0, None),
        ((1, 1, 2), "fetch", 0, 2, 1),
    ]
    assert [rerun.stage for rerun in schedule.reruns[1]] == [0, 1]
    assert [moment for moment, _ in schedule.transfers] == sorted(moment for moment, _ in schedule.transfers)


@pytest.mark.parametrize("kind", ["send", "release", "fetch"])
def test_transfers_are_no_reruns(kind: str) -> None:
    schedule = lowered(
        *[("forward", 0, 0), ("forward", 1, 0), ("free", 1, None), (kind, 0, 0), ("backward", 1, None)],
        *[("free", 0, None), ("backward", 0, None)],
        count=2,
    )
    assert schedule.reruns == {1: (), 0: ()}
    assert [t for _, t in schedule.transfers] == [Transfer(kind, 0, 0, 0)]  # type: ignore[arg-type]


def test_a_boundary_that_goes_before_a_kept_backward_goes_in_the_backward_before() -> None:
    """Stage 3 is kept: nobody tells the runtime that its backward begins."""
    rows = [("forward", 0, 0), *(("forward", k, None) for k in (1, 2)), ("forward", 3, 0), ("forward", 4, None)]
    late = [("recompute", 4, 0), ("backward", 4, None), ("free", 1, None), ("backward", 3, None)]
    last = [("forward", 1, 0), ("forward", 2, 0), *(("backward", k, None) for k in (2, 1, 0))]
    schedule = lowered(*rows, *late, *last, count=5)
    assert schedule.holding_input == {1, 2, 4}
    assert {k: stages for k, stages in schedule.input_releases.items() if stages} == {4: (2,)}


def test_a_boundary_that_goes_before_any_second_run_is_not_held() -> None:
    rows = [("forward", 0, 0), *(("forward", k, None) for k in (1, 2)), ("forward", 3, 0)]
    late = [("free", 1, None), ("backward", 3, None)]
    last = [("forward", 1, 0), ("forward", 2, 0), *(("backward", k, None) for k in (2, 1, 0))]
    schedule = lowered(*rows, *late, *last, count=4)
    assert schedule.holding_input == {1}
    assert not any(schedule.input_releases.values())


def test_a_boundary_that_goes_before_the_second_runs_goes_in_the_backward_before_them() -> None:
    """Stage 4's second run may need the room that stage 2's held input takes."""
    rows = [("forward", 0, 0), *(("forward", k, None) for k in (1, 2, 3, 4, 5)), ("recompute", 5, 0), ("backward", 5)]
    middle = [("free", 1, None), ("forward", 3, None), ("recompute", 4, 0), ("backward", 4), ("recompute", 3, 0)]
    last = [("backward", 3), ("forward", 1, None), ("recompute", 2, 0), ("backward", 2), ("recompute", 1, 0)]
    whole = [*rows, *middle, *last, ("backward", 1), ("backward", 0)]
    schedule = lowered(*[row if len(row) == 3 else (*row, None) for row in whole], count=6)
    assert {k: stages for k, stages in schedule.input_releases.items() if stages} == {5: (2,)}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        # Stage 0 runs again before the backward of stage 2, which is kept and tells nobody.
        (
            "F0 F1 x0 F2k F0 B2 x1 R1 B1 x0 R0 B0",
            "'block.0' is recomputed before a stage that is not recomputed itself.*'block.2'",
        ),
        # Stage 1 is kept by its second run, before the backward of stage 2: nothing of it is asked for at its turn.
        (
            "F0k F1 F2 F3 x1 F1 F2k R3 B3 x2 x1 F1 B2 x1 R1 B1 x0 B0",
            "'block.1' is recomputed before a stage that is not recomputed itself.*'block.2'",
        ),
        # The output of stage 0 is kept for stage 1 beside another second run.
        ("F0 F1 x0 F2 F0 R2 B2 x1 R1 B1 x0 R0 B0", "'block.1' is not recomputed directly after the stage before it"),
        # Stage 1's input goes between its second run and that of stage 2, which stops at its last saved tensor.
        (
            "F0 F1 x1 F2 x2 F1 x0 R2 B2 x1 F0 R1 B1 x0 R0 B0",
            "the input of 'block.1' is released before 'block.2' is recomputed",
        ),
    ],
)
def test_what_the_runtime_would_do_later_or_once_more_is_refused(rows: str, message: str) -> None:
    kinds = {"F": "forward", "x": "free", "R": "recompute", "B": "backward"}
    actions = []
    for row in rows.split():
        keeps = row[0] == "R" or row.endswith("k")
        actions.append(Action(kinds[row[0]], int(row[1]), 0 if keeps else None))  # type: ignore[arg-type]
    stages, schedule = [stage(k) for k in range(4)], Schedule(tuple(actions))
    assert not can_carry_out(stages, schedule)
    with pytest.raises(UnsupportedPlan, match=message):
        lower_schedule(stages, schedule)
