"""Stages that change tensors in place, and that see one storage through several tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.stage_cases.registry import ROWS, WIDTH, Pair, case


@case
def relu_in_place(s: Pair, x: Tensor) -> Any:
    return s.b(F.relu_(s.a(x)))


@case
def chain_in_place(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    y.mul_(2).add_(1).relu_()
    return s.b(y) * y.sum()


@case
def masked_fill(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    y.masked_fill_(x > 0, 0.1)
    return s.b(torch.softmax(y, -1))


@case
def slices_filled(s: Pair, x: Tensor) -> Any:
    y = torch.zeros(ROWS, 2 * WIDTH)
    y[:, :WIDTH] = s.a(x)
    y[:, WIDTH:].copy_(s.b(x))
    return (y * y).sigmoid()


@case
def piece_changed(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    y[:, :8].sigmoid_()
    return s.b(y), y[:, 8:].exp()


@case
def pieces_that_count_apart(s: Pair, x: Tensor) -> Any:
    a, b, c, d = torch.unsafe_chunk(s.a(x), 4, 1)
    gates = a.sigmoid_() * b.tanh_() + c.sigmoid_()
    return gates.exp() * d, torch.unsafe_split(s.b(x), 4)[1].add_(1).exp()


@case
def views(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    a, b = y.chunk(2, -1)
    c = torch.cat([a.sigmoid(), b.exp()], -1).t().reshape(4, 32)[::2].unbind(0)
    return (c[0] * c[1]).tanh(), y.as_strided((4, 4), (16, 2), 3).exp(), y.expand(3, ROWS, WIDTH).tanh()


@case
def more_views(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    z = y.transpose(0, 1).contiguous().view(4, 4, 8).permute(2, 0, 1).reshape(ROWS, WIDTH)
    z += y
    return z.exp(), torch.stack([z, y]).logsumexp(0), y.flip(0).exp(), y.repeat(2, 2).exp(), y.unfold(1, 4, 2).exp()


@case
def diagonal(s: Pair, x: Tensor) -> Any:
    y = (s.a(x) @ s.a(x).t()).clone()
    y.diagonal().mul_(3)
    y.fill_diagonal_(2.0)
    z = y.tril()
    z[0] = y[1]
    return z.sigmoid(), torch.diag_embed(y).exp().sum()


@case
def out_arguments(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    with torch.no_grad():
        first, second = torch.empty(0), torch.empty(ROWS, WIDTH)
        torch.mul(y, 2, out=first)
        torch.add(first, y, out=second)
        first.resize_(4, 32)
    return y * second, y.reshape(4, 32) * first


@case
def data_replaced(s: Pair, x: Tensor) -> Any:
    y, z, w = s.a(x).exp(), torch.zeros(ROWS, WIDTH), torch.zeros(1)
    z.data = y.detach() * 2
    w.set_(y.detach() + 1)  # type: ignore[call-overload]
    t = y.detach().clone()
    t.t_().unsqueeze_(0)
    return y * z * w, s.b(y).sigmoid() * t.squeeze(0).t()


@case
def data_written(s: Pair, x: Tensor) -> Any:
    """Through ``.data``, so that no version counter shows it; backward uses what is there then."""
    y = s.a(x).exp()
    z = y.sigmoid()
    z.data.mul_(0.5)
    return z * y


@case
def lists_changed(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    pair = [y.detach().clone(), torch.ones(ROWS, WIDTH)]
    with torch.no_grad():
        torch._foreach_mul_(pair, 2)
        torch._foreach_add_(pair, [torch.ones(ROWS, WIDTH), y])
    return y * pair[0] * pair[1], torch._foreach_exp([y, y * 2])[1]


@case
def formats(s: Pair, x: Tensor) -> Any:
    y = s.a(x).reshape(2, 4, 4, 4).to(memory_format=torch.channels_last).exp()
    z = torch.empty_like(y).copy_(y)
    return y * z.sigmoid(), F.interpolate(y, scale_factor=2), F.pixel_shuffle(y, 2), F.pad(y, (1, 1)).exp()
