"""Storages copied to host memory, and the saved tensors and held inputs that view them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from planner.runtime.copy_engine import CopyEngine, OffloadedCopy, PendingFetch, bytes_of
from profiler.recomputation.saved_tensors import Geometry, SavedTensor, geometry_of, tensor_over, version_of
from profiler.workload.compiled_forwards import leave_uncompiled

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
        if self.offloaded:
            assert self._storage is not None
            self._storage.fetch_now()
        return super().tensor()

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


class OffloadedStorage:
    """One storage with the tensors that view it: copied once, however many they are."""

    __slots__ = ("__weakref__", "_copy", "_fetch", "_views")

    def __init__(self, views: Iterable[OffloadableTensor]) -> None:
        self._views: list[weakref.ref[OffloadableTensor]] = []
        self._copy: OffloadedCopy | None = None
        self._fetch: PendingFetch | None = None
        for view in views:
            self._views.append(weakref.ref(view))
            view.join(self)

    def send(self, engine: CopyEngine) -> bool:
        """Begin to copy it to host memory; False where that is full."""
        view = next((view for view in self._alive() if not view.offloaded), None)
        if view is None or self._copy is not None:
            return True
        with torch._C._DisableTorchDispatch():
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
            with torch._C._DisableTorchDispatch():
                self._fetch = self._copy.fetch()

    def finish_fetch(self) -> None:
        """It is about to be used: a copy back that has begun has to arrive, and nothing stays in host memory."""
        if self._fetch is not None:
            with torch._C._DisableTorchDispatch():
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
