"""Carries out a plan's copies to host memory and back, each as the step comes to its moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from planner.plans.lowering import LoweredSchedule, Transfer, TransferMoment
from planner.plans.plan import Plan
from planner.runtime.copy_engine import CopyEngine
from planner.runtime.offload_matching import match_saved_storages
from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from planner.runtime.plan_checks import warn_once
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

_ALL_RERUNS = 10**9  # more than any backward has before it
_UnitStorages = dict[int, list[weakref.ref[OffloadedStorage]]]  # the storages of each offload unit


class WaitingStage(Protocol):
    """A stage that waits to run again."""

    def offload_inputs(self, numbers: Sequence[int]) -> list[OffloadedStorage]:
        """The storages under input tensors that it holds, by their numbers."""
        ...


class TransferExecutor:
    """Carries out a schedule's transfers as the step comes to their moments, each once, in order.

    It owns no tensor: what is not in the graph any more is not sent. What is used before its planned
    moment is brought back by whoever uses it; then its later transfers come to nothing.

    Args:
        plan, lowered: of the step.
        engine: copies the bytes.
        waiting: stages that wait to run again.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        engine: CopyEngine,
        waiting: Mapping[int, WaitingStage],
    ) -> None:
        self._plan = plan
        self._lowered = lowered
        self._engine = engine
        self._waiting = waiting
        self._units: dict[tuple[int, int | None], _UnitStorages] = {}  # by stage and what it is kept with
        self._next = 0
        self._backward = -1  # how many stages have gone backward, as far as the schedule knows them

    def sends(self, stage: int, option: int | None) -> bool:
        """Whether anything of a stage is to be sent."""
        return (stage, option) in self._lowered.sending

    def kept(self, stage: int, option: int, saved: Sequence[OffloadableTensor | None]) -> None:
        """A run of a stage has kept these saved tensors."""
        units = self._plan.offload_units_of(stage, option)
        menu = self._plan.menus[self._plan.stages[stage].menu]
        wanted = {number for unit in units for number in unit}
        storages = match_saved_storages(saved, menu.ops, wanted)
        if storages is None:
            self._cannot(stage, "it saves other tensors than when profiled; they stay on the device")
            return
        if wanted - storages.keys():
            self._cannot(stage, "some of the tensors that were to be sent are not there")
        self._units[stage, option] = {
            unit: [weakref.ref(storages[number]) for number in numbers if number in storages]
            for unit, numbers in enumerate(units)
        }

    def forward_done(self, position: int) -> None:
        """The first forward of a stage, and of all before it, is over; what it has made for itself may still be there.

        So nothing is brought back before ``next_begins``.
        """
        self._advance(TransferMoment(0, position + 1, 0), bring_back=False)

    def next_begins(self, position: int) -> None:
        """The first forward of the stage after this one begins."""
        self._advance(TransferMoment(0, position + 1, 0))

    def backward_begins(self, stage: int, reruns: int = _ALL_RERUNS) -> None:
        """The backward of a stage is next, and so many of the reruns before it are done."""
        if stage in self._lowered.backward_order:
            self._backward = self._lowered.backward_order[stage]
            self._advance(TransferMoment(1, self._backward, reruns))

    def finish_fetches(self, stage: int) -> None:
        """The backward of a stage needs what is kept of it."""
        for sender, option in self._lowered.sending:
            if sender == stage and option is not None:
                for references in self._units.get((sender, option), {}).values():
                    for storage in _alive(references):
                        storage.finish_fetch()

    def _advance(self, moment: TransferMoment, *, bring_back: bool = True) -> None:
        transfers = self._lowered.transfers
        while self._next < len(transfers) and transfers[self._next][0] <= moment:
            if transfers[self._next][1].kind == "prefetch" and not bring_back:
                return
            self._next += 1
            self._carry_out(transfers[self._next - 1][1])

    def _carry_out(self, transfer: Transfer) -> None:
        if transfer.kind == "prefetch" and self._lowered.backward_order[transfer.stage] < self._backward:
            return  # This backward has left that stage out; it would take memory for nothing.
        if transfer.kind == "offload" and transfer.option is None:
            self._take_inputs(transfer.stage, transfer.unit)
        units = self._units.get((transfer.stage, transfer.option), {})
        for storage in _alive(units.get(transfer.unit, [])):
            if transfer.kind == "release":
                storage.release()
            elif transfer.kind == "prefetch":
                storage.prefetch()
            elif not storage.send(self._engine):
                why = "host memory is full, with more than one step's tensors in it; the rest stays on the device"
                self._cannot(transfer.stage, why)

    def _take_inputs(self, stage: int, unit: int) -> None:
        """The input that a stage holds is one of its units from now on."""
        holder = self._waiting.get(stage)
        if holder is not None:
            storages = holder.offload_inputs(self._plan.offload_units_of(stage, None)[unit])
            self._units.setdefault((stage, None), {})[unit] = [weakref.ref(storage) for storage in storages]

    def _cannot(self, stage: int, why: str) -> None:
        warn_once(self._plan.stages[stage].name, f"{why}; the peak is not promised")


def _alive(references: Sequence[weakref.ref[OffloadedStorage]]) -> list[OffloadedStorage]:
    return [storage for reference in references if (storage := reference()) is not None]


def before_backward(outputs: Sequence[Tensor], since: int, callback: Callable[[], None]) -> None:
    """Have ``callback`` called when backward comes to what made ``outputs``, if that was after ``since``.

    The engine runs ready nodes in falling order of their sequence number: the highest of a stage is its first.
    """
    nodes: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    first = max(nodes, key=lambda node: node._sequence_nr(), default=None)
    if first is not None and first._sequence_nr() >= since:
        first.register_prehook(lambda _: callback())
