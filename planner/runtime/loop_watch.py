"""Watches the first steps of a planned loop for memory that the plan does not count on, and warns once of its owner.

It also takes the peak of whole steps, from the first forward after an update to the next such forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from planner.plans.plan import Plan
from planner.runtime.plan_checks import PlanWarnings, parameter_tables
from planner.units import format_bytes
from profiler.measurement.device_memory import requested_bytes
from profiler.measurement.meter import Mark, Meter, memory_meter
from profiler.workload.compiled_forwards import CompiledForward, Forward, is_compiled, leave_uncompiled
from profiler.workload.tensor_parts import distinct_bytes, has_storage, storage_key, storage_of
from profiler.workload.tensor_trees import tensors_in

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
        plan: the applied plan.
        model: the model with the plan.
        device: the device on which it computes.

    Attributes:
        is_over: no more peaks are taken: all were, or another profiler took the place of this one.
        is_lost: another profiler took the place of this one.
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
            resident_bytes: bytes that are alive now.
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
        """Leave out the steps from now on, which are not of the loop, until the next one that is."""
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
        """Leave out peaks of what ran before the loop."""
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
    """Whether the running profiler was begun by a meter: those of torch set a flag as they begin."""
    return torch.autograd._profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled


_LOST = (
    "planner.apply: another profiler was begun while watch=True measured the loop over two steps, so its peak is not "
    "measured; begin the other one after the fourth step, or leave watch=True out"
)
WATCHED = 4  # forwards whose outputs are looked after, and more as long as a peak is still to be taken


class LoopWatch:
    """Finds memory that a loop holds in addition to what its plan counts on, as forwards begin.

    Looking for gradients and outputs costs nothing.

    Args:
        plan: the applied plan.
        model: the model with the plan.
        device: the device on which it computes.
        warn: gives the warnings of the plan.
        metered: also take the peak of a whole step.

    Attributes:
        peak_bytes: the highest measured peak; None before the first.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, device: torch.device, warn: PlanWarnings, *, metered: bool
    ) -> None:
        self._plan = plan
        self._model = weakref.ref(model)
        self._owned = parameter_tables(model)
        self.peak_bytes: int | None = None
        self._forwards = 0
        self._outputs: list[tuple[weakref.ref[Any], int, str]] = []  # storages with their bytes and who made them
        self._makers: dict[int, tuple[weakref.ref[Any], str]] = {}  # of storages, the innermost modules
        # Whose outputs are held is looked for once some are: hooks on every module would slow all first forwards.
        self._names: Literal["unknown", "wanted", "seen"] = "unknown"
        self._warn = warn
        if plan.in_flight and device.type == "cpu":
            metered = False  # Several micro-batches are in flight as one of them begins.
        self._peak = LoopPeak(plan, model, device) if metered else None

    def forward_begins(self) -> None:
        """Look for gradients and outputs that are alive, and take the peak of the step before."""
        self._forwards += 1
        more_bytes = self._look_for_gradients()
        if self._looks_after_outputs and self._forwards > 1:
            more_bytes += self._look_for_outputs(max(0, -more_bytes))
        if self._peak is not None:
            self._take_peak(self._peak, more_bytes)

    @contextlib.contextmanager
    def outside_loop(self) -> Iterator[None]:
        """Inside, no peak of steps is taken: they are metered by themselves, and are not of the loop."""
        peak = self._peak
        try:
            self._peak = None
            if peak is not None:
                peak.pause()
            yield
        finally:
            self._peak = peak

    def end(self) -> None:
        """Take no more peaks: the plan is taken off."""
        if self._peak is not None:
            self._peak.stop()
            self._peak = None

    @property
    def _looks_after_outputs(self) -> bool:
        return self._forwards <= WATCHED or self._peak is not None

    @contextlib.contextmanager
    def forward(self, forward: Forward) -> Iterator[None]:
        """Wraps a forward; after an output was found still held, records which module makes each output.

        Args:
            forward: the forward that runs; compiled code is left alone, since a hook would recompile it.
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
        if not self._looks_after_outputs:
            return
        seen: set[int] = set()
        for tensor in tensors_in(output):
            if has_storage(tensor) and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                storage = storage_of(tensor)
                _, maker = self._makers.get(storage_key(tensor), (None, ""))
                self._outputs.append((weakref.ref(storage), storage.nbytes(), maker))
        self._makers.clear()

    def _look_for_gradients(self) -> int:
        """Bytes of gradients in addition to those that the plan counts on."""
        parameters = [p for owned in self._owned for p in owned.values() if p is not None]
        there_bytes = distinct_bytes(p.grad for p in parameters if p.is_leaf and p.grad is not None)
        more_bytes = there_bytes - self._expected_gradient_bytes()
        if more_bytes > 0:
            self._warn.say(
                f"planner.apply: gradients of {format_bytes(there_bytes)} are alive as a forward begins, and the plan "
                f"counts on {format_bytes(there_bytes - more_bytes)}: the peak may be {format_bytes(more_bytes)} "
                "higher. Clear them before forward (zero_grad), or profile the loop as it is: Workload(step=...), or "
                "accumulate=True",
                about="gradients",
            )
        return more_bytes

    def _expected_gradient_bytes(self) -> int:
        """Bytes of the gradients that the chain counts as resident; fewer where the step first clears some."""
        plan = self._plan
        resident_bytes = 0 if plan.resident is None else plan.resident.gradients
        beside_bytes = 0 if plan.chain is None else plan.chain.resident_bytes - plan.resident_bytes
        return max(0, resident_bytes + beside_bytes)

    def _look_for_outputs(self, spare_bytes: int) -> int:
        """Bytes of held outputs in addition to those that the plan counts on between two steps.

        Args:
            spare_bytes: bytes of gradients that the plan counts on and that are not there: within a step of several
                forwards, outputs of the earlier ones may take their place.
        """
        if self._plan.in_flight:
            return 0  # Those of the micro-batches in flight are counted with what each of them keeps.
        self._outputs = [entry for entry in self._outputs if entry[0]() is not None]
        expected_bytes = 0 if self._plan.resident is None else self._plan.resident.loop
        more_bytes = sum(size for _, size, _ in self._outputs) - expected_bytes
        # What a custom step refers to stays, whatever becomes of an output.
        own_step = self._plan.resident is not None and not self._plan.resident.inputs
        said_bytes = more_bytes - spare_bytes
        if said_bytes > 0 and self._names == "unknown":
            self._names = "wanted"
        elif said_bytes > 0:
            _, size, maker = max(self._outputs, key=lambda entry: (entry[1], bool(entry[2])))
            made_by = f", made by {maker}" if maker else ""
            if own_step:
                remedy = "delete it before the next forward, or profile a step that holds it as this loop does"
            elif expected_bytes:
                remedy = "keep one at a time, or profile with Workload(step=...)"
            else:
                remedy = "delete it before backward, or profile with keeps_output=True or Workload(step=...)"
            self._warn.say(
                f"planner.apply: your loop still holds the model's output, {format_bytes(size)}{made_by}: the peak may "
                f"be {format_bytes(said_bytes)} higher than the plan's; {remedy}",
                about="outputs",
            )
        return max(0, more_bytes) if own_step else more_bytes

    def _take_peak(self, peak: LoopPeak, more_bytes: int) -> None:
        """Take the peak of the step before, where a forward begins another one.

        Args:
            peak: takes the peak.
            more_bytes: bytes alive now in addition to those that the plan counts on.
        """
        resident_bytes = self._plan.resident_bytes if self._plan.chain is None else self._plan.chain.resident_bytes
        peak_bytes = peak.forward_begins(resident_bytes + more_bytes)
        if peak.is_lost:
            self._warn.say(_LOST)
        if peak_bytes is not None:
            self.peak_bytes = max(peak_bytes, self.peak_bytes or 0)
        over_bytes = 0 if peak_bytes is None else peak_bytes - self._plan.budget_bytes
        if over_bytes > 0:
            beside_bytes = over_bytes - max(0, more_bytes)
            what = f", {format_bytes(beside_bytes)} of it from an unknown owner" if beside_bytes > 0 else ""
            self._warn.say(
                f"planner.apply: a step of your loop takes {format_bytes(self._plan.budget_bytes + over_bytes)}, "
                f"{format_bytes(over_bytes)} above the budget{what}. Profile the loop as it is: Workload(step=...)",
                about="peak",
            )
        if peak.is_over:
            self._peak = None


def is_metered(watch: bool | None, device: torch.device) -> bool:
    """Whether the peak is taken: by default where that is free."""
    return device.type == "cuda" if watch is None else watch
