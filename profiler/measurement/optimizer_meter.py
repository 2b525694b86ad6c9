"""The optimizer's step alone: what it keeps, what it holds meanwhile, and how long it takes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from profiler.measurement.meter import memory_meter, metered, time_meter
from profiler.workload.preservation import preserved
from profiler.workload.steps import resident_bytes_of
from profiler.workload.variants import varied
from profiler.workload.workload import Workload

STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """What an optimizer costs.

    Attributes:
        state_bytes: kept from step to step.
        temporary_bytes: the most that a step holds beside gradients and states, clipping included.
        seconds: of a step, the median of a few.
    """

    state_bytes: int
    temporary_bytes: int
    seconds: float


def measure_optimizer(workload: Workload) -> OptimizerCost:
    """Measure the optimizer's step of a workload on the gradients of one real backward.

    Runs one forward and backward and then the optimizer's step a few times; the workload is left as it was found. A
    scaler is left out: unscaling is done in place.

    Raises:
        Exception: whatever the model or the optimizer raises.
    """
    bare = varied(workload, scaler=None)
    with preserved(bare):
        bare.zero_grad()
        bare.backward(bare.forward())
        bare.update()  # States are made in it.
        resident = resident_bytes_of(bare)
        memory = metered(memory_meter(bare.device, resident.total), bare.update)
        times = [sum(i.seconds for i in metered(time_meter(bare.device), bare.update)) for _ in range(STEPS)]
    return OptimizerCost(
        state_bytes=resident.optimizer,
        temporary_bytes=max(i.peak_bytes - memory[0].start_bytes for i in memory),
        seconds=statistics.median(times),
    )
