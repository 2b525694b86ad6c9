"""Hooks that come or go while a stage runs: its second run has those of its first, and leaves those that there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload
from tests.support.exactness import assert_same, budgets, state_after

WIDTH = 32


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Collecting(nn.Module):
    """Asks its layer for what it returns, by a hook that the first call registers, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.collected: list[Tensor] = []
        self.asked = False

    def _collect(self, module: nn.Module, given: Any, returned: Any) -> None:
        self.collected.append(returned)

    def forward(self, x: Tensor) -> Tensor:
        if not self.asked:
            self.asked = True
            self.layer.register_forward_hook(self._collect)
        hidden = torch.tanh(self.layer(x))
        inside = sum(self.collected, start=torch.zeros(()))
        self.collected.clear()
        return x + self.out(hidden) * inside.sigmoid()


class Preparing(Plain):
    """Has a hook that takes itself out in the first call, as lazy modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = self.layer.register_forward_pre_hook(self._prepared, with_kwargs=True)

    def _prepared(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.handle.remove()
        return tuple(torch.exp(-each) for each in args), kwargs


class Counting(Plain):
    """Registers a backward hook in every call, and takes out that of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.layer.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)
        return super().forward(x)


def workload_of(kind: type[nn.Module]) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(*(kind() for _ in range(4)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(model=model, inputs=torch.randn(64, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer)


def hooks_of(model: nn.Module) -> list[int]:
    return [
        len(table)
        for module in model.modules()
        for name, table in vars(module).items()
        if name.endswith(("_hooks", "_with_kwargs"))
    ]


@pytest.mark.parametrize("kind", [Collecting, Preparing, Counting])
def test_hooks_that_a_stage_registers_or_takes_out_as_it_runs(kind: type[nn.Module]) -> None:
    work = workload_of(kind)
    expected = state_after(work, steps=3)
    profile = planner.profile(workload_of(kind), menus=False)
    planned = workload_of(kind)
    plan = planner.solve(profile, next(budgets(profile)))
    assert plan.recomputed_ops
    with planner.apply(planned.model, plan):
        assert_same(state_after(planned, steps=3), expected)
    assert hooks_of(planned.model) == hooks_of(work.model)


def doubled(module: nn.Module, given: Any, returned: Any) -> Tensor:
    return returned * 2


def test_a_hook_that_is_gone_before_backward() -> None:
    def gradients(work: Workload) -> list[Tensor | None]:
        handles = [
            stage.layer.register_forward_hook(doubled) for stage in work.model.modules() if isinstance(stage, Plain)
        ]
        assert isinstance(work.inputs, Tensor)
        loss = work.model(work.inputs).square().mean()
        for handle in handles:
            handle.remove()
        loss.backward()
        return [parameter.grad for parameter in work.model.parameters()]

    profile = planner.profile(workload_of(Plain), menus=False)
    planned = workload_of(Plain)
    with planner.apply(planned.model, planner.solve(profile, next(budgets(profile)))):
        assert_same(gradients(planned), gradients(workload_of(Plain)))
