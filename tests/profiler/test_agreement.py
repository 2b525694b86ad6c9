"""Records of several ranks as one."""

from __future__ import annotations

import pytest

from profiler.agreement import UnlikeValues, merged_largest
from profiler.records import Phase, StageRecord


def stage(**changes) -> StageRecord:
    phase = Phase(start_bytes=1, peak_bytes=5, end_bytes=2, seconds=0.5)
    return StageRecord(name="h.0", kind="stage", forward=phase, backward=phase, **changes)


def test_each_measured_number_is_the_largest_of_any():
    one = stage(kept_bytes=3, recompute_seconds=0.1)
    other = stage(kept_bytes=2, recompute_seconds=0.4)
    merged = merged_largest([one, other])
    assert (merged.kept_bytes, merged.recompute_seconds) == (3, 0.4)
    assert merged.forward == one.forward


def test_phases_that_follow_each_other_still_do():
    one = [Phase(start_bytes=0, peak_bytes=9, end_bytes=4), Phase(start_bytes=4, peak_bytes=6, end_bytes=1)]
    other = [Phase(start_bytes=2, peak_bytes=7, end_bytes=3), Phase(start_bytes=3, peak_bytes=8, end_bytes=2)]
    first, second = merged_largest([one, other])
    assert first.end_bytes == second.start_bytes == 4
    assert (first.peak_bytes, second.peak_bytes) == (9, 8)


def test_numbers_that_say_what_runs_have_to_be_equal():
    with pytest.raises(UnlikeValues) as caught:
        merged_largest([stage(menu=0), stage(menu=0), stage(menu=1)])
    assert (caught.value.number, caught.value.where) == (2, "menu")


@pytest.mark.parametrize("other", [[1], (1, 2), [1, "2"], None])
def test_values_of_another_form_are_refused(other):
    with pytest.raises(UnlikeValues):
        merged_largest([[1, 2], other])


def test_a_rule_says_what_becomes_of_an_attribute():
    merged = merged_largest([stage(kept_bytes=3), stage(kept_bytes=2)], {"kept_bytes": min})
    assert merged.kept_bytes == 2
