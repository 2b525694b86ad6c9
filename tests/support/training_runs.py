"""A training run of three numbers, as tests of what is printed of it take it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from planner.plans.plan import Plan
from planner.training.training import TrainingRun


def trained(plan: Plan, **changes: Any) -> TrainingRun:
    """Within a budget of 100 bytes: predicted 90, measured 95, at 1.5 times the unplanned step."""
    small = replace(
        plan, budget_bytes=100, predicted_peak_bytes=90, predicted_seconds=0.01, unplanned_seconds=0.008
    )  # fmt: skip
    run = TrainingRun(
        plan=small, losses=(1.5,), step_seconds=(0.012,), measured_peak_bytes=95, measured_seconds=0.012
    )  # fmt: skip
    return replace(run, **changes)
