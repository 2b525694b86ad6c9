"""Meters of bytes alive on the device, by its allocator's own events, and of seconds, between the marks of a step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from profiler.current_device import active_device, host_seconds
from profiler.measurement.device_memory import MEMORY, AllocatorEvent, AllocatorEvents, requested_bytes
from profiler.recomputation.saved_tensors import PLAIN_TENSORS, geometry_of, tensor_over
from profiler.records import Phase
from profiler.simulation.simulated_device import SimulatedDevice
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.data_parallel import CopiesOfThreads, in_flight_bytes
from profiler.workload.random_states import RandomState
from profiler.workload.steps import TensorsOfState, resident_bytes_of
from profiler.workload.tensor_parts import has_storage, storage_key
from profiler.workload.workload import OnPhase, StepPhase, Workload

leave_uncompiled(__name__)

_EVENT = "sublinear-planner:"


@dataclass(frozen=True, slots=True)
class Place:
    """A stage, or what runs outside of stages directly before one (``index`` their number: after the last one)."""

    kind: Literal["stage", "outside"]
    index: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The phase, and the place, that begins at a moment of a step.

    Attributes:
        phase: ``again``: a stage runs another time, in backward; ``loss``: backward, before any of its nodes has run;
            ``collected``: the step is over, and cyclic garbage is collected.
        place: the place of the phase; None for phases without places.
    """

    phase: StepPhase | Literal["loss", "again", "collected"]
    place: Place | None = None


# The marks of a step in order, each with what happened until the next one. Bytes are those alive on the device,
# resident ones included; seconds are 0 where memory is metered, and bytes where time is.
MarkedPhases = list[tuple[Mark, Phase]]


WarmUp = Callable[[], object] | None


class Meter(Protocol):
    """Takes marks while a step runs and tells afterwards what lay between them.

    A custom step is given to ``start`` to run once before: a meter that counts changes then sees what it
    leaves, and the next one lets go of.
    """

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None: ...

    def mark(self, mark: Mark) -> None: ...

    def stop(self) -> MarkedPhases: ...


def memory_meter(device: torch.device, resident_bytes: int, state: TensorsOfState | None = None) -> Meter:
    """The exact memory meter for ``device``.

    Args:
        device: ``cpu`` (events of ``torch.profiler``) or ``cuda`` (allocator statistics).
        resident_bytes: bytes already alive when ``start`` is called. On the
            CPU the events only count changes, so this is where they start
            from; on CUDA the allocator's own total is shifted to it.
        state: of the workload whose step is metered; that it lets go of such
            tensors is seen only with it.

    Raises:
        ValueError: another kind of device.
    """
    if (simulated := active_device()) is not None:
        return _SimulatedMemoryMeter(simulated, resident_bytes)
    if device.type == "cpu":
        return _CpuMemoryMeter(resident_bytes, state)
    if device.type == "cuda":
        return _CudaMemoryMeter(device, resident_bytes)
    raise ValueError(f"device: expected cpu or cuda, got {device.type!r}; move the model to one of them")


def step_memory_meter(workload: Workload) -> Meter:
    """The memory meter for the next step of a workload, which begins where gradients are cleared."""
    workload.zero_grad()
    return memory_meter(workload.device, resident_bytes_of(workload).total, TensorsOfState(workload))


def time_meter(device: torch.device) -> Meter:
    """The meter of seconds for ``device``: wall clock on the CPU, events on CUDA."""
    return _CudaTimeMeter(device) if device.type == "cuda" else _CpuTimeMeter()


class _CpuMemoryMeter:
    """Counts from the allocator's events.

    It tells of memory that is given back only where it saw it taken. What a step finds there and lets go of has to be
    taken while it runs: ``state`` is moved to other memory as it starts, and ``warm_up`` runs before the first mark.
    """

    def __init__(self, resident_bytes: int, state: TensorsOfState | None) -> None:
        self._resident_bytes = resident_bytes
        self._state = state
        self._moved: list[_Moved] = []
        self._events = AllocatorEvents()
        self._marks: list[Mark] = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        self._events.start()
        if warm_up is not None:
            warm_up()
        if self._state is not None:
            self._moved = _moved(self._state.now())
        self.mark(mark)

    def mark(self, mark: Mark) -> None:
        event = f"{_EVENT}{len(self._marks)}"  # The profiler takes text: a mark goes by its number.
        self._marks.append(mark)
        with torch.profiler.record_function(event):
            pass

    def stop(self) -> MarkedPhases:
        events = self._events.stop()
        for moved in self._moved:
            moved.put_back()
        self._moved = []  # A graph that lives on may hold this meter, by the hooks of its step.
        return _cumulated(events, self._marks, self._resident_bytes)


class _Moved:
    """Tensors over one storage that lie in another one for as long as the profiler runs.

    It tells of memory that is given back only where it saw it taken. For other memory it tells nothing, or the bytes of
    what lay there before.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._before = [(weakref.ref(tensor), tensor.data) for tensor in tensors]
        self._storage = tensors[0].untyped_storage()
        self._moved_to = weakref.ref(copied := self._storage.clone())
        for tensor in tensors:
            tensor.data = tensor_over(copied, geometry_of(tensor))

    def put_back(self) -> None:
        """Puts tensors that are still there back where they lay, with the values that they have now."""
        if (now := self._moved_to()) is None:
            return
        alive = [(tensor, before) for reference, before in self._before if (tensor := reference()) is not None]
        there = [(tensor, before) for tensor, before in alive if storage_key(tensor) == now._cdata]
        if there:
            self._storage.copy_(now)
        for tensor, before in there:
            tensor.data = before


def _moved(tensors: list[Tensor]) -> list[_Moved]:
    by_storage: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if type(tensor) in PLAIN_TENSORS and has_storage(tensor):
            by_storage.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
    return [_Moved(list(together.values())) for together in by_storage.values()]


def _cumulated(events: list[AllocatorEvent], marks: list[Mark], resident_bytes: int) -> MarkedPhases:
    """Cumulate the changes of the CPU allocator between marks, in time order."""
    phases: MarkedPhases = []
    mark, start, peak, live = None, resident_bytes, resident_bytes, resident_bytes
    for event in events:
        if event.name == MEMORY:
            if mark is not None:
                live += event.change_bytes
                peak = max(peak, live)
        elif event.name.startswith(_EVENT):
            if mark is not None:
                phases.append((mark, Phase(start_bytes=start, peak_bytes=peak, end_bytes=live)))
            mark, start, peak = marks[int(event.name.removeprefix(_EVENT))], live, live
    assert mark is not None
    return [*phases, (mark, Phase(start_bytes=start, peak_bytes=peak, end_bytes=live))]


class _CudaMemoryMeter:
    """Bytes that tensors ask for; what the allocator takes beside them is no part of a phase (``held_for``)."""

    def __init__(self, device: torch.device, resident_bytes: int) -> None:
        self._device = device
        self._resident_bytes = resident_bytes
        self._shift_bytes = 0
        self._mark = Mark("forward")
        self._start_bytes = 0
        self._phases: MarkedPhases = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        torch.cuda.synchronize(self._device)
        # Tensors of others on the device are no part of the step.
        self._shift_bytes = self._resident_bytes - requested_bytes(self._device).now
        self._begin(mark)

    def _begin(self, mark: Mark) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._mark = mark
        self._start_bytes = requested_bytes(self._device).now + self._shift_bytes

    def _end(self) -> None:
        found = requested_bytes(self._device)
        phase = Phase(
            start_bytes=self._start_bytes,
            peak_bytes=found.peak + self._shift_bytes,
            end_bytes=found.now + self._shift_bytes,
        )
        self._phases.append((self._mark, phase))

    def mark(self, mark: Mark) -> None:
        self._end()
        self._begin(mark)

    def stop(self) -> MarkedPhases:
        torch.cuda.synchronize(self._device)
        self._end()
        return self._phases


class _SimulatedMemoryMeter:
    """Reads the bytes that a simulated device counts."""

    def __init__(self, device: SimulatedDevice, resident_bytes: int) -> None:
        self._device, self._resident_bytes = device, resident_bytes
        self._shift_bytes = 0
        self._mark = Mark("forward")
        self._start_bytes = 0
        self._phases: MarkedPhases = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        if warm_up is not None:
            warm_up()
        self._shift_bytes = self._resident_bytes - self._device.live_bytes
        self._begin(mark)

    def _begin(self, mark: Mark) -> None:
        self._device.forget_peak()
        self._mark, self._start_bytes = mark, self._device.live_bytes + self._shift_bytes

    def _end(self) -> None:
        device, shift = self._device, self._shift_bytes
        phase = Phase(
            start_bytes=self._start_bytes,
            peak_bytes=device.peak_bytes + shift,
            end_bytes=device.live_bytes + shift,
        )
        self._phases.append((self._mark, phase))

    def mark(self, mark: Mark) -> None:
        self._end()
        self._begin(mark)

    def stop(self) -> MarkedPhases:
        self._end()
        return self._phases


_LETTING_GO_SECONDS = 2e-3  # gloo's threads need far less where a core is free


class ShardedMemoryMeter:
    """A memory meter for models under ``fully_shard``: what its buffers add to a phase, and to the peak by chance.

    Forwards begin and end without the buffers in which parameters were gathered: one unit's are given back as the next
    is called, whatever is kept in between, and are a part of the peak alone. Copies of what was reduced may be there
    until something is gathered again, or not: peaks have them.

    Args:
        meter: the meter of the bytes.
        states: the states of the units.
    """

    def __init__(self, meter: Meter, states: Sequence[Any]) -> None:
        self._meter, self._states = meter, states
        self._taken: list[int] = []
        self._perhaps: list[int] = []
        self._copies = CopiesOfThreads(states)

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        self._meter.start(mark, warm_up)
        self._note(mark)

    def mark(self, mark: Mark) -> None:
        self._note(mark)
        if self._perhaps[-1]:
            time.sleep(_LETTING_GO_SECONDS)  # It counts as there from here on: it should not be there as well.
        self._meter.mark(mark)

    def stop(self) -> MarkedPhases:
        phases, taken = self._meter.stop(), [*self._taken, 0]
        return [
            (mark, _moved_by(phase, begin, perhaps, end))
            for (mark, phase), perhaps, (begin, end) in zip(
                phases, self._perhaps, itertools.pairwise(taken), strict=True
            )
        ]

    def _note(self, mark: Mark) -> None:
        in_flight = in_flight_bytes(self._states)
        self._taken.append(in_flight if mark.phase == "forward" else 0)
        self._perhaps.append(self._copies.size_now())


def _moved_by(phase: Phase, begin: int, perhaps: int, end: int) -> Phase:
    start_bytes, end_bytes = phase.start_bytes - begin, phase.end_bytes - end
    return replace(phase, start_bytes=start_bytes, peak_bytes=phase.peak_bytes + perhaps, end_bytes=end_bytes)


class NoMeter:
    """Takes marks for steps that nothing is to be known of."""

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        pass

    def mark(self, mark: Mark) -> None:
        pass

    def stop(self) -> MarkedPhases:
        return []


class _CpuTimeMeter:
    def __init__(self) -> None:
        self._marks: list[Mark] = []
        self._moments: list[Any] = []

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        self.mark(mark)

    def mark(self, mark: Mark) -> None:
        self._marks.append(mark)
        self._moments.append(self._now())

    def stop(self) -> MarkedPhases:
        self._moments.append(self._now())
        lengths = itertools.starmap(self._seconds, itertools.pairwise(self._moments))
        return [(mark, Phase(seconds=seconds)) for mark, seconds in zip(self._marks, lengths, strict=True)]

    def _now(self) -> Any:
        return host_seconds()

    def _seconds(self, begin: Any, end: Any) -> float:
        return end - begin


class _CudaTimeMeter(_CpuTimeMeter):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        torch.cuda.synchronize(self._device)
        super().start(mark)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0


def metered(meter: Meter, run: Callable[[], Any], warm_up: WarmUp = None) -> Phase:
    """Call ``run`` under a meter that gets no other mark; the meter is stopped also after an exception."""
    meter.start(Mark("forward"), warm_up)
    try:
        run()
    finally:
        ((_, phase),) = meter.stop()
    return phase


def metered_step(
    workload: Workload,
    meter: Meter,
    first: Callable[[StepPhase], Mark],
    on_phase: OnPhase,
    *,
    until: StepPhase | None = None,
    warm_up: WarmUp = None,
    at_end: Callable[[], object] = lambda: None,
) -> MarkedPhases:
    """One training step under a meter; the meter is stopped also after an exception.

    Args:
        workload: the workload of the step.
        meter: the meter, started when gradients are cleared and the first phase begins.
        first: the mark of that phase: the forward that is measured, or another one before it.
        on_phase: the function that makes the marks of the later phases.
        until: the phase to stop at, as for ``Workload.step``.
        warm_up: the function that runs a whole step before that, which draws the same numbers; needed for a custom
            step, which may have drawn what it runs before its first phase.
        at_end: the function to call once the step is over, before the meter stops.
    """
    phases: MarkedPhases = []
    first_step = None if warm_up is None else functools.partial(RandomState().repeat, warm_up)
    with contextlib.ExitStack() as on_exit:
        started = False

        def begin(phase: StepPhase, loss: Tensor | None) -> None:
            nonlocal started
            if not started:
                started = True
                meter.start(first(phase), first_step)
                on_exit.callback(lambda: phases.extend(meter.stop()))
            else:
                on_phase(phase, loss)

        workload.step(begin, until)
        at_end()
    return phases


PhasesOfMark = dict[Mark, list[Phase]]


def by_mark(phases: MarkedPhases) -> PhasesOfMark:
    """Phases grouped by their marks, both in order of time."""
    grouped: PhasesOfMark = {}
    for mark, phase in phases:
        grouped.setdefault(mark, []).append(phase)
    return grouped


def typical_seconds(runs: list[MarkedPhases]) -> dict[Mark, float]:
    """Seconds per mark: the median over the runs, of two runs the smaller (a machine stalls, it never hurries)."""
    seconds: dict[Mark, list[float]] = {}
    for run in runs:
        for mark, phases in by_mark(run).items():
            seconds.setdefault(mark, []).append(sum(phase.seconds for phase in phases))
    return {mark: statistics.median_low(values) for mark, values in seconds.items()}


def joined(phases: Sequence[Phase] | None, seconds: float) -> Phase:
    """Phases that follow each other as one, with its seconds, which another run has measured."""
    if not phases:
        return Phase(seconds=seconds)
    return Phase(
        start_bytes=phases[0].start_bytes,
        peak_bytes=max(phase.peak_bytes for phase in phases),
        end_bytes=phases[-1].end_bytes,
        seconds=seconds,
    )


def highest(phases: Sequence[Phase], seconds: float) -> Phase:
    """Phases of one kind as one that begins, reaches and ends at the most of them."""
    if not phases:
        return Phase()
    return Phase(
        start_bytes=max(phase.start_bytes for phase in phases),
        peak_bytes=max(phase.peak_bytes for phase in phases),
        end_bytes=max(phase.end_bytes for phase in phases),
        seconds=seconds,
    )


def extended(phase: Phase, following: Phase) -> Phase:
    """A phase and the one that follows it as one."""
    return joined([phase, following], phase.seconds + following.seconds)
