"""Stages that have a say in autograd: functions, hooks, modes, checkpoints, a backward of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.stage_cases.registry import WIDTH, Pair, case


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        y = x * x * scale
        ctx.scale = scale
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, y = ctx.saved_tensors
        return 2 * x * ctx.scale * grad + 0 * y, None


class Halve(torch.autograd.Function):
    """Changes its input in place and saves it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5).sigmoid_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return 0.5 * grad * y * (1 - y)


@case
def functions(s: Pair, x: Tensor) -> Any:
    return s.b(Square.apply(s.a(x), 3.0)), Halve.apply(s.b(x))


@case
def no_grad_inside(s: Pair, x: Tensor) -> Any:
    with torch.no_grad():
        gate = s.a(x).sigmoid()
        gate.mul_(2)
    y = s.b(x).exp()
    return y * gate, y.detach().clamp(max=5) * gate.sum()


@case
def inference_inside(s: Pair, x: Tensor) -> Any:
    with torch.inference_mode():
        steps = (torch.arange(16).float() * 2).clone()
    return (s.a(x) + steps).exp().log() + steps


@case
def gradients_toggled(s: Pair, x: Tensor) -> Any:
    weight = (s.a.weight.detach() * 2).requires_grad_()
    ones = torch.ones(WIDTH, requires_grad=True)
    (slope,) = torch.autograd.grad((ones.exp() * 3).sum(), ones)
    return s.b(F.linear(x, weight).exp() * slope)


@case
def backward_inside(s: Pair, x: Tensor) -> Any:
    y = s.a(x).tanh()
    energy = (y.pow(3) * y.sigmoid().exp()).sum()
    del y
    (first,) = torch.autograd.grad(energy, x, create_graph=True)
    h = s.b(x.sigmoid()).exp()
    (second,) = torch.autograd.grad((h * h.tanh()).sum(), x, create_graph=True)
    return (s.b(first) * second).sigmoid() * energy


@case
def checkpoint_inside(s: Pair, x: Tensor) -> Any:
    y = s.a(x).sigmoid()
    z = checkpoint(lambda t: torch.tanh(F.dropout(s.b(t), 0.3)), y, use_reentrant=False)
    return z.exp() * y


@case
def reentrant_checkpoint_inside(s: Pair, x: Tensor) -> Any:
    y = s.a(x).sigmoid()
    z = checkpoint(lambda t: torch.tanh(F.dropout(s.b(t), 0.3)), y, use_reentrant=True)
    return z.exp() * y


@case
def hooks_inside(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    y.register_hook(lambda grad: grad * 2)
    y.retain_grad()
    return s.b(y).sigmoid()


@case
def containers(s: Pair, x: Tensor) -> Any:
    return {"first": s.a(x).exp(), "second": (s.b(x).tanh(), None, 3)}
