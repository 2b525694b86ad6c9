"""Copies to host memory and back: the storages that travel, with the tensors that view them, each at its moment.

A stage's saved tensors are matched with the storages that its profile numbers; the plan's transfers name these numbers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from planner.plans.lowering import LoweredSchedule, Transfer, TransferMoment
from planner.plans.plan import Plan
from planner.runtime.copy_engines import CopyEngine, HostCopy, HostFetch, bytes_of
from planner.runtime.plan_checks import PlanWarnings
from profiler.current_device import active_device
from profiler.op_graph import StageOps
from profiler.recomputation.dropped_call import DroppedCall
from profiler.recomputation.saved_tensors import (
    Geometry,
    SavedParameters,
    SavedTensor,
    geometry_of,
    is_parameter_like,
    tensor_over,
    version_of,
)
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.tensor_parts import storage_key, storage_of

leave_uncompiled(__name__)


class OffloadableTensor(SavedTensor):
    """Stands in the graph, or in a stage's input, for a tensor that may be in host memory in the meantime.

    Whoever needs the tensor owns this, and this owns the offloaded storage: all goes when the graph does.
    """

    __slots__ = ("__weakref__", "_geometry", "_requires_grad", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._geometry: Geometry | None = None
        self._storage: OffloadedStorage | None = None
        self._requires_grad = tensor.requires_grad

    @property
    def value(self) -> Tensor:
        """The tensor while it is on the device."""
        return self._tensor

    @property
    def offloaded(self) -> bool:
        """Whether the tensor is in host memory alone."""
        return self._geometry is not None

    def join(self, storage: OffloadedStorage) -> None:
        """It is a view of this storage from now on."""
        self._storage = storage

    def tensor(self) -> Tensor:
        """The tensor, brought back from host memory; RuntimeError where it was changed in place, as autograd does."""
        self.fetched()
        return super().tensor()

    def fetched(self) -> tuple[Tensor, int]:
        """The tensor, brought back from host memory, and its version; one that was changed in place as it is."""
        if self.offloaded:
            assert self._storage is not None
            self._storage.fetch_now()
        return self._tensor, self._version

    def release(self) -> None:
        """Hold no memory of the device, unless the tensor was changed in place: then using it has to fail."""
        if not self.offloaded and version_of(self._tensor) == self._version:
            self._geometry = geometry_of(self._tensor)
            del self._tensor

    def restore(self, storage: torch.UntypedStorage) -> None:
        """The tensor is on the device again, in a storage of its own."""
        if self._geometry is not None:
            self._tensor = tensor_over(storage, self._geometry).requires_grad_(self._requires_grad)
            self._version = version_of(self._tensor)
            self._geometry = None


def _beside_ops() -> contextlib.AbstractContextManager[Any]:
    """Inside, copies are no ops of the step; on a simulated device they count as such, or their memory would not."""
    return torch._C._DisableTorchDispatch() if active_device() is None else contextlib.nullcontext()


class OffloadedStorage:
    """One storage with the tensors that view it: copied once, however many they are."""

    __slots__ = ("__weakref__", "_copy", "_fetch", "_views")

    def __init__(self, views: Iterable[OffloadableTensor]) -> None:
        self._views: list[weakref.ref[OffloadableTensor]] = []
        self._copy: HostCopy | None = None
        self._fetch: HostFetch | None = None
        for view in views:
            self._views.append(weakref.ref(view))
            view.join(self)

    def send(self, engine: CopyEngine) -> bool:
        """Begin to copy it to host memory; False where that is full."""
        view = next((view for view in self._alive() if not view.offloaded), None)
        if view is None or self._copy is not None:
            return True
        with _beside_ops():
            self._copy = engine.send(bytes_of(view.value))
        return self._copy is not None

    def release(self) -> None:
        """Let go of it on the device once it is in host memory."""
        if self._copy is None or self._fetch is not None:
            return
        self._copy.wait()
        for view in self._alive():
            view.release()

    def prefetch(self) -> None:
        """Begin to bring it back."""
        if self._fetch is None and self._copy is not None and any(view.offloaded for view in self._alive()):
            with _beside_ops():
                self._fetch = self._copy.fetch()

    def finish_fetch(self) -> None:
        """It is about to be used: a copy back that has begun has to arrive, and nothing stays in host memory."""
        if self._fetch is not None:
            with _beside_ops():
                storage = self._fetch.wait().untyped_storage()
                for view in self._alive():
                    view.restore(storage)
            self._fetch = self._copy = None
        elif not any(view.offloaded for view in self._alive()):
            self._copy = None

    def fetch_now(self) -> None:
        """It is needed now, planned or not."""
        self.prefetch()
        self.finish_fetch()

    def _alive(self) -> list[OffloadableTensor]:
        return [view for reference in self._views if (view := reference()) is not None]


class SavedTensorLog:
    """Notes what autograd saves in a first run of a stage, in order; the graph alone owns it."""

    def __init__(self) -> None:
        self.parameters = SavedParameters()
        self._packed: list[weakref.ref[OffloadableTensor] | None] = []

    def note(self, packed: Any) -> None:
        """Note what was given to autograd for the next saved tensor."""
        self._packed.append(weakref.ref(packed) if isinstance(packed, OffloadableTensor) else None)

    def pack(self, tensor: Tensor) -> Any:
        """Returns what a kept stage gives to autograd; a parameter is there anyway."""
        packed = self.parameters.stand_in(tensor) if is_parameter_like(tensor) else OffloadableTensor(tensor.detach())
        self.note(packed)
        return packed

    def saved(self) -> list[OffloadableTensor | None]:
        """In order; None for what cannot be offloaded, or is gone again."""
        return [None if reference is None else reference() for reference in self._packed]


def match_saved_storages(
    saved: Sequence[OffloadableTensor | None], ops: StageOps, wanted: Collection[int]
) -> dict[int, OffloadedStorage] | None:
    """The storages that may be offloaded, with all that views them; None where the run was not that of the profile.

    Args:
        saved: for each tensor that was saved.
        ops: the stage's, as profiled.
        wanted: numbers of the storages that may be offloaded.
    """
    if len(saved) != len(ops.saves):
        return None
    matcher = _StorageMatcher(ops, frozenset(wanted))
    numbered = zip(saved, ops.saves, strict=True)
    if not all(tensor is None or matcher.add(tensor, number) for tensor, number in numbered):
        return None
    return {number: OffloadedStorage(views) for number, views in matcher.views.items()}


class _StorageMatcher:
    """The storages of one run by their numbers, as far as they are known."""

    def __init__(self, ops: StageOps, wanted: frozenset[int]) -> None:
        self.views: dict[int, list[OffloadableTensor]] = {}
        self._ops = ops
        self._wanted = wanted
        self._numbers: dict[int, int] = {}  # by what identifies a storage while it is alive
        self._keys: dict[int, int] = {}

    def add(self, view: OffloadableTensor, number: int) -> bool:
        """A view of storage ``number`` (-1: of none that is counted); False where it cannot be."""
        key = storage_key(view.value)
        known = self._numbers.setdefault(key, number)
        if known != number or (number >= 0 and self._keys.setdefault(number, key) != key):
            return False
        if number not in self._wanted:
            return True
        self.views.setdefault(number, []).append(view)
        return _is_plain(view.value) and _storage_bytes(view.value) == self._ops.storages[number].size_bytes


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are those of its storage, and no parameter's."""
    return type(tensor) in (Tensor, FakeTensor) and tensor.layout is torch.strided


def _storage_bytes(tensor: Tensor) -> int:
    return storage_of(tensor).nbytes() if tensor.layout is torch.strided else 0


def input_storages(inputs: Sequence[OffloadableTensor]) -> list[OffloadedStorage]:
    """The storages under held inputs, as far as they may be offloaded."""
    views_by_key: dict[int, list[OffloadableTensor]] = {}
    for view in inputs:
        if _is_plain(view.value):
            views_by_key.setdefault(storage_key(view.value), []).append(view)
    return [OffloadedStorage(views) for views in views_by_key.values()]


_ALL_RERUNS = 10**9  # more than any backward has before it
_UnitStorages = dict[int, list[weakref.ref[OffloadedStorage]]]  # the storages of each offload unit


class TransferExecutor:
    """Carries out a schedule's transfers as the step comes to their moments, each once, in order.

    It owns no tensor: what is not in the graph any more is not sent. What is used before its planned
    moment is brought back by whoever uses it; then its later transfers come to nothing.

    Args:
        plan, lowered: the applied plan, and what its schedule does at each stage.
        engine: copies the bytes.
        waiting: dropped stages by position, as far as the graph needs them.
        warn: gives the warnings of the plan.
    """

    def __init__(
        self,
        plan: Plan,
        lowered: LoweredSchedule,
        engine: CopyEngine,
        waiting: Mapping[int, DroppedCall],
        warn: PlanWarnings,
    ) -> None:
        self._warn = warn
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
            if transfers[self._next][1].kind == "fetch" and not bring_back:
                return
            self._next += 1
            self._carry_out(transfers[self._next - 1][1])

    def _carry_out(self, transfer: Transfer) -> None:
        if transfer.kind == "fetch" and self._lowered.backward_order[transfer.stage] < self._backward:
            return  # This backward has left that stage out; it would take memory for nothing.
        if transfer.kind == "send" and transfer.option is None:
            self._take_inputs(transfer.stage, transfer.unit)
        units = self._units.get((transfer.stage, transfer.option), {})
        for storage in _alive(units.get(transfer.unit, [])):
            if transfer.kind == "release":
                storage.release()
            elif transfer.kind == "fetch":
                storage.prefetch()
            elif not storage.send(self._engine):
                why = "host memory is full, with more than one step's tensors in it; the rest stays on the device"
                self._cannot(transfer.stage, why)

    def _take_inputs(self, stage: int, unit: int) -> None:
        """The input that a stage holds is one of its units from now on."""
        call = self._waiting.get(stage)
        if call is None or call.done:
            return
        views: dict[int, OffloadableTensor] = {}
        for number in self._plan.offload_units_of(stage, None)[unit]:
            held = call.input.held(number)
            tensor = None if held is None else held.tensor
            # What was changed in place since stays.
            if held is not None and isinstance(tensor, Tensor) and version_of(tensor) == held.version:
                held.tensor = views.setdefault(id(tensor), OffloadableTensor(tensor))
        storages = input_storages(list(views.values()))
        self._units.setdefault((stage, None), {})[unit] = [weakref.ref(storage) for storage in storages]

    def _cannot(self, stage: int, why: str) -> None:
        self._warn.of_stage(self._plan.stages[stage].name, f"{why}; the peak is not promised")


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
