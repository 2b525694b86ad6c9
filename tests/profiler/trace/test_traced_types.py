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
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH), nn.GroupNorm(4, WIDTH)])
        self.norms.insert(0, nn.BatchNorm1d(WIDTH, affine=False))
        self.norms.insert(1, nn.BatchNorm1d(WIDTH, track_running_stats=False))
        self.norms.insert(2, nn.BatchNorm1d(WIDTH).eval())
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.norms)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        return x


def work_of(**more: Any) -> planner.Workload:
    torch.manual_seed(0)
    return planner.Workload(
        model=Norms(), inputs=torch.randn(ROWS, WIDTH), loss=lambda y: y.float().square().mean(), **more
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0.0, 1.0])
def test_norms_under_autocast_take_what_is_predicted(depth: float) -> None:
    profile = planner.profile(work_of(autocast=torch.bfloat16), stages="whole")
    assert profile.menus[0].graph is not None
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1)
    least = refused.value.minimum_budget_bytes
    plan = planner.solve(profile, least + int(depth * (profile.unplanned_peak_bytes - least)))
    work = work_of(autocast=torch.bfloat16)
    with planner.apply(work.model, plan):
        measured = planner.measure(work, repeats=1).peak_bytes
    assert measured <= plan.predicted_peak_bytes <= 1.02 * measured
