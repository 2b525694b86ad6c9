"""A model that reads everything that a block may read, and loops of training with a habit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from profiler.workload.workload import Workload

WIDTH = 16
SETTINGS = {"factor": 1.0}  # out of sight of every module


class Block(nn.Module):
    """Reads everything that a block may read: attributes, containers, objects, buffers, a counter."""

    codebook: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(2 * WIDTH), nn.Dropout(dropout)
        self.condition: Tensor | None = None
        self.calls = 0
        self.scale = 1.0
        self.history = [1.0]
        self.context = SimpleNamespace(time=1.0)
        self.mean = torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("codebook", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 3 == 0:  # in some steps only
            self.codebook.mul_(0.9)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        y = x * self.scale * self.history[-1] * self.context.time * SETTINGS["factor"] * (1 + 0.1 * (self.calls % 3))
        y = y * self.codebook.clone() + self.mean.clone() + torch.rand(WIDTH, generator=self.generator)
        if self.condition is not None:
            y = y * self.condition
        return x + self.last(self.dropout(torch.nn.functional.gelu(self.norm(self.first(y)))))


class Net(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(blocks), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        for k, block in enumerate(self.blocks):
            if condition is not None:
                block.condition = condition * (1 + k)
            x = block(x)
        return self.out(x)


def net(make: Callable[[], nn.Module] = lambda: Block(0.1), blocks: int = 4) -> Net:
    torch.manual_seed(0)
    return Net([make() for _ in range(blocks)])


def batch() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(5))


def loss_of(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def recomputing(model: nn.Module, inputs: Any = None) -> planner.Plan:
    """A plan under the smallest budget: most of the blocks run again."""
    work = Workload(model=model, inputs=(batch(),) if inputs is None else inputs, loss=loss_of)
    profile = planner.profile(work, menus=False)
    with pytest.raises(planner.Infeasible) as caught:
        planner.solve(profile, 1)
    plan = planner.solve(profile, caught.value.minimum_budget_bytes)
    assert sum(stage.decision == "recompute" for stage in plan.stages) >= 2
    return plan


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


Habit = Callable[[nn.Module, Tensor], Tensor]


def trained(model: nn.Module, habit: Habit, steps: int = 4) -> dict[str, Any]:
    """What some steps by a loop with this habit leave; it returns the loss of each once its backward is over."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        losses.append(habit(model, batch()).item())
        optimizer.step()
    kinds = (bool, int, float, Tensor)
    attributes = [{n: v for n, v in vars(m).items() if isinstance(v, kinds)} for m in model.modules()]
    return {
        "losses": losses,
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "state": dict(model.state_dict()),
        "attributes": {str(k): values for k, values in enumerate(attributes)},
        "random": torch.get_rng_state(),
    }


def blocks_of(model: Any) -> list[Any]:
    return list(model.blocks)


def plain(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    loss.backward()
    return loss


def evaluating(model: nn.Module, x: Tensor) -> Tensor:
    loss = loss_of(model(x))
    model.eval()
    loss.backward()
    return loss
