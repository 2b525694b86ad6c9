"""Outputs of stages that others still hold when the stage runs again: what is made again takes their memory.

A stage that reads a skip connection holds it until its own backward. Where the stage that made it runs again before, a
second one of the same values would lie beside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import Geometry, change_counter, geometry_of, tensor_over, version_of
from profiler.tensors.tensor_parts import has_storage, storage_key
from profiler.workload.compiled_forwards import leave_uncompiled

leave_uncompiled(__name__)


class SharedOutputs:
    """What a stage returned last, as far as it is still there; this holds no memory of the device.

    Args:
        tensors: in the output of a run.
    """

    __slots__ = ("_returned",)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._returned = [_Returned(tensor) if _is_plain(tensor) else None for tensor in tensors]

    def take_the_place_of(self, tensors: Sequence[Tensor], views: Iterable[Tensor]) -> None:
        """Have what another run made lie in the memory of these, where they are there and unchanged.

        Args:
            tensors: in the output of that run, which had the same values.
            views: all tensors that hold memory of that run; those that lie in storages of ``tensors`` move.
        """
        found: dict[int, torch.UntypedStorage] = {}
        for number, (returned, tensor) in enumerate(zip(self._returned, tensors, strict=False)):
            storage = returned.storage_for(tensor) if returned is not None else None
            if storage is not None:
                found[storage_key(tensor)] = storage
            elif _is_plain(tensor):
                self._returned[number] = _Returned(tensor)
        if not found:
            return
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            for view in views:
                if _is_plain(view) and (storage := found.get(storage_key(view))) is not None:
                    view.data = tensor_over(storage, geometry_of(view))


class _Returned:
    """One tensor of an output, and whether it was changed in place since."""

    __slots__ = ("_counter", "_geometry", "_size_bytes", "_storage", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._geometry: Geometry = geometry_of(tensor)
        self._storage = weakref.ref(storage := tensor.untyped_storage())
        self._size_bytes = storage.nbytes()
        self._counter = change_counter(tensor)
        self._version = version_of(tensor)

    def storage_for(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """The storage, if a tensor that was made again may lie in it."""
        storage = self._storage()
        if storage is None or version_of(self._counter) != self._version or not _is_plain(tensor):
            return None
        made = tensor.untyped_storage()
        fits = made.nbytes() == self._size_bytes and geometry_of(tensor) == self._geometry
        return storage if fits and made._cdata != storage._cdata else None


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and has_storage(tensor) and not tensor.is_inference()
