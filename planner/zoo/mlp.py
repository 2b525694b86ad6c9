"""A multilayer perceptron: a plain ``nn.Sequential`` whose output is as wide as its input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.zoo.training import ZooModel


def build_mlp(
    *,
    batch: int = 4096,
    layers: int = 12,
    hidden: int = 128,
) -> ZooModel:
    """``layers`` pairs of Linear and ReLU, all ``hidden`` wide, with a mean squared error."""
    pairs = [module for _ in range(layers) for module in (nn.Linear(hidden, hidden), nn.ReLU())]
    inputs, target = torch.randn(batch, hidden), torch.randn(batch, hidden)
    return ZooModel(nn.Sequential(*pairs), inputs, _squared_error, target)


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)
