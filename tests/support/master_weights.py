"""Training in bfloat16 with float32 master copies of the weights, as mixed-precision libraries do it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import planner
from tests.support.odd_models import workload


class Masters:
    """Float32 copies of a bfloat16 model's parameters, and the hooks that carry gradients there and values back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.bfloat16()
        self.copies = [p.detach().float().requires_grad_() for p in model.parameters()]

    def optimizer(self, kind: Any) -> torch.optim.Optimizer:
        settings: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(self.copies, lr=0.01, **settings)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        return optimizer

    def _before(self, *_: object) -> None:
        for copy, parameter in zip(self.copies, self.model.parameters(), strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None

    @torch.no_grad()
    def _after(self, *_: object) -> None:
        for copy, parameter in zip(self.copies, self.model.parameters(), strict=True):
            parameter.copy_(copy)


def with_masters(kind: Any = torch.optim.AdamW) -> planner.Workload:
    plain = workload("plain")
    masters = Masters(plain.model)
    return planner.Workload(
        model=masters.model, inputs=in_half(plain.inputs), loss=plain.loss, optimizer=masters.optimizer(kind)
    )


def in_half(inputs: Any) -> Tensor:
    assert isinstance(inputs, Tensor)
    return inputs.bfloat16()
