"""The cases by name: how a stage is built, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

WIDTH = 16
ROWS = 8
Body = Callable[["Pair", Tensor], Any]


class Pair(nn.Module):
    """Two linear layers and what a case does with them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@dataclass(frozen=True, slots=True)
class Case:
    """How to build a stage, and the shapes of what it takes; integers below ``words`` where that is set."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((ROWS, WIDTH),)
    words: int = 0

    def make(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The same stage and inputs each time."""
        torch.manual_seed(123)
        stage = self.build()
        if self.words:
            return stage, tuple(torch.randint(0, self.words, shape) for shape in self.shapes)
        return stage, tuple(torch.randn(*shape, requires_grad=True) for shape in self.shapes)


CASES: dict[str, Case] = {}


def of_pair(body: Body) -> Case:
    """Two linear layers and what this does with them."""
    return Case(lambda: Pair(body))


def case(body: Body) -> Body:
    """The same, as one of the cases."""
    CASES[body.__name__] = of_pair(body)
    return body


Built = TypeVar("Built", bound=Callable[[], nn.Module])


def modules(name: str, *shapes: tuple[int, ...], words: int = 0) -> Callable[[Built], Built]:
    """A case whose stage is built so; it takes tensors of these shapes."""

    def add(build: Built) -> Built:
        CASES[name] = Case(build, shapes or ((ROWS, WIDTH),), words)
        return build

    return add


def without_leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same, none of them a leaf: so a stage inside a model gets them."""
    return tuple(tensor * 1 if tensor.requires_grad else tensor for tensor in inputs)
