"""Tensors that are written to between stages, or between forward and backward, where that is legal without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.recomputation.saved_tensors import RerunError
from tests.support.exactness import assert_same

WIDTH = 16
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
SEGMENT = planner.Rules(checkpoints="head")
EACH = planner.Rule(modules="blocks.*")


class Block(nn.Module):
    """Autograd saves nothing of what it takes beside its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return x + self.b(torch.tanh(sum(more, self.a(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *more)
        return self.head(x)


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def plan_of(make: Callable[[], nn.Module], inputs: tuple[Tensor, ...] = (X,), rules: Any = SEGMENT) -> planner.Plan:
    work = planner.Workload(model=build(make), inputs=inputs, loss=loss_of)
    return planner.state(planner.profile(work, stages=["blocks.*", "head"], menus=False), rules)


def assert_exact(make: Callable[[], nn.Module], plan: planner.Plan, step: Callable[[nn.Module], None]) -> None:
    """A step leaves the same gradients with a plan as without one."""
    plain, planned = build(make), build(make)
    step(plain)
    with planner.apply(planned, plan):
        step(planned)
    assert_same(*({name: p.grad for name, p in model.named_parameters()} for model in (plain, planned)))


def test_what_blocks_of_a_segment_take_besides_may_be_refilled_before_backward() -> None:
    given = torch.randn(32, WIDTH)

    def step(model: nn.Module) -> None:
        bias = given.clone()
        loss = loss_of(model(X, bias))
        bias[7] += 3
        loss.backward()

    assert_exact(Net, plan_of(Net, (X, given)), step)


class MakesBias(Net):
    """What its blocks take besides is no part of the batch, so that no copy of it is made."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.bias = torch.ones(32, WIDTH)
        return super().forward(x, self.bias)


def test_what_blocks_of_a_segment_take_besides_is_refused_where_it_changed_and_no_copy_is_there() -> None:
    model = build(MakesBias)
    with planner.apply(model, plan_of(MakesBias)):
        loss = loss_of(model(X))
        model.bias.zero_()  # type: ignore[operator]
        with pytest.raises(RerunError, match=r"stage 'blocks.0': expected its input to be as it was in forward"):
            loss.backward()
