"""A device that runs out of memory, on a machine that does not: what tests of recovery share."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from profiler.workload.tensor_trees import tensors_in


class Limit(TorchDispatchMode):
    """A device of ``limit_bytes`` for what ops allocate inside; views and what was there before take nothing."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        before = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs or {}))}
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in before and storage.data_ptr() not in self._known:
                self._take(storage)
        return output

    def _take(self, storage: Any) -> None:
        if self.live_bytes + storage.nbytes() > self.limit_bytes:
            raise torch.OutOfMemoryError(f"fake device: tried to allocate {storage.nbytes()} bytes")
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._known.add(storage.data_ptr())
        weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())

    def _free(self, address: int, size_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= size_bytes
