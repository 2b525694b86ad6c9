"""Modules with the habits that break checkpointing tools where whole modules run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.fuzz.stateful_blocks import Square
from tests.support.small_blocks import WIDTH, Residual, Stack, block


class Norm(nn.Module):
    """A BatchNorm: its statistics must be updated once a step."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = nn.BatchNorm1d(4 * WIDTH, momentum=momentum)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(torch.relu(self.norm(self.linear(x))))


class MovingScale(nn.Module):
    """A buffer that the forward reads and changes: a second run must see the old value."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(y.mean(0).detach() * 0.1)
        return x + y


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Record:
    value: Tensor
    extra: dict[str, Tensor]


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = block(), block()

    def forward(self, pair: Pair | tuple[Tensor, Tensor]) -> Pair:
        left, right = pair
        return Pair(left + self.left(right), right + self.right(left))


class TupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TupleBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(x, x * 0.5)
        for each in self.blocks:
            pair = each(pair)
        return pair.left + pair.right


class DataclassBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, *, record: Record, scale: float = 1.0) -> Record:
        value = record.value + scale * self.inner(record.value)
        return Record(value=value, extra={"mean": value.mean(0)})


class DataclassModel(nn.Module):
    """Keyword arguments only, dataclasses in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DataclassBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        record = Record(value=x, extra={})
        for each in self.blocks:
            record = each(record=record, scale=0.5)
        return {"loss": (record.value**2).mean() + record.extra["mean"].sum()}


class SharedModel(nn.Module):
    """One block called several times: shared weights, calls told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Residual(dropout=0.2)
        self.own = Residual()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.own(self.shared(x))
        return x


class SkipModel(nn.Module):
    """Long skips: the output of a block is read again much later."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Residual(dropout=0.1) for _ in range(3)])
        self.up = nn.ModuleList([nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), Residual()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for each in self.down:
            x = each(x)
            skips.append(x)
        for each in self.up:
            x = each(torch.cat([x, skips.pop()], -1))
        return x


class InPlace(nn.Module):
    """An in-place activation inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)))


class EatsInput(nn.Module):
    """Changes its input in place: it must never be run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.clone())
        return x.add_(y)


class EatsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([EatsInput(), Residual(), EatsInput(), Residual()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for each in self.blocks:
            x = each(x)
        return x


class HidesTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * Square.apply(self.inner(x))


class Cache:
    """A cache as transformers have it: an object that grows with every call."""

    def __init__(self) -> None:
        self.past: list[Tensor] = []


class CachingBlock(nn.Module):
    """Appends to a cache: a second run gives something else, so it must not be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.past.append(x)
        return x + self.inner(sum(cache.past, torch.zeros_like(x)))


class CachingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([CachingBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache()
        for each in self.blocks:
            x = each(x, cache)
        return x


class Box:
    """An object that is no container we know."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class BoxBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, box: Box) -> Box:
        box.x = box.x + self.inner(box.x)
        return box


class BoxModel(nn.Module):
    """Blocks that hand on an object and change it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BoxBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        box = Box(x * 1.0)
        for each in self.blocks:
            box = each(box)
        return box.x


class RemembersBlock(nn.Module):
    """Stores an activation on itself, history and all."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return x + self.last


class MeddlesBlock(nn.Module):
    """Counts in a buffer that is not its own."""

    def __init__(self, owner: list[nn.Module]) -> None:
        super().__init__()
        self.inner = block()
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].count.add_(1)  # type: ignore[operator,union-attr]
        return x + self.inner(x)


class MeddlesModel(nn.Module):
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.blocks = nn.ModuleList([MeddlesBlock([self]) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)
        return x


class ChangedAfter(nn.Module):
    """Changes a block's output in place after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for each in self.blocks:
            h = each(x)
            h += x
            x = h
        return x


class GrowingBlock(nn.Module):
    """Adds to a list that it is given: a second run works on a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return x + self.inner(sum(seen, torch.zeros_like(x)))


class GrowingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GrowingBlock() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for each in self.blocks:
            x = each(x, seen)
        return x


def frozen_stack() -> nn.Module:
    model = Stack([Residual() for _ in range(6)])
    for each in model.blocks[:2]:
        each.requires_grad_(False)
    for each in model.blocks[3].parameters():  # type: ignore[union-attr]
        each.requires_grad_(False)
    return model


class Explains(nn.Module):
    """Returns more than anybody goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = x + self.inner(x)
        return out, out.detach().repeat(1, 8)
