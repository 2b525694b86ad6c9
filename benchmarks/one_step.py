"""What a step takes that is run for good: unlike ``planner.measure``, nothing is put back."""

from __future__ import annotations

from collections.abc import Callable

from profiler.measurement.meter import metered, step_memory_meter, time_meter
from profiler.workload.workload import Workload


def peak_bytes_of(workload: Workload, run: Callable[[], object] | None = None) -> int:
    """Most bytes alive at once, model states and batch included, while ``run`` runs: one step where none is given."""
    return metered(step_memory_meter(workload), run or workload.step).peak_bytes


def seconds_of(workload: Workload) -> float:
    """Seconds of one step that begins without gradients."""
    workload.zero_grad()
    return metered(time_meter(workload.device), workload.step).seconds
