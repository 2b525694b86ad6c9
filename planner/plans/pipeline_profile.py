"""The profile of one stage of a pipeline: one micro-batch by itself, and what else is alive beside it in a real step.

The ranks of a pipeline have different modules, so each is profiled by itself, and has a plan of its own. They run a few
whole steps together, in which nothing but bytes and seconds is read; everything about the stage's inside is measured on
one micro-batch, with what the rank got for it in such a step, and no other rank takes part in that.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from planner.plans.cost_model import lone_chain_of
from profiler.agreement import measured_with
from profiler.measurement.meter import Mark, MarkedPhases, memory_meter
from profiler.records import Phase, Profile, ResidentBytes, StageRecord
from profiler.workload.given_models import class_name, inner_model
from profiler.workload.reachable import reached_from
from profiler.workload.snapshot import preserved
from profiler.workload.steps import ProfileError, TensorsOfState, resident_bytes_of
from profiler.workload.tensor_parts import distinct_bytes, is_distributed
from profiler.workload.tensor_trees import map_tensors, tensors_in
from profiler.workload.workload import Workload
from solvers.chain.micro_batches import most_kept

TIMED_STEPS = 3
_SCHEDULES = "torch.distributed.pipelining.schedules"
_PLANNED = ("ScheduleGPipe", "Schedule1F1B")
Side = Literal["forward", "backward"]
OnMicroBatch = Callable[[Side, int], None]
Event = tuple[Side, int]


def profile_pipeline_stage(workload: Workload, schedule: Any, profile_alone: Callable[[Workload], Profile]) -> Profile:
    """Profile a rank's stage; all ranks of the pipeline call this.

    Args:
        workload: whose step runs ``schedule.step``; its model is the stage's module.
        schedule: the one that ``schedule_of`` finds.
        profile_alone: profiles a workload in this process.

    Raises:
        ProfileError: as there.
    """
    assert workload.custom_step is not None
    custom = workload.custom_step

    def step() -> None:
        custom.result = custom.function()  # The loop holds it until the next step's.

    with preserved(workload):
        micro_batch = captured_micro_batch(schedule, step)
        resident = resident_bytes_of(workload)
        events, phases = _metered(workload, schedule, step, resident)
        seconds = [_seconds_of(step, workload.device) for _ in range(TIMED_STEPS)]
    accumulates = _gradients_at_the_fullest(events)
    with measured_with(None):  # Other ranks have other modules.
        alone = profile_alone(_one_micro_batch(workload, schedule, micro_batch, accumulate=accumulates))
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


# The schedule that a step runs, and when it goes forward and backward ------------------


def schedule_of(workload: Workload) -> Any:
    """The schedule of ``torch.distributed.pipelining`` that the user's step refers to; None where there is none.

    Raises:
        ProfileError: several, or one that no plan can be made for, or of another module than the workload's.
    """
    defined: Any = sys.modules.get(_SCHEDULES)
    if defined is None or workload.custom_step is None:
        return None
    reached = reached_from(workload.custom_step.function)
    found = [each for each in reached if isinstance(each, defined._PipelineSchedule)]
    if not found:
        return None
    _check(found, workload)
    return found[0]


def _check(found: list[Any], workload: Workload) -> None:
    names = [type(schedule).__name__ for schedule in found]
    if names[0] not in _PLANNED or len(names) > 1:
        raise ProfileError(
            f"profile: expected a step of one {' or '.join(_PLANNED)}, got {', '.join(names)}; plans are for ranks "
            "that run one stage each: take one of these, or train this schedule without a plan"
        )
    stage = found[0]._stage
    if inner_model(stage.submod) is not inner_model(workload.model):
        raise ProfileError(
            f"profile: expected the module of this rank's stage as the model, got a {type(workload.model).__name__}; "
            "pass Workload(model=stage.submod, step=...)"
        )
    if stage.dw_builder is not None:
        raise ProfileError(
            "profile: expected a stage that goes backward at once, got one with a dw_builder; leave it out, or train "
            "without a plan"
        )
    if isinstance(stage.submod, DistributedDataParallel) or class_name(stage.submod) != type(stage.submod).__name__:
        raise ProfileError(
            "profile: expected a pipeline stage that one rank holds, got one in DistributedDataParallel or "
            "fully_shard; plan pipelines without data parallelism, or data parallel models without a pipeline"
        )
    if any(is_distributed(tensor) for tensor in (*stage.submod.parameters(), *stage.submod.buffers())):
        raise ProfileError(
            "profile: expected a pipeline stage of one rank, got one whose parameters are distributed (DTensor); plan "
            "tensor parallel models without a pipeline, or pipelines of whole modules"
        )


@dataclass(slots=True)
class MicroBatch:
    """The input of a stage for one micro-batch, without its graph.

    Attributes:
        args, kwargs: of its module.
        target: for the loss; None but on the last stage.
        gradients: of what its module returned; empty on the last stage.
    """

    args: Any = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    gradients: tuple[Any, ...] = ()


@contextlib.contextmanager
def micro_batches_seen(schedule: Any, see: OnMicroBatch) -> Iterator[None]:
    """Inside, ``see`` is told as a micro-batch goes forward or backward, and with -1 once backwards are over."""
    stage = schedule._stage
    plain = {name: getattr(stage, name) for name in ("forward_one_chunk", "backward_one_chunk")}

    def forward(number: int, *args: Any, **kwargs: Any) -> Any:
        see("forward", number)
        return plain["forward_one_chunk"](number, *args, **kwargs)

    def backward(number: int, *args: Any, **kwargs: Any) -> Any:
        see("backward", number)
        result = plain["backward_one_chunk"](number, *args, **kwargs)
        if kwargs.get("last_backward"):
            see("backward", -1)
        return result

    stage.forward_one_chunk, stage.backward_one_chunk = forward, backward
    try:
        yield
    finally:
        del stage.forward_one_chunk, stage.backward_one_chunk


def captured_micro_batch(schedule: Any, step: Callable[[], Any]) -> MicroBatch:
    """Run a step, and copy what the stage gets for its first micro-batch."""
    stage, found = schedule._stage, MicroBatch()
    plain_call, plain_loss = stage.forward_maybe_with_nosync, schedule._compute_loss
    under_way: list[tuple[Side, int]] = []

    def see(side: Side, number: int) -> None:
        under_way[:] = [(side, number)]
        if (side, number) == ("backward", 0) and not stage.is_last:
            found.gradients = map_tensors(_copied, stage._retrieve_recv_grads(0))

    def call(*args: Any, **kwargs: Any) -> Any:
        if under_way == [("forward", 0)]:
            found.args, found.kwargs = map_tensors(_copied, args), map_tensors(_copied, kwargs)
        return plain_call(*args, **kwargs)

    def loss(output: Any, target: Any, *args: Any) -> Any:
        if under_way == [("forward", 0)]:
            found.target = map_tensors(_copied, target)
        return plain_loss(output, target, *args)

    stage.forward_maybe_with_nosync, schedule._compute_loss = call, loss
    try:
        with micro_batches_seen(schedule, see):
            step()
    finally:
        del stage.forward_maybe_with_nosync, schedule._compute_loss
    return found


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def outputs_with_gradients(output: Any) -> list[Tensor]:
    """The tensors that a stage's backward begins from, as pipelining takes them."""
    return [tensor for tensor in tensors_in(output) if tensor.requires_grad]
