"""Finds, among the tensors that a stage run has saved, those that view the storages that a plan may offload."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from profiler.op_graph import StageOps
from profiler.recomputation.outer_hooks import SavedParameters
from profiler.recomputation.saved_tensors import is_parameter_like
from profiler.tensors.storages import storage_key, storage_of
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class SavedTensorLog:
    """What autograd saves in a first run of a stage, in order; the graph alone owns it."""

    def __init__(self) -> None:
        self.parameters = SavedParameters()
        self._packed: list[weakref.ref[OffloadableTensor] | None] = []

    def note(self, packed: Any) -> None:
        """What was given to autograd for the next saved tensor."""
        self._packed.append(weakref.ref(packed) if isinstance(packed, OffloadableTensor) else None)

    def pack(self, tensor: Tensor) -> Any:
        """What a stage that is kept gives to autograd: a parameter is there anyway."""
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
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _storage_bytes(tensor: Tensor) -> int:
    return storage_of(tensor).nbytes() if tensor.layout is torch.strided else 0


def input_storages(inputs: Sequence[OffloadableTensor]) -> list[OffloadedStorage]:
    """The storages under held inputs, as far as they may be offloaded."""
    views_by_key: dict[int, list[OffloadableTensor]] = {}
    for view in inputs:
        if _is_plain(view.value):
            views_by_key.setdefault(storage_key(view.value), []).append(view)
    return [OffloadedStorage(views) for views in views_by_key.values()]
