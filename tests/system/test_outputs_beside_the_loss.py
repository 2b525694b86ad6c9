"""What has no part in the loss keeps its graph, and what that saved, for as long as the loop or a module holds it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.outside_meter import OutsideMeter
from profiler.workload.workload import Workload
from tests.support.exactness import budgets

WIDTH, ROWS = 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Pooled(nn.Module):
    """As an encoder with a pooler that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        wide = 8 * WIDTH  # Most is there at the end of forward, beside what the last step's output keeps.
        self.pooler = nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Sigmoid())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks(x)
        return {"hidden": hidden, "pooled": self.pooler(hidden).exp()}


class WithLeaf(Pooled):
    """Makes a tensor in forward that takes a gradient."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = torch.zeros(ROWS, 8, WIDTH).requires_grad_()
        return {"hidden": self.blocks(x) + made.sum(1)}


class WithAttribute(Pooled):
    """Keeps what has no part in the loss on a module, as a mixture of experts may keep its balance."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.blocks(x)
        self.balance = self.pooler(hidden).exp()
        return {"hidden": hidden}


def built(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.randn(ROWS, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(output: Any) -> Tensor:
    return output["hidden"].square().mean()


def peak_bytes_of_a_loop(kind: type[nn.Module], plan: planner.Plan | None) -> int:
    gc.collect()
    with OutsideMeter() as meter:
        model, x, optimizer = built(kind)
        if plan is not None:
            planner.apply(model, plan)
        for step in range(3):
            if step == 1:
                meter.begin()
            output = model(x)
            loss = loss_of(output)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.peak_bytes


@pytest.mark.parametrize("kind", [Pooled, WithLeaf, WithAttribute])
def test_the_bytes_are_those_of_the_loop(kind: type[nn.Module]) -> None:
    model, x, optimizer = built(kind)
    profile = planner.profile(Workload(model=model, inputs=x, loss=loss_of, optimizer=optimizer), menus=False)
    assert peak_bytes_of_a_loop(kind, None) == profile.unplanned_peak_bytes
    for budget in budgets(profile):
        plan = planner.solve(profile, budget)
        assert peak_bytes_of_a_loop(kind, plan) <= plan.predicted_peak_bytes <= budget
