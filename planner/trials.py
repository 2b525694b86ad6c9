"""Trials: one real step at one size, with or without a plan, and whether its measured peak is within the budget."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.applier import apply
from planner.plan import Plan
from profiler.measurement import measure
from profiler.preservation import preserved
from profiler.profiling import first_step, resident_bytes_of
from profiler.storages import distinct_bytes
from profiler.trees import tensors_in
from profiler.workload import Workload

Build = Callable[[int], Workload]
Report = Callable[[str], None]
_MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a real step at a size took.

    Attributes:
        size: the value of the key that is varied.
        samples: of one step: the first dimension of the batch's first tensor.
        peak_bytes: measured; None where the device ran out of memory.
        seconds: of a step; None where it did.
        plan: that it ran under; None for the unplanned step.
    """

    size: int
    samples: int
    peak_bytes: int | None
    seconds: float | None
    plan: Plan | None = None

    def fits(self, budget_bytes: int) -> bool:
        """Whether the peak is within the budget."""
        return self.peak_bytes is not None and self.peak_bytes <= budget_bytes

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.seconds else None


def trial(build: Build, size: int, plan: Plan | None, *, repeats: int) -> Trial:
    """Build the workload and run its step; running out of memory, while building too, is an outcome.

    Raises:
        ValueError: the step fails for another reason.
    """
    samples = 0
    try:
        workload = build(size)
        samples = samples_of(workload, size)
        with contextlib.nullcontext() if plan is None else apply(workload.model, plan):
            measured = measure(workload, repeats=repeats)
        return Trial(size=size, samples=samples, peak_bytes=measured.peak_bytes, seconds=measured.seconds, plan=plan)
    except (ValueError, RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    workload = None  # The traceback that held its tensors is gone as well, here.
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Trial(size=size, samples=samples, peak_bytes=None, seconds=None, plan=plan)


def samples_of(workload: Workload, size: int) -> int:
    """Samples of one step; ``size`` where the batch has no tensor that tells."""
    return next((tensor.shape[0] for tensor in tensors_in(workload.inputs) if tensor.dim()), size)


def ran_out(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that the device has no memory left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(seen, RuntimeError) and "can't allocate memory" in str(seen):  # what torch says on the CPU
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def room_bytes(device: torch.device) -> int | None:
    """Bytes that a new tensor may take on the device, as far as that is known: other programs may take them first."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = _MEMORY_INFO.read_text().splitlines()
    except OSError:
        return None  # a system that does not say
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else 1024 * int(found)


def has_room(device: torch.device, peak_bytes: int, states_bytes: int) -> bool:
    """Whether a step may be run: the device can hold its peak and, on the CPU, the copy by which it is undone."""
    room = room_bytes(device)
    copied = states_bytes if device.type == "cpu" else 0
    return room is None or peak_bytes + copied <= room


def states_bytes(workload: Workload) -> int:
    """Bytes of the model's states, whatever the batch: parameters, buffers, gradients and optimizer states."""
    with preserved(workload):
        first_step(workload)
        resident = resident_bytes_of(workload)
    gradients = distinct_bytes(p for p in workload.model.parameters() if p.requires_grad)
    return resident.total - resident.inputs - resident.gradients + gradients
