"""Attention blocks of MindSpore's tutorial on recomputation: few weights, large scores, no residual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.zoo.training import ZooModel

# The tutorial's constants; its dropout keeps 0.9.
SCALE = 2.37891
MASK_WEIGHT = -0.0001
DROPOUT = 0.1


class ResidualBlock(nn.Module):
    """One block of the tutorial's network; (batch, seq, heads, width) to the same shape.

    Every position looks at every other through its own input (query, key and
    value are the input itself), with a mask ``y`` of shape (batch, seq, seq)
    that all heads share.
    """

    def __init__(self, batch: int, seq: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.ones(batch, seq, seq))
        self.softmax = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        queries = x.permute(0, 2, 1, 3) / SCALE
        keys = x.permute(0, 2, 3, 1) / SCALE
        scores = torch.matmul(queries, keys)
        mask = (1.0 - self.y.unsqueeze(1)) * MASK_WEIGHT
        weights = self.dropout(self.softmax(mask + scores))
        values = x.permute(0, 2, 1, 3)
        return torch.matmul(weights, values).permute(0, 2, 1, 3)


class Blocks(nn.Module):
    """Blocks one after another."""

    def __init__(self, *, blocks: int, batch: int, seq: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(batch, seq) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_mindspore_blocks(
    *,
    batch: int = 8,
    blocks: int = 10,
    hidden: int = 512,
    heads: int = 16,
    seq: int = 128,
) -> ZooModel:
    """The network of MindSpore's tutorial "Recomputation": derivative of the summed output with respect to the input.

    The input is (batch, seq, heads, hidden / heads), (8, 128, 16, 32) by
    default as in the tutorial, which fills it with ones where the zoo draws from
    the seed. Beyond the tutorial, the masks are trained as well: they are the only
    parameters.

    Source: https://mindspore.cn/docs/en/r2.5.0/model_train/parallel/recompute.html
    """
    model = Blocks(blocks=blocks, batch=batch, seq=seq)
    return ZooModel(model, torch.randn(batch, seq, heads, hidden // heads, requires_grad=True), Tensor.sum)
