"""Small models with the habits that break checkpointing tools, by name; shared by the tests of profiler and planner."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from profiler.workload.workload import Workload
from tests.support.odd_ops import (
    Alternates,
    Attends,
    Forces,
    Gated,
    Hints,
    Nested,
    NotesModel,
    ReadsStatistics,
    Recurs,
    Rotates,
    SlicesInPlace,
    TiedModel,
    WritesUnseen,
    sharing_stack,
)
from tests.support.odd_stages import (
    BoxModel,
    CachingModel,
    ChangedAfter,
    DataclassModel,
    EatsModel,
    Explains,
    GrowingModel,
    HidesTensor,
    InPlace,
    MeddlesModel,
    MovingScale,
    Norm,
    RemembersBlock,
    SharedModel,
    SkipModel,
    TupleModel,
    frozen_stack,
)
from tests.support.small_blocks import WIDTH, FirstOnly, Residual, Stack

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
