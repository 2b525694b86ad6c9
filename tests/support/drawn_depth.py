"""Small models that draw at random what they run, by how they draw it; and training steps of many seeds, metered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import planner
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.steps import resident_bytes_of
from profiler.workload.workload import Workload, varied

WIDTH, DEPTH, RATE = 32, 6, 0.4
SEEDS = 20


class Layer(nn.Module):
    """May leave itself out; ``shorter`` is what it does then."""

    def __init__(self, rate: float = 0.0, shorter: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rate, self.shorter = rate, shorter

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.rate and torch.rand(()) < self.rate:
            return self.shorter(x)
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Drawing(nn.Module):
    """Runs those of its layers, and as often, as ``draw`` says."""

    def __init__(self, draw: Callable[[nn.ModuleList], Iterator[nn.Module]], layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.draw = nn.ModuleList(layers), draw
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.draw(self.layers):
            x = layer(x)
        return self.head(x)


def _dropping(dropped: Callable[[], Any]) -> Callable[[nn.ModuleList], Iterator[nn.Module]]:
    return lambda layers: (layer for layer in layers if not dropped())


def _masked(keep: Callable[[], Any]) -> Callable[[nn.ModuleList], Iterator[nn.Module]]:
    return lambda layers: (layer for layer, kept in zip(layers, keep(), strict=True) if kept)


def _first(depth: Callable[[], int]) -> Callable[[nn.ModuleList], Iterator[nn.Module]]:
    return lambda layers: iter(list(layers)[: depth()])


def _repeated(layers: nn.ModuleList) -> Iterator[nn.Module]:
    for _ in range(int(torch.randint(1, DEPTH + 1, ()))):
        yield layers[0]


def _experts(layers: nn.ModuleList) -> Iterator[nn.Module]:
    """One of three each time."""
    for number in range(0, 3 * DEPTH, 3):
        yield layers[number + int(torch.randint(3, (1,)))]


DRAWS: dict[str, Callable[[nn.ModuleList], Iterator[nn.Module]]] = {
    "tensor": _dropping(lambda: torch.rand([]) < RATE),
    "number": _dropping(lambda: torch.rand([]).item() >= 1 - RATE),
    "bernoulli": _dropping(lambda: torch.bernoulli(torch.tensor(RATE))),
    "python": _dropping(lambda: random.random() < RATE),
    "numpy": _dropping(lambda: np.random.uniform() < RATE),
    "mask": _masked(lambda: torch.rand(DEPTH) >= RATE),
    "list": _masked(lambda: (torch.rand(DEPTH) >= RATE).tolist()),
    "exit": _first(lambda: int(torch.randint(1, DEPTH + 1, ()))),
    "python_exit": _first(lambda: random.randint(1, DEPTH)),
    "numpy_exit": _first(lambda: np.random.randint(1, DEPTH + 1)),
    "repeated": _repeated,
    "experts": _experts,
    "inside": iter,
    "inside_scaled": iter,
}


def drawing(name: str) -> Workload:
    """A training step of a model; its own optimizer's states come with the first step."""
    torch.manual_seed(0)
    rate = RATE if name.startswith("inside") else 0.0
    shorter = (lambda x: x * 0.5) if name == "inside_scaled" else (lambda x: x)
    count = {"repeated": 1, "experts": 3 * DEPTH}.get(name, DEPTH)
    model = Drawing(DRAWS[name], [Layer(rate, shorter) for _ in range(count)])
    optimizer = torch.optim.AdamW(model.parameters())
    return Workload(model=model, inputs=torch.randn(256, WIDTH), loss=lambda y: y.square().mean(), optimizer=optimizer)


def everything(name: str) -> Callable[[nn.ModuleList], Iterator[nn.Module]]:
    """Draws the most that ``drawing(name)`` may run."""
    if name == "repeated":
        return lambda layers: iter([layers[0]] * DEPTH)
    return (lambda layers: iter(layers[::3])) if name == "experts" else iter


@contextmanager
def running_everything(work: Workload, name: str) -> Iterator[None]:
    """Inside, each step of ``drawing(name)`` is its largest, and its optimizer has all of its states."""
    model: Any = work.model
    drawn, rates = model.draw, [layer.rate for layer in model.layers]
    model.draw = everything(name)
    for layer in model.layers:
        layer.rate = 0.0
    fill_states(work)
    try:
        yield
    finally:
        model.draw = drawn
        for layer, rate in zip(model.layers, rates, strict=True):
            layer.rate = rate


def fill_states(work: Workload) -> None:
    """Have the optimizer make the states of all parameters; these stay as they are."""
    parameters = [*work.model.parameters()]
    values = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in work.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass(slots=True)
class SeededRun:
    """What steps of other seeds each gave, and the most bytes that any of them took."""

    losses: list[float]
    gradients: list[list[Tensor | None]]
    parameters: list[Tensor]
    peak_bytes: int


def run_of(work: Workload, optimizer: torch.optim.Optimizer, seeds: int = SEEDS) -> SeededRun:
    """Train from the weights as they are, and put them back."""
    weights = [p.detach().clone() for p in work.model.parameters()]
    trained = varied(work, optimizer=optimizer)
    run = SeededRun([], [], [], 0)
    for seed in range(seeds):
        seed_all(seed)
        trained.zero_grad()
        meter = memory_meter(work.device, resident_bytes_of(trained).total)
        step = metered(meter, lambda: run.losses.append(trained.step()))
        run.peak_bytes = max(run.peak_bytes, step.peak_bytes)
        run.gradients.append([None if p.grad is None else p.grad.clone() for p in work.model.parameters()])
    run.parameters = [p.detach().clone() for p in work.model.parameters()]
    trained.zero_grad()
    with torch.no_grad():
        for parameter, value in zip(work.model.parameters(), weights, strict=True):
            parameter.copy_(value)
    return run


def assert_promises_kept(work: Workload, plan: planner.Plan, expected: SeededRun, optimizer: Any) -> None:
    """Under the plan the same comes out of every step, bit for bit, and none takes more than the plan's budget."""
    with planner.apply(work.model, plan):
        found = run_of(work, optimizer, len(expected.losses))
    assert found.losses == expected.losses
    for left, right in zip(found.gradients, expected.gradients, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(found.parameters, expected.parameters, strict=True))
    assert found.peak_bytes <= plan.budget_bytes
