"""Generators of the host that give numbers of a level."""

from __future__ import annotations

import random

import numpy as np
import pytest

from profiler.workload.host_numbers import LEVELS, host_states
from profiler.workload.snapshot import RandomState


@pytest.mark.parametrize("level", range(LEVELS))
def test_fractions_are_of_the_level(level: int) -> None:
    before = RandomState.capture()
    try:
        before.with_host_numbers(level).restore()
        drawn = [draw() for _ in range(60) for draw in (random.random, np.random.rand)]
    finally:
        before.restore()
    assert drawn == pytest.approx([level / (LEVELS - 1)] * len(drawn), abs=2.0**-26)
    assert max(drawn) < 1.0


@pytest.mark.parametrize("most", range(1, LEVELS - 1))
def test_every_small_whole_number_is_the_first_of_some_level(most: int) -> None:
    before = RandomState.capture()
    ours, theirs = set(), set()
    try:
        for level in range(LEVELS):
            numpy_state, python_state = host_states(level)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            ours.add(random.randint(0, most))
            theirs.add(int(np.random.randint(0, most + 1)))
    finally:
        before.restore()
    assert ours == theirs == set(range(most + 1))


def test_what_draws_until_a_number_fits_comes_to_an_end() -> None:
    before = RandomState.capture()
    try:
        for level in range(LEVELS):
            before.with_host_numbers(level).restore()
            assert sorted(np.random.permutation(100)) == list(range(100))
            assert abs(np.random.standard_normal()) < 10
            assert abs(random.gauss(0.0, 1.0)) < 10
    finally:
        before.restore()
