"""A multilayer perceptron: a plain ``nn.Sequential`` whose output is as wide as its input."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from planner.zoo.training import finish, seeded
from profiler.workload.workload import Workload


def build_mlp(
    *,
    batch: int = 4096,
    layers: int = 12,
    hidden: int = 128,
    seed: int = 0,
    device: str = "cpu",
    optimizer: str = "adamw",
    precision: str = "float32",
) -> Workload:
    """``layers`` pairs of Linear and ReLU, all ``hidden`` wide, with a mean squared error."""
    with seeded(seed):
        pairs = [module for _ in range(layers) for module in (nn.Linear(hidden, hidden), nn.ReLU())]
        inputs = torch.randn(batch, hidden)
        target = torch.randn(batch, hidden).to(device)
    return finish(
        nn.Sequential(*pairs),
        inputs,
        device=device,
        optimizer=optimizer,
        precision=precision,
        loss=lambda output: functional.mse_loss(output.float(), target),
    )
