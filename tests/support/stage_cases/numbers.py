"""Stages with kinds of numbers, random numbers, and shapes and ways that depend on data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.stage_cases.registry import ROWS, WIDTH, Pair, case


@case
def conjugates(s: Pair, x: Tensor) -> Any:
    z = torch.view_as_complex(s.a(x).reshape(ROWS, ROWS, 2)).exp()
    w = torch.view_as_complex(s.b(x).reshape(ROWS, ROWS, 2)).conj()
    return w * z, torch.mm(w, z), torch.mm(z, w.t()).abs(), z.mH @ z, (w * 2).imag.exp(), z.conj().imag.sigmoid()


@case
def negatives(s: Pair, x: Tensor) -> Any:
    z = torch.view_as_complex(s.a(x).reshape(ROWS, ROWS, 2)).exp()
    n = z.conj().imag
    return n.exp() * n, (n * 2).sigmoid(), torch.mm(n, n)


@case
def fourier(s: Pair, x: Tensor) -> Any:
    z = torch.fft.rfft(s.a(x)) * torch.fft.rfft(s.b(x)).conj()
    return torch.fft.irfft(z), torch.fft.fft(x).imag.exp()


@case
def bits(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    positive = (y.detach().view(torch.int32) & 0x7FFFFFFF).view(torch.float32)
    half = y.detach().view(torch.bfloat16).float()[:, ::2]
    return s.b(y * positive), y.exp() * half.nan_to_num(0, 0, 0).clamp(-1, 1)


@case
def sparse(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    fixed, rows = torch.eye(ROWS).to_sparse(), torch.eye(ROWS).to_sparse_csr()
    own = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 3, 4]]), y[0, :3], (ROWS, ROWS))
    return torch.sparse.mm(fixed, y.exp()).sigmoid(), (rows @ y).tanh(), torch.sparse.mm(own, y).exp()


@case
def autocast_inside(s: Pair, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.gelu(s.a(x))
        z = s.b(y) + s.b(y * 2)
    return z.float().softmax(-1)


# Randomness ----------------------------------------------------------------------


@case
def draws(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    like, full, blank = torch.rand_like(y), torch.bernoulli(torch.full((ROWS, WIDTH), 0.5)), torch.empty(ROWS, WIDTH)
    blank.normal_()
    order, some = torch.randperm(ROWS), torch.multinomial(y.detach().softmax(-1), 2)
    zeros, waits = torch.zeros_like(y).uniform_(), torch.empty_like(y).exponential_()
    normal = torch.normal(0.0, 1.0, (ROWS, WIDTH)) + torch.randn(ROWS, WIDTH)
    return (
        (y * like).exp() * full,
        (y[order] * blank).sigmoid(),
        (y * waits * F.gumbel_softmax(y)).tanh() + normal,
        y.gather(1, some).exp() * zeros.sum(),
        y[torch.randint(0, ROWS, (4,))].exp(),
    )


@case
def bernoulli_of_probabilities(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    chances = y.detach().sigmoid()
    y = y * torch.empty_like(chances).bernoulli_(chances)
    return F.dropout1d(F.dropout(y, 0.5).unsqueeze(0), 0.5).exp()


@case
def own_generator(s: Pair, x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(1)
    y = s.a(x) * torch.randn(ROWS, WIDTH, generator=generator)
    return (y * torch.rand(ROWS, WIDTH, generator=generator)).exp()


@case
def attention_with_dropout(s: Pair, x: Tensor) -> Any:
    q, k = s.a(x).reshape(1, 2, 8, 8), s.b(x).reshape(1, 2, 8, 8)
    masked = F.scaled_dot_product_attention(q, k, q * 2, dropout_p=0.3, attn_mask=torch.randn(8, 8).tril())
    return masked.exp(), F.scaled_dot_product_attention(q, k, k, is_causal=True)


# Shapes and control flow that depend on data ---------------------------------------


@case
def data_dependent(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    z = y[(y > 1).nonzero(as_tuple=True)].sigmoid()
    chosen = torch.where(y > 1, y, y * y)
    return z.sum() * chosen, y[y > 0.5].log().sum(), torch.masked_select(y, y < 1).prod()


@case
def item(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    largest = y.detach().max().item()
    return s.b(y / largest).sigmoid() if largest > 0 else y


@case
def scattered(s: Pair, x: Tensor) -> Any:
    y = s.a(x).exp()
    z, zeros = torch.zeros_like(y), torch.zeros(ROWS, WIDTH, dtype=torch.long)
    z[torch.tensor([0, 2, 2])] = y[:3]
    z.index_put_((torch.tensor([1, 1]),), y[:2], accumulate=True)
    w = z.clone().scatter_add_(0, zeros, y)
    return z.sigmoid() * w.tanh(), torch.scatter_reduce(y, 0, zeros, y * 2, "amax")


@case
def made_in_forward(s: Pair, x: Tensor) -> Any:
    steps, table = torch.arange(16).float() / 16, torch.tensor([[1.0], [2.0], [3.0]])
    twos = torch.from_numpy(np.ones((ROWS, WIDTH), "float32") * 2)
    y = (s.a(x) * steps).exp() * twos
    return (y * twos).sigmoid().sum() * table.exp()


@case
def reductions(s: Pair, x: Tensor) -> Any:
    y = s.a(x)
    square = y.t() @ y + torch.eye(WIDTH) * 20
    return (
        y.logsumexp(-1), y.cumsum(-1).cumprod(0), y.sort(-1)[0].exp(), y.topk(3)[0].exp(), y.max(-1)[0].exp(),
        y.std(-1), F.normalize(y), torch.einsum("ij,kj->ik", y, y).softmax(-1), F.cross_entropy(y, torch.arange(ROWS)),
        torch.linalg.cholesky(square).exp(), torch.linalg.solve(square, y.t()).sin(), torch.logdet(square),
    )  # fmt: skip
