"""Whether a plan fits the model and the batch it is used with, and warnings that are given once where it does not."""

from __future__ import annotations

import warnings

import torch
from torch.autograd import forward_ad

from planner.plans.plan import Plan
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload

leave_uncompiled(__name__)

_WARNED: set[str] = set()


def check_inputs(workload: Workload, plan: Plan) -> None:
    """Refuse a batch of other shapes than the plan's."""
    shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(workload.inputs))
    if shapes != plan.input_shapes:
        raise ValueError(
            f"a plan for a batch of shapes {list(plan.input_shapes)}: expected the same batch, got {list(shapes)}; "
            "give the --set values of the profile, or profile and solve again"
        )


def check_device(workload: Workload, plan: Plan) -> None:
    """Refuse a model on another kind of device than the plan's."""
    planned = torch.device(plan.device).type
    if workload.device.type != planned:
        raise ValueError(
            f"a plan for {planned}: expected a model on {planned}, got one on {workload.device.type}; "
            f"use --device {planned}, or profile and solve on {workload.device.type}"
        )


def transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is under way; says once what that means.

    Its tensors stand for others, for a batch of them or with tangents: what is saved of them cannot be made again.
    """
    if torch._C._functorch.maybe_current_level() is None and forward_ad._current_level < 0:
        return False
    _warn_once(
        "planner.apply: the model runs under torch.func or forward-mode differentiation; the plan does not act there: "
        "everything is kept, and the peak is not promised"
    )
    return True


def warn_once(stage: str, what: str) -> None:
    """Warn of a planned stage, each thing once in a process."""
    _warn_once(f"planned stage {stage!r}: {what}")


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)
