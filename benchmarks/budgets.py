"""Budgets that benchmarks plan for, from the smallest that a profile has a plan for up to its unplanned peak."""

from __future__ import annotations

from typing import Any

import numpy as np

import planner


def smallest_budget(profile: planner.Profile, **options: Any) -> int:
    """Returns the smallest budget that a plan is known for, with these options of ``planner.solve``."""
    try:
        planner.solve(profile, 1, **options)
    except planner.Infeasible as refusal:
        return refusal.minimum_budget_bytes
    raise AssertionError("a budget of one byte cannot be feasible")


def even_budgets(profile: planner.Profile, count: int, **options: Any) -> list[int]:
    """Returns budgets in equal steps from the unplanned peak to the smallest, with options of ``planner.solve``."""
    smallest = smallest_budget(profile, **options)
    return [int(b) for b in np.linspace(profile.unplanned_peak_bytes, smallest, count, dtype=np.int64)]
