"""Tensors that are written to between stages, or between forward and backward, where that is legal without a plan."""

from __future__ import annotations

import warnings
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
        with pytest.raises(RerunError, match=r"stage 'blocks.0': its input was changed in place since forward"):
            loss.backward()


def in_place(x: Tensor) -> None:
    with torch.no_grad():
        x[7] = 0


def by_data(x: Tensor) -> None:
    x.data.mul_(0.5)


class Writes(Net):
    """Writes to what its blocks return."""

    write: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, *more)
            if self.write is not None:
                self.write(x)
        return self.head(x)


class WritesInPlace(Writes):
    write = staticmethod(in_place)


class WritesByData(Writes):
    write = staticmethod(by_data)


def plain_step(model: nn.Module) -> None:
    loss_of(model(X)).backward()


@pytest.mark.parametrize("make", [WritesInPlace, WritesByData])
def test_what_is_written_to_between_two_stages_is_not_linked(make: Callable[[], Net]) -> None:
    plan = plan_of(make)
    assert not any(stage.record.links for stage in plan.stages)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "planned stage|planner.apply")
        assert_exact(make, plan, plain_step)


def test_writes_between_the_stages_of_a_segment_that_come_after_profiling_are_exact_and_said() -> None:
    def step(model: Writes) -> None:
        model.write = in_place
        plain_step(model)

    with pytest.warns(RuntimeWarning, match=r"stage 'blocks.2': its input was changed in place .* it is held"):
        assert_exact(Writes, plan_of(Writes), step)  # type: ignore[arg-type]


def test_forward_hooks_that_write_to_what_stages_of_a_segment_return_are_exact() -> None:
    def halve(module: nn.Module, args: Any, output: Tensor) -> None:
        output[7] *= 0.5

    def step(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.register_forward_hook(halve)
        plain_step(model)

    assert_exact(Net, plan_of(Net), step)


def test_a_link_whose_memory_is_swapped_is_none() -> None:
    def swap(x: Tensor) -> None:
        x.data = x.data * 2

    def step(model: Writes) -> None:
        model.write = swap
        plain_step(model)

    assert_exact(Writes, plan_of(Writes), step)  # type: ignore[arg-type]
