"""Replanning: a plan's own chain gives what its profile would give, but for programs of other budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.plans.solving import replan


def alike(plan: planner.Plan) -> planner.Plan:
    return replace(plan, solve_seconds=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("linked", [False, True])
def test_it_gives_what_the_profile_gives_of_whole_stages(blocks, tmp_path, share, linked):
    blocks = blocks.stage_level()
    offload = planner.Offload(link_gbps=1.0) if linked else "never"
    whole = planner.solve(blocks, "100%", offload=offload)
    whole.save(tmp_path / "plan.json")
    loaded = planner.Plan.load(tmp_path / "plan.json")
    with pytest.raises(planner.Infeasible) as refusal:
        replan(loaded, 1)
    smallest = refusal.value.minimum_budget_bytes
    budget = smallest + int(share * (blocks.unplanned_peak_bytes - smallest))
    # Not auto: what its integer programs find in their time depends on how busy the machine is.
    again = replan(loaded, budget, solver="rotor")
    assert alike(again) == alike(planner.solve(blocks, budget, solver="rotor", offload=offload))


def test_it_chooses_among_the_programs_that_the_plan_has(blocks):
    whole = planner.solve(blocks, "100%", offload="never")
    budget = int(0.7 * blocks.unplanned_peak_bytes)
    again = replan(whole, budget, solver="rotor")
    assert again.predicted_peak_bytes <= budget and again.menus == whole.menus
    assert again.predicted_seconds >= planner.solve(blocks, budget, solver="rotor", offload="never").predicted_seconds


def recomputes(plan: planner.Plan) -> bool:
    return any(stage.decision in ("recompute", "segment", "selective") for stage in plan.stages)


@pytest.mark.parametrize("mode", ["auto", "only"])
def test_nothing_is_recomputed_only_where_that_was_asked(blocks, mode):
    """A plan that had no reason to recompute, and may have been found as one that only sends, is bound by nothing."""
    slow = planner.Offload(mode=mode, link_gbps=0.02)
    loose = planner.solve(blocks, "100%", offload=slow)
    assert loose.offload_only == (mode == "only")
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(blocks, 1, offload=replace(slow, mode="only"))
    tight = replan(loose, refusal.value.minimum_budget_bytes, time_limit_seconds=1e-3)
    assert recomputes(tight) == (mode == "auto")


def test_the_headroom_stays(blocks):
    plan = planner.solve(blocks, "100%", headroom=1000)
    smaller = replan(plan, plan.budget_bytes - 5000)
    assert (smaller.headroom_bytes, smaller.budget_bytes) == (1000, plan.budget_bytes - 4000)


def test_what_was_stated_is_not_solved_for(blocks):
    plan = planner.state(blocks, planner.Rules(checkpoints=["transformer.h.1"]))
    with pytest.raises(ValueError, match="a manual plan"):
        replan(plan, plan.budget_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_what_stages_take_more_is_what_the_step_takes_more(blocks, share):
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(blocks, 1)
    smallest = refusal.value.minimum_budget_bytes
    plan = planner.solve(blocks, smallest + int(share * (blocks.unplanned_peak_bytes - smallest)))
    more = plan.predicted_seconds - plan.unplanned_seconds
    assert sum(stage.extra_seconds for stage in plan.stages) == pytest.approx(more, rel=1e-9)
    assert all(stage.extra_seconds == 0.0 for stage in plan.stages if stage.decision == "keep")
