"""Small models with the habits that break checkpointing tools; shared by the tests of profiler and applier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from profiler.workload.workload import Workload

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


class Square(torch.autograd.Function):
    """Keeps a tensor where no saved-tensor hook can see it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.hidden = x.clone()
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.hidden * grad


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
    """Blocks that hand on and change an opaque object: they must not be recomputed."""

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


class FirstOnly(nn.Module):
    """Goes on with the first thing that a block returns."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.blocks:
            x = each(x)[0]
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Stack([Residual() for _ in range(6)]),
    "dropout": lambda: Stack([Residual(dropout=0.3) for _ in range(6)]),
    "batchnorm": lambda: Stack([Norm() for _ in range(5)]),
    "batchnorm_average": lambda: Stack([Norm(momentum=None) for _ in range(4)]),
    "moving_buffer": lambda: Stack([MovingScale() for _ in range(4)]),
    "tuple": TupleModel,
    "dataclass": DataclassModel,
    "shared": SharedModel,
    "skip": SkipModel,
    "in_place": lambda: Stack([InPlace() for _ in range(5)]),
    "eats_input": EatsModel,
    "hidden_tensor": lambda: Stack([HidesTensor() for _ in range(4)]),
    "frozen": frozen_stack,
    "sequential": lambda: nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]),
    "cache": CachingModel,
    "growing_list": GrowingModel,
    "opaque_object": BoxModel,
    "remembers": lambda: Stack([RemembersBlock() for _ in range(4)]),
    "meddles": MeddlesModel,
    "changed_after": ChangedAfter,
    "explains": lambda: FirstOnly([Explains() for _ in range(5)]),
}


# Habits that matter where single ops run again.
OP_MODELS: dict[str, Callable[[], nn.Module]] = {
    "rotates": lambda: Stack([Rotates() for _ in range(4)]),
    "slices_in_place": lambda: Stack([SlicesInPlace() for _ in range(4)]),
    "recurs": lambda: Stack([Recurs() for _ in range(3)]),
    "gated": lambda: Stack([Gated() for _ in range(3)]),
    "forces": lambda: Stack([Forces() for _ in range(3)]),
    "writes_blank": lambda: Stack([WritesUnseen(blank=True) for _ in range(3)]),
    "writes_zeros": lambda: Stack([WritesUnseen(blank=False) for _ in range(3)]),
    "reads_statistics": lambda: Stack([ReadsStatistics() for _ in range(3)]),
    "alternates": lambda: Stack([Alternates() for _ in range(4)]),
    "shared_activation": sharing_stack,
    "nested": lambda: Stack([Nested() for _ in range(3)]),
    "attends": lambda: Stack([Attends() for _ in range(4)]),
    "tied": TiedModel,
    "notes": NotesModel,
    "hints": lambda: FirstOnly([Hints() for _ in range(5)]),
}


def workload(name: str, *, batch: int = 64, autocast: torch.dtype | None = None) -> Workload:
    torch.manual_seed(0)
    model = {**MODELS, **OP_MODELS}[name]().train()
    inputs = torch.randn(batch, WIDTH)
    loss = None if name == "dataclass" else (lambda output: (output.float() ** 2).mean())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return Workload(model=model, inputs=inputs, loss=loss, optimizer=optimizer, autocast=autocast)
