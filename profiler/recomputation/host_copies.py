"""Copies of a tensor's values in memory that the device's allocator does not count."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from profiler.recomputation.saved_tensors import PLAIN_TENSORS

# A view that skips most of its storage is not worth copying: what lies between comes along.
_MOST_SPREAD = 2
# Up to here tensors are compared with their copies, which takes some 90 microseconds then.
MOST_COMPARED_BYTES = 2**20


def uncounted_copy(tensor: Tensor, most_spread: float = _MOST_SPREAD) -> UncountedCopy | None:
    """A copy of a tensor's values in host memory; None for tensors that are no plain strided ones.

    Args:
        tensor: to copy.
        most_spread: how many times its elements may lie between its first and its last one.
    """
    if type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
        return None
    if tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    count, span = tensor.numel(), _span(tensor)
    if count == 0:
        return UncountedCopy(tensor, 0)
    return UncountedCopy(tensor, span) if span <= most_spread * count and _has_memory(tensor, span) else None


class UncountedCopy:
    """What a plain tensor holds, and how it lies.

    From a GPU it is copied into page-locked memory in the order of the current stream, without waiting for it.

    Args:
        tensor: a strided one.
        span: how many elements its storage has from its first one to its last one.
    """

    __slots__ = ("_dtype", "_size", "_stride", "_values")

    def __init__(self, tensor: Tensor, span: int) -> None:
        self._size, self._stride, self._dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._values: bytes | Tensor
        if tensor.is_cpu:  # Not by ``tensor.numpy()``: a storage that numpy has seen can never be resized again.
            self._values = bytes((ctypes.c_char * (span * tensor.itemsize)).from_address(tensor.data_ptr()))
        else:
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                flat = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
                self._values = torch.empty((span,), dtype=self._dtype, pin_memory=True).copy_(flat, non_blocking=True)

    def on(self, device: torch.device) -> Tensor:
        """A tensor like the copied one, on a device."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if isinstance(self._values, Tensor):
                flat = self._values
            elif self._values:
                flat = torch.from_numpy(np.frombuffer(self._values, np.uint8).copy()).view(self._dtype)
            else:
                flat = torch.empty(0, dtype=self._dtype)
            return flat.to(device, non_blocking=True).as_strided(self._size, self._stride)

    def other_than(self, tensor: Tensor) -> bool:
        """Whether a tensor holds something else now, as far as that is cheap to say: it is small and on the CPU."""
        if not isinstance(self._values, bytes) or len(self._values) > MOST_COMPARED_BYTES:
            return False
        if (tensor.size(), tensor.stride(), tensor.dtype) != (self._size, self._stride, self._dtype):
            return True
        if not tensor.is_cpu or not _has_memory(tensor, _span(tensor)):
            return True
        return bool(self._values) and ctypes.string_at(tensor.data_ptr(), len(self._values)) != self._values

    def put_back(self, tensor: Tensor) -> None:
        """Write the values into a tensor, resized where it has another shape now; its version stays as it was."""
        lies = tensor.size(), tensor.stride(), tensor.dtype
        same = lies == (self._size, self._stride, self._dtype) and tensor.is_cpu
        if same and isinstance(self._values, bytes) and _has_memory(tensor, _span(tensor)):
            ctypes.memmove(tensor.data_ptr(), self._values, len(self._values))
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            values = self.on(tensor.device)
            if (tensor.shape, tensor.dtype) == (self._size, self._dtype):
                tensor.data.copy_(values, non_blocking=True)
            else:
                tensor.data = values.clone()  # Numpy's memory could not be resized again.


def _has_memory(tensor: Tensor, span: int) -> bool:
    return tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + span) * tensor.itemsize


def _span(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
