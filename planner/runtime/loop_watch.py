"""Watches the first steps of a planned loop for what the plan does not count on, and says once what holds it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from planner.plans.plan import Plan
from planner.runtime.plan_checks import say_once
from planner.units import format_bytes
from profiler.measurement.device_memory import requested_bytes
from profiler.measurement.meter import Mark, Meter, memory_meter
from profiler.tensors.storages import distinct_bytes, has_storage, storage_key, storage_of
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import CompiledForward, Forward, is_compiled, leave_uncompiled

leave_uncompiled(__name__)

# Forwards whose outputs are looked after; a meter runs from the begin of the second to that of the last.
WATCHED = 4
_STEP = Mark("forward")


class LoopWatch:
    """What a loop holds beside what its plan counts on, looked at as forwards begin.

    That gradients or outputs are there costs nothing to see. The peak is read from the allocator's counters on CUDA,
    where this is free, and from the profiler's events on the CPU.

    Args:
        plan: that is applied.
        model: that it is applied to.
        device: that it computes on.
        metered: also take the peak of a whole step.

    Attributes:
        peak_bytes: the most of those that were taken; None before.
    """

    def __init__(self, plan: Plan, model: nn.Module, device: torch.device, *, metered: bool) -> None:
        self._plan = plan
        self._model = weakref.ref(model)
        self._device = device
        self.peak_bytes: int | None = None
        self._forwards = 0
        self._outputs: list[tuple[weakref.ref[Any], int, str]] = []  # storages with their bytes and who made them
        self._makers: dict[int, tuple[weakref.ref[Any], str]] = {}  # of storages, the innermost modules
        # Whose outputs are held is looked for once some are: hooks on every module would slow all first forwards.
        self._names: Literal["unknown", "wanted", "seen"] = "unknown"
        self._said: set[str] = set()
        if plan.beside and device.type == "cpu":
            metered = False  # From one forward to the next is no step.
        self._meter = None if not metered else _CudaPeak(device, plan) if device.type == "cuda" else _CpuPeak()

    def forward_begins(self) -> None:
        """Look at what is there."""
        self._forwards += 1
        model = self._model()
        if model is None:
            return
        more_bytes = self._look_for_gradients(model)
        if self._forwards > WATCHED:
            return
        if self._forwards > 1:
            more_bytes += self._look_for_outputs(max(0, -more_bytes))
            self._take_peak(more_bytes)

    @contextlib.contextmanager
    def forward(self, forward: Forward) -> Iterator[None]:
        """Around a forward; of the one after an output was found still held it sees which module makes what.

        Args:
            forward: that runs; in compiled code nothing is seen, since a hook would make it another.
        """
        model = self._model()
        seeing, self._names = self._names == "wanted", "seen" if self._names == "wanted" else self._names
        if model is None or not seeing or isinstance(forward, CompiledForward) or is_compiled(model):
            yield
            return
        names = {id(module): name for name, module in model.named_modules() if name}

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if (name := names.get(id(module))) is not None:
                for tensor in tensors_in(output):
                    known = self._makers.get(storage_key(tensor))
                    if has_storage(tensor) and (known is None or known[0]() is None):
                        self._makers[storage_key(tensor)] = weakref.ref(storage_of(tensor)), name

        hook = register_module_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def forward_ends(self, output: Any) -> None:
        """Remember what the model returned, without holding it."""
        if self._forwards > WATCHED:
            return
        seen: set[int] = set()
        for tensor in tensors_in(output):
            if has_storage(tensor) and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                storage = storage_of(tensor)
                _, maker = self._makers.get(storage_key(tensor), (None, ""))
                self._outputs.append((weakref.ref(storage), storage.nbytes(), maker))
        self._makers.clear()

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say_once(text)

    def _look_for_gradients(self, model: nn.Module) -> int:
        """By how many bytes gradients are more than those that the plan counts on."""
        there_bytes = distinct_bytes(p.grad for p in model.parameters() if p.is_leaf and p.grad is not None)
        more_bytes = there_bytes - self._expected_gradient_bytes()
        if more_bytes > 0:
            self._say(
                "gradients",
                f"planner.apply: expected gradients of {format_bytes(there_bytes - more_bytes)} as a forward begins, "
                f"got {format_bytes(there_bytes)}: the peak may be {format_bytes(more_bytes)} higher. Clear them "
                "before forward (zero_grad), or profile the loop as it is: Workload(step=...), or accumulate=True",
            )
        return more_bytes

    def _expected_gradient_bytes(self) -> int:
        plan = self._plan
        resident = 0 if plan.resident is None else plan.resident.gradients
        beside = 0 if plan.chain is None else max(0, plan.chain.resident_bytes - plan.resident_bytes)
        return resident + beside

    def _look_for_outputs(self, spare_bytes: int) -> int:
        """By how many bytes outputs that are still held are more than those that the plan counts on between two steps.

        Args:
            spare_bytes: by which gradients are fewer than what the plan counts on beside that: within a step of
                several forwards, where the measured one began, there may be outputs of those before.
        """
        if self._plan.beside:
            return 0  # Those of the micro-batches in flight are counted with what each of them keeps.
        self._outputs = [entry for entry in self._outputs if entry[0]() is not None]
        expected_bytes = 0 if self._plan.resident is None else self._plan.resident.loop
        more_bytes = sum(size for _, size, _ in self._outputs) - expected_bytes
        said_bytes = more_bytes - spare_bytes
        if said_bytes > 0 and self._names == "unknown":
            self._names = "wanted"
        elif said_bytes > 0:
            _, size, maker = max(self._outputs, key=lambda entry: (entry[1], bool(entry[2])))
            made_by = f", made by {maker}" if maker else ""
            remedy = "delete it before backward" if not expected_bytes else "keep one at a time"
            known = "" if expected_bytes else "keeps_output=True or "
            self._say(
                "outputs",
                f"planner.apply: your loop still holds the model's output, {format_bytes(size)}{made_by}: the peak may "
                f"be {format_bytes(said_bytes)} higher than the plan's; {remedy}, or profile with {known}"
                "Workload(step=...)",
            )
        # What a step of the user's own refers to stays, whatever becomes of an output.
        own_step = self._plan.resident is not None and not self._plan.resident.inputs
        return max(0, more_bytes) if own_step else more_bytes

    def _take_peak(self, more_bytes: int) -> None:
        """Of the step before.

        Args:
            more_bytes: by which there is more now than the plan counts on.
        """
        if self._meter is None:
            return
        resident_bytes = self._plan.resident_bytes if self._plan.chain is None else self._plan.chain.resident_bytes
        peak_bytes = self._meter.begin(resident_bytes + more_bytes)
        if peak_bytes is not None:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)
        over_bytes = 0 if peak_bytes is None else peak_bytes - self._plan.budget_bytes
        if over_bytes > 0:
            beside_bytes = over_bytes - max(0, more_bytes)
            what = f", {format_bytes(beside_bytes)} of it by what this watch cannot name" if beside_bytes > 0 else ""
            self._say(
                "peak",
                f"planner.apply: a step of your loop takes {format_bytes(self._plan.budget_bytes + over_bytes)}, "
                f"{format_bytes(over_bytes)} above the budget{what}. Profile the loop as it is: Workload(step=...)",
            )
        if self._forwards == WATCHED:
            self._meter.stop()
            self._meter = None


class _CudaPeak:
    """The allocator's own peak, read at the begin of every step; nothing of it is reset where that can be helped.

    What others have on the device (workspaces of libraries, other models) is in its counters and left out here.
    """

    def __init__(self, device: torch.device, plan: Plan) -> None:
        self._device = device
        if requested_bytes(device).peak > plan.budget_bytes:  # An unplanned step ran before.
            torch.cuda.reset_peak_memory_stats(device)
        self._before_bytes = requested_bytes(device).peak

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
        self._began = 0

    def begin(self, resident_bytes: int) -> int | None:
        """Most bytes at once in the step before, by what is there now; None where it was not metered."""
        self._began += 1
        if self._began == 1 and not torch.autograd._profiler_enabled():
            self._meter = memory_meter(torch.device("cpu"), 0)
            self._meter.start(_STEP)
        elif self._began == 2 and self._meter is not None:
            self._meter.mark(_STEP)
        elif self._began == 3 and self._meter is not None:
            meter, self._meter = self._meter, None
            _, step = meter.stop()[-1]
            return resident_bytes + step.peak_bytes - step.start_bytes
        return None

    def stop(self) -> None:
        """Stop a meter that still runs."""
        if self._meter is not None:
            self._meter.stop()
            self._meter = None


def is_metered(watch: bool | None, device: torch.device) -> bool:
    """Whether the peak is taken: by default where that is free."""
    return device.type == "cuda" if watch is None else watch
