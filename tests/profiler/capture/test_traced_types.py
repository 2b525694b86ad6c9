"""Types of norms' statistics in half precision, as they are when the ops run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner

WIDTH, ROWS = 16, 32


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GroupNorm(4, WIDTH)])
        self.norms.insert(0, nn.BatchNorm1d(WIDTH, affine=False))
        self.norms.insert(1, nn.BatchNorm1d(WIDTH, track_running_stats=False))
        self.norms.insert(2, nn.BatchNorm1d(WIDTH).eval())

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = torch.relu(norm(self.layer(x)))
        return x


def work_of(**more: Any) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(
        model=Norms(), inputs=torch.randn(ROWS, WIDTH), loss=lambda y: y.float().square().mean(), **more
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_norms_under_autocast_are_predicted_to_the_byte(share: float) -> None:
    profile = planner.profile(work_of(autocast=torch.bfloat16), graph=True)
    with pytest.raises((planner.Infeasible, planner.NothingFound)) as refused:
        planner.solve(profile, 1, time_limit_seconds=2)
    least = refused.value.minimum_budget_bytes
    budget = least + int(share * (profile.unplanned_peak_bytes * 2 - least))
    plan = planner.solve(profile, budget, time_limit_seconds=2)
    work = work_of(autocast=torch.bfloat16)
    with planner.apply(work.model, plan):
        assert planner.measure(work, repeats=1).peak_bytes == plan.predicted_peak_bytes
