"""One call for a training script: profile, solve and apply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from planner.applier import apply
from planner.offloading import Mode, Offload
from planner.planning import solve
from planner.profiling import profile
from profiler.stages import StagePattern
from profiler.workload import LossFunction, Workload


def auto_checkpoint(
    model: nn.Module,
    inputs: Any,
    *,
    budget: str | int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: torch.dtype | str | None = None,
    stages: Sequence[StagePattern] | None = None,
    solver: str = "auto",
    offload: Offload | Mode = "auto",
    headroom: str | int = 0,
) -> nn.Module:
    """Profile the model on one batch, solve for ``budget`` and apply the plan.

    Args:
        model: the model to train, in training mode; planned in place.
        inputs: one batch (tensor, tuple or dict), as for ``Workload``.
        budget: the most bytes on the device at once during a whole step.
        loss, optimizer, autocast: as for ``Workload``; give the optimizer you
            train with, because its states and its step count in the budget.
        stages, solver, offload, headroom: as for ``profile`` and ``solve``.

    Returns:
        The same model; ``planner.handle_of(model)`` gives the handle to inspect
        the plan or to remove it.

    Raises:
        Infeasible: no plan fits; carries the smallest feasible budget.
        ProfileError, ValueError: as ``profile`` and ``solve``.
    """
    workload = Workload(model=model, inputs=inputs, loss=loss, optimizer=optimizer, autocast=autocast)
    apply(model, solve(profile(workload, stages=stages), budget, solver=solver, offload=offload, headroom=headroom))
    return model
