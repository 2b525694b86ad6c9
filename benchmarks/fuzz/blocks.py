"""Blocks of generated models: layers, state and randomness. Each takes and returns ``(batch, time, WIDTH)``.

A script that shows a failure has the sources of those that it needs, so they use torch alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Mlp(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        # A habit that raised a rate from 0 would train another model than the profiled one.
        # The planner cannot see that where the block runs under no_grad.
        self.dropout = nn.Dropout(p) if p else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.dropout(F.gelu(self.first(self.norm(x)))))


class Dropping(Mlp):
    def __init__(self) -> None:
        super().__init__(p=0.3)


class Norms(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x).flatten(0, -2))
        return x + self.second(F.gelu(h)).view_as(x)


class AveragingNorms(Norms):
    def __init__(self) -> None:
        super().__init__(momentum=None)


class InstanceNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Convolves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1),
            nn.BatchNorm1d(2 * WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout1d(0.2),
            nn.Conv1d(2 * WIDTH, WIDTH, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.transpose(1, 2)).transpose(1, 2)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.first(x)) * 0.5
        return self.second(h.add_(0.1)).add_(x)


class EatsInput(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(torch.tanh(self.inner(x.clone())))


class Recurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)[0]


class Remembers(nn.Module):
    """A recurrent layer whose state goes from batch to batch, as truncated backpropagation has it."""

    state: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.state = None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.inner(x, self.state)
        self.state = state.detach()
        return x + out


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.take = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.give = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.take(self.norm(x)).chunk(3, -1))
        dropout = 0.1 if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return x + self.give(h.transpose(1, 2).flatten(2))


class AttendsPlainly(nn.Module):
    """Attention that a kernel computes as it was chosen by ``sdpa_kernel``."""

    def __init__(self) -> None:
        super().__init__()
        self.take, self.give = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.take(x).chunk(3, -1))
        return x + self.give(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class CrossReads(nn.Module):
    """Reads what another part of the model made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.inner = Mlp(p=0.1)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.inner(x + self.attention(self.norm(x), memory, memory, need_weights=False)[0])


class Gates(nn.Module):
    """Autograd saves nothing of what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.tanh(torch.sigmoid(x + memory + self.shift))


class LooksUp(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=sparse)
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.detach().float().abs().mean(-1) * 40).long().clamp(0, 49)
        return x + self.inner(self.table(rows) * torch.sigmoid(x))


class LooksUpSparsely(LooksUp):
    def __init__(self) -> None:
        super().__init__(sparse=True)


class SpectralNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.spectral_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.tanh(self.inner(x)))


class Orthogonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.inner(x))


class OldSpectralNorm(nn.Module):
    """Sets its weight as a plain attribute in every forward, as torch did before there were parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class LeakyNoise(nn.Module):
    """Draws in evaluation mode nothing, in training mode from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.Linear(WIDTH, WIDTH), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.inner(x))
        return x + (h + 0.1 * torch.randn_like(h) if self.training else h)


class Turns(nn.Module):
    """Complex numbers seen through views."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(torch.tanh(self.inner(x)).float().unflatten(-1, (-1, 2)).contiguous()).exp()
        return x + 0.1 * torch.view_as_real(z * z.conj().imag).flatten(-2)


class Deep(nn.Module):
    """Several modules in a row, two of them one and the same."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.GELU()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), act, nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH), act, nn.LayerNorm(WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
