"""The profiler's public names."""

from __future__ import annotations

import pytest

import profiler
from profiler.records import Profile
from profiler.workload.workload import Workload


def test_public_names_are_those_of_the_rooms() -> None:
    assert all(callable(getattr(profiler, name)) for name in profiler.__all__)
    assert profiler.Workload is Workload and profiler.Profile is Profile
    assert set(profiler.__all__) <= set(dir(profiler))


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="'profiler' has no attribute 'Plan'"):
        getattr(profiler, "Plan")  # noqa: B009 - type checkers would refuse the attribute, too
