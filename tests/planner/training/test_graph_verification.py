"""Plans of single ops held against their own runs: solved for less until the measured peak is within the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import planner
import planner.training.graph_verification as verification
from profiler.graph_profile import GraphProfile
from profiler.measurement.step_measurement import Measurement, measure

WIDTH, BATCH = 16, 64


def work_of(width: int = WIDTH) -> planner.Workload:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    inputs = torch.randn(BATCH, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return planner.Workload(model=model, inputs=inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


@pytest.fixture(scope="module")
def profiled() -> GraphProfile:
    return planner.profile(work_of(), graph=True)


def test_a_plan_that_keeps_its_budget_is_handed_back(profiled: GraphProfile) -> None:
    plan = planner.solve(profiled, "90%", time_limit_seconds=1)
    verified = planner.verify(work_of(), plan)
    assert verified.plan == plan
    (only,) = verified.rounds
    assert only.peak_bytes == plan.predicted_peak_bytes


def measuring_more(monkeypatch: Any, more_bytes: int) -> None:
    def measured(workload: planner.Workload) -> Measurement:
        found = measure(workload, repeats=1)
        return replace(found, peak_bytes=found.peak_bytes + more_bytes)

    monkeypatch.setattr(verification, "measure", measured)


@pytest.mark.parametrize("given", [True, False])
def test_one_above_its_budget_is_solved_for_less(profiled: GraphProfile, monkeypatch: Any, given: bool) -> None:
    plan = planner.solve(profiled, "90%", time_limit_seconds=1)
    measuring_more(monkeypatch, BATCH * WIDTH * 4)
    verified = planner.verify(work_of(), plan, profile=profiled if given else None, time_limit_seconds=1)
    first, *_, last = verified.rounds
    assert first.plan == plan and first.peak_bytes > plan.budget_bytes >= last.peak_bytes
    assert verified.plan == last.plan and last.plan.budget_bytes == plan.budget_bytes
    assert last.plan.predicted_peak_bytes <= plan.budget_bytes - last.plan.headroom_bytes


def test_where_none_keeps_the_budget_the_smallest_peak_is_named(profiled: GraphProfile, monkeypatch: Any) -> None:
    plan = planner.solve(profiled, "90%", time_limit_seconds=1)
    measuring_more(monkeypatch, plan.budget_bytes)
    with pytest.raises(planner.NothingFound, match=r"of \d plans run with backend='eager'") as refused:
        planner.verify(work_of(), plan, profile=profiled, time_limit_seconds=1)
    assert plan.budget_bytes < refused.value.minimum_budget_bytes < 2 * plan.budget_bytes


def test_a_profile_of_another_step_is_refused(profiled: GraphProfile, monkeypatch: Any) -> None:
    measuring_more(monkeypatch, profiled.unplanned_peak_bytes)
    other = planner.profile(work_of(2 * WIDTH), graph=True)
    with pytest.raises(planner.PlanMismatch, match="expected the profile that the plan was made from"):
        planner.verify(work_of(), planner.solve(profiled, "90%", time_limit_seconds=1), profile=other)


@pytest.mark.slow
def test_compiled_by_inductor_the_step_keeps_the_budget(profiled: GraphProfile) -> None:
    plan = planner.solve(profiled, "85%", time_limit_seconds=2)
    assert plan.recomputed_ops
    verified = planner.verify(work_of(), plan, backend="inductor", profile=profiled, time_limit_seconds=2)
    work = work_of()
    with planner.apply(work.model, verified.plan, backend="inductor"):
        assert planner.measure(work, repeats=1).peak_bytes == verified.rounds[-1].peak_bytes <= plan.budget_bytes
