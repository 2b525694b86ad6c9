"""Tensor and sequence parallel models under plans, on two ranks: exact, and within the budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideMeter
from benchmarks.rank_processes import values_of_ranks
from tests.support.parallel_models import next_words, sharded_transformer, trained, words

BUDGETS = ("95%", "1%")  # of the second one the smallest feasible


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = next_words(model(batch), batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def built(sequence: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sharded_transformer(3, sequence=sequence)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def under_plans(rank: int, sequence: bool) -> dict[str, Any]:
    model, optimizer = built(sequence)
    expected = trained(model, stepper(model, optimizer))
    model, optimizer = built(sequence)
    batch = words()
    workload = planner.Workload(
        model=model,
        inputs=batch,
        loss=lambda y: next_words(y, batch),
        optimizer=optimizer,
        keeps_output=False,
    )
    profile = planner.profile(workload)
    said: dict[str, Any] = {"reasons": {menu.opaque for menu in profile.menus}, "plans": []}
    for budget in BUDGETS:
        try:
            plan = planner.solve(profile, budget)
        except planner.Infeasible as refusal:
            plan = planner.solve(profile, refusal.minimum_budget_bytes)
        model, optimizer = built(sequence)
        with planner.apply(model, plan):
            got = trained(model, stepper(model, optimizer))
        with OutsideMeter() as meter:
            model, optimizer = built(sequence)
            step, batch = stepper(model, optimizer), words()
            with planner.apply(model, plan):
                meter.begin()
                for _ in range(2):
                    step(batch)
        same = len(got) == len(expected) and all(map(torch.equal, expected, got))
        said["plans"].append((same, meter.peak_bytes, plan.budget_bytes, plan.fingerprint))
    rule = planner.Rule(modules="blocks.*", ops="native_layer_norm")
    with pytest.raises(ValueError, match="distributed .DTensor.*state it for the whole stage"):
        planner.profile(workload, rules=rule)
    return said


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.nightly
def test_plans_are_exact_within_the_budget_and_the_same(sequence: bool) -> None:
    first, second = values_of_ranks(under_plans, sequence)
    for said in (first, second):
        assert any("DTensor" in reason for reason in said["reasons"])
        assert all(same for same, *_ in said["plans"])
        assert all(peak <= budget for _, peak, budget, _ in said["plans"])
    assert [plan[3] for plan in first["plans"]] == [plan[3] for plan in second["plans"]]
    assert len({plan[3] for plan in first["plans"]}) > 1
