"""A planned step on a device that need not be there: its peak, and what CUDA's allocator would hold for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.distributed.sharding import Engine
from planner.plans.estimating import simulated_workload
from planner.plans.plan import Plan
from planner.runtime.applier import apply, measure
from profiler.current_device import active_device
from profiler.device_record import DeviceRecord
from profiler.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedRun:
    """What steps under a plan take on a device that was simulated.

    Attributes:
        peak_bytes: most bytes of tensors alive at once.
        reserved_bytes: most bytes that CUDA's allocator holds of the device for them; None on a CPU.
        expandable_bytes: the same with expandable segments.
    """

    peak_bytes: int
    reserved_bytes: int | None = None
    expandable_bytes: int | None = None


def run_estimated(
    workload: Workload | Callable[[], Workload],
    plan: Plan,
    device: str | Path | DeviceRecord,
    *,
    ranks: int | None = None,
    shard: Engine | None = None,
) -> EstimatedRun:
    """Runs steps under a plan on fake tensors, from the first one on, and tells what they take.

    The allocator begins with the model's parameters and buffers alone, as training does: optimizer states are made at
    the end of the first step, between what it has left.

    Raises:
        ProfileError: the step fails on fake tensors.
    """
    with simulated_workload(workload, device, ranks=ranks, shard=shard) as fake, apply(fake.model, plan):
        measured = measure(fake, repeats=1)
        simulated = active_device()
        assert simulated is not None
        if not simulated.allocators:
            return EstimatedRun(peak_bytes=measured.peak_bytes)
        default, expandable = (allocator.reserved_bytes for allocator in simulated.allocators)
    return EstimatedRun(peak_bytes=measured.peak_bytes, reserved_bytes=default, expandable_bytes=expandable)
