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
class AllocatorRun:
    """What CUDA's allocator did in these steps.

    Attributes:
        reserved_bytes: the most that it held of the device.
        flushes: how often the device had no memory left, and what was free was given back.
        short_bytes: the most that was missing after that; above 0, steps run out of memory.
    """

    reserved_bytes: int
    flushes: int = 0
    short_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedRun:
    """What steps under a plan take on a device that was simulated.

    Attributes:
        peak_bytes: most bytes of tensors alive at once.
        default, expandable: of CUDA's allocator by default and with expandable segments; None on a CPU.
    """

    peak_bytes: int
    default: AllocatorRun | None = None
    expandable: AllocatorRun | None = None


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
        simulated = active_device()
        assert simulated is not None
        simulated.capacity_bytes = simulated.record.budget_bytes
        measured = measure(fake, repeats=1)
        runs = [
            AllocatorRun(reserved_bytes=each.peak_reserved_bytes, flushes=each.flushes, short_bytes=each.short_bytes)
            for each in simulated.allocators
        ]
    return EstimatedRun(peak_bytes=measured.peak_bytes, **dict(zip(("default", "expandable"), runs, strict=False)))
