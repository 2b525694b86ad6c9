"""A step that keeps more than the profiled one is within its budget, or says that it may not be."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload
from tests.support.small_blocks import WIDTH, Residual, Stack


def workload(blocks: list[nn.Module]) -> Workload:
    torch.manual_seed(0)
    model = Stack(blocks)
    return Workload(
        model=model,
        inputs=(torch.randn(64, WIDTH),),
        loss=lambda output: output.pow(2).mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def smallest_plan(work: Workload) -> planner.Plan:
    profile = planner.profile(work)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    return planner.solve(profile, caught.value.minimum_budget_bytes)


def said_in(work: Workload, steps: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            work.step()
    return [str(warning.message) for warning in said]


def test_a_rate_that_was_nothing_when_profiled_is_said_once() -> None:
    work = workload([Residual() for _ in range(6)])
    with planner.apply(work.model, smallest_plan(work)):
        assert said_in(work) == []
        for module in work.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        (said,) = said_in(work)
    assert "6 more differentiable ops" in said
    assert "the peak is not promised" in said


class Alternating(nn.Module):
    """Does more in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        y = torch.sigmoid(self.first(x))
        return x + self.last(torch.tanh(y * 3) if self.odd else y)


def test_stages_that_differ_from_step_to_step_are_named() -> None:
    profile = planner.profile(workload([Alternating() for _ in range(4)]), menus=False)
    assert any("'blocks.0' and 3 more: what is saved differs from one step" in line for line in profile.unsteady)


class Storing(nn.Module):
    """Keeps a tensor from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [x.detach() * 2]
        return self.inner(x)


def test_what_modules_keep_from_step_to_step_counts() -> None:
    work = workload([Storing() for _ in range(6)])
    resident = planner.profile(work, menus=False).resident
    assert resident.buffers == 6 * 64 * WIDTH * 4
