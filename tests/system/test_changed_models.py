"""Loops that change the model after planning: frozen, merged, other rates; they train as without a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.tensor_trees import tensors_in

WIDTH, BATCH = 32, 64


class Adapted(nn.Module):
    """Two blocks; the first adds a small matrix product to its layer's, as LoRA does, until that is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(0.2)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) if self.merged else self.first(x) + self.up(self.down(x))
        return self.last(self.drop(torch.nn.functional.gelu(y)))


def nothing(model: Any) -> None:
    """It stays as it is: what fails below does so for what changes."""


def freezing(model: Any) -> None:
    model.first.weight.requires_grad_(False)


def thawing(model: Any) -> None:
    model.last.bias.requires_grad_(True)


def tying(model: Any) -> None:
    model.last.weight = model.first.weight


def merging(model: Any) -> None:
    with torch.no_grad():
        model.first.weight += model.up.weight @ model.down.weight
    model.merged = True


def dropping_more(model: Any) -> None:
    model.drop.p = 0.5


def dropping_nothing(model: Any) -> None:
    model.drop.p = 0.0


def evaluating_a_part(model: Any) -> None:
    model.drop.eval()


def hooking(model: Any) -> None:
    model.first.register_forward_hook(lambda _, __, output: 2 * output)


def swapping_data_before_backward(model: Any) -> None:
    model.last.weight.data = model.last.weight.data * 0.5


def writing_data_before_backward(model: Any) -> None:
    model.last.weight.data.mul_(0.5)


BEFORE_BACKWARD = (swapping_data_before_backward, writing_data_before_backward)
CHANGES = (
    nothing, freezing, thawing, tying, merging, dropping_more, dropping_nothing, evaluating_a_part, hooking,
    *BEFORE_BACKWARD,
)  # fmt: skip


def adapted() -> planner.Workload:
    torch.manual_seed(0)
    model = Adapted()
    model.last.bias.requires_grad_(False)
    return planner.Workload(model=model, inputs=torch.randn(BATCH, WIDTH), loss=lambda y: y.square().mean())


@functools.cache
def smallest_plan(stages: Any) -> planner.Plan:
    profile = planner.profile(adapted(), stages=stages)
    with pytest.raises(planner.Infeasible) as refused:
        planner.solve(profile, 1)
    return planner.solve(profile, refused.value.minimum_budget_bytes)


def after_a_change(change: Callable[[Any], None], plan: planner.Plan | None) -> list[Any]:
    """Losses and gradients of a step, a changed one, and one more."""
    work = adapted()
    model, x = work.model, next(iter(tensors_in(work.inputs)))
    if plan is not None:
        planner.apply(model, plan)
    torch.manual_seed(1)
    seen: list[Any] = []
    for number in range(3):
        model.zero_grad()
        if number == 1 and change not in BEFORE_BACKWARD:
            change(model)
        loss = model(x).square().mean()
        if number == 1 and change in BEFORE_BACKWARD:
            change(model)
        loss.backward()
        seen += [loss.detach().clone(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, "whole"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_loop_that_changes_the_model_trains_as_without_a_plan(change: Callable[[Any], None], stages: Any) -> None:
    got, expected = after_a_change(change, smallest_plan(stages)), after_a_change(change, None)
    for have, want in zip(got, expected, strict=True):
        assert (want is None) == (have is None) and (want is None or torch.equal(want, have))
