"""Training under a plan: real steps of a workload, with the measured peak and seconds beside the predicted ones."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from planner.applier import apply, check_precision
from planner.plan import Plan
from profiler.measurement import measure
from profiler.trees import tensors_in
from profiler.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """What training under a plan gave.

    Attributes:
        plan: the plan that was applied.
        losses: of each training step.
        step_seconds: of each training step; the first one also allocates optimizer states.
        measured_peak_bytes: most bytes alive at once in a whole step.
        measured_seconds: median seconds of a step, by the same meter as the profile's.
    """

    plan: Plan
    losses: tuple[float, ...]
    step_seconds: tuple[float, ...]
    measured_peak_bytes: int
    measured_seconds: float


def train_planned(workload: Workload, plan: Plan, *, steps: int) -> TrainingRun:
    """Apply ``plan``, measure a step, train ``steps`` steps, and take the plan off again.

    Measuring leaves the workload as it was, so the losses are those of training alone.

    Raises:
        PlanMismatch: a plan for another model or another precision.
        ValueError: no steps, a plan for another kind of device, or a step that fails.
    """
    if steps < 1:
        raise ValueError(f"--steps: expected at least 1, got {steps}; give a whole number above zero")
    check_device(workload, plan)
    check_precision(workload.model, plan, workload.autocast)
    with apply(workload.model, plan):
        check_inputs(workload, plan)
        measured = measure(workload)
        losses, seconds = train_steps(workload, steps)
    return TrainingRun(
        plan=plan,
        losses=losses,
        step_seconds=seconds,
        measured_peak_bytes=measured.peak_bytes,
        measured_seconds=measured.seconds,
    )


def train_steps(workload: Workload, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Train ``steps`` steps on the workload's batch; the loss and the wall-clock seconds of each.

    Raises:
        ValueError: a step fails.
    """
    losses, seconds = [], []
    for step in range(steps):
        begin = time.perf_counter()
        try:
            losses.append(workload.step())  # reading the loss waits for the forward
            _wait_for(workload.device)
        except Exception as error:  # User code runs here; whatever it raises is reported as its failure.
            raise ValueError(
                f"training step {step + 1}: expected a step that runs, got {type(error).__name__}: {error}; "
                "correct the model, its inputs or the loss"
            ) from error
        seconds.append(time.perf_counter() - begin)
    return tuple(losses), tuple(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
