"""A block of modules, the ordinals of its ops, and the same with a look at what is on in its modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.op_cases.registry import WIDTH, Case


class Block(nn.Module):
    """Ops by ordinal: 0 layer norm; 1 t, 2 addmm; 3 gelu; 4 to 7 dropout; 8 t, 9 addmm; 10 add."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.Sequential(nn.GELU(), nn.Dropout(0.3))
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))


NORM, FIRST_T, FIRST, GELU, EMPTY, BERNOULLI, DIV, MUL, SECOND_T, SECOND, ADD = range(11)
DROPOUT = (EMPTY, BERNOULLI, DIV, MUL)
BLOCK = Case(Block)


class Spy(nn.Module):
    """A module's forward, with a look at the modes and hooks that are on."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.seen: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
        self.seen.append((torch._C._len_torch_dispatch_stack(), hooks is not None))
        return self.inside(x)


class Spied(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = Spy(self.norm), Spy(self.first), Spy(self.second)
        self.act = nn.Sequential(Spy(self.act[0]), Spy(self.act[1]))


SPIED = Case(Spied)
