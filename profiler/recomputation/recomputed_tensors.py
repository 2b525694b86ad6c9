"""Storages that ops on a tape make, and what stands in the graph for the tensors that autograd saves of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from profiler.recomputation.saved_tensors import geometry_of, tensor_over, version_of, view_of
from profiler.recomputation.tape_program import Slot
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class RecomputedStorage:
    """A storage that an op on the tape makes: gone after forward, made again in backward.

    Ops are known by their ordinals and placeholders by weak references: no cycle keeps a step's memory alive.

    Args:
        slot: its number on the tape.
        storage: the one that the forward made.
        tensor: the op's result, which lies there.

    Attributes:
        original: the storage that the forward made.
        writers: ordinals of the ops, for each version.
        placeholders: what stands in the graph for tensors over its last version: as for any saved tensor, what is
            written to the storage later counts.
    """

    __slots__ = ("_first_version", "original", "placeholders", "slot", "writers")

    def __init__(self, slot: Slot, storage: Any, tensor: Tensor) -> None:
        self.slot = slot
        self.original: weakref.ref[Any] = weakref.ref(storage)
        self._first_version = version_of(tensor)  # torch's own count of changes in place when it was new
        self.writers = [slot[0]]
        self.placeholders: list[weakref.ref[RecomputedTensor]] = []

    @property
    def version(self) -> int:
        """How often ops on the tape have changed it."""
        return len(self.writers) - 1

    def is_under(self, tensor: Tensor, storage: Any) -> bool:
        """Whether it is ``storage``, which lies under ``tensor``, and only ops on the tape have changed it."""
        # An address may be used again after its storage is gone. Fewer changes are no sign of others: pieces of
        # ``unsafe_split`` count their own alone, ``_foreach`` ops none.
        return self.original() is storage and version_of(tensor) < self._first_version + len(self.writers)

    def waiting(self) -> list[RecomputedTensor]:
        """The placeholders that are still there, and still without their tensor."""
        placeholders = (reference() for reference in self.placeholders)
        return [placeholder for placeholder in placeholders if placeholder is not None and placeholder.waits()]

    def fill(self, tensor: Tensor) -> None:
        """Its last version has been made again, under ``tensor``."""
        for reference in self.placeholders:
            placeholder = reference()
            if placeholder is not None and placeholder.waits():
                placeholder.fill(tensor)


class RecomputedTensor:
    """Stands in the graph for a saved tensor that is made again when backward asks for it; then holds it.

    The autograd node owns it, so what it holds goes exactly when autograd lets go of a saved tensor.

    Args:
        recompute: makes its storage again, and fills it.
        recomputed: the storage.
        tensor: what it stands for.
    """

    __slots__ = ("__weakref__", "_geometry", "_recompute", "_recomputed", "_value")

    def __init__(
        self, recompute: Callable[[RecomputedStorage], None], recomputed: RecomputedStorage, tensor: Tensor
    ) -> None:
        self._recompute: Callable[[RecomputedStorage], None] | None = recompute
        self._recomputed = recomputed
        self._geometry = geometry_of(tensor)
        self._value: Tensor | None = None
        recomputed.placeholders.append(weakref.ref(self))

    @property
    def writers(self) -> list[int]:
        """Ordinals of the ops that make its storage."""
        return self._recomputed.writers

    @property
    def made_as(self) -> Slot | None:
        """Which result of which op its storage is; None where another op has changed it since."""
        return self._recomputed.slot if self._recomputed.version == 0 else None

    def waits(self) -> bool:
        """Whether it is still without its tensor."""
        return self._value is None

    def tensor(self) -> Tensor:
        """The saved tensor; runs what is needed for it."""
        if self._value is None:
            assert self._recompute is not None
            self._recompute(self._recomputed)
        assert self._value is not None
        return self._value

    def fill(self, tensor: Tensor) -> None:
        """Take the tensor from the storage made again."""
        self._value = view_of(tensor, self._geometry)
        self._recompute = None

    def fill_from_storage(self, storage: Any) -> None:
        """Take the tensor from the storage itself, which is still alive."""
        self._value = tensor_over(storage, self._geometry)
        self._recompute = None
