"""Explains a step that takes more memory than there is: in which op, and the remedies."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.measurement.device_memory import MEMORY, AllocatorEvents
from profiler.measurement.meter import Mark, MarkedPhases, WarmUp
from profiler.measurement.stage_probe import WHERE
from profiler.records import ResidentBytes
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.steps import causes_of, resident_bytes_of, states_bytes
from profiler.workload.tensor_parts import any_distributed
from profiler.workload.workload import Workload

leave_uncompiled(__name__)

MIB = 2**20


def remedies(workload: Workload, needed_bytes: int, limit_bytes: int) -> str:
    """Returns changes that would about fit into a limit; states count once, a batch by its size.

    Args:
        workload: the workload of the step, with its optimizer's states.
        needed_bytes: the bytes that the step takes.
        limit_bytes: the bytes that it may take.
    """
    resident = resident_bytes_of(workload)
    levers = _levers(workload, resident, needed_bytes)
    fit = {name: size_bytes for name, size_bytes in levers.items() if size_bytes <= limit_bytes}
    known = ", ".join(f"{name} ({size_bytes / MIB:,.1f} MiB)" for name, size_bytes in (fit or levers).items())
    if fit:
        return f"what would about fit: {known}"
    return f"make the model smaller, as not even these would fit{f': {known}' if known else ''}"


def _levers(workload: Workload, resident: ResidentBytes, needed_bytes: int) -> dict[str, int]:
    """Returns the approximate bytes of the step with each change, and with all of them."""
    whatever_the_batch = states_bytes(workload, resident)
    samples = {shape[0] for shape in workload.input_shapes if shape}
    without = needed_bytes - resident.optimizer
    halves = {p.dtype for p in workload.model.parameters() if p.is_floating_point()} == {torch.float32}
    levers: dict[str, int] = {}
    if samples and max(samples) > 1:
        levers["half the batch"] = whatever_the_batch + max(0, needed_bytes - whatever_the_batch) // 2
        levers["a batch of one"] = whatever_the_batch + max(0, needed_bytes - whatever_the_batch) // max(samples)
    if resident.optimizer:
        levers["SGD without momentum"] = without
    if halves:
        levers["bf16 throughout"] = needed_bytes // 2
    return levers


def where_raised(error: BaseException, model: nn.Module) -> str:
    """The stage in which an error was raised, or the innermost module; empty where neither is known."""
    names = {id(module): name for name, module in model.named_modules() if name}
    inner = ""
    for cause in causes_of(error):
        if stage := getattr(cause, WHERE, ""):
            return stage
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            name = names.get(id(frame.f_locals.get("self")))
            inner = f"in module {name!r}" if name else inner
    return inner


def op_meter(device: torch.device) -> OpMeter:
    """The meter that finds ops for ``device``."""
    return _CudaOpMeter(device) if device.type == "cuda" else _CpuOpMeter()


class OpMeter(ABC):
    """A meter of no bytes: it finds the op in which most are alive, in each interval between marks.

    Attributes:
        ops: the op, by mark, of the interval with that mark in which the most bytes were alive; missing where no op
            ran.
    """

    def __init__(self) -> None:
        self.ops: dict[Mark, str] = {}
        self._most: dict[Mark, int] = {}

    def start(self, mark: Mark, warm_up: WarmUp = None) -> None:
        if warm_up is not None:
            warm_up()
        self._begin()
        self.mark(mark)

    @abstractmethod
    def mark(self, mark: Mark) -> None: ...

    def stop(self) -> MarkedPhases:
        self._end()
        return []

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...

    def _note(self, mark: Mark, alive_bytes: int, op: str) -> None:
        if alive_bytes > self._most.get(mark, -(2**63)):
            self._most[mark], self.ops[mark] = alive_bytes, op


class _CpuOpMeter(OpMeter):
    """Finds the op by the allocator's events, and those of the ops around them."""

    def __init__(self) -> None:
        super().__init__()
        self._events = AllocatorEvents(ops=True)
        self._marks: list[Mark] = []

    def _begin(self) -> None:
        self._events.start()

    def mark(self, mark: Mark) -> None:
        self._marks.append(mark)
        with torch.profiler.record_function(f"{_MARK}{len(self._marks) - 1}"):
            pass

    def _end(self) -> None:
        alive, mark = 0, None
        around: list[tuple[int, str]] = []  # ends of ops that have begun and may not have ended, the outermost first
        for now, duration_ns, name, change_bytes in self._events.stop():
            if name.startswith(_MARK):
                mark = self._marks[int(name.removeprefix(_MARK))]
            elif name == MEMORY:
                alive += change_bytes
                around = [(end, op) for end, op in around if end >= now]
                if mark is not None and around:
                    self._note(mark, alive, around[0][1])
            elif name.startswith("aten::"):
                around = [(end, op) for end, op in around if end >= now]
                around.append((now + duration_ns, name))


_MARK = "sublinear-planner-op:"


class _CudaOpMeter(OpMeter):
    """Finds the op by the allocator's peak after each op."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._mode = _AfterEachOp(self._after)
        self._now: Mark | None = None

    def _begin(self) -> None:
        self._mode.__enter__()

    def mark(self, mark: Mark) -> None:
        self._now = mark
        torch.cuda.reset_peak_memory_stats(self._device)

    def _after(self, op: Any) -> None:
        if self._now is not None:
            self._note(self._now, torch.cuda.max_memory_allocated(self._device), op._schema.name)

    def _end(self) -> None:
        self._mode.__exit__(None, None, None)


class _AfterEachOp(TorchDispatchMode):
    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any_distributed(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._note(func)
        return result
