"""The plans of a curve: what each predicts is what the solver says at that budget, and its stages do it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import planner
import planner.zoo
from planner.report.plan_curve import POINTS, plans_of_curve
from profiler.records import Phase
from profiler.step_replay import runs_once
from tests.support.step_profiles import chain_step, profile_of


@pytest.fixture(scope="module")
def plan(files) -> planner.Plan:
    return planner.Plan.load(files / "plan.json")


def test_each_plan_of_a_chain_is_what_solving_for_its_peak_gives(plan, files):
    plans = plans_of_curve(plan)
    assert 2 < len(plans) <= POINTS
    profile = planner.Profile.load(files / "profile.json")
    for each in (plans[0], plans[len(plans) // 2], plans[-1]):
        solved = planner.solve(profile, each.predicted_peak_bytes, solver="rotor", offload="never")
        assert solved.predicted_seconds == pytest.approx(each.predicted_seconds)
        assert each.recomputed_seconds == sum(stage.extra_seconds for stage in each.stages)
    for smaller, larger in itertools.pairwise(plans):
        assert smaller.predicted_peak_bytes < larger.predicted_peak_bytes
        assert smaller.predicted_seconds > larger.predicted_seconds >= larger.lower_bound_seconds
    assert plans[-1].predicted_peak_bytes == plan.unplanned_peak_bytes


def test_each_plan_of_a_graph_says_what_its_own_runs_take():
    profile = profile_of(chain_step(layers=8))
    plan = planner.solve(profile, "80%", time_limit_seconds=1)
    plans = plans_of_curve(plan, time_limit_seconds=2)
    assert len(plans) > 1
    for each in plans:
        assert each.predicted_peak_bytes == each.around.peak_bytes(each.graph, each.runs)
        again = [*each.runs.forward, *each.runs.backward]
        seconds = sum(each.graph.ops[k].seconds for k in again) - sum(op.seconds for op in each.graph.ops)
        assert each.recomputed_seconds == pytest.approx(seconds)
    assert plans[-1].runs == runs_once(plan.graph)
    assert plans[-1].predicted_seconds == pytest.approx(plan.predicted_seconds - plan.recomputed_seconds)


def test_what_a_graph_proves_at_its_own_peak_is_not_said_at_that_of_the_optimizer_step():
    profile = profile_of(chain_step(layers=8))
    other_peak_bytes = profile.unplanned_peak_bytes - 150 * 2**10  # between those of two orders
    profile = replace(profile, optimizer=Phase(peak_bytes=other_peak_bytes))
    plans = plans_of_curve(planner.solve(profile, "90%", time_limit_seconds=1), time_limit_seconds=7)
    assert [(plan.predicted_peak_bytes, plan.predicted_seconds, plan.status) for plan in plans] == [
        (other_peak_bytes, 26, "feasible"),
        (profile.unplanned_peak_bytes, 24, "optimal"),
    ]
    assert plans[0].lower_bound_seconds < 26
