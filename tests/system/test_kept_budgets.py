"""Steps keep their budget where single stages, hooks or optimizers take bytes that are easily overlooked."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.steps import resident_bytes_of
from tests.support.exactness import budgets


def peaks_of_steps(work: planner.Workload, plan: planner.Plan, steps: int = 3) -> list[int]:
    """Most bytes alive at once in each of some planned steps."""
    peaks = []
    with planner.apply(work.model, plan):
        for _ in range(steps):
            work.zero_grad()
            gc.collect()
            meter = memory_meter(work.device, resident_bytes_of(work).total)
            peaks.append(metered(meter, work.step).peak_bytes)
    return peaks


class TinyStage(nn.Module):
    """Its forward takes fewer bytes than torch's random state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.linear(x)))


@pytest.mark.slow
def test_the_random_state_that_second_runs_of_tiny_stages_read_is_within_the_budget() -> None:
    torch.manual_seed(0)
    work = planner.Workload(
        model=nn.Sequential(*(TinyStage() for _ in range(40))),
        inputs=torch.randn(16, 8),
        loss=lambda output: output.square().mean(),
    )
    profile = planner.profile(work, menus=False)
    for budget in (*budgets(profile), profile.unplanned_peak_bytes):
        plan = planner.solve(profile, budget, solver="rotor")
        assert max(peaks_of_steps(work, plan)) <= plan.predicted_peak_bytes <= budget
    assert {stage.decision for stage in plan.stages} == {"keep"}


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize(
    "optimizer",
    [functools.partial(torch.optim.RAdam, foreach=False), functools.partial(torch.optim.ASGD, t0=3), torch.optim.NAdam],
)
def test_what_an_optimizer_does_late_in_training_is_within_the_budget(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
    work = planner.Workload(
        model=model, inputs=torch.rand(4, 48), loss=squared, optimizer=optimizer(model.parameters())
    )
    profile = planner.profile(work, menus=False)
    plan = planner.solve(profile, "100%")
    assert max(peaks_of_steps(work, plan, steps=8)) == profile.unplanned_peak_bytes
