"""The peaks of steps, planned or run by a profile, by the meter of the device's allocator."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import planner
from profiler.measurement import meter as meters
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


def noted_peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which every step under the memory meter adds its peak from now on."""
    peaks: list[int] = []
    cumulated = meters._cumulated

    def noted(*args: Any) -> Any:
        phases = cumulated(*args)
        peaks.append(max(phase.peak_bytes for _, phase in phases))
        return phases

    monkeypatch.setattr(meters, "_cumulated", noted)
    return peaks
