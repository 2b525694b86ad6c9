"""Modules with the habits that matter where single ops run again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.small_blocks import WIDTH, Residual, Stack, block


class Rotates(nn.Module):
    """Complex numbers seen through views: conjugates, real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.tanh(self.first(x)).unflatten(-1, (-1, 2))).exp()
        w = torch.view_as_complex(torch.tanh(self.second(x)).unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(z * w.conj()).flatten(-2)
        return x + 0.1 * turned * z.conj().imag.exp().repeat(1, 2)


class SlicesInPlace(nn.Module):
    """Fills a storage piece by piece, and changes pieces of another one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, : 2 * WIDTH].sigmoid_()
        whole = torch.empty_like(h)
        whole[:, : 2 * WIDTH] = h[:, 2 * WIDTH :]
        whole[:, 2 * WIDTH :].copy_(h[:, : 2 * WIDTH])
        return x + self.second(torch.tanh(whole.masked_fill_(whole > 0.9, 0.5)))


class Recurs(nn.Module):
    """A recurrent layer: its kernel makes a workspace only where gradients are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.unsqueeze(1))[0].squeeze(1)


class Gated(nn.Module):
    """A cell that takes its gates from one storage in pieces that count their changes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.inner(x)
        h, c = self.inner(x + h, (h, c))
        return x + h * c


class Forces(nn.Module):
    """Goes backward inside its own forward, as models of energies and forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.inner(x)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.back(force).sigmoid() * energy.tanh()


class Unseen(torch.autograd.Function):
    """A kernel that torch's dispatcher does not see: like a Triton kernel, it writes into a tensor that was made."""

    @staticmethod
    def forward(ctx, x: Tensor, blank: bool) -> Tensor:  # type: ignore[override]
        out = torch.empty_like(x) if blank else torch.zeros_like(x)
        out.numpy()[:] = x.detach().numpy() ** 2
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return grad * 2 * x * (out + 1).sign() + 0.1 * out, None


class WritesUnseen(nn.Module):
    def __init__(self, *, blank: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.blank = blank

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(Unseen.apply(torch.tanh(self.first(x)), self.blank)))


class ReadsStatistics(nn.Module):
    """Reads running statistics before and after a BatchNorm changes them, which no version counter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.first(x) * self.norm.running_var.exp())  # type: ignore[union-attr]
        return x + self.second(self.norm(h) * self.norm.running_mean.exp()).tanh()  # type: ignore[union-attr]


class Alternates(nn.Module):
    """Runs other ops in every second step of training, and changes in place what it has read by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = torch.sigmoid(h * 2.0)
        if self.odd:
            h.add_(1.0)
            y = torch.tanh(y * 3.0) + h
        return x + self.second(torch.tanh(y))


class Activated(nn.Module):
    """Blocks that share one module for their activation."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(WIDTH, 4 * WIDTH), act, nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)) * 0.5)


class Nested(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = Residual(dropout=0.2), Residual(dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return torch.sigmoid(checkpoint(self.inner, h, use_reentrant=False)) * h


class Attends(nn.Module):
    """Attention with dropout on its weights and a mask that is made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.SiLU()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1)
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).unflatten(0, (-1, 8))
        mask = torch.ones(h.shape[0], h.shape[0]).triu(1).bool()
        h = self.attention(h, h, h, attn_mask=mask, need_weights=False)[0].flatten(0, 1)
        return x + self.act(h) + self.inner(h)


class TiedModel(nn.Module):
    """Words in, words out, with one table for both."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3 * WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Residual(dropout=0.1) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.table((x.abs() * WIDTH).long().clamp_(max=3 * WIDTH - 1)[:, 0])
        for each in self.blocks:
            h = each(h)
        return self.head(h)


def sharing_stack() -> nn.Module:
    act = nn.GELU()
    return Stack([Activated(act) for _ in range(4)])


class Hints(nn.Module):
    """Returns what backward does not need, unless the sigmoid of it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hint = self.wide(x)
        return x + self.back(torch.sigmoid(hint)), hint


class Notes(nn.Module):
    """Puts what backward does not need, unless the sigmoid of it runs again, into a list."""

    def __init__(self, notes: list[Tensor]) -> None:
        super().__init__()
        self.hints = Hints()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        out, hint = self.hints(x)
        self.notes.append(hint)
        return out


class NotesModel(nn.Module):
    """Lets the list go before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Tensor] = []
        self.stack = Stack([Notes(self.notes) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        out = self.stack(x)
        self.notes.clear()
        return out
