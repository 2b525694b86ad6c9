from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from planner.plans import cut_choice
from planner.plans.cut_choice import with_best_cut


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def _smallest_bytes(profile: planner.Profile) -> int:
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1, offload="never")
    return refused.value.minimum_budget_bytes


@pytest.fixture
def _faster_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_choice, "_WORTH_BYTES", 0)
    monkeypatch.setattr(cut_choice, "_slowdown", lambda profile, budget_bytes: float(len(profile.stages)))


@pytest.mark.usefixtures("_faster_whole")
@pytest.mark.parametrize("accumulates", [True, False])
def test_no_budget_is_lost_to_a_faster_cut(accumulates: bool) -> None:
    """A call planned at once hands over all gradients at its end, which are alive beside those they are added to."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block(64) for _ in range(4)))
    batch = torch.randn(128 if accumulates else 1024, 64)

    def step() -> None:
        model(batch).square().sum().backward()
        if not accumulates:
            model.zero_grad()

    workload = planner.Workload(model=model, step=step)
    parts, whole = (planner.profile(workload, stages=stages) for stages in (["0", "1", "2", "3"], "whole"))
    assert (_smallest_bytes(whole) > _smallest_bytes(parts)) == accumulates
    assert with_best_cut(parts, lambda: whole) is (parts if accumulates else whole)
