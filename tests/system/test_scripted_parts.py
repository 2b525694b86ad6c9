"""Models with parts that ``torch.jit.script`` has compiled: planned around them, and named."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload

WIDTH = 32

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit is deprecated

    def scripted() -> nn.Module:
        wide = 4 * WIDTH
        layers = nn.Sequential(nn.Linear(WIDTH, wide), nn.BatchNorm1d(wide), nn.GELU(), nn.Linear(wide, WIDTH))
        return torch.jit.script(layers)


class Inside(nn.Module):
    """A block with a scripted part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = scripted()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.part(x))


class Mixed(nn.Module):
    """Plain blocks, scripted ones, and one with a scripted part."""

    def __init__(self) -> None:
        super().__init__()
        plain = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)]
        self.blocks = nn.ModuleList([*plain[:2], scripted(), Inside(), *plain[2:]])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(model: nn.Module, batch: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_parts_are_kept_and_named_and_the_rest_is_planned() -> None:
    torch.manual_seed(0)
    model, batch = Mixed(), torch.randn(256, WIDTH)
    state = copy.deepcopy(model.state_dict())
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    profile = planner.profile(Workload(model=model, inputs=batch, loss=lambda y: y.square().mean()), menus=False)
    assert [module.__dict__.get("forward") for module in model.modules()] == forwards
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    reasons = {name: record.reason for record in profile.left_out for name in record.names}
    assert "it is compiled by torch.jit" in reasons["blocks.2"]
    assert "its part is compiled by torch.jit" in reasons["blocks.3"]

    with pytest.raises(planner.Infeasible, match=r"use the module as it was before torch.jit") as caught:
        planner.solve(profile, profile.resident.total * 3, solver="rotor")
    plan = planner.solve(profile, caught.value.minimum_budget_bytes, solver="rotor")
    assert any(stage.runs > 1 for stage in plan.stages)
    other = Mixed()  # whose scripted parts have not run yet
    other.load_state_dict(state)
    with planner.apply(other, plan):
        planned = [step(other, batch) for _ in range(3)]
    plain = [step(model, batch) for _ in range(3)]
    assert all(torch.equal(a, b) for p, q in zip(planned, plain, strict=True) for a, b in zip(p, q, strict=True))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_model_is_profiled_planned_and_trained() -> None:
    model, batch = torch.nn.Sequential(scripted(), scripted()), torch.randn(64, WIDTH)
    whole = torch.jit.script(model)
    profile = planner.profile(Workload(model=whole, inputs=batch, loss=lambda y: y.square().mean()), menus=False)
    with planner.apply(whole, planner.solve(profile, "100%", solver="rotor")):
        step(whole, batch)
