"""The true peak and the seconds of a workload's step, planned or not, and what its model states hold in real steps.

Model states are parameters, gradients, the optimizer's states and casts of parameters.
"""

from __future__ import annotations

import gc
import statistics
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.current_device import active_device
from profiler.measurement.device_memory import cache_flushes, faulted_bytes, held_for, release_cache, requested_bytes
from profiler.measurement.meter import Mark, Meter, memory_meter, metered, metered_step, step_memory_meter, time_meter
from profiler.records import Phase
from profiler.workload.compiled_forwards import is_compiled, uncompiled
from profiler.workload.optimizers import optimizer_tensors, with_inner
from profiler.workload.random_states import RandomState
from profiler.workload.snapshot import preserved
from profiler.workload.steps import (
    ProfileError,
    TensorsOfState,
    check_workload,
    checked_step,
    first_step,
    optimizer_state_bytes,
    resident_bytes_of,
    until_stepped,
)
from profiler.workload.tensor_parts import any_distributed, distinct_bytes, storage_key, storage_of
from profiler.workload.workload import StepPhase, Workload, varied


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The bytes and seconds of a step.

    Attributes:
        peak_bytes: most bytes alive on the device at once in the whole step, as its tensors asked for.
        seconds: median over ``step_seconds``.
        loss: the loss of the first step.
        allocated_bytes: most bytes of blocks that the device's allocator handed out for that; what is above
            ``peak_bytes`` is rounding. None on the CPU, which has no such allocator.
        reserved_bytes: most bytes that it held of the device at once; what is above ``allocated_bytes`` is
            fragmentation. None on the CPU.
        cache_flushes: how often the device had no memory left in these steps until the allocator gave back what it
            cached, which waits for the device; 0 on the CPU.
        faulted_bytes: the bytes that the system had to hand over, cleared, in one step, since the C library's allocator
            had given them back: the fewest of the steps. None on other devices.
        rank_peak_bytes: the peak of each rank where several measured together; ``peak_bytes`` is the highest.
    """

    peak_bytes: int
    seconds: float
    step_seconds: tuple[float, ...]
    loss: float
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    faulted_bytes: int | None = None
    cache_flushes: int = 0
    rank_peak_bytes: tuple[int, ...] = ()


def allocator_bytes_of(workload: Workload, set_aside_bytes: int = 0) -> int:
    """Returns the bytes that CUDA's allocator hands out beyond those of a step's tensors, at the peak; 0 on the CPU.

    Runs a step, for good. Tensors of others on the device count, too.

    Args:
        workload: whose step it is.
        set_aside_bytes: the same as for ``beside_bytes``.
    """
    simulated = active_device()
    if workload.device.type != "cuda" and simulated is None:
        return 0
    release_cache(workload.device)
    if simulated is None:
        torch.cuda.reset_peak_memory_stats(workload.device)
    else:
        simulated.forget_peak()
    workload.zero_grad()
    until_stepped(workload, workload.step)
    held = held_for(workload.device, 0)
    return (held.allocated if held else 0) + beside_bytes(workload, set_aside_bytes)


def beside_bytes(workload: Workload, set_aside_bytes: int = 0) -> int:
    """Returns the bytes allocated between steps beside their tensors (workspaces, others' tensors); 0 on the CPU.

    Args:
        workload: a workload that has run a step, so that its workspaces are there.
        set_aside_bytes: the gradients that are there only while it is measured.
    """
    if workload.device.type != "cuda":
        return 0
    gc.collect()
    there_bytes = requested_bytes(workload.device).now - set_aside_bytes
    return max(0, there_bytes - resident_bytes_of(workload).total)


def measure(workload: Workload, *, repeats: int = 3) -> Measurement:
    """Measures a step in this process; takes the arguments of ``planner.measure``, and raises the same errors."""
    check_workload(workload, "measure")
    if repeats < 1:
        raise ValueError(f"measure: expected repeats of at least 1, got {repeats}; pass a whole number")
    device = workload.device
    losses: list[float] = []
    faults: list[int] = []
    with preserved(workload):
        release_cache(device)  # What others left in the allocator is no part of the step.
        randomness, state = RandomState(), TensorsOfState(workload)
        flushes = cache_flushes(device)
        first_step(workload)
        resident_bytes = resident_bytes_of(workload).total

        def again(meter: Meter) -> Phase:
            randomness.restore()
            workload.zero_grad()
            before = faulted_bytes(device)
            warm_up = workload.step if workload.custom_step is not None else None
            step = metered(meter, lambda: losses.append(workload.step()), warm_up)
            if before is not None:
                faults.append((faulted_bytes(device) or 0) - before)
            return step

        peak_bytes = until_stepped(workload, lambda: again(memory_meter(device, resident_bytes, state))).peak_bytes
        held = held_for(device, peak_bytes)
        times = [until_stepped(workload, lambda: again(time_meter(device))).seconds for _ in range(repeats)]
        flushes = cache_flushes(device) - flushes
    return Measurement(
        peak_bytes=peak_bytes,
        allocated_bytes=held.allocated if held else None,
        reserved_bytes=held.reserved if held else None,
        seconds=statistics.median(times),
        step_seconds=tuple(times),
        loss=losses[0],
        faulted_bytes=min(faults, default=None),
        cache_flushes=flushes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The bytes of the model states in one step.

    Attributes:
        peak_bytes: most bytes alive at once in the whole step.
        peak_phase: the phase of the peak: ``forward``, ``backward`` or ``optimizer``.
        gradient_bytes: the gradients alive when backward was over.
        temporary_bytes: most bytes that the optimizer's step held besides gradients and states, unscaling and
            clipping included.
    """

    peak_bytes: int
    peak_phase: str
    gradient_bytes: int
    temporary_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStates:
    """The model states of a workload on its device, each storage counted once.

    Attributes:
        parameter_bytes: the model's parameters.
        other_parameter_bytes: the loss's, and those of the optimizer that are not the model's (master copies, say).
        state_bytes: the optimizer's states by name.
        scaler_bytes: the tensors that a scaler holds from step to step.
        cast_bytes: most bytes of casts of parameters alive at once in forward: autocast caches them until its end.
        kept_cast_bytes: the casts among them that are kept for backward.
        first: the step in which the optimizer made its states; None where it came with them, or there is none.
        steady: every later step.
    """

    parameter_bytes: int
    other_parameter_bytes: int
    state_bytes: tuple[tuple[str, int], ...]
    scaler_bytes: int
    cast_bytes: int
    kept_cast_bytes: int
    first: StepBytes | None
    steady: StepBytes


def measure_states(workload: Workload) -> MeasuredStates:
    """Measure the model states in a first step, a later one, and one forward that watches for casts.

    The workload is left as it was found.

    Raises:
        ProfileError: the step fails, or the model is in eval mode.
    """
    if not workload.model.training:
        raise ProfileError("model states: the model is in eval mode; call model.train()")
    with preserved(workload):
        randomness = RandomState()
        fresh = bool(workload.optimizers) and not any(each.state for each in with_inner(workload.optimizers))
        first_bytes = checked_step(workload, lambda: _step(workload))
        randomness.restore()
        steady = checked_step(workload, lambda: _step(workload))
        randomness.restore()
        cast_bytes, kept_bytes = _casts(workload)
        resident = resident_bytes_of(workload)
        return MeasuredStates(
            parameter_bytes=resident.parameters,
            other_parameter_bytes=resident.other_parameters,
            state_bytes=_by_name(workload),
            scaler_bytes=resident.scaler,
            cast_bytes=cast_bytes,
            kept_cast_bytes=kept_bytes,
            first=first_bytes if fresh else None,
            steady=steady,
        )


def _step(workload: Workload) -> StepBytes:
    """One whole step under the memory meter."""
    workload.zero_grad()
    before = resident_bytes_of(workload)
    meter = step_memory_meter(workload)
    gradient_bytes = 0

    def mark(phase: StepPhase, _: Tensor | None) -> None:
        nonlocal gradient_bytes
        if phase == "optimizer":
            gradient_bytes = resident_bytes_of(workload).gradients
        meter.mark(Mark(phase))

    phases = dict(metered_step(workload, meter, Mark, mark))
    made_bytes = optimizer_state_bytes(workload) - before.optimizer
    highest = max(phases, key=lambda mark: phases[mark].peak_bytes)
    optimizer = phases[Mark("optimizer")]
    return StepBytes(
        peak_bytes=phases[highest].peak_bytes,
        peak_phase=highest.phase,
        gradient_bytes=gradient_bytes,
        temporary_bytes=optimizer.peak_bytes - optimizer.start_bytes - made_bytes,
    )


def _by_name(workload: Workload) -> tuple[tuple[str, int], ...]:
    """The optimizer's states; a storage that several of them share counts for the first one."""
    names: dict[str, list[Tensor]] = {}
    seen: set[int] = set()
    for _, name, tensor in optimizer_tensors(workload.optimizers):
        if tensor.device.type == workload.device.type and storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))
            names.setdefault(name, []).append(tensor)
    return tuple((name, distinct_bytes(tensors)) for name, tensors in names.items())


def _casts(workload: Workload) -> tuple[int, int]:
    """Bytes of casts of parameters: the most at once in a forward, and those that its end leaves."""
    workload.zero_grad()
    watch = _CastWatch([*workload.model.parameters(), *workload.parameters_beside()])
    # Dynamo never compiles again what it met under a dispatch mode.
    step = uncompiled(workload.step) if is_compiled(workload.model) else workload.step
    kept_bytes = 0

    def begin(phase: StepPhase, _: Tensor | None) -> None:
        nonlocal kept_bytes
        kept_bytes = watch.alive_bytes()

    with watch:
        step(begin, until="backward")
    return watch.most_bytes, kept_bytes


class _CastWatch(TorchDispatchMode):
    """Watches for copies of parameters in another type."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__()
        self.most_bytes = 0
        self._parameters = {storage_key(p) for p in parameters if p.layout is torch.strided}
        self._casts: list[tuple[Callable[[], Any], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any_distributed(types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and storage_key(args[0]) in self._parameters:
            storage = storage_of(output)
            self._casts.append((weakref.ref(storage), storage.nbytes()))
            del storage
            self.most_bytes = max(self.most_bytes, self.alive_bytes())
        return output

    def alive_bytes(self) -> int:
        """Returns the bytes of the casts that are still alive."""
        return sum(size for reference, size in self._casts if reference() is not None)


STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """The cost of an optimizer.

    Attributes:
        state_bytes: the states kept from step to step.
        temporary_bytes: the most that a step holds besides gradients and states, clipping included.
        seconds: the time of a step, the median of a few.
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
        bare.step()  # States are made in it.
        resident = resident_bytes_of(bare)
        update = metered(memory_meter(bare.device, resident.total), bare.update)
        times = [metered(time_meter(bare.device), bare.update).seconds for _ in range(STEPS)]
    return OptimizerCost(
        state_bytes=resident.optimizer,
        temporary_bytes=update.peak_bytes - update.start_bytes,
        seconds=statistics.median(times),
    )
