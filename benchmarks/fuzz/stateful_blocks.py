"""Blocks of generated models that depend on more than weights and input, or whose forward does more than compute."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.blocks import WIDTH, Mlp


class Conditioned(nn.Module):
    """Reads what its parent puts on it before the call (FiLM, timesteps, masks)."""

    cond: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.film = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.film(self.cond)


class Scaled(nn.Module):
    """Reads a number that training changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sigmoid(self.inner(x) * self.scale) ** 2


class Counts(nn.Module):
    """Reads a number and advances it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x) * (1 + 0.1 * self.calls))


class CountsSometimes(nn.Module):
    """Runs other ops in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        h = torch.sigmoid(self.first(x))
        return x + self.second(torch.tanh(h * 3.0) if self.odd else h)


class MovingScale(nn.Module):
    """Reads a buffer and writes it in place."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9).add_(y.detach().float().flatten(0, -2).mean(0) * 0.1)
        return y


class ReplacedScale(nn.Module):
    """Reads a buffer and puts another tensor in its place."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x)) * self.scale
        self.scale = self.scale * 0.9 + y.detach().float().flatten(0, -2).mean(0) * 0.1
        return x + y


class Codebook(nn.Module):
    """Refreshes its codes in every third step only."""

    codes: Tensor
    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        self.step += 1
        if self.training and self.step % 3 == 0:
            self.codes.mul_(0.5).add_(h.detach().float().flatten(0, -2)[:8].mean(0) * 0.5)
        nearest = torch.cdist(h.detach().float().flatten(0, -2), self.codes).argmin(-1)
        return x + self.back(h * self.codes[nearest].view_as(x))


class LateStatistics(nn.Module):
    """Writes a buffer only in steps that the first one does not foretell, by a count that is no buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.inner(x - self.mean)
        if self.training and self.calls % 2 == 0:
            self.mean.lerp_(x.detach().float().flatten(0, -2).mean(0), 0.5)
        return y


class TensorAttribute(nn.Module):
    """Keeps a running tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.running = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x) * self.running)
        self.running = 0.9 * self.running + 0.1 * y.detach().float().flatten(0, -2).mean(0)
        return x + y


class History(nn.Module):
    """Appends to a list of its own and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        self.means.append(float(y.detach().mean()))
        return x + y * (1 + sum(self.means[-3:]))


class LayerDrop(nn.Module):
    """Stochastic depth as it is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp(p=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.3:
            return x
        return self.inner(x)


class DrawsInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * (0.5 + random.random())


class DrawsInNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * float(np.random.rand())


class OwnGenerator(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) * torch.rand(WIDTH, generator=self.generator))


class Checkpoints(nn.Module):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Mlp(p=0.2), Mlp(p=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, torch.tanh(self.first(x)), use_reentrant=False)  # type: ignore[return-value]


class Forces(nn.Module):
    """Goes backward inside its own forward, as models of energies and forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(self.inner(x)).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + self.back(force).sigmoid() * energy.tanh()


class Equilibrium(nn.Module):
    """Finds a fixed point without gradients, and corrects the gradient in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(self.inner(z) + x)
        z = torch.tanh(self.inner(z) + x)
        if z.requires_grad:
            z.register_hook(lambda grad: grad + 0.5 * grad.tanh())
        return z


class Square(torch.autograd.Function):
    """Keeps a tensor where no saved-tensor hook can see it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.hidden = x.clone()
        return x * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.hidden * grad


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * Square.apply(self.inner(x))  # type: ignore[operator]


class Stores(nn.Module):
    """Stores an activation on itself, cut from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        self.last = y.detach().mean()
        return y


class Casts(nn.Module):
    """Runs a part of itself in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.nn.functional.silu(self.first(x))
        return x + self.second(h.to(self.second.weight.dtype)).to(x.dtype)


class Hooked(nn.Module):
    """Has hooks: before and after its forward, and around its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner.register_forward_pre_hook(self.before)
        self.inner.register_forward_hook(self.after)
        self.outer.register_full_backward_hook(self.back)
        self.seen = 0

    def before(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] * 1.5,)

    def after(self, module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        self.seen += 1
        return torch.tanh(output)

    def back(self, module: nn.Module, inward: Any, outward: Any) -> tuple[Tensor]:
        return (inward[0] * 0.5,)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.sigmoid(self.inner(x)))
