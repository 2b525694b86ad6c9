"""The true-peak meter: bytes alive on the device between marks, from the allocator's own events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

_MARK = "sublinear-planner:"


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened from one mark to the next.

    Bytes are those alive on the device, resident ones included; seconds are 0
    where only memory was metered and the other way round.
    """

    label: str
    start_bytes: int = 0
    peak_bytes: int = 0
    end_bytes: int = 0
    seconds: float = 0.0


class Meter(Protocol):
    """Takes marks while a step runs and tells afterwards what lay between them."""

    def start(self, label: str) -> None: ...

    def mark(self, label: str) -> None: ...

    def stop(self) -> list[Interval]: ...


def memory_meter(device: torch.device, resident_bytes: int) -> Meter:
    """The exact memory meter for ``device``.

    Args:
        device: ``cpu`` (events of ``torch.profiler``) or ``cuda`` (allocator statistics).
        resident_bytes: bytes already alive when ``start`` is called. On the
            CPU the events only count changes, so this is where they start
            from; on CUDA the allocator's own total is shifted to it.

    Raises:
        ValueError: another kind of device.
    """
    if device.type == "cpu":
        return _CpuMemoryMeter(resident_bytes)
    if device.type == "cuda":
        return _CudaMemoryMeter(device, resident_bytes)
    raise ValueError(f"device: expected cpu or cuda, got {device.type!r}; move the model to one of them")


def time_meter(device: torch.device) -> Meter:
    """The meter of seconds for ``device``: wall clock on the CPU, events on CUDA."""
    return _CudaTimeMeter(device) if device.type == "cuda" else _CpuTimeMeter()


class _CpuMemoryMeter:
    def __init__(self, resident_bytes: int) -> None:
        self._resident_bytes = resident_bytes
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def start(self, label: str) -> None:
        self._profiler.start()
        self.mark(label)

    def mark(self, label: str) -> None:
        with torch.profiler.record_function(_MARK + label):
            pass

    def stop(self) -> list[Interval]:
        self._profiler.stop()
        kineto = self._profiler.profiler
        assert kineto is not None and kineto.kineto_results is not None
        return _intervals(kineto.kineto_results.events(), self._resident_bytes)


def _intervals(events: list[Any], resident_bytes: int) -> list[Interval]:
    """Cumulate the ``[memory]`` events of the CPU allocator between marks, in time order."""
    timed = sorted(
        ((event.start_ns(), event) for event in events if _is_wanted(event)),
        key=lambda pair: pair[0],
    )
    found: list[Interval] = []
    label, start, peak, live = "", resident_bytes, resident_bytes, resident_bytes
    for _, event in timed:
        name = event.name()
        if name == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
            continue
        if label:
            found.append(Interval(label, start, peak, live))
        label, start, peak = name[len(_MARK) :], live, live
    found.append(Interval(label, start, peak, live))
    return found


def _is_wanted(event: Any) -> bool:
    name = event.name()
    if name == "[memory]":
        return event.device_type() == torch.autograd.DeviceType.CPU
    return name.startswith(_MARK)


class _CudaMemoryMeter:
    def __init__(self, device: torch.device, resident_bytes: int) -> None:
        self._device = device
        self._resident_bytes = resident_bytes
        self._shift_bytes = 0
        self._label = ""
        self._start_bytes = 0
        self._found: list[Interval] = []

    def start(self, label: str) -> None:
        torch.cuda.synchronize(self._device)
        # Tensors of others on the device are no part of the step.
        self._shift_bytes = self._resident_bytes - torch.cuda.memory_allocated(self._device)
        self._begin(label)

    def _begin(self, label: str) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._label = label
        self._start_bytes = torch.cuda.memory_allocated(self._device) + self._shift_bytes

    def _end(self) -> None:
        self._found.append(
            Interval(
                self._label,
                self._start_bytes,
                torch.cuda.max_memory_allocated(self._device) + self._shift_bytes,
                torch.cuda.memory_allocated(self._device) + self._shift_bytes,
            )
        )

    def mark(self, label: str) -> None:
        self._end()
        self._begin(label)

    def stop(self) -> list[Interval]:
        torch.cuda.synchronize(self._device)
        self._end()
        return self._found


class _CpuTimeMeter:
    def __init__(self) -> None:
        self._marks: list[tuple[str, float]] = []

    def start(self, label: str) -> None:
        self.mark(label)

    def mark(self, label: str) -> None:
        self._marks.append((label, time.perf_counter()))

    def stop(self) -> list[Interval]:
        self.mark("")
        return [Interval(label, seconds=end - begin) for (label, begin), (_, end) in _pairs(self._marks)]


class _CudaTimeMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def start(self, label: str) -> None:
        torch.cuda.synchronize(self._device)
        self.mark(label)

    def mark(self, label: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((label, event))

    def stop(self) -> list[Interval]:
        self.mark("")
        torch.cuda.synchronize(self._device)
        return [
            Interval(label, seconds=begin.elapsed_time(end) / 1000.0)
            for (label, begin), (_, end) in _pairs(self._marks)
        ]


def _pairs(marks: list[Any]) -> list[tuple[Any, Any]]:
    return list(itertools.pairwise(marks))


def metered(meter: Meter, run: Callable[[], Any], label: str = "step") -> list[Interval]:
    """Run ``run`` under ``meter`` and return its intervals; the meter is stopped also after an exception."""
    meter.start(label)
    try:
        run()
    finally:
        found = meter.stop()
    return found
