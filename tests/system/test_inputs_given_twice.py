"""One tensor given to a stage several times, as self-attention gets it: a second run has to see that it is one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import planner


class Attends(nn.Module):
    """Takes another way through ``nn.MultiheadAttention`` where query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


def build() -> planner.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(Attends() for _ in range(3)), nn.Linear(32, 32))
    return planner.Workload(model=model, inputs=torch.randn(8, 16, 32), loss=lambda y: y.square().mean())


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    return planner.profile(build(), stages=["*.attention", "*.norm", "3"], menus=False)


def test_attention_of_one_tensor_to_itself_can_run_again(profile: planner.Profile) -> None:
    assert all(stage.recomputable for stage in profile.stages if stage.name.endswith("attention"))


@pytest.mark.parametrize("offload", [planner.Offload(mode="never"), planner.Offload(mode="auto", link_gbps=1000)])
def test_gradients_and_peak_are_as_promised(profile: planner.Profile, offload: planner.Offload) -> None:
    with pytest.raises(planner.Infeasible) as refusal:
        planner.solve(profile, 1, solver="rotor", offload=offload)
    least = refusal.value.minimum_budget_bytes
    plan = planner.solve(profile, least, solver="rotor", offload=offload)
    plain, planned = build(), build()
    with planner.apply(planned.model, plan):
        assert planner.measure(planned, repeats=1).peak_bytes <= least
        planned.step()
    plain.step()
    for a, b in zip(plain.model.parameters(), planned.model.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)
