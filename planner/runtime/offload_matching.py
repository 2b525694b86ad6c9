"""Stowing: which of the tensors that a stage run has saved belong to which of its storages that may travel."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.runtime.offloaded_tensors import OffloadableTensor, OffloadedStorage
from profiler.op_graph import StageOps
from profiler.recomputation.selective_call import SelectiveCall
from profiler.workload.compiled_forwards import leave_uncompiled
from profiler.workload.storages import allocated_bytes

leave_uncompiled(__name__)

# Ordinals of the ops that hold a storage, and its bytes: all that is known of one that only they hold.
_HolderKey = tuple[frozenset[int], int]


class SavedTensorLog:
    """What autograd saves in a first run of a stage, in order; the graph alone owns it."""

    def __init__(self) -> None:
        self._found: list[weakref.ref[OffloadableTensor] | None] = []

    def note(self, packed: Any) -> None:
        """What was given to autograd for the next saved tensor."""
        self._found.append(weakref.ref(packed) if isinstance(packed, OffloadableTensor) else None)

    def pack(self, tensor: Tensor) -> Any:
        """What a stage that is kept gives to autograd: a parameter is there anyway."""
        packed = tensor if tensor.is_leaf and tensor.requires_grad else OffloadableTensor(tensor.detach())
        self.note(packed)
        return packed

    def pieces(self) -> list[OffloadableTensor | None]:
        """In order; None for what cannot travel, or is gone again."""
        return [None if reference is None else reference() for reference in self._found]


def match_saved_storages(
    pieces: Sequence[OffloadableTensor | None], ops: StageOps, wanted: Collection[int], call: SelectiveCall | None
) -> dict[int, OffloadedStorage] | None:
    """The storages that may travel, with all that holds them; None where the run was not that of the profile.

    Args:
        pieces: for each tensor that was saved.
        ops: the stage's, as profiled.
        wanted: numbers of the storages that may travel.
        call: the run, where it kept a choice: the ops that it runs again hold tensors, too.
    """
    if len(pieces) != len(ops.saves) or (call is not None and call.diverged is not None):
        return None
    found = _StorageMatcher(ops, frozenset(wanted))
    given = zip(pieces, ops.saves, strict=True)
    if not all(piece is None or found.add(piece, number) for piece, number in given):
        return None
    if call is not None and not found.take_over(call):
        return None
    return {number: OffloadedStorage(views) for number, views in found.views.items()}


class _StorageMatcher:
    """The storages of one run by their numbers, as far as they are known."""

    def __init__(self, ops: StageOps, wanted: frozenset[int]) -> None:
        self.views: dict[int, list[OffloadableTensor]] = {}
        self._ops = ops
        self._wanted = wanted
        self._numbers: dict[int, int] = {}  # by what identifies a storage while it is alive
        self._keys: dict[int, int] = {}

    def add(self, piece: OffloadableTensor, number: int) -> bool:
        """A piece of storage ``number`` (-1: of none that is counted); False where it cannot be."""
        key = _key(piece.value)
        known = self._numbers.setdefault(key, number)
        if known != number or (number >= 0 and self._keys.setdefault(number, key) != key):
            return False
        if number not in self._wanted:
            return True
        self.views.setdefault(number, []).append(piece)
        return _plain(piece.value) and _bytes(piece.value) == self._ops.storages[number].size_bytes

    def take_over(self, call: SelectiveCall) -> bool:
        """What the recorded ops hold; False where it is not clear which storage is which."""
        unknown: dict[int, list[tuple[int, OffloadableTensor]]] = {}
        for ordinal, piece in _handed_over(call):
            number = self._numbers.get(_key(piece.value))
            if number is None:
                unknown.setdefault(_key(piece.value), []).append((ordinal, piece))
            elif number in self._wanted:
                self.views[number].append(piece)
        there: dict[_HolderKey, list[list[OffloadableTensor]]] = {}
        for held in unknown.values():
            signature = frozenset(ordinal for ordinal, _ in held), _bytes(held[0][1].value)
            there.setdefault(signature, []).append([piece for _, piece in held])
        return all(self._assign(numbers, there.get(of, [])) for of, numbers in self._expected(call).items())

    def _expected(self, call: SelectiveCall) -> dict[_HolderKey, list[int]]:
        """Wanted storages that autograd itself does not save."""
        found: dict[_HolderKey, list[int]] = {}
        positions = {call.selection.ordinals[position]: position for position in call.selection.rerun}
        held = self._ops.held_for(positions)
        for number in sorted(self._wanted.difference(self._ops.saves)):
            readers = frozenset(positions[ordinal] for ordinal in held.get(number, ()))
            found.setdefault((readers, self._ops.storages[number].size_bytes), []).append(number)
        return found

    def _assign(self, numbers: list[int], there: list[list[OffloadableTensor]]) -> bool:
        if len(numbers) != len(there) or not all(_plain(views[0].value) for views in there):
            return False
        self.views.update(zip(numbers, there, strict=True))  # Those that are alike in all are for each other.
        return True


def _handed_over(call: SelectiveCall) -> Iterator[tuple[int, OffloadableTensor]]:
    """What the ops to run again hold, held by pieces from now on."""
    for ordinal, held in call.held():
        found: list[OffloadableTensor] = []

        def holder(tensor: Tensor, found: list[OffloadableTensor] = found) -> OffloadableTensor:
            found.append(OffloadableTensor(tensor))
            return found[0]

        held.hand_over(holder)
        for piece in found:
            yield ordinal, piece


def _plain(tensor: Tensor) -> bool:
    """Whether its bytes are those of its storage, and no parameter's."""
    return type(tensor) is Tensor and tensor.layout is torch.strided


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else -id(tensor)


def _bytes(tensor: Tensor) -> int:
    return allocated_bytes(tensor.untyped_storage()) if tensor.layout is torch.strided else 0


def offloaded_inputs(pieces: Sequence[OffloadableTensor]) -> list[OffloadedStorage]:
    """Held inputs that may travel: one luggage for each storage."""
    found: dict[int, list[OffloadableTensor]] = {}
    for piece in pieces:
        if _plain(piece.value):
            found.setdefault(_key(piece.value), []).append(piece)
    return [OffloadedStorage(views) for views in found.values()]
