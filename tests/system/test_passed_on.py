"""Blocks that return what they were given beside what they make, as T5's pass on a bias: planned op by op, exactly."""

from __future__ import annotations

import pytest

import planner
from planner.zoo import build
from tests.support.exactness import assert_same, state_after


def work() -> planner.Workload:
    return build("t5", layers=3, hidden=32, heads=2, seq=32, batch=4)


@pytest.mark.slow
def test_blocks_of_t5_are_captured_as_wholes_and_every_plan_is_exact() -> None:
    profile = planner.profile(work())
    blocks = [stage for stage in profile.stages if stage.module_class == "T5Block"]
    assert [stage.name for stage in blocks] == [
        f"{side}.block.{k}" for side in ("encoder", "decoder") for k in range(3)
    ]
    assert all(profile.menus[stage.menu].graph is not None for stage in blocks)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1)
    least, most = refused.value.minimum_budget_bytes, profile.unplanned_peak_bytes
    expected = state_after(work(), steps=2)
    for budget in (least, (least + most) // 2):
        plan = planner.solve(profile, budget)
        measured, trained = work(), work()
        with planner.apply(measured.model, plan):
            assert planner.measure(measured, repeats=1).peak_bytes == plan.predicted_peak_bytes <= budget
        with planner.apply(trained.model, plan):
            assert_same(state_after(trained, steps=2), expected)
