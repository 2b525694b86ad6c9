"""The true peak and the seconds of a workload's step, planned or not."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass

import torch

from profiler.measurement.device_memory import faulted_bytes, held_for, release_cache, requested_bytes
from profiler.measurement.meter import Meter, memory_meter, metered, time_meter
from profiler.records import Phase
from profiler.workload.snapshot import RandomState, preserved
from profiler.workload.steps import TensorsOfState, check_workload, first_step, resident_bytes_of, until_stepped
from profiler.workload.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a step took.

    Attributes:
        peak_bytes: most bytes alive on the device at once in the whole step, as its tensors asked for.
        seconds: median over ``step_seconds``.
        loss: of the first step.
        allocated_bytes: most bytes of blocks that the device's allocator handed out for that; what is above
            ``peak_bytes`` is rounding. None on the CPU, which has no such allocator.
        reserved_bytes: most bytes that it held of the device at once; what is above ``allocated_bytes`` is
            fragmentation. None on the CPU.
        faulted_bytes: that the system had to hand over, cleared, in one step, since the C library's allocator had given
            them back: the fewest of the steps. None on other devices.
        rank_peak_bytes: where several ranks measured together, the peak of each; ``peak_bytes`` is the highest.
    """

    peak_bytes: int
    seconds: float
    step_seconds: tuple[float, ...]
    loss: float
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    faulted_bytes: int | None = None
    rank_peak_bytes: tuple[int, ...] = ()


def allocator_bytes_of(workload: Workload, set_aside_bytes: int = 0) -> int:
    """What CUDA's allocator hands out beside what the tensors of a step ask for, at the peak; 0 on the CPU.

    Runs a step, for good. Tensors of others on the device count, too.

    Args:
        workload: whose step it is.
        set_aside_bytes: as of ``beside_bytes``.
    """
    if workload.device.type != "cuda":
        return 0
    release_cache(workload.device)
    torch.cuda.reset_peak_memory_stats(workload.device)
    workload.zero_grad()
    until_stepped(workload, workload.step)
    held = held_for(workload.device, 0)
    return (held.allocated if held else 0) + beside_bytes(workload, set_aside_bytes)


def beside_bytes(workload: Workload, set_aside_bytes: int = 0) -> int:
    """What is allocated between steps beside their tensors: workspaces of libraries, tensors of others; 0 on the CPU.

    Args:
        workload: that has run a step, so that its workspaces are there.
        set_aside_bytes: of gradients that are there only while it is measured.
    """
    if workload.device.type != "cuda":
        return 0
    gc.collect()
    there_bytes = requested_bytes(workload.device).now - set_aside_bytes
    return max(0, there_bytes - resident_bytes_of(workload).total)


def measure(workload: Workload, *, repeats: int = 3) -> Measurement:
    """What ``planner.measure`` does in each process; arguments and errors are as there."""
    check_workload(workload, "measure")
    if repeats < 1:
        raise ValueError(f"measure: expected repeats of at least 1, got {repeats}; pass a whole number")
    device = workload.device
    losses: list[float] = []
    faults: list[int] = []
    with preserved(workload):
        release_cache(device)  # What others left in the allocator is no part of the step.
        randomness, state = RandomState.capture(), TensorsOfState(workload)
        first_step(workload)
        resident_bytes = resident_bytes_of(workload).total

        def again(meter: Meter) -> Phase:
            randomness.restore()
            workload.zero_grad()
            before = faulted_bytes(device)
            warm_up = workload.step if workload.own is not None else None
            step = metered(meter, lambda: losses.append(workload.step()), warm_up)
            if before is not None:
                faults.append((faulted_bytes(device) or 0) - before)
            return step

        peak_bytes = until_stepped(workload, lambda: again(memory_meter(device, resident_bytes, state))).peak_bytes
        held = held_for(device, peak_bytes)
        times = [until_stepped(workload, lambda: again(time_meter(device))).seconds for _ in range(repeats)]
    return Measurement(
        peak_bytes=peak_bytes,
        allocated_bytes=held.allocated if held else None,
        reserved_bytes=held.reserved if held else None,
        seconds=statistics.median(times),
        step_seconds=tuple(times),
        loss=losses[0],
        faulted_bytes=min(faults, default=None),
    )
