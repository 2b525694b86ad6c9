"""A small model whose batches change their size, planned for some sizes, and its solver held back or let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import planner
from planner.training.dynamic_shapes import DynamicHandle


def layers(count: int = 4, width: int = 16) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Tanh()) for _ in range(count)))


def rows(count: int, width: int = 16) -> Tensor:
    return torch.randn(count, width)


def planned(
    sizes: tuple[int, ...] = (64, 256), budget: Any = "75%", **settings: Any
) -> tuple[nn.Module, DynamicHandle]:
    model = layers()
    examples = [rows(size) for size in sizes[:-1]]
    workload = planner.Workload(model, rows(sizes[-1]), loss=torch.mean)
    planner.auto_checkpoint(workload, budget=budget, dynamic=True, sizes=examples, **settings)
    return model, handle_of(model)


def step(model: nn.Module, count: int) -> None:
    model.zero_grad()
    model(rows(count)).mean().backward()


def handle_of(model: nn.Module) -> DynamicHandle:
    handle = planner.handle_of(model)
    assert isinstance(handle, DynamicHandle)
    return handle


def held_back(handle: DynamicHandle) -> list[Callable[[], None]]:
    """Keep jobs from the thread."""
    held: list[Callable[[], None]] = []
    handle._book.background.submit = held.append  # type: ignore[method-assign]
    return held


def release(handle: DynamicHandle, held: list[Callable[[], None]]) -> None:
    del handle._book.background.submit
    for job in held:
        handle._book.background.submit(job)
    assert handle.wait(60)


def state(model: nn.Module) -> list[Tensor]:
    """Gradients and buffers."""
    grads = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*grads, *(buffer.clone() for buffer in model.buffers())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
