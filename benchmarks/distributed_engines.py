"""Models of the zoo under DistributedDataParallel and fully_shard, and loops that train them, as users write both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import planner
from planner.zoo import build

STEPS = 5
# Small enough for several ranks on two cores. In the first ResNet parameters weigh as much as activations.
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 4, "hidden": 32, "heads": 2, "seq": 64, "vocab": 100, "batch": 8},
    "bert": {"layers": 4, "hidden": 32, "heads": 2, "seq": 64, "vocab": 100, "batch": 8},
    "llama": {"layers": 4, "hidden": 32, "heads": 2, "seq": 64, "vocab": 100, "batch": 8},
    "resnet50": {"hidden": 8, "image": 32, "batch": 16},
    "resnet50 of batch 64": {"hidden": 8, "image": 32, "batch": 64},
}


@dataclass
class Training:
    """What a rank trains.

    Attributes:
        plain: the model as the zoo builds it, without what is around it.
        model: that the loop calls.
        seen: of each step the loss, and a digest of all gradients.
    """

    plain: nn.Module
    model: nn.Module
    batch: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    seen: list[tuple[float, str]] = field(default_factory=list)

    def note(self, loss: Tensor) -> None:
        """Remember a step after its backward, without memory of torch's."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                digest.update(np.ascontiguousarray(local.detach().numpy()).tobytes())
        self.seen.append((loss.item(), digest.hexdigest()))


Loop = Callable[[Training, int], None]  # trains so many steps


def usual(train: Training, steps: int) -> None:
    """One forward and backward, with gradients that are cleared first."""
    for _ in range(steps):
        train.optimizer.zero_grad()
        outputs = train.model(**train.batch)
        loss = outputs.loss
        loss.backward()
        train.note(loss)
        train.optimizer.step()


def accumulating(train: Training, steps: int) -> None:
    """Two micro-batches, of which the first one's gradients are not reduced."""
    model: Any = train.model
    halves = [{name: tensor.chunk(2)[k] for name, tensor in train.batch.items()} for k in (0, 1)]
    for _ in range(steps):
        train.optimizer.zero_grad()
        with model.no_sync():
            loss = model(**halves[0]).loss
            loss.backward()
        loss = model(**halves[1]).loss
        loss.backward()
        train.note(loss)
        train.optimizer.step()


def _sharded(model: nn.Module, *, reshard: bool) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a zoo model."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    children = [child for parent in lists for child in parent.children()]
    within = [getattr(child, "layers", None) for child in children]  # Of ResNet's stages.
    stages = [layer for layers in within if isinstance(layers, nn.Sequential) for layer in layers]
    return stages or children


@dataclass(frozen=True, slots=True)
class Engine:
    """A way to train on several ranks.

    Attributes:
        wrap: the model before it is trained.
        loop: that trains it.
    """

    wrap: Callable[[nn.Module], nn.Module]
    loop: Loop = usual


ENGINES: dict[str, dict[str, Engine]] = {
    "ddp": {
        "": Engine(DistributedDataParallel),
        "gradient_as_bucket_view": Engine(lambda m: DistributedDataParallel(m, gradient_as_bucket_view=True)),
        "static_graph": Engine(lambda m: DistributedDataParallel(m, static_graph=True)),
        "no_sync": Engine(DistributedDataParallel, accumulating),
    },
    "fsdp2": {
        "": Engine(lambda m: _sharded(m, reshard=True)),
        "reshard_after_forward=False": Engine(lambda m: _sharded(m, reshard=False)),
        'reshard="solve"': Engine(lambda m: _sharded(m, reshard=True)),
    },
}


def training(name: str, engine: Engine, sizes: Mapping[str, Mapping[str, int]] = SIZES) -> Training:
    """A model with equal weights on all ranks, and a batch of the rank's own."""
    weights = build(name.split()[0], **sizes[name])
    batch = build(name.split()[0], seed=dist.get_rank(), **sizes[name]).inputs
    model = engine.wrap(weights.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    return Training(weights.model, model, batch, optimizer)


def workload_of(train: Training, engine: Engine) -> planner.Workload:
    """The loop as it is described to the planner."""
    if engine.loop is usual:
        return planner.Workload(model=train.model, inputs=train.batch, optimizer=train.optimizer)

    def step() -> None:
        engine.loop(train, 1)

    return planner.Workload(model=train.model, step=step, optimizer=train.optimizer)
