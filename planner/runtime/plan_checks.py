"""Whether a plan fits a workload: the same kind of device, the same shapes."""

from __future__ import annotations

import torch

from planner.plans.plan import Plan
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload


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
