"""Links: which copy engine carries what a plan sends to host memory."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from planner.plans.lowering import Program
from planner.plans.plan import Plan
from planner.runtime.copy_engine import Engine
from planner.runtime.cuda_link import CudaEngine
from planner.runtime.simulated_link import ArtificialEngine


def device_of(model: nn.Module) -> torch.device:
    """The device that a model computes on."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def engine_for(plan: Plan, program: Program, device: torch.device) -> Engine | None:
    """The engine with its host memory, allocated here once; None where nothing travels.

    On a device that has no streams beside the computation's nothing does, which is said.
    """
    if not program.transfers:
        return None
    if device.type == "cuda":
        return CudaEngine(device, plan.host_bytes)
    if device.type == "cpu" and plan.link is not None:
        return ArtificialEngine(plan.link, plan.host_bytes)
    warnings.warn(
        f"apply: expected a device that copies beside its computation, got {device}; nothing is sent to host memory, "
        "and the peak is not promised. Solve without offloading",
        RuntimeWarning,
        stacklevel=4,
    )
    return None
