"""Running training steps to be measured: the first one, those that the loss scale leaves out, what stays between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from profiler.records import ResidentBytes
from profiler.workload.storages import distinct_bytes
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.workload import Workload, optimizer_tensors, scaler_tensors

Result = TypeVar("Result")
# GradScaler's scale begins at 65536 and halves with every skipped step; below 1 it no longer serves its end.
SKIPPED_STEPS = 24


class ProfileError(ValueError):
    """The workload cannot be profiled; the message says what failed and what to do."""


def check_workload(workload: Any, who: str) -> None:
    """Refuse what is no workload; ``who`` begins the message. Raises ProfileError."""
    if not isinstance(workload, Workload):
        raise ProfileError(
            f"{who}: expected a planner.Workload, got a {type(workload).__name__}; "
            "say what a step is first: planner.Workload(model=..., inputs=..., loss=..., optimizer=...)"
        )


def first_step(workload: Workload) -> None:
    """Run a step to warm up; raises ProfileError as ``checked_step`` does."""
    checked_step(workload, workload.step)
    workload.zero_grad()


def checked_step(workload: Workload, run: Callable[[], Result]) -> Result:
    """Call ``run``, a whole step, and again while the scaler leaves the optimizer out; what the last call returns.

    Raises:
        ProfileError: it fails, or no step has finite gradients.
    """
    try:
        return until_stepped(workload, run)
    except ProfileError:
        raise
    except Exception as error:  # User code runs here; whatever it raises is reported as its failure.
        raise ProfileError(
            f"profile: expected a training step that runs, got {type(error).__name__}: {error}; "
            "correct the model, its inputs or the loss"
        ) from error


def until_stepped(workload: Workload, run: Callable[[], Result]) -> Result:
    """What ``run``, a whole step, returns the first time that the optimizer's step is a part of it.

    Raises:
        ProfileError: the scaler leaves it out however small the scale becomes.
    """
    for _ in range(SKIPPED_STEPS):
        result = run()
        if workload.stepped:
            return result
    raise ProfileError(
        f"profile: expected finite gradients once the loss scale is small enough, got inf or NaN in {SKIPPED_STEPS} "
        "steps in a row; correct the loss, or use bfloat16"
    )


def resident_bytes_of(workload: Workload) -> ResidentBytes:
    """Bytes that are there between two steps, each storage once."""
    optimizer, model, device = workload.optimizer, workload.model, workload.device
    of_model = {id(parameter) for parameter in model.parameters()}
    return ResidentBytes(
        parameters=distinct_bytes(model.parameters()),
        buffers=distinct_bytes(model.buffers()),
        optimizer=distinct_bytes(
            tensor for *_, tensor in optimizer_tensors(optimizer) if tensor.device.type == device.type
        ),
        inputs=distinct_bytes(tensors_in(workload.inputs)),
        gradients=distinct_bytes(p.grad for p in workload.with_gradients() if p.grad is not None),
        other_parameters=distinct_bytes(p for p in workload.parameters_beside() if id(p) not in of_model),
        scaler=distinct_bytes(scaler_tensors(workload.scaler)),
    )
