"""Spoilt files end every command in words, nothing half-written; ``python -m benchmarks.mutated_files`` has more."""

from __future__ import annotations

import random

import pytest

from benchmarks.mutated_files import COMMANDS, feed, spoilt
from tests.support.nightly import by_day


@pytest.mark.parametrize("reader", by_day(COMMANDS, ["profile", "plan", "graph-solution"]))
def test_no_spoilt_file_ends_in_a_traceback(reader):
    codes, bad = feed(40, 1, (reader,))
    assert bad == []
    assert set(codes[reader]) <= {0, 2, 3} and codes[reader][2] > 20


def test_files_are_spoilt_the_same_way_for_the_same_seed():
    whole = '{"format": "f", "stages": [{"name": "a", "bytes": 3}, {"name": "b", "bytes": 4}]}'
    first, second = ([spoilt(whole, draw) for _ in range(50)] for draw in (random.Random(1), random.Random(1)))
    assert first == second and len(set(first)) > 25
