"""The profile of one stage of a pipeline: one micro-batch by itself, and what else is alive beside it in a real step.

The ranks of a pipeline have different modules, so each is profiled by itself, and has a plan of its own. They run a few
whole steps together, in which nothing but bytes and seconds is read; everything about the stage's inside is measured on
one micro-batch, with what the rank got for it in such a step, and no other rank takes part in that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from planner.distributed.pipeline_schedule import (
    MicroBatch,
    Side,
    captured_micro_batch,
    micro_batches_seen,
    outputs_with_gradients,
)
from planner.plans import profiling
from planner.plans.cost_model import lone_chain_of
from profiler.agreement import measured_with
from profiler.measurement.meter import Mark, MarkedPhases, memory_meter
from profiler.records import Phase, Profile, ResidentBytes, StageRecord
from profiler.tensors.tensor_parts import distinct_bytes
from profiler.workload.snapshot import preserved
from profiler.workload.steps import TensorsOfState, resident_bytes_of
from profiler.workload.workload import Workload
from solvers.chain.micro_batches import most_kept

TIMED_STEPS = 3
Event = tuple[Side, int]


def profile_pipeline_stage(workload: Workload, schedule: Any, **settings: Any) -> Profile:
    """Profile a rank's stage; all ranks of the pipeline call this.

    Args:
        workload: whose step runs ``schedule.step``; its model is the stage's module.
        schedule: that the step runs.
        settings: as for ``planner.profile``.

    Raises:
        ProfileError: as there.
    """
    assert workload.own is not None
    own = workload.own

    def step() -> None:
        own.result = own.function()  # The loop holds it until the next step's.

    with preserved(workload):
        micro_batch = captured_micro_batch(schedule, step)
        resident = resident_bytes_of(workload)
        events, phases = _metered(workload, schedule, step, resident)
        seconds = [_seconds_of(step, workload.device) for _ in range(TIMED_STEPS)]
    accumulates = _gradients_at_the_fullest(events)
    with measured_with(None):  # Other ranks have other modules.
        alone = profiling.profile(_one_micro_batch(workload, schedule, micro_batch, accumulate=accumulates), **settings)
    return _put_together(workload, alone, resident, events, phases, seconds, accumulates=accumulates)


def _metered(
    workload: Workload, schedule: Any, step: Callable[[], Any], resident: ResidentBytes
) -> tuple[list[Event], MarkedPhases]:
    """One whole step under the memory meter, with a mark as each micro-batch goes forward or backward."""
    events: list[Event] = []
    meter = memory_meter(workload.device, resident.total, TensorsOfState(workload))

    def see(side: Side, number: int) -> None:
        if number >= 0:
            events.append((side, number))
        meter.mark(Mark("optimizer" if number < 0 else "evaluation"))

    meter.start(Mark("forward"), step)
    try:
        with micro_batches_seen(schedule, see):
            step()
    finally:
        phases = meter.stop()
    return events, phases


def _seconds_of(step: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _others_alive(events: Sequence[Event]) -> list[int]:
    """As each event begins: how many other micro-batches have gone forward and not yet backward."""
    forward, backward, counts = 0, 0, []
    for side, _ in events:
        counts.append(forward - backward - (side == "backward"))
        forward, backward = forward + (side == "forward"), backward + (side == "backward")
    return counts


def _gradients_at_the_fullest(events: Sequence[Event]) -> bool:
    """Whether a backward that finds gradients there has as many others beside it as the first one has (1F1B)."""
    counts = [count for (side, _), count in zip(events, _others_alive(events), strict=True) if side == "backward"]
    return len(counts) > 1 and counts[1] >= counts[0]


def _one_micro_batch(workload: Workload, schedule: Any, micro_batch: MicroBatch, *, accumulate: bool) -> Workload:
    """Forward and backward of one micro-batch, without the others and without any other rank."""
    model, last = workload.model, schedule._stage.is_last
    loss_of: Any = schedule._loss_fn

    def step() -> None:
        output = model(*micro_batch.args, **micro_batch.kwargs)
        if last:
            loss = loss_of(output, micro_batch.target)
            loss.backward()
        else:
            torch.autograd.backward(outputs_with_gradients(output), list(micro_batch.gradients))
        for parameter in () if accumulate else model.parameters():
            parameter.grad = None
        for tensor in micro_batch.args:
            if isinstance(tensor, torch.Tensor):
                tensor.grad = None

    return Workload(model=model, step=step)


def _put_together(
    workload: Workload,
    alone: Profile,
    resident: ResidentBytes,
    events: Sequence[Event],
    phases: MarkedPhases,
    seconds: Sequence[float],
    *,
    accumulates: bool,
) -> Profile:
    """The profile of the micro-batch, with the bytes and seconds of the whole step around it."""
    micro_batches = sum(side == "forward" for side, _ in events)
    optimizer = [phase for mark, phase in phases if mark.phase == "optimizer"]
    begun = [phase for mark, phase in phases if mark.phase == "evaluation"]
    base_bytes = begun[0].start_bytes  # The step has let go by then of what the one before left.
    shifted = _shifted(alone, base_bytes - alone.stages[0].forward.start_bytes)
    kept_bytes = most_kept(lone_chain_of(shifted))
    gradient_bytes = distinct_bytes(p for p in workload.model.parameters() if p.requires_grad) if accumulates else 0
    beside = set()
    for (side, _), count, phase in zip(events, _others_alive(events), begun, strict=True):
        known_bytes = base_bytes + (count + (side == "backward")) * kept_bytes
        other_bytes = max(0, phase.start_bytes - known_bytes)
        beside.add((count, max(other_bytes, gradient_bytes if side == "backward" else 0)))
    chain_seconds = sum(stage.forward.seconds + stage.backward.seconds for stage in alone.stages)
    return replace(
        shifted,
        resident=resident,
        optimizer=Phase(
            start_bytes=optimizer[0].start_bytes,
            peak_bytes=max(phase.peak_bytes for phase in optimizer),
            end_bytes=optimizer[-1].end_bytes,
        ),
        unplanned_peak_bytes=max(phase.peak_bytes for _, phase in phases),
        unplanned_seconds=max(statistics.median(seconds), micro_batches * chain_seconds),
        step_seconds=tuple(seconds),
        evaluation=Phase(),
        evaluations=micro_batches,
        link=None,  # Its copies would be in flight as often as there are micro-batches.
        in_flight=tuple(sorted(beside)),
    )


def _shifted(profile: Profile, by_bytes: int) -> Profile:
    """The profile of a step that has so many bytes more from its begin to its end."""

    def phase(record: Phase) -> Phase:
        names = ("start_bytes", "peak_bytes", "end_bytes")
        return replace(record, **{name: max(0, getattr(record, name) + by_bytes) for name in names})

    def stage(record: StageRecord) -> StageRecord:
        return replace(
            record,
            forward=phase(record.forward),
            backward=phase(record.backward),
            dropped=phase(record.dropped) if record.dropped != Phase() else record.dropped,
        )

    return replace(profile, stages=tuple(map(stage, profile.stages)))
