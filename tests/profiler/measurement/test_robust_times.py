"""Steady times find what each thing takes, whatever stalls and whole steps come between."""

from __future__ import annotations

import random

import pytest

from profiler.measurement.robust_times import Sample, steady_seconds

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
