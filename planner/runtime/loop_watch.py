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
from planner.runtime.loop_peak import LoopPeak
from planner.runtime.plan_checks import parameter_tables, say_once
from planner.units import format_bytes
from profiler.tensors.storages import distinct_bytes, has_storage, storage_key, storage_of
from profiler.tensors.tensor_trees import tensors_in
from profiler.workload.compiled_forwards import CompiledForward, Forward, is_compiled, leave_uncompiled

leave_uncompiled(__name__)

_LOST = (
    "planner.apply: expected the profiler to run for two steps (watch=True), got another one that was begun meanwhile: "
    "the peak of this loop is not taken; begin yours after the fourth step, or leave watch=True out"
)
WATCHED = 4  # forwards whose outputs are looked after, and more as long as a peak is still to be taken


class LoopWatch:
    """What a loop holds beside what its plan counts on, looked at as forwards begin.

    That gradients or outputs are there costs nothing to see.

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
        self._owned = parameter_tables(model)
        self.peak_bytes: int | None = None
        self._forwards = 0
        self._outputs: list[tuple[weakref.ref[Any], int, str]] = []  # storages with their bytes and who made them
        self._makers: dict[int, tuple[weakref.ref[Any], str]] = {}  # of storages, the innermost modules
        # Whose outputs are held is looked for once some are: hooks on every module would slow all first forwards.
        self._names: Literal["unknown", "wanted", "seen"] = "unknown"
        self._said: set[str] = set()
        if plan.beside and device.type == "cpu":
            metered = False  # Several micro-batches are in flight as one of them begins.
        self._peak = LoopPeak(plan, model, device) if metered else None

    def forward_begins(self) -> None:
        """Look at what is there."""
        self._forwards += 1
        more_bytes = self._look_for_gradients()
        if self._looks_after_outputs and self._forwards > 1:
            more_bytes += self._look_for_outputs(max(0, -more_bytes))
        if self._peak is not None:
            self._take_peak(self._peak, more_bytes)

    @contextlib.contextmanager
    def outside_loop(self) -> Iterator[None]:
        """Of the steps within it no peak is taken: they are metered by themselves, and none of the loop's."""
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

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say_once(text)

    def _look_for_gradients(self) -> int:
        """By how many bytes gradients are more than those that the plan counts on."""
        parameters = [p for owned in self._owned for p in owned.values() if p is not None]
        there_bytes = distinct_bytes(p.grad for p in parameters if p.is_leaf and p.grad is not None)
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
        """Those that the chain counts as always there: fewer than as the step begins, where it clears them first."""
        plan = self._plan
        resident_bytes = 0 if plan.resident is None else plan.resident.gradients
        beside_bytes = 0 if plan.chain is None else plan.chain.resident_bytes - plan.resident_bytes
        return max(0, resident_bytes + beside_bytes)

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
        # What a step of the user's own refers to stays, whatever becomes of an output.
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
            self._say(
                "outputs",
                f"planner.apply: your loop still holds the model's output, {format_bytes(size)}{made_by}: the peak may "
                f"be {format_bytes(said_bytes)} higher than the plan's; {remedy}",
            )
        return max(0, more_bytes) if own_step else more_bytes

    def _take_peak(self, peak: LoopPeak, more_bytes: int) -> None:
        """Of the step before, where a forward begins another one.

        Args:
            peak: takes it.
            more_bytes: by which there is more now than the plan counts on.
        """
        resident_bytes = self._plan.resident_bytes if self._plan.chain is None else self._plan.chain.resident_bytes
        peak_bytes = peak.forward_begins(resident_bytes + more_bytes)
        if peak.is_lost:
            self._say("lost", _LOST)
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
        if peak.is_over:
            self._peak = None


def is_metered(watch: bool | None, device: torch.device) -> bool:
    """Whether the peak is taken: by default where that is free."""
    return device.type == "cuda" if watch is None else watch
