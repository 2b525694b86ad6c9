"""Profiles a workload's training step by running it about ten times; the model is left as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from profiler.agreement import agreed, is_together, largest
from profiler.current_device import active_device
from profiler.device_record import EstimateRecord
from profiler.measurement.assembly import assemble
from profiler.measurement.captured_stages import ProposeRuns
from profiler.measurement.device_memory import (
    RoomWatch,
    give_back_freed_memory,
    is_limited,
    is_short,
    large_blocks_mapped,
    measure_link,
    ran_out,
    room_bytes,
    take_workspaces,
)
from profiler.measurement.measuring import Measuring, Progress, ProgressReporter, frugal_first_step
from profiler.measurement.meter import Mark, memory_meter, metered_step
from profiler.measurement.shortage import MIB, where_raised
from profiler.measurement.step_measurement import allocator_bytes_of
from profiler.measurement.unsteady_bytes import LargestStep, largest_step
from profiler.records import Profile
from profiler.simulation.simulated_device import SimulatedDevice
from profiler.trace.partition import Stages, StagesError
from profiler.workload.compiled_forwards import check_no_cuda_graphs, is_compiled
from profiler.workload.forward_patches import is_patched
from profiler.workload.given_models import ModelCaches, check_no_checkpointing, inner_model
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import (
    ProfileError,
    TensorsOfState,
    first_step,
    gradient_bytes,
    resident_bytes_of,
)
from profiler.workload.tensor_trees import tensors_in
from profiler.workload.torch_state import under_compiled_autograd
from profiler.workload.workload import Workload

# Of what the device has left, profiling by itself takes so much: allocators, libraries and the trace need their part.
SHARE_OF_ROOM = 0.75


def profile(
    workload: Workload,
    *,
    stages: Stages = None,
    programs: ProposeRuns | None = None,
    every_stage: bool = False,
    progress: Progress | None = None,
    limit_bytes: int | None = None,
) -> Profile:
    """Measure one training step of a workload on the device it is on.

    Runs about ten steps: one to warm up, one traced, one with the memory
    meter, some timed, and forwards in which no stage keeps anything.
    Parameters, buffers, gradients, optimizer states, random states and
    train/eval flags are as before afterwards, also after an exception.

    Args:
        workload: the training step; its model in training mode.
        stages: None to find stages automatically; otherwise module names,
            glob patterns or module classes.
        programs: names the orders worth having of a captured stage's ops, each op once first; None to capture nothing.
        every_stage: capture those, too, that save little.
        progress: called as ``progress(what, done, total)`` before each run.
        limit_bytes: the most bytes of a step: a few stages are kept at a time, and the others are recomputed. Without
            one, profiling does so by itself where a plain step runs out of memory.

    Returns:
        The profile: bytes as exact integers, seconds as medians.

    Raises:
        ProfileError: the step fails, does not fit in any way, or the model is in eval mode or planned.
        StagesError: a stage pattern matches nothing, or the step calls the model more than once.
    """
    check_profilable(workload)
    request = _Request(stages, programs, every_stage)
    if limit_bytes is not None and is_compiled(workload.model):
        raise ProfileError(
            "profile: a compiled model cannot be profiled within a limit; profile it before torch.compile"
        )
    if is_limited() or (limit_bytes is not None and is_short(limit_bytes)):
        give_back_freed_memory(workload.device)
    if limit_bytes is None:
        try:
            return _profiled(workload, request, ProgressReporter(progress), None)
        except ProfileError as error:
            # Where others wait in this step for a rank that ran out, there is no other step for all of them.
            if not ran_out(error) or is_compiled(workload.model) or is_together():
                raise
        give_back_freed_memory(workload.device)
        limit_bytes = int(SHARE_OF_ROOM * room_bytes(workload.device)) + resident_bytes_of(workload).total
    return _profiled(workload, request, ProgressReporter(progress), limit_bytes)


def check_profilable(workload: Workload) -> None:
    """Refuse a workload of which nobody could make a plan; raises ProfileError."""
    if not workload.model.training:
        raise ProfileError("profile: the model is in eval mode; call model.train()")
    if under_compiled_autograd():
        raise ProfileError(
            "profile: compiled autograd is on (torch._dynamo.config.compiled_autograd): it makes everything that a "
            "plan drops at once, and no budget would hold; turn it off while the model trains under a plan"
        )
    if is_patched(workload.model):
        raise ProfileError("profile: the model is planned already; call its handle's remove() first")
    if any(tensor.is_nested and tensor.layout is torch.strided for tensor in tensors_in(workload.inputs)):
        raise ProfileError(
            "profile: the inputs hold a nested tensor of torch's older kind, with which no stage can be recomputed; "
            "make it with torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    try:
        inner_model(workload.model)
        check_no_checkpointing(workload.model, "profile")
        check_no_cuda_graphs(workload.model, workload.device, "profile")
    except ValueError as error:
        raise ProfileError(str(error)) from error


class _Request(NamedTuple):
    """The arguments of ``profile`` that say what is measured."""

    stages: Stages
    programs: ProposeRuns | None
    every_stage: bool


def _profiled(workload: Workload, request: _Request, report: ProgressReporter, limit_bytes: int | None) -> Profile:
    """Returns the profile by plain steps, or by steps that take no more than a limit; of the largest step drawn."""
    start = RandomState()
    profile, largest = _profiled_from(start, workload, request, report, limit_bytes)
    if largest is None:
        return profile
    if largest.start is not start:
        profile, _ = _profiled_from(largest.start, workload, request, report, limit_bytes, looks=False)
    return replace(profile, unsteady=(*profile.unsteady, largest.said))


def _profiled_from(
    start: RandomState,
    workload: Workload,
    request: _Request,
    report: ProgressReporter,
    limit_bytes: int | None,
    *,
    looks: bool = True,
) -> tuple[Profile, LargestStep | None]:
    """Returns the profile of a step from some random numbers, and what was found where it looks for a larger one."""
    set_aside_bytes = gradient_bytes(workload)
    take_workspaces(workload.device)
    with preserved(workload), ModelCaches(workload.model).off():
        start.restore()
        state_of_modules = TensorsOfState(workload)
        report("warm up")
        if limit_bytes is None:
            first_plain_step(workload)
        try:
            if limit_bytes is not None:
                frugal_first_step(workload, request.stages, limit_bytes)
            _choose_forward(workload, state_of_modules, frugal=limit_bytes is not None)
            resident = resident_bytes_of(workload)
            measuring = Measuring(workload, resident, state_of_modules, start, report, limit_bytes)
            measured = measuring.measure(request.stages, request.programs, every_stage=request.every_stage)
            profile = assemble(workload, measured, resident)
            largest = None
            if looks:
                report("look for what is drawn at random")
                largest = largest_step(workload, start, keeps=limit_bytes is None)
        except StagesError:
            raise
        except Exception as error:
            if ran_out(error):
                raise ProfileError(ran_out_in_words(error, limit_bytes, workload)) from error
            if isinstance(error, ProfileError):
                raise
            raise ProfileError(
                f"profile: the step does not run several times the same way, with saved-tensor hooks: {_failure(error)}"
            ) from error
        profile = replace(profile, frugal=limit_bytes is not None)
        if limit_bytes is None:
            profile = replace(profile, allocator_bytes=allocator_bytes_of(workload, set_aside_bytes))
        if (simulated := active_device()) is not None:
            return _estimated_for(simulated, profile), largest
        # A step that runs forward several times would send as often as that over the link.
        return replace(profile, link=measure_link(workload.device) if profile.evaluations == 1 else None), largest


def _estimated_for(simulated: SimulatedDevice, profile: Profile) -> Profile:
    """The profile of a run on fake tensors as one of the device that was simulated."""
    device, (margin_bytes, margin) = simulated.record, simulated.costs.margin()
    return replace(
        profile,
        device="cuda:0" if device.kind == "cuda" else "cpu",
        device_name=device.name,
        link=device.link if profile.evaluations == 1 else None,
        estimate=EstimateRecord(
            device=device.name,
            origin=device.origin,
            memory_bytes=device.budget_bytes,
            least_seconds=device.least_seconds,
            most_seconds=device.most_seconds,
            margin_bytes=margin_bytes,
            margin=margin,
        ),
    )


def _failure(error: Exception) -> str:
    """Returns the failure of a step in words, and the remedy."""
    if isinstance(error, StopIteration):
        return (
            "StopIteration: profiling runs the step some dozens of times; train on a batch that is there, not on the "
            "next one of an iterator"
        )
    if "torch.func" in str(error) and "saved tensor hooks" in str(error):
        return f"{type(error).__name__}: {str(error).splitlines()[0]} A step that calls torch.func cannot be planned"
    return f"{type(error).__name__}: {error}; leave what fails out of the workload"


def first_plain_step(workload: Workload) -> None:
    """``first_step``; on the CPU it ends with a MemoryError before the system would kill the process."""
    if workload.device.type != "cpu" or is_compiled(workload.model) or active_device() is not None:
        return first_step(workload)
    with large_blocks_mapped(), RoomWatch() as watch:
        first_step(workload)
    if is_short(watch.used_bytes):
        give_back_freed_memory(workload.device)
    return None


def ran_out_in_words(error: BaseException, limit_bytes: int | None, workload: Workload) -> str:
    """Returns the message for memory that ran out: the error's own first line has the bytes asked for, if any."""
    where = where_raised(error, workload.model)
    while isinstance(error, ProfileError) and error.__cause__ is not None:
        error = error.__cause__
    said = next(iter(str(error).strip().splitlines()), type(error).__name__)
    step = "a step that recomputes every stage" if limit_bytes is not None else "a plain training step"
    states_mib = resident_bytes_of(workload).total / MIB
    return (
        f"profile: {step} runs out of memory ({said}{where and f', {where}'}); the model, its gradients and the "
        f"optimizer hold {states_mib:,.1f} MiB from step to step; make the batch smaller, take an optimizer or a "
        "precision that needs less, or a device with more memory"
    )


def _choose_forward(workload: Workload, state: TensorsOfState, *, frugal: bool) -> None:
    """Chooses the forward of a custom step to measure: the one that needs the most memory, the last of equal ones."""
    step = workload.custom_step
    if step is None or step.forwards < 2:
        return
    if frugal:  # Of those with the largest batch the last, which finds gradients there.
        step.measured = agreed(max(range(step.forwards), key=lambda number: (step.input_elements[number], number)))
        return
    step.measured = -1
    meter = memory_meter(workload.device, resident_bytes_of(workload).total, state)
    phases = metered_step(
        workload, meter, Mark, lambda phase, _: meter.mark(Mark(phase)), warm_up=lambda: workload.step()
    )
    peaks = largest([phase for begun, phase in phases if begun == Mark("evaluation")])
    step.measured = max(range(step.forwards), key=lambda number: (peaks[number].peak_bytes, number))
