"""Models spread over ranks by tensor and pipeline parallelism, and how a few steps of them train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from profiler.workload.tensor_parts import local_part

WIDTH, TOKENS, BATCH, WORDS = 32, 16, 8, 50


class Block(nn.Module):
    """A transformer's block; its heads are as many as its rank has of them."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        q, k, v = (part(h).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.n2(x)))))


class Transformer(nn.Module):
    """Blocks between an embedding and a head; a part of a pipeline leaves out one of these, or both."""

    def __init__(self, blocks: int, *, first: bool = True, last: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH) if first else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH) if last else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sharded_transformer(blocks: int, *, sequence: bool) -> Transformer:
    """Tensor parallel over all ranks; with ``sequence`` norms and what lies between blocks is split by tokens."""
    torch.manual_seed(0)
    model, mesh = Transformer(blocks), init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
    rows = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
    layout: dict[str, Any] = {**dict.fromkeys(("q", "k", "v", "up"), columns), "o": rows, "down": rows}
    if sequence:
        layout |= {"n1": SequenceParallel(), "n2": SequenceParallel()}
        outside = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, layout)
    return model


def words(seed: int = 5) -> Tensor:
    """A batch, the same on all ranks."""
    return torch.randint(0, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed))


def next_words(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PipelineLoop:
    """A rank's loop over a pipeline.

    Args:
        schedule: class of the schedule.
        micro_batches: of a step.
        blocks: of each rank.
    """

    def __init__(self, schedule: Callable[..., Any], micro_batches: int, blocks: int = 2) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.first, self.last = rank == 0, rank == ranks - 1
        torch.manual_seed(rank)
        self.model = Transformer(blocks, first=self.first, last=self.last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        stage = PipelineStage(self.model, rank, ranks, torch.device("cpu"))
        self.schedule = schedule(stage, micro_batches, loss_fn=next_words)
        self.batch = words()

    def step(self) -> Tensor | None:
        """One step; the mean loss on the last rank."""
        losses: list[Tensor] = []
        self.optimizer.zero_grad()
        inputs = [self.batch] if self.first else []
        self.schedule.step(*inputs, target=self.batch if self.last else None, losses=losses)
        self.optimizer.step()
        return torch.stack(losses).mean().detach() if losses else None


def trained(model: nn.Module, step: Callable[[Tensor], Tensor | None], steps: int = 5) -> list[Tensor]:
    """The losses of a few steps, and after each the gradients: what of them this rank holds."""
    torch.manual_seed(7)
    seen: list[Tensor] = []
    for number in range(steps):
        loss = step(words(number))
        seen += [] if loss is None else [loss]
        seen += [local_part(p.grad).detach().clone() for p in model.parameters() if p.grad is not None]
    return seen
