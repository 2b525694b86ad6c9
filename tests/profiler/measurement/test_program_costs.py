"""Steady times find what each thing takes, whatever stalls and whole steps come between."""

from __future__ import annotations

import random

import pytest

from profiler.measurement.meter import Mark, Place
from profiler.measurement.program_steps import Costs, ProgramCost, Sample, steady_seconds
from profiler.records import Phase
from tests.support.option_groups import BACKWARD, FORWARD, group, marked

TRUE = {"keep": 4.0, "cheap": 4.4, "dear": 9.0}


def samples(paces: list[float], stalls: dict[tuple[int, str], float]) -> list[Sample]:
    return [
        Sample(step, what, seconds * pace * stalls.get((step, what), 1.0))
        for step, pace in enumerate(paces)
        for what, seconds in TRUE.items()
    ]


def test_slow_steps_do_not_count() -> None:
    assert steady_seconds(samples([1.0, 3.0, 1.0, 2.0], {})) == pytest.approx(TRUE)


def test_single_stalls_do_not_count() -> None:
    stalled = samples([1.0] * 4, {(0, "keep"): 50.0, (2, "dear"): 7.0})
    assert steady_seconds(stalled) == pytest.approx(TRUE)


def test_a_thing_that_was_only_timed_in_slow_steps_is_not_blamed_for_them() -> None:
    found = [s for s in samples([1.0, 1.0, 2.0, 2.0], {}) if s.what != "cheap" or s.step > 1]
    assert steady_seconds(found) == pytest.approx(TRUE)


def test_what_was_timed_once_shows_no_pace_and_is_held_against_that_of_its_step() -> None:
    found = [s for s in samples([1.0, 1.0, 2.0, 1.0], {}) if s.what == "keep" or s.step == 2]
    found.append(Sample(2, "cheaper", 2 * 4.2))
    assert steady_seconds(found) == pytest.approx({**TRUE, "cheaper": 4.2})


def test_the_order_of_the_samples_does_not_matter() -> None:
    shuffled = samples([1.0, 2.5, 1.0, 1.5], {(1, "cheap"): 3.0})
    random.Random(0).shuffle(shuffled)
    assert steady_seconds(shuffled) == pytest.approx(TRUE)


def test_nothing_timed_is_nothing() -> None:
    assert steady_seconds([]) == {}


# Of groups ---------------------------------------------------------------------------


def test_bytes_are_those_that_the_plain_stage_keeps_more() -> None:
    groups = [group([0, 1]), group([2], family=1)]
    plain = dict([marked(FORWARD, 0, start_bytes=100, peak_bytes=190, end_bytes=150)])
    costs = Costs(groups, plain)
    step = {
        Mark(FORWARD, Place("stage", 0)): [
            Phase(start_bytes=200, peak_bytes=230, end_bytes=210),
            Phase(start_bytes=210, peak_bytes=270, end_bytes=220),
        ],
        Mark(BACKWARD, Place("stage", 0)): [Phase(start_bytes=220, peak_bytes=300, end_bytes=200)],
        Mark(FORWARD, Place("stage", 2)): [Phase(start_bytes=1, peak_bytes=5, end_bytes=3)],  # Its own code.
    }
    costs.add_memory([0], step)
    measured = ProgramCost(freed_bytes=50 - 20, forward_peak_bytes=70, backward_peak_bytes=80)
    assert costs.finish() == [measured, ProgramCost()]


def seconds_of(forward: float, backward: float, *stages: int) -> dict[Mark, list[Phase]]:
    own = [(marked(FORWARD, k, seconds=forward), marked(BACKWARD, k, seconds=backward)) for k in stages]
    return dict(each for pair in own for each in pair)


def of_seconds(cost: ProgramCost) -> list[float]:
    return [cost.forward_seconds, cost.backward_seconds, cost.keep_forward_seconds, cost.keep_backward_seconds]


def test_a_family_has_the_seconds_of_its_own_code_and_of_its_programs() -> None:
    groups = [group([0]), group([1]), group([2], family=1), group([3], family=2, opaque="it is not")]
    costs = Costs(groups, {})
    costs.add_seconds([], {**seconds_of(4.0, 8.0, 0, 1), **seconds_of(1.0, 2.0, 2, 3)})
    costs.add_seconds([0, 1, 2], {**seconds_of(5.0, 8.5, 0, 1), **seconds_of(1.5, 2.5, 2), **seconds_of(1.0, 2.0, 3)})
    first, second, other, opaque = costs.finish()
    assert of_seconds(first) == of_seconds(second) == [5.0, 8.5, 4.0, 8.0]
    assert of_seconds(other) == [1.5, 2.5, 1.0, 2.0]
    assert opaque == ProgramCost()


def test_a_phase_of_several_intervals_takes_the_seconds_of_all() -> None:
    costs = Costs([group([0])], {})
    costs.add_seconds([0], {Mark(FORWARD, Place("stage", 0)): [Phase(seconds=1.0), Phase(seconds=0.5)]})
    assert of_seconds(costs.finish()[0])[0] == 1.5


def test_what_runs_outside_of_stages_shows_the_pace_of_a_step() -> None:
    """Programs run in slow steps alone: what is the same in every step tells that these were slow."""
    costs, outside = Costs([group([0])], {}), Mark("forward", Place("outside", 0))
    for pace, programs in ((1.0, []), (1.0, []), (3.0, [0]), (3.0, [0])):
        step = seconds_of(pace * (5.0 if programs else 4.0), pace * 8.0, 0)
        costs.add_seconds(programs, {**step, outside: [Phase(seconds=pace * 80.0)]})
    assert of_seconds(costs.finish()[0]) == pytest.approx([5.0, 8.0, 4.0, 8.0])
