"""Takes the peak of a whole step of a planned loop, from its first forward after an update to the next such forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from planner.plans.plan import Plan
from profiler.measurement.device_memory import requested_bytes
from profiler.measurement.meter import Mark, Meter, memory_meter
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

# Begins of steps at which a peak is asked for: the CPU's meter starts, is told, and ends.
BEGINS = 3
_STEP = Mark("forward")


class LoopPeak:
    """The peak of the first whole steps of a loop, of however many forwards each.

    A forward begins a step where an optimizer of the model's parameters has stepped since the one before, or something
    else has changed them. On CUDA the allocator's counters are read, which is free; on the CPU the profiler's events,
    over two steps: what a step finds there and lets go of is seen only if it was seen taken.

    Args:
        plan: that is applied.
        model: that it is applied to.
        device: that the model computes on.

    Attributes:
        is_over: all that was to be taken was taken, or another profiler took this one's place.
        is_lost: another profiler did.
    """

    def __init__(self, plan: Plan, model: nn.Module, device: torch.device) -> None:
        self.is_over = self.is_lost = False
        self._model = weakref.ref(model)
        self._peak = _CudaPeak(device, plan) if device.type == "cuda" else _CpuPeak()
        self._version: int | None = None
        self._stepped = False
        self._begins = 0
        self._hook = register_optimizer_step_post_hook(_noting(weakref.WeakMethod(self._note)))
        self._unhooked = weakref.finalize(self, self._hook.remove)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped: a fused one changes parameters without counting it."""
        if (model := self._model()) is not None:
            ours = {id(parameter) for parameter in model.parameters()}
            self._stepped |= any(
                id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]
            )

    def forward_begins(self, resident_bytes: int) -> int | None:
        """Most bytes at once in the step before, where this forward begins another and that one was metered.

        Args:
            resident_bytes: all that is there now.
        """
        if not self._begins_step() or self.is_over:
            return None
        if self._peak.is_lost():
            self.is_lost = True
            self.stop()
            return None
        if not self._peak.may_begin():
            return None
        self._begins += 1
        peak_bytes = self._peak.begin(resident_bytes)
        if self._begins == BEGINS:
            self.stop()
        return peak_bytes

    def _begins_step(self) -> bool:
        model = self._model()
        if model is None:
            return False
        if self._version is None:
            self._peak.loop_begins()
        version = sum(parameter._version for parameter in model.parameters() if parameter.requires_grad)
        begins = self._version is not None and (self._stepped or version != self._version)
        self._version, self._stepped = version, False
        return begins

    def pause(self) -> None:
        """What runs from now on is no part of the loop: begin anew with the next step that is."""
        self._peak.stop()
        self._version, self._begins = None, 0

    def stop(self) -> None:
        """Take no more peaks."""
        self._peak.stop()
        self._unhooked()
        self.is_over = True


def _noting(note: weakref.WeakMethod[Callable[[torch.optim.Optimizer], None]]) -> Callable[..., None]:
    def noting(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (method := note()) is not None:
            method(optimizer)

    return noting


class _CudaPeak:
    """The allocator's own peak, read at the begin of every step; nothing of it is reset where that can be helped.

    What others have on the device (workspaces of libraries, other models) is in its counters and left out here.
    """

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._device = device
        if requested_bytes(device).peak > plan.budget_bytes:  # An unplanned step ran before.
            torch.cuda.reset_peak_memory_stats(device)
        self._before_bytes = 0

    def loop_begins(self) -> None:
        """What was before is no peak of the loop."""
        self._before_bytes = requested_bytes(self._device).peak

    def is_lost(self) -> bool:
        """Counters are always there."""
        return False

    def may_begin(self) -> bool:
        """Counters are always there."""
        return True

    def begin(self, resident_bytes: int) -> int | None:
        """Most bytes at once in the step before, by what is there now; None where it was no new peak."""
        found = requested_bytes(self._device)
        before_bytes, self._before_bytes = self._before_bytes, found.peak
        return resident_bytes + found.peak - found.now if found.peak > before_bytes else None

    def stop(self) -> None:
        """Nothing runs."""


class _CpuPeak:
    """The memory meter over two steps: in the second it sees what the first one left go."""

    def __init__(self) -> None:
        self._meter: Meter | None = None
        self._marks = 0

    def loop_begins(self) -> None:
        """The meter starts with a step."""

    def is_lost(self) -> bool:
        """Whether another profiler has begun since the meter did: torch has one at a time, the last."""
        if self._meter is None or _is_ours():
            return False
        self._meter = None  # It is not to be stopped: that would end the other one.
        return True

    def may_begin(self) -> bool:
        """A profiler of the user's own is left alone."""
        return self._meter is not None or not torch.autograd._profiler_enabled()

    def begin(self, resident_bytes: int) -> int | None:
        """Most bytes at once in the step before, by what is there now; None where it was not metered."""
        if self._meter is None:
            self._meter, self._marks = memory_meter(torch.device("cpu"), 0), 1
            self._meter.start(_STEP)
            return None
        if self._marks == 1:
            self._marks = 2
            self._meter.mark(_STEP)
            return None
        meter, self._meter = self._meter, None
        _, step = meter.stop()[-1]
        return resident_bytes + step.peak_bytes - step.start_bytes

    def stop(self) -> None:
        """Stop a meter that still runs."""
        if self._meter is not None and _is_ours():
            self._meter.stop()
        self._meter = None


def _is_ours() -> bool:
    """Whether the profiler that runs was begun by a meter: torch's own say so where they begin."""
    return torch.autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled
