"""When copies begin and end, by hand."""

from __future__ import annotations

import pytest

from planner.steps.copy_clock import StepSeconds, copy_times
from planner.steps.copy_placement import CopyPlacement, absences_between_uses
from profiler.step_replay import StepCopy, StepRuns, runs_once
from solvers.problem.link import Link
from tests.support.step_profiles import AROUND, KIB, chain_step

SIZE = 100 * KIB
STEP = chain_step(layers=6)
ONCE = runs_once(STEP)  # six turns of a second, the loss, six of two seconds
SECONDS = StepSeconds(of_op=tuple(op.seconds for op in STEP.ops), between=0.0)
LOSS = 6


def link(seconds: float) -> Link:
    return Link(to_host_bytes_per_second=SIZE / seconds, to_device_bytes_per_second=SIZE / seconds)


def placed(fetches: dict[int, list[int]], budget_bytes: int, seconds: float, runs: StepRuns = ONCE) -> CopyPlacement:
    absences = absences_between_uses(STEP, runs, fetches)
    placement = CopyPlacement(STEP, runs, absences, SECONDS, link(seconds))
    peaks = AROUND.peaks(STEP, runs, placement.copies())
    placement.place([budget_bytes - peak_bytes for peak_bytes in peaks])
    return placement


def turns(placement: CopyPlacement) -> list[tuple[int, int, int]]:
    return [(absence.storage, absence.first, absence.fetched) for absence in placement.absences]


def test_an_absence_lies_between_two_uses_and_only_where_the_schedule_fetches() -> None:
    (absence,) = absences_between_uses(STEP, ONCE, {1: [9], 2: []})
    assert (absence.used, absence.first, absence.fetched, absence.needed) == (2, 3, 10, 10)
    assert absences_between_uses(STEP, ONCE, {1: [12]}) == []  # nobody reads it any more


def test_with_room_nothing_is_sent() -> None:
    assert turns(placed({1: [10]}, 100 * SIZE, 1.0)) == []


@pytest.mark.parametrize(("seconds", "first", "fetched"), [(0.5, 3, 9), (1.0, 3, 9), (2.5, 5, 8), (4.0, 6, 8)])
def test_copies_are_done_in_time_where_there_is_room(seconds: float, first: int, fetched: int) -> None:
    # Made at 2 s, used until 3 s, needed at 12 s; turn 9 begins at 10 s, turn 8 at 8 s.
    placement = placed({1: [10]}, 8 * SIZE - 1, seconds)
    assert turns(placement) == [(1, first, fetched)]
    assert copy_times(STEP, ONCE, placement.copies(), link(seconds), SECONDS).stall_seconds == 0


def test_without_room_they_are_waited_for() -> None:
    fetches = {0: [11], 1: [10], 2: [9], 3: [8]}
    away = CopyPlacement(STEP, ONCE, absences_between_uses(STEP, ONCE, fetches), SECONDS, link(3.0))
    least_bytes = max(AROUND.peaks(STEP, ONCE, away.copies()))
    tight = placed(fetches, least_bytes, 3.0)
    assert max(AROUND.peaks(STEP, ONCE, tight.copies())) <= least_bytes
    assert copy_times(STEP, ONCE, tight.copies(), link(3.0), SECONDS).stall_seconds > 0


def test_copies_come_in_the_order_of_their_moments() -> None:
    placement = placed({1: [10]}, 8 * SIZE - 1, 1.0)
    assert placement.copies() == (
        StepCopy(kind="send", storage=1, side="forward", before=2),
        StepCopy(kind="release", storage=1, side="forward", before=3),
        StepCopy(kind="fetch", storage=1, side="backward", before=2),
    )
