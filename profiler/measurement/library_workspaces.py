"""Memory that CUDA's libraries take for themselves when they are first needed, and keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 16  # Smaller products do not reach the kernels that have a workspace.


def take_workspaces(device: torch.device) -> None:
    """Has cuBLAS take its workspaces, in this thread and in the one that runs backward; nothing on the CPU.

    Each thread has a handle of its own, with a workspace for products and another one for products with a bias. Without
    a plan, the thread of backward runs none of the latter; where a plan has it recompute a linear layer, the workspace
    would count in the first such step.
    """
    if device.type == "cuda":
        products_in_both_threads(device)


def products_in_both_threads(device: torch.device) -> None:
    """Multiplies small matrices, with a bias and without, in this thread and in the one that runs backward."""
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for dtype in _TYPES:
            given = torch.ones(_ROWS, _ROWS, device=device, dtype=dtype, requires_grad=True)
            _InBackward.apply(_product(given)).sum().backward()


def _product(given: Tensor) -> Tensor:
    return functional.linear(functional.linear(given, given), given, given[0])


class _InBackward(torch.autograd.Function):
    """Returns what it is given; the products run again in backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        _product(gradients[0].contiguous())
        return gradients[0]
