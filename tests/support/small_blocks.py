"""Blocks of which the odd models are made."""

from __future__ import annotations

from torch import Tensor, nn

WIDTH = 16


def block(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Residual(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = block()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.inner(x))


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return self.head(x)


class FirstOnly(Stack):
    """Goes on with the first thing that a block returns."""

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)[0]
        return self.head(x)
