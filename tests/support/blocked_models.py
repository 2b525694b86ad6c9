"""Models whose blocks cannot run a second time, each for another reason, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiler.workload.workload import Workload

WIDTH = 32


class Residual(nn.Module):
    """A block of which a change says what it does with its input and its branch."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.narrow(torch.tanh(self.wide(x))))


class Scaled(nn.Module):
    """Scales by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class ScaledInside(Residual):
    """A block that draws from Python's random generator in one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(super().forward(x))


class Blocks(nn.Module):
    """Six blocks between two layers."""

    def __init__(self, make: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.h = nn.ModuleList([make() for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return x


class Penalised(nn.Module):
    """A critic with a penalty on its gradient (WGAN-GP)."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Blocks()

    def forward(self, real: Tensor, made: Tensor) -> Tensor:
        between = (0.5 * (real + made)).requires_grad_()
        (gradient,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=-1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


def _python(x: Tensor, branch: Tensor) -> Tensor:
    return x + branch * random.random()


def _numpy(x: Tensor, branch: Tensor) -> Tensor:
    return x + branch * float(np.random.rand())


class InPlace(Residual):
    """A block that halves its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.5))


_BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Residual,
    "python": lambda: Residual(_python),
    "python_inside": ScaledInside,
    "numpy": lambda: Residual(_numpy),
    "in_place": InPlace,
}


def blocked_workload(name: str) -> Workload:
    """A step of a model whose blocks have a habit: one of the blocks', ``penalty`` or ``use_cache``."""
    torch.manual_seed(0)
    if name == "use_cache":
        return _gpt2()
    batch = torch.randn(128, WIDTH)
    if name == "penalty":
        return Workload(model=Penalised(), inputs=(batch, torch.randn_like(batch)))
    return Workload(model=Blocks(_BLOCKS[name]), inputs=batch, loss=lambda output: output.square().mean())


def _gpt2() -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_layer": 4, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 50}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(0, 50, (2, 64))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": True}
    return Workload(model=GPT2LMHeadModel(config).train(), inputs=inputs)
