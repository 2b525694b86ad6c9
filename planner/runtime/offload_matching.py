"""Finds, among the tensors that a stage run has saved, those that view the storages that a plan may offload."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from profiler.op_graph import StageOps
from profiler.recomputation.outer_hooks import SavedParameters
from profiler.recomputation.saved_tensors import is_there_anyway
from profiler.recomputation.selective_call import SelectiveCall
from profiler.tensors.storages import storage_key, storage_of
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)

# Ordinals of the ops that hold a storage, and its bytes: all that is known of one that only they hold.
_HolderKey = tuple[frozenset[int], int]


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
        packed = self.parameters.stand_in(tensor) if is_there_anyway(tensor) else OffloadableTensor(tensor.detach())
        self.note(packed)
        return packed

    def saved(self) -> list[OffloadableTensor | None]:
        """In order; None for what cannot be offloaded, or is gone again."""
        return [None if reference is None else reference() for reference in self._packed]


def match_saved_storages(
    saved: Sequence[OffloadableTensor | None], ops: StageOps, wanted: Collection[int], call: SelectiveCall | None
) -> dict[int, OffloadedStorage] | None:
    """The storages that may be offloaded, with all that views them; None where the run was not that of the profile.

    Args:
        saved: for each tensor that was saved.
        ops: the stage's, as profiled.
        wanted: numbers of the storages that may be offloaded.
        call: the run, where it kept a choice: the ops that it runs again hold tensors, too.
    """
    if len(saved) != len(ops.saves) or (call is not None and call.diverged is not None):
        return None
    matcher = _StorageMatcher(ops, frozenset(wanted))
    numbered = zip(saved, ops.saves, strict=True)
    if not all(tensor is None or matcher.add(tensor, number) for tensor, number in numbered):
        return None
    if call is not None and not matcher.add_held(call):
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

    def add_held(self, call: SelectiveCall) -> bool:
        """What the recorded ops hold; False where it is not clear which storage is which."""
        unknown: dict[int, list[tuple[int, OffloadableTensor]]] = {}
        for ordinal, view in _handed_over(call):
            number = self._numbers.get(storage_key(view.value))
            if number is None:
                unknown.setdefault(storage_key(view.value), []).append((ordinal, view))
            elif number in self._wanted:
                self.views[number].append(view)
        candidates: dict[_HolderKey, list[list[OffloadableTensor]]] = {}
        for holders in unknown.values():
            key = frozenset(ordinal for ordinal, _ in holders), _storage_bytes(holders[0][1].value)
            candidates.setdefault(key, []).append([view for _, view in holders])
        expected = self._expected(call)
        return all(self._assign(numbers, candidates.get(key, [])) for key, numbers in expected.items())

    def _expected(self, call: SelectiveCall) -> dict[_HolderKey, list[int]]:
        """Wanted storages that autograd itself does not save."""
        numbers_by_key: dict[_HolderKey, list[int]] = {}
        positions = {call.selection.ordinals[position]: position for position in call.selection.rerun}
        readers = self._ops.held_for(positions)
        for number in sorted(self._wanted.difference(self._ops.saves)):
            holders = frozenset(positions[ordinal] for ordinal in readers.get(number, ()))
            numbers_by_key.setdefault((holders, self._ops.storages[number].size_bytes), []).append(number)
        return numbers_by_key

    def _assign(self, numbers: list[int], candidates: list[list[OffloadableTensor]]) -> bool:
        if len(numbers) != len(candidates) or not all(_is_plain(views[0].value) for views in candidates):
            return False
        self.views.update(zip(numbers, candidates, strict=True))  # Those that are alike in all are for each other.
        return True


def _handed_over(call: SelectiveCall) -> Iterator[tuple[int, OffloadableTensor]]:
    """What the ops to run again hold, each as an offloadable tensor from now on, with the op's position."""
    for ordinal, recorded in call.recorded_inputs():
        made: list[OffloadableTensor] = []

        def holder(tensor: Tensor, made: list[OffloadableTensor] = made) -> OffloadableTensor:
            made.append(OffloadableTensor(tensor))
            return made[0]

        recorded.pass_on(holder)
        for view in made:
            yield ordinal, view


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
