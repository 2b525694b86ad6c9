"""Copies a workload that is there on a simulated device."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from profiler.current_device import active_device
from profiler.simulation.simulated_device import is_whole
from profiler.workload.optimizers import optimizer_tensors
from profiler.workload.reachable import reached_from, tensors_of
from profiler.workload.steps import ProfileError
from profiler.workload.workload import Workload, varied


def on_fake_tensors(workload: Workload) -> Workload:
    """Returns a copy of a workload whose tensors are fake, and count on the simulated device; whole numbers stay real.

    Raises:
        ProfileError: it has a step of its own, or holds what cannot be copied.
    """
    if workload.custom_step is not None:
        raise ProfileError(
            "estimate: a workload with a step of its own refers to tensors that are there; give the function that "
            "builds the workload instead: planner.estimate(build, device=...)"
        )
    roots = [workload.model, workload.inputs, workload.loss, *workload.optimizers]
    held = [*workload.model.parameters(), *workload.model.buffers(), *tensors_of(reached_from(*roots))]
    held += [tensor for *_, tensor in optimizer_tensors(workload.optimizers)]
    memo: dict[int, Any] = {}
    for tensor in held:
        if id(tensor) not in memo:
            memo[id(tensor)] = _faked(tensor)
    try:
        return copy.deepcopy(varied(workload), memo)  # Without the output of its last step.
    except Exception as error:  # Models are user code: whatever stands in the way of a copy is named.
        raise ProfileError(
            f"estimate: the workload cannot be copied ({type(error).__name__}: {error}); give the function that builds "
            "it instead: planner.estimate(build, device=...)"
        ) from error


def _faked(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same layout on the simulated device."""
    device = active_device()
    assert device is not None
    if is_whole(tensor) and not isinstance(tensor, FakeTensor):
        with _disable_current_modes():  # Else the original would count as well.
            made = tensor.detach().to("cpu", copy=True)
    else:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    device.hold(made)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made
