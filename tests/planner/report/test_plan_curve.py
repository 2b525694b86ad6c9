"""The plans of a curve: what each predicts is what the solver says at that budget, and its stages do it."""

from __future__ import annotations

import itertools

import pytest

import planner
from planner.report.plan_report import CURVE_POINTS, plans_of_curve


@pytest.fixture(scope="module")
def plan(files) -> planner.Plan:
    return planner.Plan.load(files / "plan.json")


def test_each_plan_of_a_chain_is_what_solving_for_its_peak_gives(plan, files):
    plans = plans_of_curve(plan)
    assert 2 < len(plans) <= CURVE_POINTS
    profile = planner.Profile.load(files / "profile.json")
    for each in (plans[0], plans[len(plans) // 2], plans[-1]):
        solved = planner.solve(profile, each.predicted_peak_bytes, solver="rotor", offload="never")
        assert solved.predicted_seconds == pytest.approx(each.predicted_seconds)
        assert each.recomputed_seconds == sum(stage.extra_seconds for stage in each.stages)
    for smaller, larger in itertools.pairwise(plans):
        assert smaller.predicted_peak_bytes < larger.predicted_peak_bytes
        assert smaller.predicted_seconds > larger.predicted_seconds >= larger.lower_bound_seconds
    assert plans[-1].predicted_peak_bytes == plan.unplanned_peak_bytes
