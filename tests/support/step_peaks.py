"""The peaks of planned steps, by the meter of the device's allocator."""

from __future__ import annotations

import gc

import planner
from profiler.measurement.meter import memory_meter, metered
from profiler.workload.steps import TensorsOfState, resident_bytes_of


def peaks_of_steps(work: planner.Workload, plan: planner.Plan, steps: int = 3) -> list[int]:
    """Most bytes alive at once in each of some planned steps."""
    peaks, state = [], TensorsOfState(work)
    with planner.apply(work.model, plan):
        for _ in range(steps):
            work.zero_grad()
            gc.collect()
            meter = memory_meter(work.device, resident_bytes_of(work).total, state)
            peaks.append(metered(meter, work.step).peak_bytes)
    return peaks
