"""Luggage: storages that travel to host memory and back, and the pieces that view them in the graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from planner.runtime.copy_engine import CopyEngine, OffloadedCopy, PendingFetch, bytes_of
from profiler.recomputation.saved_tensors import Geometry, geometry_of, tensor_over, version_of
from profiler.recomputation.selective_call import SavedTensor
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class OffloadableTensor(SavedTensor):
    """Stands in the graph, or in a stage's input, for a tensor that may be away in the meantime.

    Whoever needs the tensor owns the piece, and the pieces own their luggage: all goes when the graph does.
    """

    __slots__ = ("__weakref__", "_geometry", "_luggage", "_requires_grad")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._geometry: Geometry | None = None
        self._luggage: OffloadedStorage | None = None
        self._requires_grad = tensor.requires_grad

    @property
    def value(self) -> Tensor:
        """The tensor while it is on the device."""
        return self._tensor

    @property
    def away(self) -> bool:
        """Whether the tensor is in host memory alone."""
        return self._geometry is not None

    def join(self, luggage: OffloadedStorage) -> None:
        """It is a view of this luggage from now on."""
        self._luggage = luggage

    def tensor(self) -> Tensor:
        """The tensor, brought back where it is away; RuntimeError where it was changed in place, as autograd does."""
        if self.away:
            assert self._luggage is not None
            self._luggage.bring()
        return super().tensor()

    def let_go(self) -> None:
        """Hold no memory of the device, unless the tensor was changed in place: then using it has to fail."""
        if not self.away and version_of(self._tensor) == self._version:
            self._geometry = geometry_of(self._tensor)
            del self._tensor

    def take(self, storage: torch.UntypedStorage) -> None:
        """The tensor is there again, in a storage of its own."""
        if self._geometry is not None:
            self._tensor = tensor_over(storage, self._geometry).requires_grad_(self._requires_grad)
            self._version = version_of(self._tensor)
            self._geometry = None


class OffloadedStorage:
    """One storage with the pieces that view it: copied once, however many they are."""

    __slots__ = ("__weakref__", "_copy", "_fetched", "_pieces")

    def __init__(self, pieces: Iterable[OffloadableTensor]) -> None:
        self._pieces: list[weakref.ref[OffloadableTensor]] = []
        self._copy: OffloadedCopy | None = None
        self._fetched: PendingFetch | None = None
        for piece in pieces:
            self.add(piece)

    def add(self, piece: OffloadableTensor) -> None:
        """One more piece that views the storage."""
        self._pieces.append(weakref.ref(piece))
        piece.join(self)

    def send(self, engine: CopyEngine) -> bool:
        """Begin to copy it to host memory; False where that is full."""
        piece = next((piece for piece in self._alive() if not piece.away), None)
        if piece is None or self._copy is not None:
            return True
        with torch._C._DisableTorchDispatch():
            self._copy = engine.send(bytes_of(piece.value))
        return self._copy is not None

    def release(self) -> None:
        """Let go of it on the device once it is in host memory."""
        if self._copy is None or self._fetched is not None:
            return
        self._copy.wait()
        for piece in self._alive():
            piece.let_go()

    def prefetch(self) -> None:
        """Begin to bring it back."""
        if self._fetched is None and self._copy is not None and any(piece.away for piece in self._alive()):
            with torch._C._DisableTorchDispatch():
                self._fetched = self._copy.fetch()

    def arrive(self) -> None:
        """It is about to be used: what is on its way back has to be there, and nothing stays in host memory."""
        if self._fetched is not None:
            with torch._C._DisableTorchDispatch():
                storage = self._fetched.wait().untyped_storage()
                for piece in self._alive():
                    piece.take(storage)
            self._fetched = self._copy = None
        elif not any(piece.away for piece in self._alive()):
            self._copy = None

    def bring(self) -> None:
        """It is needed now, planned or not."""
        self.prefetch()
        self.arrive()

    def _alive(self) -> list[OffloadableTensor]:
        return [piece for reference in self._pieces if (piece := reference()) is not None]
