"""A plan acts also where a loop calls a part of the planned model, and not the model itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.tensor_parts import distinct_bytes
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, budgets
from tests.support.nightly import by_day
from tests.support.small_blocks import WIDTH, Residual, Stack


class TrainingModule(nn.Module):
    """As people write for Lightning: the loop calls ``training_step``, and that calls the inner net."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack([Residual(dropout=0.1) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, x: Tensor) -> Tensor:
        return self.net(x).pow(2).mean()

    def stage_by_stage(self, x: Tensor) -> Tensor:
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(x).pow(2).mean()


def build() -> tuple[TrainingModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TrainingModule()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch() -> Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    model, optimizer = build()
    return planner.profile(
        Workload(model=model, inputs=(batch(),), loss=lambda output: output.pow(2).mean(), optimizer=optimizer)
    )


def trained(
    model: TrainingModule, optimizer: torch.optim.Optimizer, step: Callable[[Tensor], Tensor]
) -> tuple[list[float], int]:
    """The losses, and the most bytes that a step after the first takes, in a loop of one's own."""
    losses, peak = [], 0
    x = batch()

    def whole_step() -> None:
        loss = step(x)
        loss.backward()
        losses.append(loss.detach().item())
        del loss
        optimizer.step()

    for _ in range(3):
        optimizer.zero_grad()
        resident = distinct_bytes([x, *model.parameters()])
        peak = max(peak, metered(memory_meter(x.device, resident), whole_step).peak_bytes)
        with torch.no_grad():
            step(x)  # a validation pass
    return losses, peak


@pytest.mark.parametrize("way", by_day(["training_step", "stage_by_stage"], ["training_step"]))
def test_a_plan_acts_where_the_model_is_gone_past(profile: planner.Profile, way: str) -> None:
    def run(plan: planner.Plan | None) -> tuple[list[Any], int]:
        model, optimizer = build()
        torch.manual_seed(7)
        if plan is not None:
            planner.apply(model, plan)
        losses, peak = trained(model, optimizer, getattr(model, way))
        return [losses, dict(model.state_dict()), torch.get_rng_state()], peak

    expected, unplanned_peak = run(None)
    for budget in budgets(profile):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got, peak = run(planner.solve(profile, budget))
        assert_same(got, expected)
        assert peak <= budget < unplanned_peak


def test_gone_past_in_a_second_forward_before_backward_is_exact(profile: planner.Profile) -> None:
    def run(plan: planner.Plan | None) -> list[Tensor]:
        model, _ = build()
        torch.manual_seed(7)
        if plan is not None:
            planner.apply(model, plan)
        first = model.training_step(batch())
        second = model.training_step(batch() + 1)
        (first * second).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same(run(planner.solve(profile, next(iter(budgets(profile))))), run(None))
