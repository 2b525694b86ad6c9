"""Limits: every true limit is found from every guess, and a right guess costs two tries."""

from __future__ import annotations

import itertools

import pytest

from planner.capacity.limit_search import MOST_STEPS, BisectionResult, bisect_size, largest_fitting


@pytest.mark.parametrize("step", [1, 3, 16])
def test_the_largest_is_found_wherever_it_is(step):
    for units, floor in itertools.product(range(40), range(0, 40, 7)):
        limit = max(units, floor) * step
        assert largest_fitting(lambda size, limit=limit: size <= limit, floor=floor * step, step=step) == limit


def test_what_always_fits_ends_at_the_most():
    assert largest_fitting(lambda size: True, floor=0, step=2) >= MOST_STEPS * 2 - 2


def test_every_limit_is_settled_from_every_guess():
    for limit, guess, floor in itertools.product(range(20), range(20), (0, 5)):
        limit, guess = max(limit, floor), max(guess, floor)
        tried: list[int] = []

        def attempt(size, limit=limit, tried=tried):
            tried.append(size)
            return size <= limit

        found = bisect_size(guess, attempt, floor=floor, step=1, tries=20)
        assert found == BisectionResult(size=limit, tried=limit > floor, next_fails=True)
        assert len(tried) == len({*tried})
        assert all(size > floor for size in tried)
        if guess == limit:
            assert len(tried) == (2 if limit > floor else 1)


def test_sizes_tried_are_multiples_of_the_step_above_the_floor():
    tried: list[int] = []

    def attempt(size):
        tried.append(size)
        return size <= 100

    assert bisect_size(32, attempt, floor=16, step=16, tries=20).size == 96
    assert all(size % 16 == 0 for size in tried)


def test_what_cannot_be_tried_leaves_the_guess_as_it_is():
    assert bisect_size(9, lambda size: None, floor=2, step=1, tries=5) == BisectionResult(
        size=9, tried=False, next_fails=False
    )


def test_a_next_size_that_cannot_be_tried_is_said_to_be_untried():
    found = bisect_size(9, lambda size: True if size <= 9 else None, floor=0, step=1, tries=5)
    assert found == BisectionResult(size=9, tried=True, next_fails=False)


def test_below_a_failure_only_what_was_tried_counts():
    found = bisect_size(9, lambda size: False if size == 9 else None, floor=2, step=1, tries=5)
    assert found == BisectionResult(size=2, tried=False, next_fails=False)


def test_tries_are_bounded():
    tried: list[int] = []

    def attempt(size):
        tried.append(size)
        return True

    found = bisect_size(1, attempt, floor=0, step=1, tries=6)
    assert (len(tried), found.size, found.next_fails) == (6, max(tried), False)


def test_where_the_tries_end_above_untried_sizes_the_next_one_is_not_said_to_fail():
    found = bisect_size(9, lambda size: size <= 2, floor=0, step=1, tries=2)  # 9 and 8 fail, 1 to 7 are left
    assert found == BisectionResult(size=0, tried=False, next_fails=False)
