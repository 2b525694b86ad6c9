"""Cases of a test that run at night alone: ``make test`` has one of each kind, ``make test-nightly`` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def by_day(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The cases for ``parametrize``; all but those that are kept are marked as nightly."""
    cases = list(cases)
    assert set(kept) <= set(cases), f"none of the cases: {set(kept) - set(cases)}"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def at_night(*values: Any) -> Any:
    """One case of several values that runs at night alone."""
    return pytest.param(*values, marks=pytest.mark.nightly)
