"""Runs one real step at one size, with or without a plan, and measures its peak; running out of memory is a result."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from planner.plans.plan import Plan
from planner.plans.profiling import profile
from planner.runtime.applier import apply, measure
from profiler.agreement import any_rank, gathered
from profiler.current_device import active_device
from profiler.measurement.device_memory import give_back_freed_memory, is_limited, ran_out, room_bytes
from profiler.measurement.profiling import first_plain_step
from profiler.records import ResidentBytes
from profiler.workload.snapshot import preserved
from profiler.workload.steps import resident_bytes_of, states_bytes
from profiler.workload.workload import Workload

Build = Callable[[int], Workload]
Notify = Callable[[str], None]  # is told in words what is being done


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Bytes and seconds of a real step at a size.

    Attributes:
        size: the value of the key that is varied.
        peak_bytes: measured; None where the device ran out of memory.
        seconds: of a step; None where it did.
        plan: that it ran under; None for the unplanned step.
    """

    size: int
    peak_bytes: int | None
    seconds: float | None
    plan: Plan | None = None

    def fits(self, budget_bytes: int) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes is not None and self.peak_bytes <= budget_bytes


def run_trial(build: Build, size: int, plan: Plan | None, *, repeats: int) -> Trial:
    """Build the workload and run its step; running out of memory, while building too, is an outcome.

    Raises:
        ValueError: the step fails for another reason.
    """
    release()
    if plan is not None and plan.host_bytes and active_device() is not None:
        # There is no link to send over: what the plan was solved for stands.
        return Trial(size=size, peak_bytes=plan.predicted_peak_bytes, seconds=plan.predicted_seconds, plan=plan)
    try:
        workload = build(size)
        with contextlib.nullcontext() if plan is None else apply(workload.model, plan):
            measured = measure(workload, repeats=repeats)
        return Trial(size=size, peak_bytes=measured.peak_bytes, seconds=measured.seconds, plan=plan)
    except (ValueError, RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    workload = None  # The traceback that held its tensors is gone as well, here.
    release()
    return Trial(size=size, peak_bytes=None, seconds=None, plan=plan)


def release() -> None:
    """Give back what earlier models left: modules refer to each other in cycles, and allocators keep what they freed.

    On CUDA blocks kept for tensors of other sizes would be in the way of a step that needs the whole device.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if is_limited():
        give_back_freed_memory(torch.device("cpu"))


def has_room(device: torch.device, peak_bytes: int, resident_bytes: int) -> bool:
    """Whether a step may be run: the device can hold its peak and, on the CPU, the copy by which it is undone.

    Of several ranks that search together, whether the devices of all can.
    """
    room = room_bytes(device)
    copied = resident_bytes if device.type == "cpu" else 0
    return not any_rank(peak_bytes + copied > room)


def measured_states_bytes(workload: Workload) -> int:
    """Bytes of the model's states, whatever the batch: parameters, buffers, gradients and optimizer states."""
    resident = _resident_after_a_step(workload) or profile(workload).resident  # by steps that need less
    return max(gathered(states_bytes(workload, resident)))


def _resident_after_a_step(workload: Workload) -> ResidentBytes | None:
    """Resident bytes after a plain step; None where memory runs out in it."""
    try:
        with preserved(workload):
            first_plain_step(workload)
            return resident_bytes_of(workload)
    except ValueError as error:
        if not ran_out(error):
            raise
    return None  # Here the error's traceback has gone, and what it held.
